"""Test torch.compile(fullgraph=True) on a training step, the custom operators, and autocast."""

from __future__ import annotations

import shutil

import pytest
import torch

import grpo_fast
from grpo_fast.loss import operators, schema
from grpo_fast.loss.arguments import Options
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


def compiled(step, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend=backend)


def training_step(case, backend="torch"):
    """Return a function that computes a training step with a linear layer before the LM head.

    The function returns the loss times 0.5, the mean ratio and the logps.
    """

    def step(x, layer, weight, bias):
        own = {"hidden": torch.tanh(x @ layer), "lm_head_weight": weight, "bias": bias}
        out = grpo_fast.linear_grpo_loss(**{**given, **own})
        return out.loss * 0.5, out.metrics["ratio/mean"], out.logps

    given = arguments("linear", case) | {"backend": backend}
    return step


def gradients(step, case):
    layer = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    leaves = [x.clone().requires_grad_() for x in (case.hidden, layer, case.weight, case.bias)]
    loss, metric, logps = step(*leaves)
    loss.backward()
    return [loss.detach(), metric, logps, *[x.grad for x in leaves]]


# This file compiles complete steps. test_argument_table.py compiles a call for each keyword.
NEEDS_CPP = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
STEPS = [  # one loss type for each kind of ratio
    *[(loss_type, "aot_eager", "torch", 1e-6) for loss_type in ("grpo", "gspo", "vespo")],
    pytest.param("dapo", "inductor", "auto", 1e-4, marks=NEEDS_CPP),
]


@pytest.mark.parametrize(("loss_type", "compiler", "backend", "rtol"), STEPS)
def test_a_step_compiles_in_one_graph(loss_type, compiler, backend, rtol):
    case = make_case(111, **options_for(loss_type, beta=0.1))
    step = training_step(case, backend)
    fast = gradients(compiled(step, compiler), case)
    for own, expected in zip(fast, gradients(step, case), strict=True):
        torch.testing.assert_close(own, expected, rtol=rtol, atol=rtol)


@pairs(backend=BACKENDS, layout=["padded", "packed"], function=FUNCTIONS)
def test_every_public_loss_compiles_in_one_graph(function, layout, backend, monkeypatch):
    backend = str(backend)  # torch 2.11 cannot trace other subclasses of str
    options = options_for("grpo", beta=0.1, entropy_coef=0.1 if function != "logps" else 0.0)
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
        return grpo_fast.linear_grpo_loss(h, w, ids, A, config, cu_seqlens=cu, backend="torch").loss

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (5, 9, 14):
        g = torch.Generator().manual_seed(T)
        h, w = torch.randn(T, 4, generator=g).requires_grad_(), torch.randn(7, 4, generator=g)
        ids, A = torch.randint(7, (T,), generator=g), torch.randn(2, generator=g)
        cu = torch.tensor([0, 2, T], dtype=torch.int32)
        torch.testing.assert_close(fast(h, w, ids, A, cu), step(h, w, ids, A, cu))


def test_bad_input_is_refused_by_the_compiled_step_too():
    case = make_case(115, **options_for("dapo"))
    given = arguments("linear", case)
    fast = compiled(lambda ids: grpo_fast.linear_grpo_loss(**{**given, "target_ids": ids}).loss)
    fast(case.ids)
    with pytest.raises(Exception, match="target_ids"):
        fast(case.ids + 10**6)
    fast(case.ids)


def test_what_no_schema_carries_is_refused():
    """Check that options that a compiled graph cannot represent raise an error."""
    plain = Options([True], grad_filter=0.1)
    assert schema.options_of(schema.graph_fields(plain)) == plain
    for name in ("shard", "inplace", "divergence"):
        with pytest.raises(ValueError, match=f"{name}: expected its default in a graph"):
            schema.graph_fields(plain._replace(**{name: True}))


# ----------------------------------------------------------
# custom ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", ["linear", "logits", "logps"])
def test_operators_agree_with_their_fake_kernels(function, dtype, monkeypatch):
    """Check that the custom operators pass torch.library.opcheck on arguments from public calls."""
    if function == "logps" and dtype != torch.float32:
        pytest.skip("logps are fp32")
    real, checked = operators.build_batch, []

    def build(loss, tensors, options, config, given):
        # The operator that opcheck runs calls `build_batch` again, so restore the original first.
        monkeypatch.setattr(operators, "build_batch", real)
        name = next(name for name, known in operators.LOSSES.items() if known is loss)
        packed = operators._pack_arguments(config, given)
        inputs = (*tensors, *options[: operators.NUM_OPTIONS], *packed)
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(
            getattr(torch.ops.grpo_fast, f"{name}_loss").default, inputs, test_utils=utils
        )
        checked.append(name)
        monkeypatch.setattr(operators, "build_batch", build)
        return real(loss, tensors, options, config, given)

    monkeypatch.setattr(operators, "build_batch", build)
    for entropy_coef in (0.0, 0.1):
        options = options_for("grpo", beta=0.1, entropy_coef=entropy_coef)
        case = make_case(116, dtype=dtype, sampling=True, **options)
        run(function, case)
        run(function, case.but(bias=None, sampling=None), layout="packed")
    assert len(checked) == 4


def test_global_precision_settings_do_not_reach_fp32_results():
    """Check that torch.set_float32_matmul_precision does not change the loss.

    Users set it for the model. The loss needs full fp32 products, because ratios are near 1.
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
