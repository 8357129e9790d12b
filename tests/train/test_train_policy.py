"""Tests of the policy: logit transforms, self-check, loading, saving, LoRA and packing."""

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout.own.engine import LOOP, difference_of
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.policy import Policy, load_policy, self_check
from tests.pairs import pairs
from tests.tiny import FAMILIES, SYMBOLS, tiny_folder, tiny_model, tiny_policy
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
