"""A model's layers on a CPU: numbers and gradients of linear ones, norms, SwiGLU and rotary
embeddings, and when they stay torch's.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, layers, loader, modules
from grpo_fast.kernels.cpu.layers import linear, rms_norm, rotary, swiglu
from grpo_fast.kernels.cpu.modules import fast_layers
from tests.pairs import pairs

pytestmark = pytest.mark.skipif(
    gemm.unavailable(torch.float32) or loader.unavailable("layers"), reason="no C++ kernels here"
)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Our product is taken on every CPU; the list of its output shapes."""
    monkeypatch.setenv("GRPO_FAST_GEMM", "own")
    route.gemm_choice.cache_clear()
    counted = []

    def counting(a, b, out, product=gemm.mm_):
        counted.append(tuple(out.shape))
        return product(a, b, out)

    monkeypatch.setattr(layers.gemm, "mm_", counting)
    yield counted
    route.gemm_choice.cache_clear()


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pairs(shape=[(40, 33), (2, 30, 33), (1, 24, 33)], has_bias=[True, False],
       frozen=["", "x", "weight", "bias", "x weight"])  # fmt: skip
def test_values_and_gradients(calls, shape, has_bias, frozen):
    x, weight = draw(*shape), draw(19, 33, seed=1)
    given = {"x": x, "weight": weight} | ({"bias": draw(19, seed=2)} if has_bias else {})
    given = {name: t.requires_grad_(name not in frozen.split()) for name, t in given.items()}
    exact = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in given.items()}
    out, expected = linear(*given.values()), F.linear(*exact.values())
    up = draw(*expected.shape[::-1], seed=3).permute(*range(expected.dim())[::-1])  # columns first
    assert out.shape == expected.shape and (out - expected).abs().max() < 2e-5
    learned = [name for name, t in given.items() if t.requires_grad]
    assert out.requires_grad == bool(learned)
    if learned:
        out.backward(up), expected.backward(up.double())
    assert len(calls) == 1 + len({"x", "weight"} & set(learned))
    for name, t in given.items():
        assert (t.grad is None) == (name not in learned)
        if t.grad is not None:
            assert (t.grad - exact[name].grad).abs().max() < 5e-5, name


def test_what_stays_torchs(calls):
    x, weight = draw(40, 8), draw(6, 8)
    few = linear(x[:23], weight)
    assert torch.equal(few, F.linear(x[:23], weight))
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
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


def test_a_model_keeps_its_names_and_its_gradients(calls):
    """Through copies, hooks, activation checkpointing; other classes are left alone."""

    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Sequential(nn.Linear(16, 8)), Other(8, 3))
    plain = copy.deepcopy(model)
    fast_layers(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert ["forward" in vars(m) for m in model.modules()] == [0, 1, 0, 0, 1, 0]
    model = copy.deepcopy(model)
    x = draw(50, 8)
    model[0].register_forward_hook(lambda *_: seen.append(1))
    seen = []
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    plain(x).square().sum().backward()
    assert len(seen) == 2 and len(calls) == 2 + 2 + 3  # dx of the first layer is not asked for
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-4 * q.grad.abs().max(), name
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad = torch.autograd.grad(model(x).square().sum(), model[0].weight, create_graph=True)
        grad[0].sum().backward()


def test_a_nan_is_seen(calls):
    x = draw(30, 8)
    x[3, 2] = torch.nan
    rows = linear(x, draw(6, 8)).isnan().all(1)
    assert rows.nonzero().flatten().tolist() == [3] and calls


class TinyRMSNorm(nn.Module):
    """As Llama's; `offset` 1 as Gemma's."""

    def __init__(self, size, offset=0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(draw(size, seed=5)), offset
        self.variance_epsilon = 0.3

    def forward(self, x, gate=None):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        y = y * (self.weight + self.offset)
        return y if gate is None else y * gate


class GemmaLikeRMSNorm(TinyRMSNorm):
    pass


@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 16), (2, 70, 33), (3, 4, 5, 200)])
def test_norms(shape, frozen, poisoned_memory):
    fast, exact = TinyRMSNorm(shape[-1]), TinyRMSNorm(shape[-1]).double()
    fast_layers(fast)
    assert "forward" in vars(fast) and isinstance(fast, TinyRMSNorm)
    x = draw(*shape).mul(3).requires_grad_(frozen != "x")
    z = x.detach().double().requires_grad_(frozen != "x")
    for norm in (fast, exact):
        norm.weight.requires_grad_(frozen != "weight")
    up = draw(*shape[::-1], seed=3).permute(*range(len(shape))[::-1])  # its columns side by side
    for norm, rows, gradient in ((fast, x, up), (exact, z, up.double())):
        norm(rows).backward(gradient)
    assert (fast(x) - exact(z)).abs().max() < 1e-5 * exact(z).abs().max()
    for ours, theirs in ((x, z), (fast.weight, exact.weight)):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).abs().max() < 2e-5 * max(1, theirs.grad.abs().max())
    gate = draw(*shape, seed=7).double()
    gated = fast(x, gate.float()) - exact(z, gate)
    assert gated.abs().max() < 1e-5 * max(1, exact(z, gate).abs().max())
    assert type(fast(x).grad_fn).__name__ == "_RmsNormBackward"


def test_norms_of_another_formula_keep_their_own():
    model = GemmaLikeRMSNorm(16, offset=1)
    other = copy.deepcopy(model)
    fast_layers(model)
    model = copy.deepcopy(model)
    x = draw(9, 16)
    assert torch.equal(model(x), other(x))
    x[3, 2] = torch.nan
    rows = rms_norm(x, other.weight.detach(), 0.1).isnan().all(1)
    assert rows.nonzero().flatten().tolist() == [3]


def test_a_norms_gradient_does_not_depend_on_threads():
    weight, x, up = (draw(*s, seed=i) for i, s in enumerate([(96,), (3000, 96), (3000, 96)]))
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        given = [t.clone().requires_grad_() for t in (x, weight)]
        found.append(torch.autograd.grad(rms_norm(*given, 1e-6), given, up))
    torch.set_num_threads(1)
    assert all(map(torch.equal, *found))


def check_gradients(ours, exact, names, up):
    """Outputs and gradients of two runs on the same numbers, the second in fp64."""
    out, expected = ours(*names), exact(*[x.double() for x in names])
    for a, b in zip(out, expected, strict=True):
        assert (a - b).abs().max() < 1e-6 * max(1, b.abs().max())
    wanted = [x for x in names if x.requires_grad]
    learned = [i for i, x in enumerate(expected) if x.requires_grad]
    gradients, expected = (
        torch.autograd.grad(
            [result[i] for i in learned], wanted, [up[i].to(result[i].dtype) for i in learned]
        )
        for result in (out, expected)
    )
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).abs().max() < 2e-6 * max(1, b.abs().max())


@pytest.mark.parametrize("frozen", ["", "gate", "up"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 16), (2, 70, 33)])
def test_swiglu(shape, frozen, poisoned_memory):
    gate = draw(*shape).mul(4).requires_grad_(frozen != "gate")
    value = draw(*shape, seed=1).requires_grad_(frozen != "up")
    up = draw(*shape[::-1], seed=2).permute(*range(len(shape))[::-1])
    check_gradients(lambda *x: [swiglu(*x)], lambda g, u: [F.silu(g) * u], [gate, value], [up])
    assert type(swiglu(gate, value).grad_fn).__name__ == "_SwiGLUBackward"
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


def turned_halves(q, k, cos, sin):
    """By complex numbers: a pair (low, high) times (cos + i sin), where both halves' angles are
    the same; transformers' formula in general.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return [x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k)]


@pairs(frozen=["", "q", "k"], heads__width=[((3, 1), 2), ((4, 2), 32), ((2, 2), 54)],
       batch__angles=[(1, 1), (2, 1), (2, 2)])  # fmt: skip
def test_rotary(batch, angles, heads, width, frozen, poisoned_memory):
    q, k = (draw(batch, 7, n, width, seed=n).transpose(1, 2) for n in heads)  # as models have them
    q, k = q.requires_grad_(frozen != "q"), k.requires_grad_(frozen != "k")
    cos, sin = draw(angles, 7, width, seed=8), draw(angles, 7, width, seed=9)
    up = [draw(*x.shape[::-1], seed=4).permute(3, 2, 1, 0) for x in (q, k)]
    assert layers.can_rotate(q, k, cos, sin)
    check_gradients(rotary, turned_halves, [q, k, cos, sin], up)
    assert rotary(q, k, cos, sin)[0].transpose(1, 2).is_contiguous()


def test_what_rotary_does_not_take():
    q, k, cos, sin = draw(2, 4, 7, 8), draw(2, 2, 7, 8), draw(2, 7, 8), draw(2, 7, 8)
    assert layers.can_rotate(q, k, cos, sin)
    for wrong in (
        (q.double(), k.double(), cos.double(), sin.double()),
        (q, k, cos.clone().requires_grad_(), sin),
        (q[..., :7], k[..., :7], cos[..., :7], sin[..., :7]),
        (q, k, cos[..., :4], sin[..., :4]),  # turns a part of the columns
        (q, k[:, :, :6], cos, sin),
        (q[0], k[0], cos, sin),
    ):
        assert not layers.can_rotate(*wrong)


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fast"),
    [
        ("Llama", ["MLP", "Attention", "RMSNorm"]),
        ("Mistral", ["MLP", "Attention", "RMSNorm"]),
        ("Qwen2", ["MLP", "Attention", "RMSNorm"]),
        ("Qwen3", ["MLP", "Attention", "RMSNorm"]),
        ("Gemma2", ["Attention", "RMSNorm"]),  # GELU; its norms are judged when they run
        ("Cohere", ["MLP"]),  # turns neighbours, not halves
        ("Phi3", ["Attention", "RMSNorm"]),  # gate and up in one matrix
    ],
)
def test_families(family, fast):
    """Logits and gradients of a model and its plain copy; the classes that compute by ours."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES, pad_token_id=0)
    torch.manual_seed(1)
    plain = getattr(transformers, f"{family}ForCausalLM")(config)
    model = copy.deepcopy(plain)
    fast_layers(model)
    chosen = {type(m).__name__ for m in model.modules() if "forward" in vars(m)} - {"Linear"}
    assert chosen == {family + name for name in fast}
    ids = torch.arange(60).view(2, 30) % 64
    for one in (model, plain):
        one(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        assert (model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max() < 1e-5
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max(), name
    hooked = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: hooked.append("mlp"))
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: hooked.append("down"))
    copy.deepcopy(model)(input_ids=ids)
    assert hooked == ["down", "mlp"]


def test_a_forward_of_somebody_elses_stays():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    theirs = model[0].forward = lambda x: x.new_zeros(len(x), 16)
    fast_layers(model)
    assert model[0].forward is theirs and "forward" in vars(model[1])


# ------------------------------------------------------------------------------------------------
# trials


@pytest.mark.parametrize("first", [0.0, 1e-30, torch.inf, torch.nan])
@pytest.mark.parametrize("weight", [None, 0.0])
def test_the_first_rows_and_weights_do_not_decide_about_a_norm(first, weight):
    class OffsetRMSNorm(TinyRMSNorm):  # a class without a verdict
        pass

    model = OffsetRMSNorm(16, offset=1)
    if weight is not None:
        torch.nn.init.constant_(model.weight, weight)
    other = copy.deepcopy(model)
    fast_layers(model)
    model(torch.full((4, 16), first))
    assert torch.equal(model(draw(9, 16)), other(draw(9, 16)))


def test_a_verdict_belongs_to_settings_and_not_to_a_class():
    plain, offset = TinyRMSNorm(16), TinyRMSNorm(16, offset=1)
    fast_layers(nn.ModuleList([plain, offset]))
    x = draw(9, 16).requires_grad_()
    for _ in range(2):
        assert type(plain(x).grad_fn).__name__ == "_RmsNormBackward"
        assert type(offset(x).grad_fn).__name__ == "MulBackward0"
        plain.offset, offset.offset = 0, 2
    plain.offset = 1
    assert torch.equal(plain(x), TinyRMSNorm(16, offset=1)(x))


class DetachedRMSNorm(TinyRMSNorm):
    """The same values, and other gradients."""

    def forward(self, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale.detach() * self.weight


class BufferedRMSNorm(TinyRMSNorm):
    """A buffer that is 1 now may be something else later."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("gain", torch.ones(size))

    def forward(self, x):
        return super().forward(x) * self.gain


class EpsilonRMSNorm(TinyRMSNorm):
    """Its forward does not read the epsilon that it shows."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4) * self.weight


@pytest.mark.parametrize("kind", [DetachedRMSNorm, BufferedRMSNorm, EpsilonRMSNorm])
def test_norms_that_are_nearly_plain_keep_their_own(kind):
    model, x = kind(16), draw(9, 16).requires_grad_()
    fast_layers(model)
    assert type(model(x).grad_fn).__name__ == "MulBackward0"


@pytest.mark.parametrize("mode", ["meta", "autocast", "inference", "no_grad", "float64", "vmap"])
def test_a_trial_does_not_see_the_modes_of_the_first_call(mode, monkeypatch):
    monkeypatch.setattr(modules, "_verdicts", {})
    modules._rotated_by_ours.cache_clear()
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, pad_token_id=0))
    norm, x = model.model.norm, draw(4, 32)
    if mode == "float64":
        monkeypatch.setattr(modules, "_verdicts", {})
        torch.set_default_dtype(torch.float64)
    contexts = {
        "meta": lambda: torch.device("meta"), "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad,
    }  # fmt: skip
    try:
        with contexts.get(mode, torch.enable_grad)():
            fast_layers(model)
            if mode == "vmap":
                torch.func.vmap(norm)(x)
            elif mode != "meta":
                norm(x)
    finally:
        torch.set_default_dtype(torch.float32)
    norm(x)
    names = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
    assert names == {"Linear", "LlamaMLP", "LlamaAttention", "LlamaRMSNorm"}
    assert all(modules._verdicts.values()) and len(modules._verdicts) >= 3
    modules._rotated_by_ours.cache_clear()


# ------------------------------------------------------------------------------------------------
# other kinds of differentiation


def pair_of(family="Llama"):
    """A model with fast layers, in eager attention, and its plain copy."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        **SIZES, pad_token_id=0, attn_implementation="eager"
    )
    plain = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = copy.deepcopy(plain)
    fast_layers(model)
    return model, plain


def scores(model):
    return lambda x: model(inputs_embeds=x, use_cache=False).logits


def by_jvp(f, x, t):
    return torch.func.jvp(f, (x,), (t,))


def by_dual_numbers(f, x, t):
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(x, t))
        return torch.autograd.forward_ad.unpack_dual(dual)


def by_vmap(f, x, t):
    return torch.func.vmap(f)(torch.stack([x, t]))


def by_grad(f, x, t):
    return torch.func.grad(lambda x: (f(x) * 0.1).square().sum())(x)


def by_jvp_of_grad(f, x, t):
    return by_jvp(torch.func.grad(lambda x: (f(x) * 0.1).square().sum()), x, t)


def by_grads_batched(f, x, t):
    x = x.clone().requires_grad_()
    out = f(x)
    ups = torch.stack([torch.ones_like(out), draw(*out.shape)])
    return torch.autograd.grad(out, x, ups, is_grads_batched=True)


def by_jacobian(f, x, t):
    one = torch.autograd.functional.jacobian(lambda x: f(x).mean((0, 1))[:2], x, vectorize=True)
    forward = torch.autograd.functional.jacobian(
        lambda s: f(x * s).mean((0, 1))[:2], torch.ones(3, 1), vectorize=True,
        strategy="forward-mode",
    )  # fmt: skip
    return one, forward


DERIVATIVES = [by_jvp, by_dual_numbers, by_vmap, by_grad, by_jvp_of_grad, by_grads_batched,
               by_jacobian]  # fmt: skip


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_forward_mode_and_batched_derivatives_are_those_of_torch(family, derivative):
    model, plain = pair_of(family)
    x, t = draw(1, 3, 32), draw(1, 3, 32, seed=1)
    ours, theirs = (derivative(scores(one), x, t) for one in (model, plain))
    ours, theirs = ((r,) if isinstance(r, torch.Tensor) else r for r in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4 * float(b.detach().abs().max()))


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_each_layer_under_each_derivative(derivative, calls):
    k = draw(1, 1, 24, 8, seed=3)
    cos, sin = draw(1, 24, 8, seed=4), draw(1, 24, 8, seed=5)
    linear_layer, norm = nn.Linear(8, 8), TinyRMSNorm(8)
    plain = copy.deepcopy(linear_layer), copy.deepcopy(norm)
    fast_layers(linear_layer), fast_layers(norm)
    up = draw(24, 8, seed=2)

    def turn(q, apply):
        return torch.cat([x.flatten(1, 2) for x in apply(q.unsqueeze(1), k, cos, sin)], 1)

    def rotary_or_torch(*x):
        return rotary(*x) if layers.can_rotate(*x) else turned_halves(*x)

    forms = [
        (linear_layer, plain[0]), (norm, plain[1]),
        (lambda x: swiglu(x, up.expand_as(x)), lambda x: F.silu(x) * up),
        (lambda x: turn(x, rotary_or_torch), lambda x: turn(x, turned_halves)),
    ]  # fmt: skip
    x, t = draw(1, 24, 8), draw(1, 24, 8, seed=1)
    for ours, theirs in forms:
        if derivative is by_jacobian:
            results = [
                torch.autograd.functional.jacobian(lambda x, f=f: f(x).mean(1), x, vectorize=True)
                for f in (ours, theirs)
            ]
        else:
            results = [derivative(f, x, t) for f in (ours, theirs)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------
# hooks, replacements and patches that arrive after `fast_layers`


def doubled(module, args, output):
    return 2 * output


def replace_act(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def hook_act(model):
    model.model.layers[0].mlp.act_fn.register_forward_hook(doubled)


def prehook_act(model):
    model.model.layers[0].mlp.act_fn.register_forward_pre_hook(lambda m, args: (2 * args[0],))


def patch_act(model):
    model.model.layers[0].mlp.act_fn.forward = torch.tanh


def hook_gate(model):
    model.model.layers[0].mlp.gate_proj.register_forward_hook(doubled)


def hook_norm(model):
    model.model.norm.register_forward_hook(doubled)


def patch_norm(model):
    model.model.norm.forward = torch.tanh


def replace_norm(model):
    model.model.norm = nn.LayerNorm(32)


def parametrize(model):
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    layer = model.model.layers[0]
    for module in (model.model.norm, layer.mlp.up_proj, layer.self_attn.q_proj):
        torch.nn.utils.parametrize.register_parametrization(module, "weight", Double())


def prune(model):
    from torch.nn.utils import prune

    prune.l1_unstructured(model.model.layers[0].mlp.down_proj, "weight", 0.5)


def weight_norm(model):
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.gate_proj)
    model.model.layers[0].mlp.gate_proj.parametrizations.weight.original0.data.mul_(3)


def lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["gate_proj", "q_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    peft.inject_adapter_in_model(config, model)


def replace_mlp(model):
    model.model.layers[0].mlp = nn.Linear(32, 32)
    torch.nn.init.constant_(model.model.layers[0].mlp.weight, 0.01)
    torch.nn.init.zeros_(model.model.layers[0].mlp.bias)


def change_epsilon(model):
    model.model.norm.variance_epsilon = 0.7


def train_mode_dropout(model):
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Tanh())


def hook_attention(model):
    model.model.layers[0].self_attn.o_proj.register_forward_hook(doubled)


CHANGES = [replace_act, hook_act, prehook_act, patch_act, hook_gate, hook_norm, patch_norm,
           replace_norm, parametrize, prune, weight_norm, lora, replace_mlp, change_epsilon,
           train_mode_dropout, hook_attention]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_a_change_of_a_submodule_is_honoured(change, when):
    model, plain = pair_of()
    before = plain(input_ids=torch.arange(6)[None]).logits
    if when == "before":
        model = copy.deepcopy(plain)
        change(model), fast_layers(model)
    else:
        if when == "between":
            model(input_ids=torch.arange(6)[None])
        change(model)
    change(plain)
    ours, theirs = (one(input_ids=torch.arange(6)[None]).logits for one in (model, plain))
    assert (theirs - before).abs().max() > 1e-2 * before.abs().max()
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def note(seen, name, *_):
    seen[name] = 1


def test_hooks_on_every_submodule_fire_as_often_as_in_a_plain_model():
    counts = []
    for model in pair_of():
        seen = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(note, seen, name))
            module.register_full_backward_hook(functools.partial(note, seen, name + "<"))
        out = model(inputs_embeds=draw(1, 6, 32).requires_grad_()).logits
        out.sum().backward()
        counts.append(seen)
    assert counts[0] == counts[1] and "model.layers.1.mlp.act_fn<" in counts[0]


def test_global_hooks_see_the_activation():
    for model in pair_of():
        seen = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_, seen=seen: seen.append(type(module).__name__)
        )
        try:
            model(input_ids=torch.arange(6)[None])
        finally:
            handle.remove()
        assert seen.count("SiLUActivation") + seen.count("SiLU") == 2


@pytest.mark.parametrize("what", ["LlamaMLP", "LlamaRMSNorm", "LlamaAttention", "Linear", "rotary"])
def test_a_class_that_is_patched_later_computes_by_the_patch(what, monkeypatch):
    from transformers.models.llama import modeling_llama

    model, plain = pair_of()
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    if what == "rotary":
        turn = modeling_llama.apply_rotary_pos_emb
        patched = lambda q, k, *rest: turn(2 * q, k, *rest)  # noqa: E731
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", patched)
    else:
        kind = nn.Linear if what == "Linear" else getattr(modeling_llama, what)
        forward = kind.forward

        def doubled_forward(self, *args, **kwargs):
            out = forward(self, *args, **kwargs)
            return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

        monkeypatch.setattr(kind, "forward", doubled_forward)
    ours, theirs = (one(input_ids=ids).logits for one in (model, plain))
    assert not torch.allclose(theirs, before, atol=1e-2)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_a_model_can_be_pickled_and_copied():
    import pickle

    model, plain = pair_of()
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with torch.no_grad():
            twin.model.norm.weight.mul_(2)
            expected = 2 * plain(input_ids=torch.arange(6)[None]).logits
            assert (twin(input_ids=torch.arange(6)[None]).logits - expected).abs().max() < 1e-3
