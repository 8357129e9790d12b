"""Interpreter cases for the row kernel that keeps blocks in registers (benchmarks/gpu)."""

import pytest
import torch

from benchmarks.gpu.row_candidates import KeptRows, kept_row_loss_
from grpo_fast.kernels import reference
from grpo_fast.kernels.types import LogitRows, LogitTransform
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig
from tests.kernels.triton_tools.interpreter import only_memory_of


@pytest.mark.parametrize("kept", [0, 2, 7])
@pytest.mark.parametrize("given", [False, True])
def test_kept_rows(kept, given):
    """Compare logps, losses and gradients with torch in fp64. Seven blocks of 64 pairs are kept."""
    generator = torch.Generator().manual_seed(kept)
    logits = (3 * torch.randn(5, 1002, generator=generator)).bfloat16()
    # One target has a probability near 1, and two are in the first and in the last pair of a row.
    target = torch.tensor([500, 0, 1001, 127, 128])
    logits[0, 500] = 200.0
    advantages, weights = (torch.randn(5, generator=generator) for _ in range(2))
    config = LossConfig(loss_type="dapo")
    expected = torch.empty(5, 1002, dtype=torch.float64)
    exact = LogitRows(logits.double(), target, LogitTransform())
    stats = reference.row_logps(exact, return_entropy=False)
    old = stats[1].float() + 0.1 * torch.randn(5, generator=generator)
    terms = RowInputs(advantages, weights.abs(), old_logps=old)
    wide = terms.map(torch.Tensor.double)
    right = reference.row_loss_(exact, expected, wide, config, return_entropy=False)
    out = torch.full_like(logits, float("nan"))
    with only_memory_of(logits, out, target, advantages, terms.policy_weights, old):
        found = kept_row_loss_(
            KeptRows(64, 1, kept, 2, given), exact._replace(logits=logits), out, terms, config,
            return_entropy=False,
        )  # fmt: skip
    for x, y in ((found.lse, right.lse), (found.logps, right.logps), (found.losses, right.losses)):
        torch.testing.assert_close(x.float(), y.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.grad_logps, right.grad_logps.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-7)
