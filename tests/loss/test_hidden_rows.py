"""Test `hidden_rows`, which lets one row of `hidden` predict several targets.

For example, the last row of a shared prompt predicts the first token of every completion.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig
from tests.kernels.formulas import torch_threads
from tests.loss_cases import BACKENDS
from tests.pairs import pairs

# The row of `hidden` that predicts each of 8 tokens, in three completions of 3, 2 and 3 tokens. Row
# 1 is the last row of the shared prompt, which predicts the first token of each completion.
ROWS = torch.tensor([1, 2, 3, 1, 4, 1, 5, 6])
CU = torch.tensor([0, 3, 5, 8], dtype=torch.int32)
V, H = 37, 16
LOSSES = {
    "token-local": dict(loss_type="grpo", beta=0.05),
    "sequence": dict(loss_type="gspo", aggregation="sequence_mean"),
    "entropy": dict(loss_type="dapo", entropy_coef=0.01),
}


def problem(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.randint(V, (8,), generator=g)
    tokens = dict(
        old_logps=-3 - torch.rand(8, generator=g), ref_logps=-3 - torch.rand(8, generator=g)
    )
    return hidden, weight, ids, torch.tensor([1.0, -0.5, 0.7]), tokens


def loss_of(options, hidden, weight, ids, advantages, tokens, **kw):
    """Return the loss output, and the gradients of `hidden` and `weight`."""
    config = LossConfig(**options)
    out = grpo_fast.linear_grpo_loss(
        hidden, weight, ids, advantages, config, cu_seqlens=CU, **tokens, **kw
    )
    return out, torch.autograd.grad(out.loss, (hidden, weight))


@pairs(
    backend=BACKENDS,
    dtype={"fp32": torch.float32, "bf16": torch.bfloat16}.items(),
    options=LOSSES.items(),
)
def test_the_loss_is_that_of_repeated_rows(options, dtype, backend):
    """Check that hidden_rows gives the results of a call with the repeated rows `hidden[rows]`.

    Loss, logps and dW must have the same bits. dH must equal the gradient of indexing in autograd.
    """
    hidden, *others = problem(dtype)
    ours, (dh, dw) = loss_of(options, hidden, *others, hidden_rows=ROWS, backend=backend)
    repeated, (dh_of_rows, dw_repeated) = loss_of(options, hidden[ROWS], *others, backend=backend)
    assert torch.equal(ours.loss, repeated.loss) and torch.equal(ours.logps, repeated.logps)
    assert torch.equal(dw, dw_repeated)
    (dh_repeated,) = torch.autograd.grad(hidden[ROWS], hidden, dh_of_rows)
    # The gradients of rows that are used once must be bitwise equal. Row 1 is used three times. Our
    # code sums its three gradients in fp32, and autograd sums them in bf16, so allow a tolerance.
    once = [0, 2, 3, 4, 5, 6]
    assert torch.equal(dh[once], dh_repeated[once]) and not dh[0].any()
    rtol = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(dh[1], dh_repeated[1], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logps_and_their_gradient(backend):
    hidden, weight, ids, _, _ = problem()
    ours = grpo_fast.linear_logps(
        hidden, weight, ids, hidden_rows=ROWS, return_entropy=True, backend=backend
    )
    repeated = grpo_fast.linear_logps(
        hidden[ROWS], weight, ids, return_entropy=True, backend=backend
    )
    up = torch.arange(1.0, 9.0)
    found, expected = (
        torch.autograd.grad((lp * up + h).sum(), (hidden, weight)) for lp, h in (ours, repeated)
    )
    assert torch.equal(ours[0], repeated[0]) and torch.equal(ours[1], repeated[1])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_padded_targets_and_chunks(monkeypatch):
    """Check that `hidden_rows` works if the targets are padded (B, L) and `hidden` is (R, H).

    The bits of the results must not change if several chunks use the same row of `hidden`.
    """
    hidden, weight, _, advantages, _ = problem()
    big = torch.randint(V, (3, 40), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(120).reshape(3, 40) % 7
    config = LossConfig(loss_type="grpo")

    def run():
        out = grpo_fast.linear_grpo_loss(hidden, weight, big, advantages, config, hidden_rows=rows)
        return out.logps, *torch.autograd.grad(out.loss, hidden)

    expected = run()
    assert expected[0].shape == (3, 40)
    monkeypatch.setattr("grpo_fast.kernels.head.sources.workspace_bytes", lambda *_: 32 * V * 4)
    for one, other in zip(run(), expected, strict=True):
        assert torch.equal(one, other)


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


def test_refusals():
    hidden, weight, ids, *others = problem()
    for bad, said in (
        (ROWS.float(), "hidden_rows: expected an int64 or int32 tensor"),
        (ROWS[:3], "hidden_rows: expected shape that of target_ids"),
        (ROWS + 1, "hidden_rows: expected rows in \\[0, 7\\)"),
        (ROWS - 2, "hidden_rows: expected rows in \\[0, 7\\)"),
    ):
        with pytest.raises(ValueError, match=said):
            loss_of({}, hidden, weight, ids, *others, hidden_rows=bad)
        with pytest.raises(ValueError, match=said):
            grpo_fast.linear_logps(hidden, weight, ids, hidden_rows=bad)
    with pytest.raises(
        ValueError, match=r"hidden of shape .* conflicts with hidden_rows: .*; pass \(R, H\)"
    ):
        loss_of({}, hidden[None], weight, ids, *others, hidden_rows=ROWS)
