"""Tests of the fast CPU layers (linear, RMSNorm, SwiGLU, rotary): values and all derivatives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grpo_fast.kernels.cpu import gemm, layers
from grpo_fast.kernels.cpu.layers import BF16, fast_layers, linear, rms_norm, rotary, swiglu
from tests.kernels.formulas import draw, torch_threads
from tests.kernels.layer_cases import NEEDS_KERNELS, TinyRMSNorm, is_fused
from tests.pairs import pairs

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("calls")]


def check_gradients(ours, exact, given, up, tolerance=1e-6):
    """Check outputs and gradients of the layer `ours` against the fp64 formula `exact`."""
    out, expected = ours(*given), exact(*[x.double() for x in given])
    for a, b in zip(out, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < tolerance * max(1, b.abs().max())
    wanted = [x for x in given if x.requires_grad]
    learned = [i for i, x in enumerate(expected) if x.requires_grad]
    assert any(x.requires_grad for x in out) == bool(learned)
    if not learned:
        return
    gradients, expected = (
        torch.autograd.grad(
            [result[i] for i in learned], wanted, [up[i].to(result[i].dtype) for i in learned]
        )
        for result in (out, expected)
    )
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).abs().max() < 2 * tolerance * max(1, b.abs().max())


@pairs(shape=[(40, 33), (2, 30, 33), (1, 24, 33)], has_bias=[True, False],
       frozen=["", "x", "weight", "bias", "x weight"])  # fmt: skip
def test_values_and_gradients(calls, shape, has_bias, frozen):
    given = {"x": draw(*shape), "weight": draw(19, 33, seed=1), "bias": draw(19, seed=2)}
    if not has_bias:
        del given["bias"]
    for name in given.keys() - frozen.split():
        given[name].requires_grad_()
    up = draw(19, *shape[-2::-1], seed=3).permute(*range(len(shape))[::-1])
    check_gradients(lambda *x: [linear(*x)], lambda *x: [F.linear(*x)], [*given.values()], [up])
    assert len(calls) == 1 + given["x"].requires_grad + given["weight"].requires_grad


def test_what_stays_torchs(calls):
    x, weight = draw(40, 8), draw(6, 8)
    few = linear(x[:23], weight)
    assert torch.equal(few, F.linear(x[:23], weight))
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.float16):
        assert linear(x, weight).dtype == torch.float16
    half = linear(x.bfloat16(), weight.bfloat16())
    assert half.dtype == torch.bfloat16
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), F.linear(x, weight))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert linear(mode.from_tensor(x), weight).shape == (40, 6)
    assert linear(draw(0, 8), weight).shape == (0, 6)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x, draw(6, 9))
    assert not calls
    with torch.inference_mode():
        assert (linear(x, weight) - F.linear(x, weight)).abs().max() < 1e-5
    assert calls == [(40, 6)]


NEEDS_BF16 = pytest.mark.skipif(gemm.unavailable(BF16) is not None, reason="no bf16 products here")


@NEEDS_BF16
@pairs(shape=[(40, 33), (2, 5, 33), (1, 33)], has_bias=[True, False], dtype=[torch.float32, BF16])
def test_bf16_products_have_an_fp32_gradient_of_the_weight(shape, has_bias, dtype):
    """Check that autocast rounds x, weight and bias to bf16 once, and that dW stays in fp32."""
    x = draw(*shape, dtype=dtype).requires_grad_()
    weight = draw(19, 33, seed=1).requires_grad_()
    bias = draw(19, seed=2).requires_grad_() if has_bias else None
    with torch.autocast("cpu", BF16):
        out = linear(x, weight, bias)
    up = draw(*out.shape, seed=3, dtype=BF16)
    out.backward(up)
    given = [None if t is None else t.detach().to(BF16).double() for t in (x, weight, bias)]
    exact = [None if t is None else t.requires_grad_() for t in given]
    expected = F.linear(*exact)
    expected.backward(up.double())
    assert out.dtype == BF16 and weight.grad.dtype == torch.float32 and x.grad.dtype == dtype
    assert ((out - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()
    size = exact[0].grad.abs().max()
    assert (x.grad - exact[0].grad).abs().max() <= 2**-8 * size
    assert (weight.grad - exact[1].grad).abs().max() < 5e-5
    if has_bias:
        assert (bias.grad - exact[2].grad).abs().max() < 5e-5


@NEEDS_BF16
def test_bf16_norms_and_gates_round_once():
    x, weight = draw(9, 33).requires_grad_(), draw(33, seed=1).requires_grad_()
    wide = rms_norm(x, weight, 1e-6)
    with torch.autocast("cpu", BF16):
        narrow = rms_norm(x, weight, 1e-6)
    assert narrow.dtype == BF16 and torch.equal(narrow, wide.to(BF16))
    up = draw(9, 33, seed=2, dtype=BF16)
    found = torch.autograd.grad(narrow, [x, weight], up)
    for ours, theirs in zip(found, torch.autograd.grad(wide, [x, weight], up.float()), strict=True):
        assert torch.equal(ours, theirs)
    gate, up = (draw(9, 40, seed=n, dtype=BF16).requires_grad_() for n in (3, 4))
    wide = swiglu(*(t.detach().float().requires_grad_() for t in (gate, up)))
    narrow = swiglu(gate, up)
    assert torch.equal(narrow, wide.to(BF16))
    narrow.backward(torch.ones_like(narrow))
    assert gate.grad.dtype == BF16
    exact = F.silu(gate.detach().double())
    assert ((up.grad - exact).abs() <= 2**-8 * exact.abs()).all()


@NEEDS_BF16
def test_a_shared_bf16_copy_follows_its_weight():
    x, weight = draw(3, 8), nn.Parameter(draw(6, 8, seed=1))
    with torch.autocast("cpu", BF16), gemm.shared_copies():
        first = linear(x, weight)
        assert gemm.narrow_copy(weight) is gemm.narrow_copy(weight)
        with torch.no_grad():
            weight.neg_()
        assert torch.equal(linear(x, weight), -first)
        weight.data = -weight.data
        assert torch.equal(linear(x, weight), first)
    assert gemm._copies.get(None) is None
    assert gemm.narrow_copy(weight) is not gemm.narrow_copy(weight)


def test_a_nan_is_seen(calls):
    x = draw(30, 8)
    x[3, 2] = torch.nan
    for y in (linear(x, draw(6, 8)), rms_norm(x, draw(8), 0.1)):
        assert y.isnan().all(1).nonzero().flatten().tolist() == [3]
    assert calls


@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 16), (2, 70, 33), (3, 4, 5, 200)])
def test_norms(shape, frozen, poisoned_memory):
    norm = TinyRMSNorm(shape[-1])
    plain = copy.deepcopy(norm)
    fast_layers(norm)
    x = draw(*shape).mul(3).requires_grad_(frozen != "x")
    weight = draw(shape[-1], seed=5).requires_grad_(frozen != "weight")
    up = draw(*shape[::-1], seed=3).permute(*range(len(shape))[::-1])

    def exact(x, weight):
        return [weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.3)]

    check_gradients(lambda *x: [rms_norm(*x, 0.3)], exact, [x, weight], [up], tolerance=1e-5)
    assert is_fused(norm(x))
    gate = draw(*shape, seed=7)
    assert torch.equal(norm(x, gate), plain(x, gate))  # more arguments than a plain RMSNorm


def test_a_norms_gradient_does_not_depend_on_threads():
    weight, x, up = (draw(*s, seed=i) for i, s in enumerate([(96,), (3000, 96), (3000, 96)]))
    found = []
    for threads in (1, 3):
        given = [t.clone().requires_grad_() for t in (x, weight)]
        with torch_threads(threads):
            found.append(torch.autograd.grad(rms_norm(*given, 1e-6), given, up))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("frozen", ["", "gate", "up"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 16), (2, 70, 33)])
def test_swiglu(shape, frozen, poisoned_memory):
    gate = draw(*shape).mul(4).requires_grad_(frozen != "gate")
    value = draw(*shape, seed=1).requires_grad_(frozen != "up")
    up = draw(*shape[::-1], seed=2).permute(*range(len(shape))[::-1])
    check_gradients(lambda *x: [swiglu(*x)], lambda g, u: [F.silu(g) * u], [gate, value], [up])
    assert is_fused(swiglu(gate, value))
    assert torch.equal(swiglu(gate.detach(), value.detach()), swiglu(gate, value))


def test_swiglu_at_the_ends_of_its_range():
    gate = torch.tensor([-1e4, -100, -88, -1e-30, 0, 1e-30, 88, 100, 1e4, torch.inf, torch.nan])
    gate = gate.requires_grad_()
    y = swiglu(gate, torch.full_like(gate, 2.0).detach())
    (slopes,) = torch.autograd.grad(y.sum(), gate)
    z = gate.detach().double().requires_grad_()
    expected = F.silu(z) * 2
    (exact,) = torch.autograd.grad(expected.sum(), z)
    assert torch.allclose(y[:-2].double(), expected[:-2], rtol=1e-6, atol=1e-35)
    assert torch.allclose(slopes[:-2].double(), exact[:-2], rtol=1e-6, atol=1e-35)
    assert y[-2] == torch.inf and y[-1].isnan() and slopes[-1].isnan()


def rotated_halves(q, k, cos, sin):
    """Rotate q and k with the formula of transformers, x·cos + (−x_high, x_low)·sin."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return [x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k)]


@pairs(frozen=["", "q", "k"], heads__width=[((3, 1), 2), ((4, 2), 32), ((2, 2), 54)],
       batch__angles=[(1, 1), (2, 1), (2, 2)])  # fmt: skip
def test_rotary(batch, angles, heads, width, frozen, poisoned_memory):
    q, k = (draw(batch, 7, n, width, seed=n).transpose(1, 2) for n in heads)
    q, k = q.requires_grad_(frozen != "q"), k.requires_grad_(frozen != "k")
    cos, sin = draw(angles, 7, width, seed=8), draw(angles, 7, width, seed=9)
    up = [draw(*x.shape[::-1], seed=4).permute(3, 2, 1, 0) for x in (q, k)]
    assert layers.can_rotate(q, k, cos, sin)
    check_gradients(rotary, rotated_halves, [q, k, cos, sin], up)
    assert rotary(q, k, cos, sin)[0].transpose(1, 2).is_contiguous()


def test_what_rotary_does_not_take():
    q, k, cos, sin = draw(2, 4, 7, 8), draw(2, 2, 7, 8), draw(2, 7, 8), draw(2, 7, 8)
    assert layers.can_rotate(q, k, cos, sin)
    for wrong in (
        (q.double(), k.double(), cos.double(), sin.double()),
        (q, k, cos.clone().requires_grad_(), sin),
        (q[..., :7], k[..., :7], cos[..., :7], sin[..., :7]),
        (q, k, cos[..., :4], sin[..., :4]),  # only some columns are rotated
        (q, k[:, :, :6], cos, sin),
        (q[0], k[0], cos, sin),
    ):
        assert not layers.can_rotate(*wrong)


def squares(f):
    return lambda x: (f(x) * 0.1).square().sum()


def by_dual_numbers(f, x, t):
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(x, t))
        return torch.autograd.forward_ad.unpack_dual(dual)


DERIVATIVES = {
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,)), "dual numbers": by_dual_numbers,
    "vmap": lambda f, x, t: torch.func.vmap(f)(torch.stack([x, t])),
    "grad": lambda f, x, t: torch.func.grad(squares(f))(x),
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(squares(f)), (x,), (t,)),
}  # fmt: skip


def pairs_of_layers():
    """Return a pair for each fast layer: the fast layer, and the same layer computed by torch."""
    k = draw(1, 1, 24, 8, seed=3)
    cos, sin = draw(1, 24, 8, seed=4), draw(1, 24, 8, seed=5)
    linear_layer, norm = nn.Linear(8, 8), TinyRMSNorm(8)
    plain = copy.deepcopy(linear_layer), copy.deepcopy(norm)
    fast_layers(linear_layer), fast_layers(norm)
    up = draw(24, 8, seed=2)

    def turn(q, apply):
        return torch.cat([x.flatten(1, 2) for x in apply(q.unsqueeze(1), k, cos, sin)], 1)

    def rotary_or_torch(*x):
        return rotary(*x) if layers.can_rotate(*x) else rotated_halves(*x)

    return [
        (linear_layer, plain[0]), (norm, plain[1]),
        (lambda x: swiglu(x, up.expand_as(x)), lambda x: F.silu(x) * up),
        (lambda x: turn(x, rotary_or_torch), lambda x: turn(x, rotated_halves)),
    ]  # fmt: skip


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_each_layer_under_each_derivative(derivative):
    x, t = draw(1, 24, 8), draw(1, 24, 8, seed=1)
    for pair in pairs_of_layers():
        for a, b in zip(*(DERIVATIVES[derivative](f, x, t) for f in pair), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_outputs_may_be_modified_in_place():
    """Check linear layers, norms and SwiGLU. Llama 4 and Gemma 3n modify the output of a layer."""
    for pair in pairs_of_layers()[:3]:
        found = []
        for layer in pair:
            x = draw(1, 24, 8).requires_grad_()
            layer(x).mul_(3).square().sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_batched_gradients_are_refused():
    x = draw(1, 24, 8).requires_grad_()
    for layer, _ in pairs_of_layers():
        out = layer(x)
        with pytest.raises(RuntimeError, match="grad: the fast CPU layers expect one plain grad"):
            torch.autograd.grad(out, x, torch.stack([out, out]), is_grads_batched=True)
