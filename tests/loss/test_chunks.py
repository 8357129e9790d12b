"""Several chunks of the head: rows that are left out keep their places, every block has its
coefficients.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels.head import loop
from grpo_fast.loss import logits as logits_sweep
from tests.loss_cases import BACKENDS, LAYOUTS, LEVELS, assert_same, make_case, options_for, run
from tests.pairs import pairs

EXACT = {"loss_tol": 2e-6, "grad_tol": 1e-5}
GAPS = torch.rand(7, 30, generator=torch.Generator().manual_seed(5)) < 0.7  # 7 completions
IDLE = torch.arange(7) % 2 == 1  # completions without an advantage: their rows have no coefficient


def many_rows(loss_type: str, level: str, **options):
    case = make_case(22, mask=GAPS, **options_for(loss_type, level, **options))
    return case.but(advantages=torch.where(IDLE, 0.0, case.advantages + 0.05))


@pairs(layout=LAYOUTS,
       loss_type__level=[("grpo", "token"), ("grpo", "sequence"), ("gmpo", "token")],
       backend=BACKENDS)  # fmt: skip
def test_chunks_with_masked_and_idle_rows(backend, loss_type, level, layout, monkeypatch):
    """Five chunks, each with rows that are left out of its GEMMs: dH, dW and db keep their
    places.
    """
    case = many_rows(loss_type, level)
    monkeypatch.setattr(loop, "workspace_bytes", lambda *_: 32 * len(case.weight) * 4)
    assert_same("linear", case, run("linear", case, layout=layout, backend=backend), **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_without_a_gap(backend, monkeypatch):
    """Every row active, so that slices, not index tensors, say where a chunk lies."""
    case = make_case(23, mask=torch.ones(7, 20, dtype=torch.bool), **options_for("grpo"))
    case = case.but(advantages=torch.where(IDLE, 0.0, case.advantages + 0.05))
    monkeypatch.setattr(loop, "workspace_bytes", lambda *_: 32 * len(case.weight) * 4)
    assert_same("linear", case, run("linear", case, backend=backend), **EXACT)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_given_logits(backend, level, monkeypatch):
    """Sixteen rows at a time: every block has its own coefficients, and its own entropy
    gradient.
    """
    monkeypatch.setattr(logits_sweep, "CPU_BLOCK_BYTES", 1)
    case = many_rows("grpo", level, entropy_coef=0.3)
    assert_same("logits", case, run("logits", case, backend=backend), **EXACT)
