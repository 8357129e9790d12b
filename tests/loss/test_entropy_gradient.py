"""`linear_logps` and `logits_logps` under a loss that reads the entropy, with and without the
logps.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from tests import oracle_inputs
from tests.loss_cases import BACKENDS, relative_l2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_the_entropy_alone(backend):
    """linear_logps and logits_logps under a loss that reads the entropy only, with rows that have
    no target.
    """
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=g), torch.randn(31, 8, generator=g)
    ids, c = torch.randint(31, (9,), generator=g), torch.randn(2, 9, generator=g)
    ids[[0, 4]] = -100
    kept = ids != -100
    raw = (hidden.double() @ weight.double().T).requires_grad_()
    lp, h = oracle_inputs.logps_and_entropy(raw, ids.clamp(min=0))
    for with_logps in (False, True):
        (true,) = torch.autograd.grad(
            (h * c[0] + with_logps * lp * c[1])[kept].sum(), raw, retain_graph=True
        )
        x, z = hidden.clone().requires_grad_(), raw.detach().float().requires_grad_()
        for leaf, result in (
            (x, grpo_fast.linear_logps(x, weight, ids, return_entropy=True, backend=backend)),
            (z, grpo_fast.logits_logps(z, ids, return_entropy=True, backend=backend)),
        ):
            logps, entropy = result
            loss = (entropy * c[0]).sum()
            (loss + (logps * c[1]).sum() if with_logps else loss).backward()
            expected = true @ weight.double() if leaf is x else true
            assert relative_l2(leaf.grad, expected) < 5e-6
            assert (leaf.grad[~kept] == 0).all()
