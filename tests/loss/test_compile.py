"""Test torch.compile(fullgraph=True), and the custom operators."""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast.loss import operators, schema
from grpo_fast.loss.batch import TokenBatch
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LOSSES_OF,
    arguments,
    make_case,
    options_for,
    relative_l2,
    run,
)
from tests.pairs import pairs


def compiled(step, **options):
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend="aot_eager", **options)


@pairs(backend=BACKENDS, layout=["padded", "packed"], function=FUNCTIONS,
       loss_type=["grpo", "gspo", "vespo"])  # fmt: skip
def test_every_public_loss_compiles_in_one_graph(function, loss_type, layout, backend, monkeypatch):
    backend = str(backend)  # torch 2.11 cannot trace other subclasses of str
    options = options_for(loss_type, beta=0.1, entropy_coef=0.1 if function != "logps" else 0.0)
    case = make_case(112, sampling=True, **options)
    expected = run(function, case, layout=layout, backend=backend)
    name = LOSSES_OF[function]
    monkeypatch.setattr(grpo_fast, name, compiled(getattr(grpo_fast, name)))
    own = run(function, case, layout=layout, backend=backend)
    assert torch.equal(own.loss, expected.loss)
    assert all(torch.equal(own.grads[name], expected.grads[name]) for name in own.grads)


def test_another_length_does_not_break_the_graph():
    config = grpo_fast.LossConfig(loss_type="dapo")

    def step(h, w, ids, A, cu):
        head = torch.tanh(h), w, ids  # a layer before the head is in the graph, too
        out = grpo_fast.linear_grpo_loss(*head, A, config, cu_seqlens=cu, backend="torch")
        return out.loss * 0.5, out.metrics["ratio/mean"]

    fast = compiled(step, dynamic=True)
    for T in (5, 9, 14):
        g = torch.Generator().manual_seed(T)
        h, w = torch.randn(T, 4, generator=g).requires_grad_(), torch.randn(7, 4, generator=g)
        ids, A = torch.randint(7, (T,), generator=g), torch.randn(2, generator=g)
        cu = torch.tensor([0, 2, T], dtype=torch.int32)
        own, expected = fast(h, w, ids, A, cu), step(h, w, ids, A, cu)
        torch.testing.assert_close(own, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x[0], h)[0] for x in (own, expected)))


def test_bad_input_is_refused_by_the_compiled_step_too():
    case = make_case(115, **options_for("dapo"))
    given = arguments("linear", case)
    fast = compiled(lambda ids: grpo_fast.linear_grpo_loss(**{**given, "target_ids": ids}).loss)
    fast(case.ids)
    with pytest.raises(Exception, match="target_ids"):
        fast(case.ids + 10**6)
    fast(case.ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", ["linear", "logits", "logps"])
def test_operators_agree_with_their_fake_kernels(function, dtype, monkeypatch):
    """Check that the custom operators pass torch.library.opcheck on arguments from public calls."""
    if function == "logps" and dtype != torch.float32:
        pytest.skip("logps are fp32")
    real, checked = TokenBatch.build, []
    name = "given_logps" if function == "logps" else function
    operator = getattr(torch.ops.grpo_fast, f"{name}_loss")

    def build(tensors, options, config, given):
        # Restore the original method first, because the operator that opcheck runs calls it again.
        monkeypatch.setattr(TokenBatch, "build", real)
        packed = operators._pack_arguments(config, given)
        inputs = (*tensors, *schema.graph_fields(options), *packed)
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(operator.default, inputs, test_utils=utils)
        checked.append(function)
        monkeypatch.setattr(TokenBatch, "build", build)
        return real(tensors, options, config, given)

    monkeypatch.setattr(TokenBatch, "build", build)
    for entropy_coef in (0.0, 0.1):
        options = options_for("grpo", beta=0.1, entropy_coef=entropy_coef)
        case = make_case(116, dtype=dtype, sampling=True, **options)
        run(function, case)
        run(function, case.but(bias=None, sampling=None), layout="packed")
    assert len(checked) == 4


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
