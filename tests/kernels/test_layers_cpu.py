"""A model's layers on a CPU: numbers and gradients of linear ones and RMSNorms, and when they stay
torch's.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, layers, loader
from grpo_fast.kernels.cpu.layers import fast_layers, linear, rms_norm

pytestmark = pytest.mark.skipif(
    gemm.unavailable(torch.float32) or loader.load("norm"), reason="no C++ kernels here"
)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Our product is taken on every CPU; the list of its output shapes."""
    monkeypatch.setenv("GRPO_FAST_GEMM", "own")
    route._gemm_choice.cache_clear()
    counted, product = [], gemm.mm_

    def mm_(a, b, out, **options):
        counted.append(tuple(out.shape))
        return product(a, b, out, **options)

    monkeypatch.setattr(layers.gemm, "mm_", mm_)
    yield counted
    route._gemm_choice.cache_clear()


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("frozen", ["", "x", "weight", "bias", "x weight"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(40, 33), (2, 30, 33), (1, 24, 33)])
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
    assert torch.equal(model(x), other(x)) and not layers._agreeing[GemmaLikeRMSNorm]
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
