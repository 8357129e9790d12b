"""Interpreter cases that check which kernels the backend "triton" launches.

It must launch the Triton kernels, and only those that a call needs. Tests of values cannot check
this, because they also pass if a different backend computes the results.
"""

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig, Support
from grpo_fast.kernels.gpu import gradients, linear, rows, support
from grpo_fast.kernels.head import sources
from grpo_fast.kernels.head import support as head_support
from grpo_fast.kernels.types import LogitRows, LogitTransform
from grpo_fast.loss.call import Call
from grpo_fast.objective.coefficients import RowInputs
from tests.loss_cases import make_case, options_for, run


@pytest.fixture
def launched(monkeypatch):
    """Return a list in which the names of all launched kernels are recorded."""
    names, original = [], rows.launch

    def launch(kernel, *arguments, **options):
        names.append(kernel.fn.__name__.removesuffix("_kernel"))
        original(kernel, *arguments, **options)

    for module in (rows, linear, support, gradients):
        monkeypatch.setattr(module, "launch", launch)
    return names


def test_rows_and_heads(launched):
    for function in ("linear", "logits"):
        run(function, make_case(7, **options_for("dapo")), backend="triton")
    assert launched == ["slice", "join", "row_grad", "row_loss"]


def test_programs_for_several_rows_change_no_bit(monkeypatch):
    """Check the loss kernel with two programs for seven rows, of which one is excluded."""
    g = torch.Generator().manual_seed(3)
    logits, weights = torch.randn(7, 1500, generator=g), torch.rand(7, generator=g)
    targets = torch.randint(1500, (7,), generator=g)
    targets[3], logits[3] = -1, torch.nan
    terms = RowInputs(weights, weights, old_logps=-weights)

    def results():
        out = torch.full_like(logits, torch.nan)  # a row that is not written stays NaN
        p = LogitRows(logits, targets, LogitTransform())
        found = rows.row_loss_(p, out, terms, LossConfig("dapo"), return_entropy=True)
        return [out, *found]

    expected = results()
    assert (expected[0][3] == 0).all() and expected[0].isfinite().all()
    config = rows.row_config(1500)._replace(programs_per_sm=1, store_policy="evict_first")
    monkeypatch.setattr(rows, "row_config", lambda vocab: config)
    for found, want in zip(results(), expected, strict=True):
        assert torch.equal(found.nan_to_num(), want.nan_to_num())


def test_a_support(launched, monkeypatch):
    """Check which kernels a call with `support` launches.

    If the weight is frozen, no kernel for dW runs. The weight may be read a second time only if the
    entropy has a gradient.
    """
    monkeypatch.setattr(head_support, "GATHERED_COST_GPU", 0)
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(8, 8, generator=g).requires_grad_()
    weight, ids = torch.randn(23, 8, generator=g), torch.randint(23, (8,), generator=g)
    sets = Support(torch.stack([ids, (ids + 1) % 23], 1).flatten(), torch.arange(0, 17, 2))

    def call(weight, entropy_coef=0.0):
        launched.clear()
        grpo_fast.linear_grpo_loss(
            hidden, weight, ids, torch.tensor([1.0, -0.7]), LossConfig(entropy_coef=entropy_coef),
            old_logps=-torch.ones(8), cu_seqlens=torch.tensor([0, 4, 8]), support=sets,
            backend="triton",
        )  # fmt: skip
        return [x for x in launched if x != "scale"]

    frozen = ["support_head", "row_grad", "scaled_hidden"]
    assert call(weight) == frozen
    assert call(weight.requires_grad_()) == [*frozen, "sums"]
    assert call(weight, 0.1) == [*frozen[:2], "sums", "sums"]
    launched.clear()
    logits = (hidden @ weight.T).detach()
    grpo_fast.logits_logps(logits, ids, support=sets, backend="triton")
    assert launched == ["row_logps"]


def test_weights_are_held_or_computed_again(monkeypatch):
    """Check that a sequence-level loss recomputes the exponentials of all chunks but the last.

    With a single chunk, nothing is recomputed. Stored and recomputed exponentials must give the
    same bits.
    """
    case = make_case(7, mask=torch.ones(2, 35, dtype=torch.bool), dtype=torch.bfloat16,
                     **options_for("gspo")).but(old=None)  # fmt: skip
    sweeps, original = [], linear.sweep

    def spy(p, partial, out=None, *rest, only_high_nll=False):
        sweeps.append("far" if only_high_nll else "bare" if out is None else "store")
        original(p, partial, out, *rest, only_high_nll=only_high_nll)

    monkeypatch.setattr(linear, "sweep", spy)
    held = run("linear", case, backend="triton")
    assert sweeps == ["store", "far"]
    sweeps.clear()
    monkeypatch.setattr(sources, "workspace_bytes", lambda *_: 0)
    again = run("linear", case, backend="triton")
    # In the forward pass, two chunks store nothing ("bare"). The third chunk stores its
    # exponentials, and recomputes the tiles that contain unlikely targets ("far"). The backward
    # pass recomputes the exponentials of the first two chunks.
    assert sweeps == ["bare", "bare", "store", "far", "store", "store"]
    assert torch.equal(held.logps, again.logps)
    assert torch.equal(held.grads["hidden"], again.grads["hidden"])


@pytest.mark.parametrize("zeros", [1, 40])
def test_rows_without_coefficient_are_inert(zeros):
    """Check that NaN in rows with coefficient 0 changes no bit of any gradient.

    If one row has coefficient 0, the kernels process all rows. If 40 rows have coefficient 0, the
    other rows are copied together, and the kernels process only the copy.
    """
    mask = torch.ones(1, 67, dtype=torch.bool)
    case = make_case(9, H=40, V=150, mask=mask, dtype=torch.bfloat16)
    share = torch.linspace(0.5, 1.5, 67)[None].clone()
    share[:, 3 : 3 + zeros] = 0.0
    case.ids[0, ::4] = 7  # many rows have target 7

    def gradients(hidden):
        leaves = [x.clone().requires_grad_() for x in (hidden, case.weight, case.bias)]
        options = {"bias": leaves[2], "backend": "triton"}
        logps = grpo_fast.linear_logps(*leaves[:2], case.ids, **options)
        return logps, torch.autograd.grad(logps, leaves, share)

    _, clean = gradients(case.hidden)
    dirty = case.hidden.clone()
    dirty[0, 3, 5] = torch.nan
    logps, found = gradients(dirty)
    assert logps[0, 3].isnan() and (found[0][0, 3 : 3 + zeros] == 0).all()
    assert all(map(torch.equal, found, clean))
    h, w, b = (x.double() for x in (case.hidden[0], case.weight, case.bias))
    raw = (h @ w.T + b).requires_grad_()
    logps = raw.log_softmax(-1).gather(-1, case.ids[0, :, None])[:, 0]
    exact = torch.autograd.grad(logps, raw, share[0])[0].T @ h
    assert (found[1].double() - exact).norm() <= 3e-3 * exact.norm()


def test_rows_without_a_target_change_nothing(monkeypatch):
    """Check logps and gradients if a GPU keeps rows without a target, because it should not wait.

    These rows contain NaN, which must not reach any result.
    """
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(40, 16, generator=g).bfloat16()
    weight = torch.randn(600, 16, generator=g).bfloat16()
    ids = torch.randint(600, (40,), generator=g)
    ids[::3] = -100
    hidden[ids == -100] = torch.nan
    found = []
    for keeps in (True, False):
        monkeypatch.setattr(Call, "_keeps_all_rows", lambda call, keeps=keeps: keeps)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logps = grpo_fast.linear_logps(*leaves, ids, backend="triton")
        (logps * torch.arange(40)).sum().backward()
        found.append((logps.detach(), *(x.grad for x in leaves)))
    (logps, d_hidden, d_weight), (*expected, all_d_weight) = found
    assert torch.equal(logps, expected[0]) and (logps[ids == -100] == 0).all()
    torch.testing.assert_close(d_hidden, expected[1])
    torch.testing.assert_close(d_weight, all_d_weight)
    assert (d_hidden[ids == -100] == 0).all()
