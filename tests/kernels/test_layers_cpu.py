"""Tests of the fast CPU layers (linear, RMSNorm, SwiGLU, rotary): values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grpo_fast.kernels.cpu import gemm, layers, loader
from grpo_fast.kernels.cpu.layers import BF16, linear, rms_norm, rotary, swiglu
from tests.kernels.formulas import draw, torch_threads
from tests.pairs import pairs

NEEDS_KERNELS = pytest.mark.skipif(
    gemm.unavailable(torch.float32) or loader.unavailable("layers"), reason="no C++ kernels here"
)
pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("calls")]


class TinyRMSNorm(nn.Module):
    """RMSNorm as in Llama. With `offset` 1, it is the RMSNorm of Gemma."""

    def __init__(self, size, offset=0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(draw(size, seed=5)), offset
        self.variance_epsilon = 0.3

    def forward(self, x, gate=None):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        y = y * (self.weight + self.offset)
        return y if gate is None else y * gate


def is_fused(x):
    """Return whether a fast layer computed x, possibly followed by a view."""
    nodes = [x.grad_fn, *(node for node, _ in x.grad_fn.next_functions)]
    return "_FusedBackward" in {type(node).__name__ for node in nodes}


def rotated_halves(q, k, cos, sin):
    """Rotate q and k with the formula of transformers, x·cos + (−x_high, x_low)·sin."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return [x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k)]


def heads_first(rotate):
    """Return `rotate` for q and k of shape (B, T, heads, D), as models compute them."""
    return lambda q, k, cos, sin: rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def plain_norm(x, weight):
    return [weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.3)]


FORMULAS = {  # the fast layer, the same formula in torch, and the tolerance
    "linear": (lambda *x: [linear(*x)], lambda *x: [F.linear(*x)], 1e-6),
    "norm": (lambda *x: [rms_norm(*x, 0.3)], plain_norm, 1e-5),
    "swiglu": (lambda *x: [swiglu(*x)], lambda gate, up: [F.silu(gate) * up], 1e-6),
    "rotary": (heads_first(rotary), heads_first(rotated_halves), 1e-6),
}
CASES = [  # a layer, and the shapes of its inputs
    ("linear", [(40, 33), (19, 33), (19,)]), ("linear", [(2, 30, 33), (19, 33)]),
    ("linear", [(1, 24, 33), (19, 33), (19,)]),
    *[("norm", [x, x[-1:]]) for x in ((1, 1), (5, 16), (2, 70, 33), (3, 4, 5, 200))],
    *[("swiglu", [x, x]) for x in ((1, 1), (5, 16), (2, 70, 33))],
    *[("rotary", [(batch, 7, q, width), (batch, 7, k, width), *[(angles, 7, width)] * 2])
      for batch, angles, q, k, width in ((1, 1, 3, 1, 2), (2, 1, 4, 2, 32), (2, 2, 2, 2, 54))],
]  # fmt: skip


@pairs(layer__shapes=CASES, frozen=["", "0", "1", "2"])
def test_values_and_gradients(calls, layer, shapes, frozen, poisoned_memory):
    """Check outputs and gradients against the same formula in fp64.

    `frozen` is the index of an input that requires no gradient. The upstream gradients have
    reversed strides. The bits must not change if no gradient is needed.
    """
    ours, exact, bar = FORMULAS[layer]
    given = [3 * draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    learned = given if layer != "rotary" else given[:2]
    for index, x in enumerate(learned):
        x.requires_grad_(str(index) != frozen)
    out, expected = ours(*given), exact(*[x.double() for x in given])
    for a, b, quiet in zip(out, expected, ours(*(x.detach() for x in given)), strict=True):
        assert a.shape == b.shape and torch.equal(a, quiet)
        assert (a - b).abs().max() < bar * max(1, b.abs().max())
    reached = [i for i, x in enumerate(expected) if x.requires_grad]
    assert all(is_fused(out[i]) for i in reached)
    ups = [draw(*out[i].shape[::-1], seed=9).permute(*range(out[i].dim())[::-1]) for i in reached]
    found, wanted = (
        torch.autograd.grad(
            [result[i] for i in reached], [x for x in given if x.requires_grad],
            [up.to(result[0].dtype) for up in ups], allow_unused=True,
        )
        for result in (out, expected)
    )  # fmt: skip
    assert layer != "linear" or len(calls) == 2 + sum(x.requires_grad for x in given[:2])
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 2 * bar * max(1, b.abs().max())


def test_what_stays_torchs(calls):
    x, weight = draw(40, 8), draw(6, 8)
    few = linear(x[:23], weight)
    assert torch.equal(few, F.linear(x[:23], weight))
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.float16):
        assert linear(x, weight).dtype == torch.float16
    assert linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
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
    given = [draw(*shape, dtype=dtype), draw(19, 33, seed=1), *[draw(19, seed=2)] * has_bias]
    given = [x.requires_grad_() for x in given]
    with torch.autocast("cpu", BF16):
        out = linear(*given)
    up = draw(*out.shape, seed=3, dtype=BF16)
    out.backward(up)
    exact = [x.detach().to(BF16).double().requires_grad_() for x in given]
    expected = F.linear(*exact)
    expected.backward(up.double())
    assert out.dtype == BF16 and given[1].grad.dtype == torch.float32
    assert given[0].grad.dtype == dtype
    assert ((out - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()
    dx = exact[0].grad
    assert (given[0].grad - dx).abs().max() <= 2**-8 * dx.abs().max()
    for x, true in zip(given[1:], exact[1:], strict=True):
        assert (x.grad - true.grad).abs().max() < 5e-5


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


def test_a_norms_gradient_does_not_depend_on_threads():
    weight, x, up = (draw(*s, seed=i) for i, s in enumerate([(96,), (3000, 96), (3000, 96)]))
    found = []
    for threads in (1, 3):
        given = [t.clone().requires_grad_() for t in (x, weight)]
        with torch_threads(threads):
            found.append(torch.autograd.grad(rms_norm(*given, 1e-6), given, up))
    assert all(map(torch.equal, *found))


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
