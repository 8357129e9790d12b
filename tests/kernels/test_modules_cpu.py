"""Tests of models with fast CPU layers: trials, hooks, replaced submodules and copies."""

from __future__ import annotations

import copy
import functools
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from grpo_fast.kernels.cpu import layers, loader
from grpo_fast.kernels.cpu.layers import fast_layers, swiglu
from tests.kernels.formulas import draw
from tests.kernels.layer_cases import NEEDS_KERNELS, SIZES, TinyRMSNorm, is_fused, pair_of

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("calls")]


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
    assert ["forward" in vars(m) for m in model.modules()] == [0, 1, 0, 0, 1, 0]
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
def test_families(family, fast):
    """Check that a model with fast layers has the logits and gradients of an unchanged copy.

    Only the classes in `fast` may get a fast layer.
    """
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


def test_settings_of_a_norm_decide():
    plain, offset = TinyRMSNorm(16), TinyRMSNorm(16, offset=1)
    torch.nn.init.zeros_(offset.weight)  # the trial uses random weights
    expected = copy.deepcopy(offset)
    fast_layers(nn.ModuleList([plain, offset]))
    x = draw(9, 16).requires_grad_()
    assert is_fused(plain(x))
    assert "forward" not in vars(offset) and torch.equal(offset(x), expected(x))


def plain_norm(self, x):
    return TinyRMSNorm.forward(self, x)


def of_epsilon(x, epsilon):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


NORMS = {  # forwards that differ from an RMSNorm's forward
    "gradients": lambda self, x: x * of_epsilon(x, self.variance_epsilon).detach() * self.weight,
    "buffer": lambda self, x: plain_norm(self, x) * self.gain,  # 1 now, but it may change later
    "epsilon": lambda self, x: x * of_epsilon(x, 1e-4) * self.weight,
    "residual": lambda self, x: x + plain_norm(self, x),
    "dropout": lambda self, x: nn.functional.dropout(plain_norm(self, x), 0.5, self.training),
    "centred": lambda self, x: plain_norm(self, x - x.mean(-1, keepdim=True)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_that_are_nearly_plain_keep_their_own(kind):
    model = type("Norm", (TinyRMSNorm,), {"forward": NORMS[kind]})(16).eval()
    if kind == "buffer":
        model.register_buffer("gain", torch.ones(16))
    fast_layers(model)
    assert "forward" not in vars(model)


class PlainMLP(nn.Module):
    """MLP of Llama. `change` is applied to the product of gate and up."""

    def __init__(self, act=None, bias=True):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias), nn.Linear(8, 12, bias)
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias), act or nn.SiLU()

    def change(self, gate, up):
        return self.act_fn(gate) * up

    def forward(self, x):
        return self.down_proj(self.change(self.gate_proj(x), self.up_proj(x)))


def changed(change=None, forward=None):
    """Return a class derived from PlainMLP with another `change` or `forward`."""
    methods = {"change": change, "forward": forward}
    return type("Changed", (PlainMLP,), {n: f for n, f in methods.items() if f is not None})


def with_attribute(mlp, name, value):
    setattr(mlp, name, value)
    return mlp


MLPS = {
    "gelu": lambda: PlainMLP(nn.GELU()),
    "clamped": lambda: changed(lambda self, g, u: self.act_fn(g.clamp(max=7)) * u)(),
    "clamped up": lambda: changed(lambda self, g, u: self.act_fn(g) * u.clamp(-20, 20))(),
    "swapped": lambda: changed(lambda self, g, u: g * self.act_fn(u))(),
    "plus one": lambda: changed(lambda self, g, u: self.act_fn(g) * (u + 1))(),
    "detached": lambda: changed(lambda self, g, u: self.act_fn(g).detach() * u)(),
    "alpha": lambda: changed(lambda self, g, u: g * torch.sigmoid(1.01 * g) * u)(),
    "dropout": lambda: changed(lambda self, g, u: nn.functional.dropout(
        self.act_fn(g) * u, 0.5, self.training))(),
    "residual": lambda: changed(forward=lambda self, x: x + PlainMLP.forward(self, x))(),
    "two inputs": lambda: changed(forward=lambda self, x, scale: PlainMLP.forward(self, x))(),
    "weights": lambda: changed(forward=lambda self, x: PlainMLP.forward(self, x)
                               + 0 * self.gate_proj.weight.sum())(),
    "parameter": lambda: with_attribute(PlainMLP(), "scale", nn.Parameter(torch.ones(8))),
    "child": lambda: with_attribute(PlainMLP(), "norm", nn.LayerNorm(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["plain", *MLPS])
def test_mlps_that_are_nearly_swiglu_keep_their_own(name):
    model = MLPS.get(name, PlainMLP)().eval()
    state = torch.get_rng_state()
    fast_layers(model)
    assert ("forward" in vars(model)) == (name == "plain")
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_with_different_attributes_have_a_trial_each():
    class Limited(PlainMLP):
        def change(self, gate, up):
            return self.act_fn(gate).clamp(max=self.limits["gate"]) * up

    model = nn.ModuleList([Limited(), Limited(), Limited()])
    for mlp, limit in zip(model, (torch.inf, 1.0, torch.inf), strict=True):
        mlp.limits = {"gate": limit}
    fast_layers(model)
    assert ["forward" in vars(mlp) for mlp in model] == [True, False, True]


def test_modules_with_equal_settings_share_a_trial(monkeypatch):
    def count(*arguments, **options):
        trials.append(1)
        return agree(*arguments, **options)

    agree, trials = layers.agree, []
    monkeypatch.setattr(layers, "agree", count)
    equal = [TinyRMSNorm(16), TinyRMSNorm(16), PlainMLP(), PlainMLP()]
    fast = [*equal, TinyRMSNorm(8), PlainMLP(nn.Sequential(nn.SiLU()))]
    slow = [TinyRMSNorm(16, offset=1), PlainMLP(nn.GELU()), PlainMLP(nn.Sequential(nn.Tanh()))]
    fast_layers(nn.ModuleList([*fast, *slow]))
    assert all("forward" in vars(m) for m in fast)
    assert not any("forward" in vars(m) for m in slow)
    assert len(trials) == len(fast) - 2 + len(slow)


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
    assert ["forward" in vars(m) for m in model] == [False, False, True]


@pytest.mark.parametrize("mode", ["meta", "autocast", "inference", "no_grad", "float64"])
def test_a_trial_does_not_see_the_callers_modes(mode):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, pad_token_id=0))
    contexts = {
        "meta": lambda: torch.device("meta"), "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad,
    }  # fmt: skip
    if mode == "float64":
        torch.set_default_dtype(torch.float64)
    try:
        with contexts.get(mode, torch.enable_grad)():
            fast_layers(model)
    finally:
        torch.set_default_dtype(torch.float32)
    names = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
    assert names == {"Linear", "LlamaMLP", "LlamaAttention", "LlamaRMSNorm"}


def mlp(model):
    return model.model.layers[0].mlp


def double(module):
    module.register_forward_hook(lambda module, args, output: 2 * output)


def parametrize(model):
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    layer = model.model.layers[0]
    for module in (model.model.norm, layer.mlp.up_proj, layer.self_attn.q_proj):
        torch.nn.utils.parametrize.register_parametrization(module, "weight", Double())


def lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["gate_proj", "q_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    peft.inject_adapter_in_model(config, model)


def replace_mlp(model):
    model.model.layers[0].mlp = nn.Linear(32, 32)
    torch.nn.init.constant_(mlp(model).weight, 0.01)
    torch.nn.init.zeros_(mlp(model).bias)


CHANGES = {
    "replace act": lambda m: setattr(mlp(m), "act_fn", nn.GELU()),
    "hook act": lambda m: double(mlp(m).act_fn),
    "prehook act": lambda m: mlp(m).act_fn.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
    "patch act": lambda m: setattr(mlp(m).act_fn, "forward", torch.tanh),
    "hook gate": lambda m: double(mlp(m).gate_proj), "hook norm": lambda m: double(m.model.norm),
    "patch norm": lambda m: setattr(m.model.norm, "forward", torch.tanh),
    "replace norm": lambda m: setattr(m.model, "norm", nn.LayerNorm(32)),
    "parametrize": parametrize,
    "prune": lambda m: prune.l1_unstructured(mlp(m).down_proj, "weight", 0.5),
    "lora": lora, "replace mlp": replace_mlp,
    "change epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.7),
    "chain act": lambda m: setattr(mlp(m), "act_fn", nn.Sequential(nn.SiLU(), nn.Tanh())),
    "hook attention": lambda m: double(m.model.layers[0].self_attn.o_proj),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_a_change_of_a_submodule_is_honoured(change, when):
    model, plain = pair_of()
    before = plain(input_ids=torch.arange(6)[None]).logits
    if when == "before":
        model = copy.deepcopy(plain)
        CHANGES[change](model)
        fast_layers(model)
    else:
        if when == "between":
            model(input_ids=torch.arange(6)[None])
        CHANGES[change](model)
    CHANGES[change](plain)
    ours, theirs = (one(input_ids=torch.arange(6)[None]).logits for one in (model, plain))
    assert (theirs - before).abs().max() > 1e-2 * before.abs().max()
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_hooks_on_every_submodule_fire_as_often_as_in_a_plain_model():
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


def test_a_model_can_be_pickled_and_copied():
    model, plain = pair_of()
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with torch.no_grad():
            twin.model.norm.weight.mul_(2)
            expected = 2 * plain(input_ids=torch.arange(6)[None]).logits
            assert (twin(input_ids=torch.arange(6)[None]).logits - expected).abs().max() < 1e-3


def test_a_pickled_model_runs_where_the_kernels_do_not_load(monkeypatch):
    def operator(library, name):
        raise loader.CsrcUnavailable("planted")

    model, plain = pair_of()
    model = pickle.loads(pickle.dumps(model))
    monkeypatch.setattr(loader, "unavailable", lambda library: "planted")
    monkeypatch.setattr(loader, "operator", operator)
    gate, up = draw(30, 8), draw(30, 8, seed=1)
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)
    ids = torch.arange(30)[None]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
