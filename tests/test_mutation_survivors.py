"""Tests that planted bugs asked for (`python -m tests.mutation`): each names what went unnoticed before."""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast.kernels.head import loop as linear
from grpo_fast.loss import passes
from tests import oracle_inputs
from tests.loss_cases import BACKENDS, LAYOUTS, LOSS_LEVELS, assert_same, make_case, options_for, relative_l2, run
from tests.triton_tools.launcher import HAS_TRITON, run_python

EXACT = {"loss_tol": 2e-6, "grad_tol": 1e-5}
GAPS = torch.rand(7, 30, generator=torch.Generator().manual_seed(5)) < 0.7  # 7 completions, about 150 active rows
IDLE = torch.arange(7) % 2 == 1  # completions without an advantage: their rows have no coefficient


@pytest.mark.parametrize("function", ["logps", "logits", "linear"])
def test_cispo_with_the_offset_bound(function):
    case = make_case(21, **options_for("cispo", cispo_bound="offset", epsilon_high=0.28))
    assert_same(function, case, run(function, case), **EXACT)


def test_the_offset_bound_of_cispo_in_numbers():
    """A ratio of 2 is cut to 1 + ε_high, one of 1/2 raised to 1 - ε_low."""
    config = grpo_fast.LossConfig(loss_type="cispo", cispo_bound="offset", epsilon_low=0.2, epsilon_high=0.3)
    logps = torch.full((2, 1), -1.0, requires_grad=True)
    old = logps.detach() - torch.tensor([[2.0], [0.5]]).log()
    grpo_fast.grpo_loss(logps, torch.ones(2), config, old_logps=old).loss.backward()
    torch.testing.assert_close(logps.grad, -torch.tensor([[1.3], [0.8]]) / 2)


def many_rows(loss_type: str, level: str, **options):
    case = make_case(22, mask=GAPS, **options_for(loss_type, level, **options))
    return case.but(advantages=torch.where(IDLE, 0.0, case.advantages + 0.05))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "token"), ("grpo", "sequence"), ("gmpo", "token")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_with_masked_and_idle_rows(backend, loss_type, level, layout, monkeypatch):
    """Five chunks, each with rows that are left out of its GEMMs: dH, dW and db keep their places."""
    case = many_rows(loss_type, level)
    monkeypatch.setattr(linear, "workspace_bytes", lambda *_: 32 * len(case.weight) * 4)
    assert_same("linear", case, run("linear", case, layout=layout, backend=backend), **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_without_a_gap(backend, monkeypatch):
    """Every row active, so that slices, not index tensors, say where a chunk lies."""
    case = make_case(23, mask=torch.ones(7, 20, dtype=torch.bool), **options_for("grpo"))
    case = case.but(advantages=torch.where(IDLE, 0.0, case.advantages + 0.05))
    monkeypatch.setattr(linear, "workspace_bytes", lambda *_: 32 * len(case.weight) * 4)
    assert_same("linear", case, run("linear", case, backend=backend), **EXACT)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_given_logits(backend, level, monkeypatch):
    """Sixteen rows at a time: every block has its own coefficients, and its own entropy gradient."""
    monkeypatch.setattr(passes, "CPU_BLOCK_BYTES", 1)
    case = many_rows("grpo", level, entropy_coef=0.3)
    assert_same("logits", case, run("logits", case, backend=backend), **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_the_entropy_alone(backend):
    """linear_logps and logits_logps under a loss that reads the entropy only, with rows that have no target."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=g), torch.randn(31, 8, generator=g)
    ids, c = torch.randint(31, (9,), generator=g), torch.randn(2, 9, generator=g)
    ids[[0, 4]] = -100
    kept = ids != -100
    raw = (hidden.double() @ weight.double().T).requires_grad_()
    lp, h = oracle_inputs.logps_and_entropy(raw, ids.clamp(min=0))
    for with_logps in (False, True):
        (true,) = torch.autograd.grad((h * c[0] + with_logps * lp * c[1])[kept].sum(), raw, retain_graph=True)
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


@pytest.mark.parametrize("all_active", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rival_that_resembles_the_target_in_bf16(backend, all_active):
    """dH = g p (w_rival - w_target), a 10th of its terms: a p of 8 bits would leave it with an error of 1%.

    With few active rows these are gathered, and their rivals with them.
    """
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 64, generator=g)
    ids = torch.arange(0, 64, 2)
    weight[ids + 1] = weight[ids] + 0.1 * torch.randn(32, 64, generator=g)
    weight, advantages = weight.bfloat16(), torch.randn(32, generator=g)
    active = torch.ones(32, dtype=torch.bool) if all_active else torch.arange(32) % 3 == 1
    advantages = advantages * active
    hidden = (weight[ids].float() / 4).bfloat16().requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    logps = (exact @ weight.double().T).log_softmax(1)[torch.arange(32), ids]
    (-(advantages * logps).mean()).backward()
    out = grpo_fast.linear_grpo_loss(
        hidden, weight, ids, advantages, grpo_fast.LossConfig(loss_type="reinforce"),
        cu_seqlens=torch.tensor([0, 32], dtype=torch.int32), backend=backend,
    )  # fmt: skip
    out.loss.backward()
    error = (hidden.grad.double() - exact.grad).norm(dim=1)[active] / exact.grad.norm(dim=1)[active]
    assert error.max() <= 3e-3 and (hidden.grad[~active] == 0).all()


@pytest.mark.parametrize("function", ["linear", "logits"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_target_of_no_probability_among_others_is_refused(backend, function):
    case = make_case(24, mask=torch.ones(2, 3, dtype=torch.bool), **options_for("grpo"))
    case.bias[int(case.ids[0, 1])] = -torch.inf
    assert (case.ids != case.ids[0, 1]).any()
    with pytest.raises(ValueError, match="target_ids: expected targets of finite probability"):
        run(function, case, backend=backend)


@pytest.mark.parametrize("loss_type", [loss_type for loss_type, level in LOSS_LEVELS if level == "token"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_poison_is_inert_for_every_loss_of_given_logits(backend, loss_type):
    """One sweep over all rows: a masked one has NaN logits, and most slopes are NaN there."""
    case = make_case(25, **options_for(loss_type))
    clean = run("logits", case, backend=backend)
    dirty = run("logits", case.but(hidden=torch.where(case.mask[..., None], case.hidden, torch.nan)), backend=backend)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean.grads["logits"], dirty.grads["logits"])


ROW_THAT_DOES_NOT_COUNT = """
import torch
from grpo_fast import LossConfig
from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.types import LogitRule
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.losses import OBJECTIVES

leaves = {o.leaf: name for name, o in OBJECTIVES.items() if o.window == "ratio" and "token" in o.levels}
for loss_type in leaves.values():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.nan
    weights, ids = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1, -100, 3])
    config = LossConfig(loss_type=loss_type, beta=0.1, max_completion_length=9)
    old, advantages, rule = torch.full((3,), -2.0), torch.tensor([1.0, -1.0, -0.5]), LogitRule(1.0, None, 1.0)
    rows_triton.row_loss_(
        logits, logits, ids, RowTerms(advantages, weights, weights, old, old), config, rule, return_entropy=False
    )
    assert (logits[1] == 0).all() and torch.isfinite(logits).all(), loss_type
    assert (logits[0] != 0).any(), loss_type
"""


@pytest.mark.triton
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_rows_that_do_not_count_are_inert_for_every_leaf_in_triton():
    """As above in Triton's interpreter, which needs a process of its own."""
    run_python("-c", ROW_THAT_DOES_NOT_COUNT, interpret=True)
