"""A model's linear layers through our product: numbers, gradients, and when they stay torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, layers
from grpo_fast.kernels.cpu.layers import FastLinear, fast_linear_layers, linear

pytestmark = pytest.mark.skipif(
    gemm.unavailable(torch.float32) is not None, reason="no C++ products here"
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
    fast_linear_layers(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in (model[0], model[2][0], model[3])] == [FastLinear, FastLinear, Other]
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
