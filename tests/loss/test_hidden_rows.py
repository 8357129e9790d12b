"""Test `hidden_rows`, which lets one row of `hidden` predict several targets.

For example, the last row of a shared prompt predicts the first token of every completion.
test_fuzz.py tests the losses with `hidden_rows`.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from tests.kernels.formulas import torch_threads
from tests.loss_cases import BACKENDS

# The row of `hidden` that predicts each of 8 tokens, in three completions of 3, 2 and 3 tokens. Row
# 1 is the last row of the shared prompt, which predicts the first token of each completion.
ROWS = torch.tensor([1, 2, 3, 1, 4, 1, 5, 6])


@pytest.mark.parametrize("backend", BACKENDS)
def test_logps_and_their_gradient(backend):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=g).requires_grad_() for n in (7, 37))
    options = {"target_ids": torch.arange(8), "return_entropy": True, "backend": backend}
    ours = grpo_fast.linear_logps(hidden, weight, hidden_rows=ROWS, **options)
    repeated = grpo_fast.linear_logps(hidden[ROWS], weight, **options)
    up = torch.arange(1.0, 9.0)
    found, expected = (
        torch.autograd.grad((lp * up + h).sum(), (hidden, weight)) for lp, h in (ours, repeated)
    )
    assert torch.equal(ours[0], repeated[0]) and torch.equal(ours[1], repeated[1])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_two_threads_sum_in_one_order():
    """Check that dH has the same bits with 1 and 2 threads if 4096 targets share 7 hidden rows."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = (
        torch.randn(7, 64, generator=g).requires_grad_(),
        torch.randn(50, 64, generator=g),
    )
    ids, rows = torch.randint(50, (4096,), generator=g), torch.randint(7, (4096,), generator=g)
    found = []
    for count in (1, 2, 2, 2, 2, 2):
        with torch_threads(count):
            logps = grpo_fast.linear_logps(hidden, weight, ids, hidden_rows=rows)
            found += torch.autograd.grad(logps.sum(), hidden)
    assert all(torch.equal(x, found[0]) for x in found)
