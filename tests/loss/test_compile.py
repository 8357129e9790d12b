"""torch.compile(fullgraph=True) of a step that calls the loss, custom-op checks, and autocast."""

from __future__ import annotations

import shutil

import pytest
import torch

import grpo_fast
from tests.loss_cases import (
    BACKENDS,
    LEAVES_AND_LEVELS,
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


def linear_step(case, config, backend="torch"):
    """A training step in miniature: a layer below the loss, the loss, a metric, an upstream
    factor.
    """
    keywords = arguments(case, "padded")
    advantages = keywords.pop("advantages")

    def step(x, layer, weight, bias):
        out = grpo_fast.linear_grpo_loss(
            torch.tanh(x @ layer),
            weight,
            case.ids,
            advantages,
            config,
            bias=bias,
            backend=backend,
            **keywords,
        )
        return out.loss * 0.5, out.metrics["ratio/mean"], out.logps

    return step


def gradients(step, case):
    g = torch.Generator().manual_seed(0)
    layer = torch.randn(8, 8, generator=g)
    leaves = [x.clone().requires_grad_() for x in (case.hidden, layer, case.weight, case.bias)]
    loss, metric, logps = step(*leaves)
    loss.backward()
    return [loss.detach(), metric, logps, *[x.grad for x in leaves]]


@pytest.mark.parametrize(("loss_type", "level"), LEAVES_AND_LEVELS)
def test_a_step_with_every_leaf_compiles_in_one_graph(loss_type, level):
    case = make_case(111, **options_for(loss_type, level, beta=0.1))
    step = linear_step(case, grpo_fast.LossConfig(**case.options))
    for own, expected in zip(gradients(compiled(step), case), gradients(step, case), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


@pairs(backend=BACKENDS, layout=["padded", "packed"], function=["linear", "logits", "logps"])
def test_every_public_loss_compiles_in_one_graph(function, layout, backend):
    backend = str(backend)  # torch 2.11 traces a str and a StrEnum, no other subclass of str
    case = make_case(
        112,
        sampling=True,
        **options_for("grpo", beta=0.1, entropy_coef=0.1 if function != "logps" else 0.0),
    )
    expected = run(function, case, layout=layout, backend=backend)
    torch._dynamo.reset()
    names = {"linear": "linear_grpo_loss", "logits": "logits_grpo_loss", "logps": "grpo_loss"}
    eager = getattr(grpo_fast, names[function])
    fast = torch.compile(eager, fullgraph=True, backend="aot_eager")
    setattr(grpo_fast, names[function], fast)
    try:
        own = run(function, case, layout=layout, backend=backend)
    finally:
        setattr(grpo_fast, names[function], eager)
    assert torch.equal(own.loss, expected.loss)
    for name in own.grads:
        assert torch.equal(own.grads[name], expected.grads[name])


def test_logps_functions_compile_in_one_graph():
    case = make_case(113, **options_for("grpo"))

    def step(h, w):
        lp, entropy = grpo_fast.linear_logps(
            h, w, case.ids, return_entropy=True, temperature=0.7, backend="torch"
        )
        lp2 = grpo_fast.logits_logps(h @ w.T, case.ids, softcap=5.0, backend="torch")
        return (lp - 0.1 * entropy).sum() + lp2.mean()

    results = []
    for f in (step, compiled(step)):
        h, w = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        f(h, w).backward()
        results.append((h.grad, w.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_step_compiles_with_inductor():
    case = make_case(114, **options_for("dapo", beta=0.1))
    step = linear_step(case, grpo_fast.LossConfig(**case.options), backend="auto")
    for own, expected in zip(
        gradients(compiled(step, "inductor"), case), gradients(step, case), strict=True
    ):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


def test_another_length_does_not_break_the_graph():
    config = grpo_fast.LossConfig(loss_type="dapo")

    def step(h, w, ids, A, cu):
        return grpo_fast.linear_grpo_loss(h, w, ids, A, config, cu_seqlens=cu, backend="torch").loss

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (5, 9, 14):
        g = torch.Generator().manual_seed(T)
        h, w = torch.randn(T, 4, generator=g).requires_grad_(), torch.randn(7, 4, generator=g)
        ids, A, cu = (
            torch.randint(7, (T,), generator=g),
            torch.randn(2, generator=g),
            torch.tensor([0, 2, T], dtype=torch.int32),
        )
        torch.testing.assert_close(fast(h, w, ids, A, cu), step(h, w, ids, A, cu))


def test_bad_input_is_refused_by_the_compiled_step_too():
    case = make_case(115, **options_for("dapo"))
    config = grpo_fast.LossConfig(**case.options)

    def step(h, w, ids):
        return grpo_fast.linear_grpo_loss(
            h, w, ids, case.advantages, config, completion_mask=case.mask, backend="torch"
        ).loss

    fast = compiled(step)
    fast(case.hidden, case.weight, case.ids)
    with pytest.raises(Exception, match="target_ids"):
        fast(case.hidden, case.weight, case.ids + 10**6)
    fast(case.hidden, case.weight, case.ids)


def test_what_no_schema_carries_is_refused():
    """The net under the public doors: a field of the options that a graph would lose."""
    from grpo_fast.loss import operators
    from grpo_fast.loss.arguments import Options

    count, plain = operators.NUM_OPTIONS, Options([True], grad_filter=0.1)
    assert operators.carried(plain, count) == plain[:count]
    for name in Options._fields[count:]:
        with pytest.raises(ValueError, match=f"{name}: expected its default in a graph"):
            operators.carried(plain._replace(**{name: True}), count)


# ----------------------------------------------------------
# custom ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", ["linear", "logits", "logps"])
def test_operators_agree_with_their_fake_kernels(function, dtype, monkeypatch):
    """torch.library.opcheck on the operators with the very arguments the public functions give
    them.
    """
    from grpo_fast.loss import operators

    if function == "logps" and dtype != torch.float32:
        pytest.skip("logps are fp32")
    real, checked = operators.build, []

    def build(loss, tensors, options, config, given):
        monkeypatch.setattr(operators, "build", real)  # the operator itself builds a batch, too
        name = next(name for name, known in operators.LOSSES.items() if known is loss)
        inputs = (*tensors, *options[: operators.NUM_OPTIONS], *operators._row(config, given))
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(
            getattr(torch.ops.grpo_fast, f"{name}_loss").default, inputs, test_utils=utils
        )
        checked.append(name)
        monkeypatch.setattr(operators, "build", build)
        return real(loss, tensors, options, config, given)

    monkeypatch.setattr(operators, "build", build)
    for entropy_coef in (0.0, 0.1):
        case = make_case(
            116,
            dtype=dtype,
            sampling=True,
            **options_for("grpo", beta=0.1, entropy_coef=entropy_coef),
        )
        run(function, case)
        run(function, case.but(bias=None, sampling=None), layout="packed")
    assert len(checked) == 4


# ----------------------------------------------------------
# autocast
@pairs(
    backend=BACKENDS,
    dtype=[torch.float32, torch.bfloat16],
    autocast=[torch.bfloat16, torch.float16],
    function=["linear", "logits", "logps"],
)
def test_autocast_changes_nothing(function, autocast, dtype, backend):
    if function == "logps" and dtype != torch.float32:
        pytest.skip("logps are fp32")
    case = make_case(117, dtype=dtype, **options_for("grpo", beta=0.1))
    plain = run(function, case, backend=backend)
    with torch.autocast("cpu", autocast):
        inside = run(function, case, backend=backend)
    assert torch.equal(plain.loss, inside.loss)
    for name in plain.grads:
        assert torch.equal(plain.grads[name], inside.grads[name])


def test_global_precision_settings_do_not_reach_fp32_results():
    """float32_matmul_precision is the user's trade for their model; a loss that reads ratios near 1
    keeps fp32.
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
