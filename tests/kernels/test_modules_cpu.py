"""Tests of the fast CPU layers (linear, RMSNorm, SwiGLU, rotary), alone and in models.

They check values and gradients, derivatives, trials, hooks, submodules and compilation.
"""

import copy
import functools
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, layers, loader
from grpo_fast.kernels.cpu.layers import BF16, fast_layers, linear, rms_norm, rotary, swiglu
from tests.kernels.formulas import draw, torch_threads
from tests.pairs import pairs
from tests.tiny import tiny_model


@pytest.fixture
def calls(monkeypatch):
    """Make the fast layers use the csrc matrix product on every CPU, and record its calls.

    Yield a list to which each product appends the shape of its output.
    """
    monkeypatch.setenv("GRPO_FAST_GEMM", "own")
    route.gemm_choice.cache_clear()
    counted = []

    def counting(a, b, out, product=gemm.mm_):
        counted.append(tuple(out.shape))
        return product(a, b, out)

    monkeypatch.setattr(layers.gemm, "mm_", counting)
    yield counted
    route.gemm_choice.cache_clear()


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


IDS = torch.arange(2, 32)[None]


class PlainMLP(nn.Module):
    """MLP of Llama. `change` is applied to the product of gate and up."""

    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj, self.act_fn = nn.Linear(12, 8), act or nn.SiLU()

    def change(self, gate, up):
        return self.act_fn(gate) * up

    def forward(self, x):
        return self.down_proj(self.change(self.gate_proj(x), self.up_proj(x)))


def pair_of(family="llama", **changes):
    """Return a tiny model with fast CPU layers, and a copy of it with the original layers."""
    pytest.importorskip("transformers")
    plain = tiny_model(family, **changes)
    model = copy.deepcopy(plain)
    fast_layers(model)
    return model, plain


def fast_ones(model):
    return ["forward" in vars(module) for module in model]


def test_a_model_keeps_its_names_and_its_gradients(calls):
    """Check that the state dict, copies, hooks and checkpointing still work with fast layers.

    A subclass of Linear must keep its forward.
    """

    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Sequential(nn.Linear(16, 8)), Other(8, 3))
    plain = copy.deepcopy(model)
    fast_layers(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert fast_ones(model.modules()) == [False, True, False, False, True, False]
    model = copy.deepcopy(model)
    x = draw(50, 8)
    model[0].register_forward_hook(lambda *_: seen.append(1))
    seen = []
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    plain(x).square().sum().backward()
    # Both forward passes call the product twice, and the backward pass calls it three times.
    assert len(seen) == 2 and len(calls) == 2 + 2 + 3
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-4 * q.grad.abs().max(), name
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad = torch.autograd.grad(model(x).square().sum(), model[0].weight, create_graph=True)
        grad[0].sum().backward()


def squares(f):
    return lambda x: (f(x) * 0.1).square().sum()


def by_dual_numbers(f, x, t):
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(x, t))
        return torch.autograd.forward_ad.unpack_dual(dual)


def after_a_change_in_place(f, x, t):
    """Modify the output of the layer in place, as Llama 4 and Gemma 3n do."""
    x = x.clone().requires_grad_()
    f(x).mul_(3).square().sum().backward()
    return x.grad[None]


DERIVATIVES = {
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,)), "dual numbers": by_dual_numbers,
    "vmap": lambda f, x, t: torch.func.vmap(f)(torch.stack([x, t])),
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(squares(f)), (x,), (t,)),
    "in place": after_a_change_in_place,
}  # fmt: skip


@pytest.mark.parametrize("derivative", [*DERIVATIVES, "batched"])
def test_each_layer_under_each_derivative(derivative):
    x, t = draw(1, 24, 8), draw(1, 24, 8, seed=1)
    for plain in (nn.Linear(8, 8), TinyRMSNorm(8), PlainMLP()):
        layer = copy.deepcopy(plain)
        fast_layers(layer)
        if derivative == "batched":
            out = layer(x.requires_grad_())
            with pytest.raises(RuntimeError, match="fast CPU layers expect one plain gradient"):
                torch.autograd.grad(out, x, torch.stack([out, out]), is_grads_batched=True)
            continue
        for a, b in zip(*(DERIVATIVES[derivative](f, x, t) for f in (layer, plain)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "fast"),
    [
        ("Llama", ["MLP", "Attention", "RMSNorm"]),
        ("Mistral", ["MLP", "Attention", "RMSNorm"]),
        ("Qwen2", ["MLP", "Attention", "RMSNorm"]),
        ("Qwen3", ["MLP", "Attention", "RMSNorm"]),
        ("Gemma2", ["Attention"]),  # its MLP uses GELU, and its norms fail the trial
        ("Cohere", ["MLP"]),  # its attention rotates pairs of columns, not halves
        ("Phi3", ["Attention", "RMSNorm"]),  # its MLP has one matrix for gate and up
    ],
)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_families(family, fast, mode):
    """Check that a model with fast layers has the logits and gradients of an unchanged copy.

    Only the classes in `fast` may get a fast layer. A compiled model must have no graph break.
    """
    if mode == "compiled" and family not in ("Llama", "Gemma2", "Cohere"):
        pytest.skip("its layers are those of another family")
    model, plain = pair_of(family.lower(), num_hidden_layers=1)
    chosen = {type(m).__name__ for m in model.modules() if "forward" in vars(m)} - {"Linear"}
    assert chosen == {family + name for name in fast}
    run = model
    if mode == "compiled":
        torch._dynamo.reset()
        run = torch.compile(model, backend="eager", fullgraph=True)
    logits, expected = (one(input_ids=IDS).logits for one in (run, plain))
    for one in (logits, expected):
        one.square().mean().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def changed(base, **methods):
    """Return a module of a class derived from `base` with other methods."""
    made = type("Changed", (base,), methods)
    return made(8) if base is TinyRMSNorm else made()


def with_scale(module):
    module.scale = nn.Parameter(torch.ones(8))
    return module


def scale_of(norm, x):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def times_gain(self, x):
    y = TinyRMSNorm.forward(self, x)
    return y if self.gain is None else y * self.gain


def buffered(gain):
    """Return a norm with a factor that is 1 or None now, but may change later."""
    norm = changed(TinyRMSNorm, forward=times_gain)
    norm.register_buffer("gain", gain)
    return norm


class Swish(nn.Module):
    """SiLU with a learnable slope, which is 1 before training."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


ALMOST = {  # modules that differ from an RMSNorm or a SwiGLU MLP
    "offset": lambda: TinyRMSNorm(8, offset=1),
    "detached scale": lambda: changed(
        TinyRMSNorm, forward=lambda self, x: x * scale_of(self, x).detach() * self.weight),
    "buffer": lambda: buffered(torch.ones(8)), "empty buffer": lambda: buffered(None),
    "gelu": lambda: PlainMLP(nn.GELU()),
    "learnable activation": lambda: PlainMLP(Swish()),
    "clamped": lambda: changed(
        PlainMLP, change=lambda self, g, u: self.act_fn(g) * u.clamp(-20, 20)),
    "dropout": lambda: changed(PlainMLP, change=lambda self, g, u: F.dropout(
        self.act_fn(g) * u, 0.5, self.training)),
    "two inputs": lambda: changed(
        PlainMLP, forward=lambda self, x, scale: PlainMLP.forward(self, x)),
    "parameter": lambda: with_scale(PlainMLP()),
}  # fmt: skip


@pytest.mark.parametrize("name", ["norm", "mlp", *ALMOST])
def test_modules_that_are_nearly_plain_keep_their_own(name):
    model = {"norm": lambda: TinyRMSNorm(8), "mlp": PlainMLP, **ALMOST}[name]().eval()
    state = torch.get_rng_state()
    fast_layers(model)
    assert ("forward" in vars(model)) == (name in ("norm", "mlp"))
    assert torch.equal(torch.get_rng_state(), state)
    if name == "norm":
        x, gate = draw(9, 8).requires_grad_(), draw(9, 8, seed=1)
        assert is_fused(model(x))
        assert torch.equal(model(x, gate), TinyRMSNorm.forward(model, x, gate))  # one more argument


class Limited(PlainMLP):
    def __init__(self, limit):
        super().__init__()
        self.limits = {"gate": limit}

    def change(self, gate, up):
        return self.act_fn(gate).clamp(max=self.limits["gate"]) * up


def test_every_module_has_a_trial():
    fast = [TinyRMSNorm(16), TinyRMSNorm(8), PlainMLP(), PlainMLP(nn.Sequential(nn.SiLU()))]
    fast.append(Limited(torch.inf))
    slow = [TinyRMSNorm(16, offset=1), PlainMLP(nn.GELU()), PlainMLP(nn.Sequential(nn.Tanh()))]
    slow.append(Limited(1.0))
    fast_layers(nn.ModuleList([*fast, *slow]))
    assert all(fast_ones(fast)) and not any(fast_ones(slow))


def attention_of(rotate, forward=None):
    """Return an attention module whose file defines `rotate` as its rotary embedding."""
    forward = forward or (lambda self, *given: apply_rotary_pos_emb(*given))  # noqa: F821
    forward = types.FunctionType(forward.__code__, {layers.ROTARY: rotate})
    attention = type("ToyAttention", (nn.Module,), {"forward": forward})()
    attention.o_proj = nn.Linear(8, 8)
    return attention


def llama_rotary():
    return pytest.importorskip("transformers.models.llama.modeling_llama").apply_rotary_pos_emb


@pytest.mark.parametrize("order", ["cos sin", "sin cos"])
def test_the_order_of_the_angles_decides(order):
    rotate, angles = llama_rotary(), [draw(1, 5, 8, seed=2), draw(1, 5, 8, seed=3)]
    swapped = lambda q, k, sin, cos: rotate(q, k, cos, sin)  # noqa: E731
    attention = attention_of(rotate if order == "cos sin" else swapped)
    fast_layers(attention)
    assert ("forward" in vars(attention)) == (order == "cos sin")
    given = draw(1, 2, 5, 8), draw(1, 1, 5, 8, seed=1), *angles
    for a, b in zip(attention(*given), type(attention).forward(attention, *given), strict=True):
        torch.testing.assert_close(a, b)


def test_a_decorator_of_an_attention_stays(spied):
    """Check a decorator that renames an argument, as in transformers 5.24."""
    attention = attention_of(llama_rotary())
    forward = type(attention).forward

    @functools.wraps(forward)
    def renamed(self, *given, sine):
        return forward(self, *given, sine)

    type(attention).forward = renamed
    fast_layers(attention)
    ours = spied(layers, "rotary")
    given = draw(1, 2, 5, 8), draw(1, 1, 5, 8, seed=1), draw(1, 5, 8, seed=2)
    found = attention(*given, sine=draw(1, 5, 8, seed=3))
    assert len(ours) == 1
    expected = renamed(attention, *given, sine=draw(1, 5, 8, seed=3))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_rotary_that_gets_keywords_is_the_models():
    """Check a rotary that accepts queries without keys, as in Qwen4."""

    def rotate(q, k=None, cos=None, sin=None):
        return plain(q, q, cos, sin)[0] if k is None else plain(q, k, cos, sin)

    plain, angles = llama_rotary(), {"cos": draw(1, 5, 8, seed=2), "sin": draw(1, 5, 8, seed=3)}
    call = lambda self, q, **angles: apply_rotary_pos_emb(q, **angles)  # noqa: E731, F821
    attention = attention_of(rotate, call)
    fast_layers(attention)
    q = draw(1, 2, 5, 8)
    assert "forward" in vars(attention) and torch.equal(attention(q, **angles), rotate(q, **angles))


def test_an_error_of_a_trial_keeps_the_forward():
    class Norm(TinyRMSNorm):
        def __copy__(self):
            raise TypeError("planted")

    class Lacking(TinyRMSNorm):
        def forward(self, x):
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    model = nn.ModuleList([Norm(8), Lacking(8), TinyRMSNorm(8)])
    fast_layers(model)
    assert fast_ones(model) == [False, False, True]


MODES = {
    "meta": lambda: torch.device("meta"), "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("mode", [*MODES, "float64"])
def test_a_trial_does_not_see_the_callers_modes(mode):
    model = nn.ModuleList([TinyRMSNorm(8), PlainMLP(), attention_of(llama_rotary())])
    if mode == "float64":
        torch.set_default_dtype(torch.float64)
    try:
        with MODES.get(mode, torch.enable_grad)():
            fast_layers(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(fast_ones(model))


def mlp(model):
    return model.model.layers[0].mlp


def double(module):
    module.register_forward_hook(lambda module, args, output: 2 * output)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrize(model):
    layer = model.model.layers[0]
    for module in (model.model.norm, layer.mlp.up_proj, layer.self_attn.q_proj):
        torch.nn.utils.parametrize.register_parametrization(module, "weight", Double())


def lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["gate_proj", "q_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    peft.inject_adapter_in_model(config, model)


CHANGES = {
    "replace act": lambda m: setattr(mlp(m), "act_fn", nn.GELU()),
    "hook act": lambda m: double(mlp(m).act_fn),
    "prehook act": lambda m: mlp(m).act_fn.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
    "patch act": lambda m: setattr(mlp(m).act_fn, "forward", torch.tanh),
    "hook gate": lambda m: double(mlp(m).gate_proj),
    "patch norm": lambda m: setattr(m.model.norm, "forward", torch.tanh),
    "parametrize": parametrize, "lora": lora,
    "change epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.7),
}  # fmt: skip


@pairs(change=CHANGES, when=["before", "after", "between"])
def test_a_change_of_a_submodule_is_honoured(change, when):
    model, plain = pair_of()
    before = plain(input_ids=IDS).logits
    if when == "before":
        model = copy.deepcopy(plain)
        CHANGES[change](model)
        fast_layers(model)
    else:
        if when == "between":
            model(input_ids=IDS)
        CHANGES[change](model)
    CHANGES[change](plain)
    ours, theirs = (one(input_ids=IDS).logits for one in (model, plain))
    assert (theirs - before).abs().max() > 1e-2 * before.abs().max()
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_hooks_fire_as_often_as_in_a_plain_model():
    """Check hooks on every submodule, and global hooks."""
    counts = []
    for model in pair_of():
        seen = set()
        for name, module in model.named_modules():
            for kind, suffix in (("forward_pre", ""), ("full_backward", "<")):
                hook = functools.partial(lambda name, *_, seen=seen: seen.add(name), name + suffix)
                getattr(module, f"register_{kind}_hook")(hook)
        model(inputs_embeds=draw(1, 6, 32).requires_grad_()).logits.sum().backward()
        counts.append(seen)
    assert counts[0] == counts[1] and "model.layers.1.mlp.act_fn<" in counts[0]
    for model in pair_of():
        seen = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_, seen=seen: seen.append(type(module).__name__)
        )
        try:
            model(input_ids=IDS)
        finally:
            handle.remove()
        assert seen.count("SiLUActivation") + seen.count("SiLU") == 2


def test_a_model_can_be_copied_and_pickled_for_a_machine_without_the_kernels(monkeypatch):
    def operator(library, name):
        raise loader.CsrcUnavailable("planted")

    model, plain = pair_of()
    pickled = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for twin in (pickled, copy.deepcopy(model)):
            twin.model.norm.weight.mul_(2)
            expected = 2 * plain(input_ids=IDS).logits
            assert (twin(input_ids=IDS).logits - expected).abs().max() < 1e-3
            twin.model.norm.weight.div_(2)
    monkeypatch.setattr(loader, "unavailable", lambda library: "planted")
    monkeypatch.setattr(loader, "operator", operator)
    gate, up = draw(30, 8), draw(30, 8, seed=1)
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)
    assert torch.equal(pickled(input_ids=IDS).logits, plain(input_ids=IDS).logits)
