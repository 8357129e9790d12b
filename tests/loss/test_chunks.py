"""Test that skipped rows do not shift the rows or coefficients of the chunks of the LM head."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels.head import given, sources
from tests.loss_cases import EVERYWHERE, LAYOUTS, LEVELS, check, make_case, options_for
from tests.pairs import pairs

GAPS = torch.rand(7, 30, generator=torch.Generator().manual_seed(5)) < 0.7  # mask of 7 completions


def many_rows(mask: torch.Tensor, loss_type: str, level: str = "token", **options):
    """Return a case in which the loss skips every second completion, because its advantage is 0."""
    case = make_case(22, mask=mask, **options_for(loss_type, level, **options))
    idle = torch.arange(7) % 2 == 1
    return case.but(advantages=torch.where(idle, 0.0, case.advantages + 0.05))


@pairs(layout=LAYOUTS,
       loss_type__level=[("grpo", "token"), ("grpo", "sequence"), ("gmpo", "token")],
       mask={"gaps": GAPS, "whole": torch.ones(7, 20, dtype=torch.bool)}.items(),
       backend=EVERYWHERE)  # fmt: skip
def test_chunks_with_masked_and_idle_rows(backend, loss_type, level, layout, mask, monkeypatch):
    """Check that dH, dW and db are correct if each of five chunks skips some of its rows.

    Chunks without skipped rows are also tested, because they use slices instead of index tensors.
    """
    case = many_rows(mask, loss_type, level)
    monkeypatch.setattr(sources, "workspace_bytes", lambda *_: 32 * len(case.weight) * 4)
    check("linear", case, layout=layout, backend=backend)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_blocks_of_given_logits(backend, level, monkeypatch):
    """Check that loss and gradients are correct if logits are processed in blocks of sixteen rows.

    Every block has different coefficients and entropy gradients. If the code used those of a
    different block, the test would fail.
    """
    monkeypatch.setattr(given, "CPU_BLOCK_BYTES", 1)
    check("logits", many_rows(GAPS, "grpo", level, entropy_coef=0.3), backend=backend)
