"""Test that a model compiled by torch.compile can call the losses, which break the graph."""

from __future__ import annotations

import inspect

import pytest
import torch

import grpo_fast
from tests.loss_cases import arguments, make_case, options_for, relative_l2, run

FUNCTIONS = (
    "linear_logps", "logits_logps", "grpo_loss", "linear_grpo_loss", "logits_grpo_loss",
    "linear_divergence",
)  # fmt: skip


def step(w1, w2, ids, advantages, config, cu):
    """Run a training step: a layer, the loss of its output, and the backward pass."""
    hidden = torch.tanh(torch.arange(20.0).view(5, 4) @ w1)
    out = grpo_fast.linear_grpo_loss(hidden, w2, ids, advantages, config, cu_seqlens=cu)
    out.loss.backward()
    return out.loss.detach() * 0.5, out.metrics["ratio/mean"] * 2


def test_a_compiled_step_trains():
    config = grpo_fast.LossConfig(loss_type="dapo")
    torch._dynamo.reset()
    found = []
    for run_step in (step, torch.compile(step, backend="aot_eager")):
        g = torch.Generator().manual_seed(0)
        w1 = torch.randn(4, 4, generator=g).requires_grad_()
        w2 = torch.randn(7, 4, generator=g).requires_grad_()
        ids, advantages = torch.randint(7, (5,), generator=g), torch.randn(2, generator=g)
        cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        values = run_step(w1, w2, ids, advantages, config, cu)
        found.append([*values, w1.grad, w2.grad])
    assert all(x.abs().sum() > 0 for x in found[0])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fullgraph_is_refused_by_name(name):
    function = getattr(grpo_fast, name)
    count = sum(x.default is x.empty for x in inspect.signature(function).parameters.values())
    with pytest.raises(Exception, match=rf"{name}\(\) cannot be in a graph of torch.compile"):
        torch.compile(lambda x: function(*[x] * count), fullgraph=True)(torch.ones(2))


def test_bad_input_is_refused_by_the_compiled_step_too():
    case = make_case(115, **options_for("dapo"))
    given = arguments("linear", case)
    torch._dynamo.reset()
    fast = torch.compile(
        lambda ids: grpo_fast.linear_grpo_loss(**{**given, "target_ids": ids}).loss, backend="eager"
    )
    fast(case.ids)
    with pytest.raises(ValueError, match="target_ids"):
        fast(case.ids + 10**6)
    fast(case.ids)


def test_global_precision_settings_do_not_reach_fp32_results():
    """Check that torch.set_float32_matmul_precision does not change the loss.

    Users set a lower precision for the model. The loss needs matrix products in full fp32.
    Importance ratios are near 1, so the error of a logp is not small compared with the log ratio.
    """
    case = make_case(119, H=64, **options_for("grpo"))
    plain = run("linear", case)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        relaxed = run("linear", case)
    finally:
        torch.set_float32_matmul_precision(before)
    assert relative_l2(relaxed.grads["hidden"], plain.grads["hidden"]) <= 2e-6
    assert (relaxed.logps - plain.logps).abs().max() <= 1e-5
