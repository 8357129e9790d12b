"""Tests of the memory model against autograd and the allocator's peak, and of `grpo-fast plan`."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.trainers.step import peak_bytes
from grpo_fast.attention import pack_groups, trunk_tokens
from grpo_fast.attention.hybrid import recurrent_layers
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.train import policy as policies
from grpo_fast.train.config import ModelConfig, RunConfig, load_recipe
from grpo_fast.train.config.words import validated
from grpo_fast.train.plan import (
    KNOWN_MODELS,
    UNLIMITED,
    Shape,
    _empty_model,
    plan,
    predict,
    token_budget,
    trainable_parameters,
)
from grpo_fast.train.policy import Policy, apply_options
from tests.attention.families import family_model
from tests.command_line import invoke
from tests.tiny import SYMBOLS, tiny_model
from tests.train.test_words import MINIMAL

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


def peak(memory, tokens):
    """Return the peak memory of a micro-batch, in bytes."""
    working = max(memory.head, memory.working + memory.working_per_token * tokens)
    return memory.fixed + memory.kept_per_token * tokens + working


def test_tokens_is_the_largest_number_that_fits():
    shape = Shape(28, 1536, 8960, 1536, 256, 151936, 1_543_714_304)
    for options in ({}, CHECKPOINTING, {**CHECKPOINTING, "tiled_mlp": 2048}):
        memory = predicted(shape, "cuda", model={"dtype": "bfloat16", **options})
        for limit in (2e10, 8e10, 141e9):
            most = memory.tokens(limit)
            assert peak(memory, most) <= limit < peak(memory, most + 2)
    assert memory.tokens(memory.fixed) == 0


def test_fixed_memory():
    shape = Shape(2, 64, 128, 64, 32, 100, 10_000)

    def fixed(sections=(), **model):
        return predicted(shape, "cuda", model=model, **dict(sections)).fixed / 10_000

    assert fixed() == 16 and fixed(dtype="bfloat16") == 8
    reference = {"reference": {"kind": "frozen"}, "loss": {"beta": 0.1}}
    assert fixed(reference) == 20 and fixed(autocast="bfloat16") == 18
    assert fixed({"reference": {"kind": "frozen"}}) == 20  # also with beta = 0
    gae = {"advantages": "gae", "critic": {}}
    assert fixed(gae) == 16 and fixed(gae | {"critic": {"kind": "model"}}) == 32
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
    lm = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: config), device=torch.device("cpu")
    )
    assert token_budget(lm, load_recipe("sort")) == UNLIMITED
    assert "(num_hidden_layers: the config of model_type 'odd' has none)" in caplog.text


# ----------------------------------------------------------------------------------- grpo-fast plan
def rows(lines):
    """Return the numbers of each row of a plan, keyed by its settings."""
    table = [line.split(maxsplit=5) for line in lines[4:]]
    return {words: [float(x.replace(",", "")) for x in numbers] for *numbers, words in table}


def test_a_plan_of_a_known_model_a_recipe_and_a_config_file(tmp_path):
    lines = plan("qwen2.5-0.5b", ["gpu=141", "prompt=8192"])
    assert lines[0] == "qwen2.5-0.5b: 494M parameters in 141 GB (90% usable)"
    assert lines[1] == "a group has a prompt of 8,192 tokens and 16 completions of 512"
    found = rows(lines)
    plain, *more = found.values()
    # fp32 weights, gradients and moments, and bf16 weights, as in the recipes
    assert plain[0] == pytest.approx(18 * 0.494032768, abs=0.01)
    assert plain[2] < more[0][2] < more[1][2] < more[2][2] and len(found) == 6
    group = trunk_tokens(8192, [512] * 16)
    assert group == 8192 + 16 * 511 and all(row[4] == row[2] // group for row in found.values())
    assert plan("gsm8k-tiny", ["gpu=24", "rollout.group_size=4"])[1] == (
        "a group has a prompt of 897 tokens and 4 completions of 128"
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KNOWN_MODELS["qwen2.5-0.5b"]))
    assert "494M parameters in 24.5 GB" in plan(str(path), ["gpu=24.5"])[0]


def test_the_head_s_workspace_is_that_of_the_requested_gpu():
    config = load_recipe("own-data", ["model.autocast=bfloat16"])
    shape = Shape(2, 64, 128, 64, 32, 1000, 10_000)
    workspace = int(141e9) // 32 >> 20 << 20
    assert predict(shape, config, "cuda", int(141e9)).head == workspace + (2 + 4) * 1000 * 64


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("sort", ["gpu=8", "model.config.num_attention_heads=3"], "number of attention heads"),
        ("sort", ["gpu=8", "model.config.model_type=lama"], "lama"),
        ("qwen2.5-7b", ["gpu=8", "model.tiled=2"], "model.tiled: unknown key; nearest: tiled_mlp"),
        ("./nowhere", ["gpu=8"], "MODEL: expected a recipe"),
        ("sort", ["gpu=8", "prompt=62"], "prompt: expected at most 61 with completions of 4 (64"),
    ],
)
def test_plans_that_are_refused(model, settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="(?s).*") as error:
        plan(model, settings)
    assert message in str(error.value)


def test_a_plan_without_a_gpu_is_for_this_machines_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("grpo_fast.train.plan.memory_of", lambda device: 64 * 10**9)
    lines = plan("sort", [])
    assert "in 64 GB of this machine, which has no GPU, (50% usable)" in lines[0]
    lm = _empty_model(load_recipe("sort").model, load_recipe("sort").data, "sort")
    expected = predict(Shape.of(lm), load_recipe("sort"), "cpu")
    assert rows(lines)["as configured"][2] == expected.tokens(32e9)


def test_a_row_has_the_settings_and_what_fits_with_them():
    done = invoke("plan", "qwen2.5-7b", "gpu=80", "rollout.group_size=4")
    assert done.exit_code == 0, done.output
    found = rows(done.output.splitlines())
    assert found["as configured"][2:] == [0, 0, 0]
    adapter = "model.gradient_checkpointing=true 'model.lora={r: 16}'"
    _, _, tokens, prompt, groups = found[adapter]
    assert prompt + 4 * 511 == tokens and groups == tokens // (8192 + 4 * 511) > 1


@pytest.mark.parametrize("content", [b"\xff", b"[1]", b'{"model_type": ["x"]}'])
def test_a_config_json_that_is_none(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="MODEL: expected a recipe, .*, got .*config.json"):
        plan(str(path), ["gpu=8"])
