"""`grad_filter` on 16-bit weights in the interpreter: what stays, what is reported and the bounds,
against fp64 (bf16).

Run by test_triton_interpreter.py in a process of its own. The d-logits of this path are never
stored: a coefficient by row multiplies weights that are 0 in the target's column, which is added
apart. tests/kernels/test_grad_filter.py has the path that stores them.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import grpo_fast
from grpo_fast import LossConfig
from grpo_fast.kernels.head import gradients as gradient_sums
from grpo_fast.kernels.head import loop as linear
from grpo_fast.kernels.head.grad_filter import WORTH_BELOW
from grpo_fast.kernels.head.gradients import GradientSums
from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)

# Three chunks of 32 rows where the workspace is small; no multiple of any block.
T, H, V = 67, 24, 1003
# How far the gradients of this path are from fp64 without a filter.
ROUNDING = 3e-3
BF16_UNIT = 2.0**-8
WIDE = {"epsilon_low": 0.9, "epsilon_high": 9.0}  # nothing is clipped: every row has a coefficient
CONFIGS = {
    "token level": {"loss_type": "dapo", **WIDE},
    "sequence level": {"loss_type": "gspo", **WIDE},
    "softcap": {"loss_type": "dapo", **WIDE, "softcap": 60.0},
}


class Problem(NamedTuple):
    hidden: Tensor  # (T, H) bf16
    weight: Tensor  # (V, H) bf16
    bias: Tensor  # (V,) bf16
    target: Tensor  # (T,)
    advantages: Tensor  # (T,)
    old: Tensor  # (T,)


def problem(spread: float, softcap: float | None = None) -> Problem:
    """Raw logits of this standard deviation. Every third target is a column that hardly any row
    wants.
    """
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=g).bfloat16()
    weight = (torch.randn(V, H, generator=g) * spread / H**0.5).bfloat16()
    target = (hidden.float() @ weight.float().T).softmax(-1).multinomial(1, generator=g)[:, 0]
    target[::3] = torch.randint(V, (len(target[::3]),), generator=g)
    old = grpo_fast.linear_logps(hidden, weight, target, softcap=softcap, backend="torch") - 0.1
    return Problem(
        hidden, weight, torch.zeros(V).bfloat16(), target, torch.randn(T, generator=g), old
    )


TOKENS = {"cu_seqlens": torch.tensor([0, 30, T]), "num_items_in_batch": 64}


def run(p: Problem, config: LossConfig, **options):
    """The loss's output and (dH, dW, db) by the Triton kernels."""
    hidden, weight, bias = leaves = [x.detach().clone().requires_grad_() for x in p[:3]]
    out = grpo_fast.linear_grpo_loss(
        hidden, weight, p.target, p.advantages, config, bias=bias, old_logps=p.old,
        backend="triton", **{**TOKENS, **options},
    )  # fmt: skip
    return out, torch.autograd.grad(out.loss, leaves)


def exact_d_logits(p: Problem, config: LossConfig) -> Tensor:
    """(T, V) fp64: the gradient of hidden·Wᵀ + bias."""
    raw = (p.hidden.double() @ p.weight.double().T + p.bias.double()).requires_grad_()
    loss = grpo_fast.logits_grpo_loss(
        raw, p.target, p.advantages, config, old_logps=p.old, backend="torch", **TOKENS
    )
    return torch.autograd.grad(loss.loss, raw)[0]


def gradients_of(d: Tensor, p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return d @ p.weight.double(), d.T @ p.hidden.double(), d.sum(0)


@pytest.fixture
def chosen(request, monkeypatch) -> list[tuple[slice, Tensor]]:
    """(rows, the columns that `heavy_columns` chose) for each chunk of 16-bit weights, filled by
    `run`.
    """
    if request.param == "chunks":
        monkeypatch.setattr(linear, "workspace_bytes", lambda *_: 0)
    found: list[tuple[slice, Tensor]] = []
    chunk: list[slice] = []
    add, heavy_columns = GradientSums.add, gradient_sums.heavy_columns

    def watched_add(self, rows, h, d_logits, count, keep):
        assert d_logits.coefficients is not None, "expected the path of 16-bit weights"
        chunk[:] = [rows]
        add(self, rows, h, d_logits, count, keep)

    def watched_columns(masses, tolerance):
        result = heavy_columns(masses, tolerance)
        found.append((chunk[0], result[0]))
        return result

    monkeypatch.setattr(GradientSums, "add", watched_add)
    monkeypatch.setattr(gradient_sums, "heavy_columns", watched_columns)
    return found


def assert_targets_stay(found, kept, is_target: Tensor, stays: Tensor) -> None:
    """dW and db of the targets whose columns no chunk chose are their own; other columns that none
    chose have zeros.
    """
    chosen = stays.any(0)
    alone = is_target.any(0) & ~chosen
    assert alone.any(), "expected targets among the columns that were left out"
    for actual, expected in zip(found[1:], kept[1:], strict=True):
        rows, exact = (x.double().reshape(V, -1) for x in (actual, expected))
        assert ((rows - exact)[alone].norm(dim=1) <= BF16_UNIT * exact[alone].norm(dim=1)).all()
        assert (rows[~chosen & ~alone] == 0).all()


def assert_bounds(found, p: Problem, d: Tensor, left_out: Tensor, *, is_large: bool) -> None:
    """The bounds of grad_filter.py on the way to the whole fp64 gradients."""
    whole = gradients_of(d, p)
    errors = [actual.double() - expected for actual, expected in zip(found, whole, strict=True)]
    for error, expected, factor in zip(errors, whole, (p.weight, p.hidden), strict=False):
        most = left_out * factor.double().norm(dim=1).max()
        assert error.norm() <= most + ROUNDING * expected.norm()
        assert not is_large or error.norm() > 5 * ROUNDING * expected.norm(), (
            "expected a large filter to show"
        )
    assert errors[2].abs().sum() <= left_out + ROUNDING * whole[2].abs().sum()


@pytest.mark.parametrize(
    ("name", "tolerance", "chosen"),
    [
        ("token level", 3e-2, "one chunk"), ("token level", 0.3, "chunks"),
        ("sequence level", 3e-2, "chunks"), ("softcap", 0.3, "one chunk"),
    ],
    indirect=["chosen"],
)  # fmt: skip
def test_a_peaked_softmax(name, tolerance, chosen):
    """The share is what is missing and within the tolerance; chosen columns and all targets are as
    in fp64.
    """
    config = LossConfig(**CONFIGS[name])
    p = problem(10.0, config.softcap)
    plain, _ = run(p, config)
    assert not chosen
    out, found = run(p, config, grad_filter=tolerance)
    assert torch.equal(out.loss, plain.loss) and torch.equal(out.logps, plain.logps)
    stays, is_target = torch.zeros(T, V, dtype=torch.bool), torch.arange(V) == p.target[:, None]
    for rows, columns in chosen:
        assert len(columns) < WORTH_BELOW * V
        stays[rows, columns] = True
    assert stays.any(1).all(), "every row belongs to a chunk"

    d = exact_d_logits(p, config)
    left_out = torch.where(stays | is_target, 0.0, d.abs()).sum()
    share, columns = (out.metrics[f"grad_filter/{x}"].item() for x in ("dropped_mass", "columns"))
    assert tolerance / 4 < share <= tolerance
    assert share == pytest.approx((left_out / d.abs().sum()).item(), rel=5e-3)
    assert columns == pytest.approx(stays.double().mean().item())

    kept = gradients_of(torch.where(stays | is_target, d, 0.0), p)
    for actual, expected in zip(found, kept, strict=True):
        assert (actual.double() - expected).norm() <= ROUNDING * expected.norm()
    assert_targets_stay(found, kept, is_target, stays)
    assert_bounds(found, p, d, left_out, is_large=tolerance == 0.3)


@pytest.mark.parametrize("chosen", ["one chunk"], indirect=True)
def test_a_flat_softmax_keeps_everything(chosen):
    p, config = problem(0.5), LossConfig(**CONFIGS["token level"])
    _, exact = run(p, config)
    out, grads = run(p, config, grad_filter=1e-3)
    assert chosen and all(len(columns) >= WORTH_BELOW * V for _, columns in chosen)
    assert out.metrics["grad_filter/dropped_mass"] == 0 and out.metrics["grad_filter/columns"] == 1
    assert all(torch.equal(a, b) for a, b in zip(grads, exact, strict=True))
