"""A model's layers on a CPU: numbers and gradients of linear ones, norms, SwiGLU and rotary
embeddings, and when they stay torch's.
"""

from __future__ import annotations

import copy

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
    assert torch.equal(model(x), other(x)) and not modules._agreeing[GemmaLikeRMSNorm]
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
    assert layers.can_turn(q, k, cos, sin)
    check_gradients(rotary, turned_halves, [q, k, cos, sin], up)
    assert rotary(q, k, cos, sin)[0].transpose(1, 2).is_contiguous()


def test_what_rotary_does_not_take():
    q, k, cos, sin = draw(2, 4, 7, 8), draw(2, 2, 7, 8), draw(2, 7, 8), draw(2, 7, 8)
    assert layers.can_turn(q, k, cos, sin)
    for wrong in (
        (q.double(), k.double(), cos.double(), sin.double()),
        (q, k, cos.clone().requires_grad_(), sin),
        (q[..., :7], k[..., :7], cos[..., :7], sin[..., :7]),
        (q, k, cos[..., :4], sin[..., :4]),  # turns a part of the columns
        (q, k[:, :, :6], cos, sin),
        (q[0], k[0], cos, sin),
    ):
        assert not layers.can_turn(*wrong)


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
