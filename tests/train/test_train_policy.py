"""Tests of the policy: logit transforms, self-check, loading, saving, LoRA and packing.

Damaged or unsuitable models are refused with the name of the file or weight.
"""

import logging
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_fast.data.tokenizer import build_bpe_tokenizer, build_symbol_tokenizer
from grpo_fast.rollout.own.engine import LOOP, difference_of
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.policy import Policy, load_policy, self_check
from tests.command_line import invoke, refused, write_recipe
from tests.pairs import pairs
from tests.tiny import FAMILIES, SYMBOLS, TEXTS, tiny_folder, tiny_model, tiny_policy
from tests.train.test_hostile_input import change_json
from tests.train.tiny_steps import batch_of, logits_of, rollout_of, taken


def a_batch():
    rollout = rollout_of([(3, [4]), (5, [6]), (2, [1])], cut=[1])
    return rollout, batch_of(rollout, torch.tensor([1.0, 2.0, 3.0])).packed([[0], [1], [2]])


@pytest.mark.parametrize("family", FAMILIES)
def test_self_check_passes_and_logps_are_the_models_own(family):
    policy = tiny_policy(family)
    assert self_check(policy) < 1e-4
    rollout, batch = a_batch()
    got = policy.logps(batch.packed).split([4, 6, 1])
    texts = zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
    for (prompt, completion), logps in zip(texts, got, strict=True):
        own = taken(logits_of(policy, prompt, completion), completion)
        torch.testing.assert_close(logps, own, rtol=0, atol=1e-4)


def test_self_check_finds_an_unknown_head_rule(monkeypatch):
    policy = tiny_policy("qwen2")
    head = policy.lm.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda x: 1.1 * nn.functional.linear(x, head.weight))
    with pytest.raises(ValueError, match="does something that this trainer does not support"):
        self_check(policy)


def test_lora_trains_the_adapter_and_saves_a_merged_model(tmp_path):
    folder = tiny_folder(tmp_path / "base", "llama")
    policy = load_policy(ModelConfig(path=folder, lora={"r": 4}, gradient_checkpointing=True))
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert not policy.head.weight.requires_grad
    _, batch = a_batch()
    policy.model.train()
    (-policy.logps(batch.packed).mean()).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.trainable())
    with torch.no_grad():
        for p in policy.trainable():
            p.add_(0.1 * torch.ones_like(p))
    moved = policy.logps(batch.packed)
    policy.save(tmp_path / "merged")
    # The attention implementation that training uses is not saved.
    assert "attn" not in (tmp_path / "merged" / "config.json").read_text()
    merged = load_policy(ModelConfig(path=str(tmp_path / "merged")))
    torch.testing.assert_close(merged.logps(batch.packed), moved, rtol=0, atol=1e-4)
    torch.testing.assert_close(policy.logps(batch.packed), moved)  # the policy works after saving


@pytest.mark.parametrize("settings", [
    {"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["mlp", "norm"]},
    {"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": "all-linear"},
])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2 ties its head to the embedding
def test_a_saved_model_has_the_logits_of_the_policy_with_its_adapter(tmp_path, family, settings):
    tokenizer = build_symbol_tokenizer(SYMBOLS)
    given = {"target_modules": ["q_proj"], "init_lora_weights": False, **settings}
    model = peft.get_peft_model(tiny_model(family, vocab_size=14), peft.LoraConfig(**given))
    policy = Policy(model, tokenizer)
    with torch.no_grad():
        for p in policy.trainable():
            p.normal_(std=0.2)
    policy.save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    gap = logits_of(policy, [3, 5], [4, 6]) - logits_of(Policy(saved, tokenizer), [3, 5], [4, 6])
    assert gap.abs().max() < 1e-4


def test_autocast_keeps_fp32_weights_and_a_callers_does_not_reach_the_policy(tmp_path):
    policy = load_policy(ModelConfig(path=tiny_folder(tmp_path, "qwen2"), autocast="bfloat16"))
    _, batch = a_batch()
    hidden = policy.hidden(batch.packed)
    assert hidden.dtype == policy.head.weight.dtype == torch.bfloat16
    (-policy.logps(batch.packed).mean()).backward()
    weight = policy.lm.get_output_embeddings().weight
    assert weight.dtype == weight.grad.dtype == torch.float32 and weight.grad.abs().sum() > 0
    policy = tiny_policy("qwen2")
    _, batch = a_batch()
    plain = policy.logps(batch.packed)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(policy.logps(batch.packed), plain) and self_check(policy) < 1e-4
        with policy.generation():
            assert difference_of(policy, LOOP) is None


def test_models_from_a_config():
    tokenizer = build_symbol_tokenizer(SYMBOLS)
    small = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    policy = load_policy(ModelConfig(config=small, tokenizer="symbols"), tokenizer)
    assert policy.head.weight.shape == (13, 16) and policy.eos_ids == {1} and policy.pad_id == 0
    with pytest.raises(ValueError, match="llama has no field hidden_sise"):
        load_policy(ModelConfig(config={**small, "hidden_sise": 3}, tokenizer="symbols"), tokenizer)
    tokenizer = build_symbol_tokenizer(SYMBOLS)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="expected an EOS token"):
        Policy(tiny_model("llama", vocab_size=13, eos_token_id=None), tokenizer)


def test_packed_samples_keep_the_given_order():
    rollout, _ = a_batch()
    found = batch_of(rollout, torch.arange(3.0), mask_truncated=True).packed([[2], [1]])
    assert found.chosen == [2, 1] and found.advantages.tolist() == [2.0, 1.0]
    assert found.completion_mask.tolist() == [True] + [False] * 6


GROUPS = [(9, (2, 5, 3)), (4, (1, 1, 7)), (6, (6, 6, 6)), (3, (12, 1, 1))]


def a_step(updates=2, budget=40, shared=True):
    options = {"updates": updates, "budget": budget, "shared": shared}
    return batch_of(rollout_of(GROUPS), torch.arange(12.0), **options)


# With 3 and 12 minibatches, the samples of one group are in several minibatches.
@pairs(shared=[True, False], budget=[1, 13, 20, 40, 10**6], updates=[1, 2, 3, 4, 12])
def test_a_step_in_micro_batches(shared, budget, updates):
    step = a_step(updates, budget, shared)
    assert len(step.minibatches) == updates
    for part, minibatch in zip(step.parts, step.minibatches, strict=True):
        assert sorted(i for batch in minibatch for i in batch.chosen) == list(part)
    for batch in step.micro_batches:
        assert batch.trunk_tokens <= budget or len(batch) == 1
        assert batch.advantages.tolist() == [float(i) for i in batch.chosen]
        parts = map(batch.packed.split, (batch.packed.target_ids, batch.column("logps")))
        for i, targets, logps in zip(batch.chosen, *parts, strict=True):
            assert targets.tolist() == step.samples.completion_ids[i] and (logps == i).all()


LAYER = "model.layers.1."
CONFIG = "config.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("models") / "whole", "llama")


@pytest.fixture
def folder(whole, tmp_path):
    """Return a copy of the folder of a tiny model. A test may damage the copy."""
    return Path(shutil.copytree(whole, tmp_path / "m"))


def weights_of(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


FILE, UP = "model.safetensors", LAYER + "mlp.up_proj.weight"
LARGER = [chr(0x4E00 + i) * 3 for i in range(99)]
# Maps a kind of damage to a function that damages the folder of a model, and to parts of the
# expected error message.
DAMAGE = {
    "truncated": (lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-1000]),
                  "/m': SafetensorError", "not fully covered"),
    "garbage": (lambda f: (f / FILE).write_bytes(b"\xff" * 999), "/m': SafetensorError"),
    "gone": (lambda f: (f / FILE).unlink(), f"no file named {FILE}"),
    "another vocabulary": (lambda f: change_json(f / CONFIG, vocab_size=99),
                           "in place of (99, 32)"),
    CONFIG: (lambda f: (f / CONFIG).write_text("{"), CONFIG),
    "an adapter": (lambda f: (f / CONFIG).rename(f / "adapter_config.json"),
                   "a LoRA adapter in ", "merge_and_unload"),
    "a field of config.json": (lambda f: change_json(f / CONFIG, num_hidden_layers="x"),
                               "num_hidden_layers"),
    "tokenizer.json": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "a larger tokenizer": (lambda f: build_bpe_tokenizer(LARGER, 500).save_pretrained(f),
                           "expected token ids below 295", "got 499"),
}  # fmt: skip
WEIGHTS = {
    "half of the layers": (lambda w: [w.pop(name) for name in [*w] if name.startswith(LAYER)],
                           "none or others for 9 of them", LAYER + "input_layernorm.w"),
    "no head": (lambda w: w.pop("lm_head.weight"), "for 1 of them: lm_head.weight"),
    "no weights": (dict.clear, "got none or others for 21 of them"),
    "another shape": (lambda w: w.update({UP: w[UP][:-1].clone()}),
                      UP + " is (63, 32) in place of (64, 32)"),
    "NaN": (lambda w: w["model.norm.weight"].fill_(float("nan")),
            "expected weights with finite logits, got NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DAMAGE, *WEIGHTS])
def test_a_damaged_model_is_refused_in_one_line(folder, tmp_path, name, caplog):
    damage, *parts = (DAMAGE | WEIGHTS)[name]
    damage(folder) if name in DAMAGE else weights_of(folder, damage)
    recipe = write_recipe(tmp_path)
    result = invoke("train", recipe, f"model={{path: {folder}, tokenizer: null}}")
    assert refused(result, *parts) and len(result.stderr.splitlines()) == 1
    assert not caplog.records and not (tmp_path / "run").exists()
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    assert refused(invoke("eval", str(folder), f"data={data}", "max_new_tokens=2"), *parts)


def test_weights_without_a_place_are_reported_in_one_line(folder, caplog):
    extra = {f"model.layers.{i}.extra": torch.ones(3) for i in range(5, 9)}
    weights_of(folder, lambda w: w.update(extra))
    load_policy(ModelConfig(path=str(folder)))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    message = record.getMessage()
    said = "4 weights have no place in the model: model.layers.5.extra, model.layers.6.extra"
    assert said in message
    assert str(folder) in message and "\n" not in message


# The LM head of the tiny llama is a separate weight. The head of the tiny qwen2 is tied to the
# embedding.
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_whole_model_says_nothing(tmp_path, family, caplog, capfd):
    folder = tiny_folder(tmp_path / "m", family)
    assert ("lm_head.weight" in load_file(f"{folder}/model.safetensors")) == (family == "llama")
    capfd.readouterr()
    load_policy(ModelConfig(path=folder))
    assert not caplog.records and "REPORT" not in "".join(capfd.readouterr())


def test_a_special_token_beyond_the_embedding(folder):
    """Check a tokenizer with a special token whose id is outside of the model's embedding.

    Gemma 3 has such a tokenizer. Only prompts that contain the token must be refused.
    """
    from grpo_fast.rollout import Sampling, generate

    tokenizer = build_bpe_tokenizer(TEXTS, 300)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    policy = load_policy(ModelConfig(path=str(folder)))
    options = Sampling(max_new_tokens=2)
    assert len(generate(policy, ["What is 1?"], options, group_size=1, seed=0).texts) == 1
    with pytest.raises(ValueError, match="token ids below 295, .* got 295 in 'What is <image>"):
        generate(policy, ["What is <image>?"], options, group_size=1, seed=0)
