"""Tests of models with fast CPU layers: trials, hooks, patches and copies."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from grpo_fast.kernels.cpu import modules
from grpo_fast.kernels.cpu.modules import fast_layers
from tests.kernels.formulas import draw
from tests.kernels.layer_cases import NEEDS_KERNELS, SIZES, TinyRMSNorm, pair_of

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
        ("Gemma2", ["Attention", "RMSNorm"]),  # its MLP uses GELU, and its norms fail the trial
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


@pytest.mark.parametrize("first", [0.0, 1e-30, torch.inf, torch.nan])
@pytest.mark.parametrize("weight", [None, 0.0])
def test_the_first_rows_and_weights_do_not_decide_about_a_norm(first, weight):
    class OffsetRMSNorm(TinyRMSNorm):  # a new class has no cached trial
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
    """RMSNorm with the usual outputs but different gradients."""

    def forward(self, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale.detach() * self.weight


class BufferedRMSNorm(TinyRMSNorm):
    """RMSNorm with a buffer. The buffer is 1 now but may change later."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("gain", torch.ones(size))

    def forward(self, x):
        return super().forward(x) * self.gain


class EpsilonRMSNorm(TinyRMSNorm):
    """RMSNorm whose forward ignores `variance_epsilon`."""

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


def renamed(function):
    """Let a function also accept `attention_mask` as `old_mask`, as transformers' decorators do."""

    @functools.wraps(function)
    def wrapper(*args, **options):
        if "old_mask" in options:
            options["attention_mask"] = options.pop("old_mask")
        return function(*args, **options)

    return wrapper


class Opaque:
    """Decorator object that does not hold the decorated function in a closure."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __get__(self, module, kind):
        return functools.partial(self.function, module) if module is not None else self

    def __call__(self, *args, **options):
        return self.function(*args, **options)


@pytest.mark.parametrize(
    ("decorators", "is_fast"), [([renamed], True), ([renamed, renamed], True), ([Opaque], False)]
)
def test_a_decorated_attention_keeps_its_decorators(decorators, is_fast, monkeypatch):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    forward = inspect.unwrap(llama.LlamaAttention.forward)
    for decorator in decorators:
        forward = decorator(forward)
    monkeypatch.setattr(llama.LlamaAttention, "forward", forward)
    config = llama.LlamaConfig(**SIZES, pad_token_id=0, attn_implementation="eager")
    model = llama.LlamaModel(config)
    attention = model.layers[0].self_attn
    x = draw(1, 5, 32)
    angles = model.rotary_emb(x, torch.arange(5)[None])
    mask = torch.full((5, 5), -1e9).triu(1)[None, None]
    options = {"old_mask" if is_fast else "attention_mask": mask}
    plain, _ = attention(x, position_embeddings=angles, **options)
    fast_layers(model)
    assert ("forward" in vars(attention)) == is_fast
    ours, _ = attention(x, position_embeddings=angles, **options)
    assert ("Rotary" in names_of_graph(ours)) == is_fast
    assert (ours - plain).abs().max() <= 1e-5 * plain.abs().max()


def names_of_graph(x):
    """Return the names of all autograd nodes from which x was computed."""
    names, nodes = "", [x.grad_fn]
    while nodes:
        node = nodes.pop()
        names += type(node).__name__
        nodes += [child for child, _ in node.next_functions if child is not None]
    return names


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
