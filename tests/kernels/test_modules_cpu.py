"""Tests of models with fast CPU layers: derivatives, trials, hooks, submodules and compilation."""

from __future__ import annotations

import copy
import functools
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_fast.kernels.cpu import layers, loader
from grpo_fast.kernels.cpu.layers import fast_layers, swiglu
from tests.kernels.formulas import draw
from tests.kernels.test_layers_cpu import NEEDS_KERNELS, TinyRMSNorm, is_fused
from tests.pairs import pairs
from tests.tiny import tiny_model

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("calls")]
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
