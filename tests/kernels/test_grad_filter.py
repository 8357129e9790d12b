"""Tests of `grad_filter`, which computes the gradient GEMMs over a subset of the columns.

They check that the reported fraction of skipped gradient is exact, and that the errors are within
their bounds. test_triton_interpreter.py runs the tests again in Triton's interpreter.
"""

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig
from grpo_fast.kernels.head.products import column_masses, heavy_columns
from tests.loss_cases import BACKENDS, IS_INTERPRETER
from tests.pairs import pairs

T, H, V = 96, 32, 1003 if IS_INTERPRETER else 3000
CU = torch.tensor([0, 40, 96], dtype=torch.int32)

CONFIGS = {
    "dapo": LossConfig(),
    "gspo": LossConfig(loss_type="gspo"),
    "entropy": LossConfig(entropy_coef=0.1),
}


def problem(spread, dtype=torch.float64):
    """Return random inputs of the loss whose logits have the standard deviation `spread`.

    A spread of 0.5 gives flat distributions, and 12 gives peaked distributions.
    """
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(T, H, generator=g, dtype=torch.float64)
    weight = torch.randn(V, H, generator=g, dtype=torch.float64) * spread / H**0.5
    probabilities = torch.distributions.Categorical(logits=hidden @ weight.T).probs
    ids = probabilities.multinomial(1, generator=g)[:, 0]
    leaves = hidden, weight, torch.zeros(V, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in leaves], ids, torch.tensor([1.0, -0.5])


def run(leaves, ids, advantages, config=LossConfig(), **kw):  # noqa: B008
    hidden, weight, bias = leaves
    out = grpo_fast.linear_grpo_loss(
        hidden, weight, ids, advantages, config, bias=bias, cu_seqlens=CU, **kw
    )
    return out, torch.autograd.grad(out.loss, leaves)


ROWS = {"one chunk": 96, "three chunks": 32}.items()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}.items()


@pairs(rows=ROWS, tolerance=[1e-1, 1e-2, 1e-4], config=CONFIGS.items())
def test_bounds(config, tolerance, rows, monkeypatch):
    """Check that the filter skips at most the tolerated share of the gradient of the logits.

    The metric "dropped_mass" is the skipped share of Σ|d-logits|. The error of dH must be at most
    the skipped part of Σ|d-logits|, times the largest norm of a row of W. The bound of dW uses the
    largest norm of a row of `hidden` instead.
    """
    monkeypatch.setattr("grpo_fast.kernels.head.sources.workspace_bytes", lambda *_: rows * V * 8)
    leaves, ids, advantages = problem(12)
    exact, exact_grads = run(leaves, ids, advantages, config)
    out, grads = run(leaves, ids, advantages, config, grad_filter=tolerance)
    assert torch.equal(out.loss, exact.loss) and torch.equal(out.logps, exact.logps)
    hidden, weight, _ = leaves
    logits = (hidden.detach() @ weight.detach().T).requires_grad_()
    plain = grpo_fast.logits_grpo_loss(logits, ids, advantages, config, cu_seqlens=CU)
    mass = torch.autograd.grad(plain.loss, logits)[0].abs().sum()
    dropped = out.metrics["grad_filter/dropped_mass"]
    assert 0 < dropped <= tolerance and 0 < out.metrics["grad_filter/columns"] < 0.6
    delta = dropped.double() * mass
    dh, dw, db = (a - b for a, b in zip(grads, exact_grads, strict=True))
    assert 0 < dh.norm() <= delta * weight.norm(dim=1).max()
    assert 0 < dw.norm() <= delta * hidden.norm(dim=1).max()
    assert 0 < db.abs().sum() <= delta * (1 + 1e-6)


@pairs(backend=BACKENDS, dtype=DTYPES, config=CONFIGS.items(), rows=ROWS)
def test_backends(dtype, backend, config, rows, monkeypatch):
    size = rows * V * dtype.itemsize
    monkeypatch.setattr("grpo_fast.kernels.head.sources.workspace_bytes", lambda *_: size)
    leaves, ids, advantages = problem(12, dtype)
    plain, exact = run(leaves, ids, advantages, config, backend=backend)
    out, grads = run(leaves, ids, advantages, config, grad_filter=1e-3, backend=backend)
    assert torch.equal(out.loss, plain.loss) and torch.equal(out.logps, plain.logps)
    assert 0 < out.metrics["grad_filter/dropped_mass"] <= 1e-3
    assert out.metrics["grad_filter/columns"] < 0.6
    for ours, theirs in zip(grads, exact, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


@pairs(backend=BACKENDS, dtype=DTYPES)
def test_the_reported_share_counts_the_target(backend, dtype):
    """Check that the metric "dropped_mass" is the share of the gradient that is missing in db.

    With a single row, db is the gradient of the row's logits. Half of this gradient belongs to the
    target, and the metric must include it.
    """
    (hidden, weight, bias), _, _ = problem(12, dtype)

    def gradient(**kw):
        out = grpo_fast.linear_grpo_loss(
            hidden[:1], weight, torch.tensor([7]), torch.ones(1), LossConfig(loss_type="reinforce"),
            bias=bias, cu_seqlens=torch.tensor([0, 1], dtype=torch.int32), backend=backend, **kw,
        )  # fmt: skip
        db = torch.autograd.grad(out.loss, bias)[0].double()
        return out.metrics.get("grad_filter/dropped_mass"), db

    (_, exact), (share, filtered) = gradient(), gradient(grad_filter=1e-1)
    missing = (exact - filtered).abs().sum() / exact.abs().sum()
    assert 0.02 < missing <= 0.1
    rel = 1e-4 if dtype == torch.float32 else 1e-2
    assert share.item() == pytest.approx(missing.item(), rel=rel)
    assert filtered[7] == exact[7] and ((filtered == 0) | (filtered == exact)).all()


def test_a_flat_softmax_keeps_everything():
    leaves, ids, advantages = problem(0.5, torch.float32)
    _, exact = run(leaves, ids, advantages)
    out, grads = run(leaves, ids, advantages, grad_filter=1e-3)
    assert out.metrics["grad_filter/dropped_mass"] == 0 and out.metrics["grad_filter/columns"] == 1
    for ours, theirs in zip(grads, exact, strict=True):
        assert torch.equal(ours, theirs)


def test_masses_hold_the_coefficients():
    """Check the mass of each vocabulary column, and which columns `heavy_columns` keeps.

    The mass of a column is the sum of |d-logit|·|scale of the row| over all rows. `heavy_columns`
    must drop the columns with the smallest masses, but must keep every column if a mass is NaN.
    """
    d = torch.zeros(70, 5)
    d[:, 0], d[0, 1:] = 1.0, torch.tensor([0.5, -0.25, 0.01, 0.0])
    masses = column_masses(d)
    assert torch.equal(masses, torch.tensor([70, 0.5, 0.25, d[0, 3].item(), 0]).double())
    assert torch.equal(column_masses(d, scale=torch.full((70,), -2.0)), 2 * masses)
    columns, dropped, total = heavy_columns(masses, 0.005)
    assert columns.tolist() == [0, 1]
    assert (dropped.item(), total.item()) == pytest.approx((0.26, 70.76))
    assert heavy_columns(torch.tensor([1.0, float("nan"), 0.5]), 0.5)[0].tolist() == [0, 1, 2]
