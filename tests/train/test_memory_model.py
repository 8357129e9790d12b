"""Tests of the memory model against autograd and the allocator's peak, and of `grpo-fast plan`."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.trainers.step import peak_bytes
from grpo_fast.attention import pack_groups, trunk_tokens
from grpo_fast.attention.hybrid import recurrent_layers
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.train.config import ModelConfig, RunConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.config.words import validated
from grpo_fast.train.models import policy as policies
from grpo_fast.train.models.loading import apply_options
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.plan import (
    KNOWN_MODELS,
    OPTIONS,
    Shape,
    plan,
    predict,
    predict_model,
    render,
    trainable_parameters,
)
from tests.attention.families import family_model
from tests.command_line import invoke
from tests.tiny import SYMBOLS, tiny_model
from tests.train.test_train_config import MINIMAL

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 16,
         "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip
CHECKPOINTING = {"gradient_checkpointing": True}
TOKENS = 1024


def predicted(shape, device, gpu=80 * 10**9, *, model=(), **sections):
    """Predict the memory of a run. `model` has fields of its section `model`."""
    fields = {"path": "x", **dict(model)}
    config = validated(RunConfig, {**MINIMAL, "model": fields, **sections})
    return predict(shape, config, device, gpu)


def a_trunk(family, dtype, **options):
    """Build a tiny policy for measurements of memory.

    Returns:
        The policy, its `Shape`, its predicted memory, and a packed batch of `TOKENS` tokens.
    """
    model = tiny_model(family, vocab_size=13, **SIZES).to(getattr(torch, dtype))
    apply_options(model, ModelConfig(path="x", **options))
    with pytest.MonkeyPatch.context() as patch:  # use the layers of a GPU, which save more tensors
        patch.setattr(policies, "fast_layers", lambda model: None)
        policy = Policy(model, build_symbol_tokenizer(SYMBOLS))
    policy.model.train()
    shape = Shape.of(model)
    packed = pack_groups([([2] * (TOKENS // 4), [[3]])] * 4)
    assert packed.layout.total == TOKENS
    device = "cuda" if options.get("gradient_checkpointing") == "offload" else "cpu"
    memory = predicted(shape, device, model={"dtype": dtype, **options})
    return policy, shape, memory, packed


def kept_bytes(policy, packed):
    """Run a forward pass, and return how many bytes autograd saves for the backward pass.

    The weights are not included.
    """
    weights, kept = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}, {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = policy.hidden(packed)
    del hidden
    return sum(kept.values())


def save_in_numpy(pin_memory):
    """Save tensors for the backward pass in numpy arrays.

    This replaces `torch.autograd.graph.save_on_cpu`, which has no effect for tensors on a CPU.
    torch's allocator does not count numpy arrays, as the allocator of a GPU does not count host
    memory.
    """
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.dtype, x.detach().float().numpy().copy()),
        lambda saved: torch.from_numpy(saved[1]).to(saved[0], copy=True),
    )


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_recurrent_layers_are_measured(family, monkeypatch):
    """Check that the prediction is within 20% of what autograd saves for a hybrid model."""
    wide = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "chunk_size": 64}
    model = family_model(family, max_position_embeddings=4096, **wide)
    monkeypatch.setattr(policies, "fast_layers", lambda model: None)
    policy = Policy(model, build_symbol_tokenizer(SYMBOLS))
    shape = Shape.of(model)
    assert shape.recurrent_layers == len(recurrent_layers(model)) and shape.recurrent_bytes > 0
    memory = predicted(shape, "cpu", model={"dtype": "float32"})
    packed = pack_groups([([2] * 256, [[3] * 129] * 8)])
    kept = kept_bytes(policy, packed) / packed.layout.total
    assert kept == pytest.approx(memory.kept_per_token, rel=0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, CHECKPOINTING, {**CHECKPOINTING, "tiled_mlp": 64}, {"tiled_mlp": 64},
     {"gradient_checkpointing": "offload"}],
    ids=["plain", "checkpointing", "checkpointing-tiled", "tiled", "offload"],
)  # fmt: skip
def test_the_prediction_against_the_allocators_peak(dtype, options, monkeypatch):
    """Check that the peak memory of a forward and backward pass is within 12% of the prediction."""
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", save_in_numpy)
    policy, _, memory, packed = a_trunk("llama", dtype, **options)

    def step():
        policy.hidden(packed).sum().backward()

    step()  # creates gradients and cached tensors, which are not part of the peak
    expected = memory.working + memory.per_token * TOKENS
    assert peak_bytes(step, "cpu") == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_prediction_against_what_autograd_keeps(family):
    """Check that the predicted bytes per token are within 2% of the bytes that autograd saves.

    The test subtracts the saved tensors of the final norm, because they are freed early in the
    backward pass.
    """
    policy, shape, memory, packed = a_trunk(family, "float32")
    final_norm, head_norms = 2 * 4 * shape.hidden, 0
    if family == "qwen3":
        head_norms = SIZES["num_hidden_layers"] * 2 * 4 * (shape.query + shape.kv)
    kept = kept_bytes(policy, packed) / TOKENS - final_norm - head_norms
    assert kept == pytest.approx(memory.kept_per_token, rel=0.02)


def test_tokens_is_the_inverse_of_peak():
    shape = Shape(28, 1536, 8960, 1536, 256, 151936, 1_543_714_304)
    for options in ({}, CHECKPOINTING, {**CHECKPOINTING, "tiled_mlp": 2048}):
        memory = predicted(shape, "cuda", model={"dtype": "bfloat16", **options})
        for limit in (2e10, 8e10, 141e9):
            most = memory.tokens(limit)
            assert memory.peak(most) <= limit < memory.peak(most + 2)
    assert memory.tokens(memory.fixed) == 0


def test_fixed_memory():
    shape = Shape(2, 64, 128, 64, 32, 100, 10_000)

    def fixed(sections=(), **model):
        return predicted(shape, "cuda", model=model, **dict(sections)).fixed / 10_000

    assert fixed() == 16 and fixed(dtype="bfloat16") == 8
    reference = {"reference": {"kind": "frozen"}, "loss": {"beta": 0.1}}
    assert fixed(reference) == 20 and fixed(autocast="bfloat16") == 18
    adapters = 2 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
    assert trainable_parameters(shape, ModelConfig(path="x", lora={"r": 4})) == adapters
    expected = 4 + 12 * adapters / 10_000
    assert fixed(reference, lora={"r": 4}) == pytest.approx(expected, rel=1e-12)
    import peft

    model = tiny_model("llama")
    shape = Shape.of(model)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = [p for p in peft.get_peft_model(model, config).parameters() if p.requires_grad]
    expected = sum(p.numel() for p in trained)
    assert trainable_parameters(shape, ModelConfig(path="x", lora={"r": 4})) == expected


def test_an_unknown_architecture_has_no_prediction(caplog):
    config = SimpleNamespace(model_type="odd", hidden_size=3)
    lm = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert predict_model(lm, load_recipe("sort")) is None
    assert "(num_hidden_layers: the config of model_type 'odd' has none)" in caplog.text


# ----------------------------------------------------------------------------------- grpo-fast plan
def shown(found):
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        for part in render(found):
            console.print(part)
    return capture.get()


def test_a_plan_of_a_known_model_a_recipe_and_a_config_file(tmp_path):
    found = plan("qwen2.5-0.5b", ["gpu=141", "prompt=8192", "completion=512", "group=16"])
    assert found.shape.parameters == 494_032_768
    memory = found.memory
    assert list(memory) == list(OPTIONS)
    most = [memory[label].tokens(found.usable) for label in (
        "as configured", "checkpointing", "+ tiled MLP", "+ tiled MLP, offload",
    )]  # fmt: skip
    assert most == sorted(set(most))
    text = shown(found)
    assert "494M parameters in 141 GB" in text
    assert found.tokens == trunk_tokens(8192, [512] * 16) == 8192 + 16 * 511
    # The workspace of the LM head must depend on the requested GPU, and not on the machine that
    # runs `grpo-fast plan`.
    head_gradient = (2 + 4) * found.shape.vocab * found.shape.hidden
    workspace = int(141e9) // 32 >> 20 << 20
    assert memory["as configured"].head == workspace + head_gradient
    recipe = plan("gsm8k-tiny", ["gpu=24", "rollout.group_size=4", "model.lora.r=8"])
    assert (recipe.prompt, recipe.completion, recipe.size) == (897, 128, 4)
    config = load_recipe("gsm8k-tiny", ["model.lora.r=8"])
    assert recipe.memory["as configured"] == predict(recipe.shape, config, "cuda", 0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KNOWN_MODELS["qwen2.5-0.5b"]))
    assert plan(str(path), ["gpu=80"]).shape.parameters == 494_032_768
    assert plan("sort", ["gpu=24.5"]).gb == 24.5
    by_name = plan("sort", ["gpu=h100"])
    assert by_name.gb == 80 and by_name.shape.vocab == 13


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("sort", ["gpu=8", "model.config.num_attention_heads=3"], "number of attention heads"),
        ("sort", ["gpu=8", "model.config.model_type=lama"], "lama"),
        ("qwen2.5-7b", ["gpu=8", "model.tiled=2"], "model.tiled: unknown key; nearest: tiled_mlp"),
        ("./nowhere", ["gpu=8"], "MODEL: expected a recipe"),
        ("sort", ["gpu=8", "prompt=62"], "prompt: expected at most 61 with completions of 4 (64"),
        ("sort", ["gpu=Q100"], "gpu: expected the GB of a GPU's memory (gpu=80), or one of A10,"),
    ],
)
def test_plans_that_are_refused(model, settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="(?s).*") as error:
        plan(model, settings)
    assert message in str(error.value)


def test_a_plan_without_a_gpu_is_for_this_machines_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("grpo_fast.train.plan.host_memory", lambda: 64 * 10**9)
    found = plan("sort", [])
    assert (found.device, found.gb, found.usable) == ("cpu", 64.0, 32e9)
    expected = predict(found.shape, load_recipe("sort"), "cpu")
    assert found.memory["as configured"] == expected
    assert "64 GB of this machine, which has no GPU" in " ".join(shown(found).split())


def test_a_sentence_names_the_first_options_that_fit():
    small, large, none = (plan("qwen2.5-7b", [f"gpu={gb}"]) for gb in (80, 1000, 4))
    sentence = "qwen2.5-7b fits with model.gradient_checkpointing=true 'model.lora={r: 16}': "
    table, said = render(small)
    assert said == small.verdict and said.startswith(sentence)
    labels = list(table.columns[0].cells)  # the options that fit are the first rows
    assert set(labels) == set(OPTIONS)
    assert labels[0] == "checkpointing, LoRA r=16" and labels[2] == "as configured"
    assert large.verdict.startswith("qwen2.5-7b fits as configured: ")
    assert none.verdict.startswith("qwen2.5-7b does not fit: a prompt of 8,192 tokens with 16 ")
    assert none.verdict.endswith(" GB, and 3.6 GB are usable.")


@pytest.mark.parametrize("content", [b"\xff", b"[1]", b'{"model_type": ["x"]}'])
def test_a_config_json_that_is_none(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="MODEL: expected a recipe, .*, got .*config.json"):
        plan(str(path), ["gpu=8"])


def test_a_plan_without_a_model_is_for_every_known_model():
    """Check that the plan lists every known model, with the models that fit at the top."""
    done = invoke("plan", "gpu=16", "group=8")
    lines = done.output.splitlines()
    assert done.exit_code == 0 and len(lines) == len(KNOWN_MODELS)
    assert all(" fits " in line or " does not fit: " in line for line in lines)
    fits = [" fits " in line for line in lines]
    assert fits == sorted(fits, reverse=True) and len(set(fits)) == 2
