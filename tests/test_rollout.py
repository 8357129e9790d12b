"""Rollout: the sampler against probabilities computed by hand, cutting at EOS, seeding, padding."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout import generate
from grpo_fast.rollout.sampler import Sampler, draw, seed_of
from grpo_fast.train.batch import MicroBatch
from grpo_fast.train.config import SamplingConfig
from grpo_fast.train.policy import Policy
from tests.tiny import tiny_model

SYMBOLS = [*map(str, range(10)), "="]
PROMPTS = ["3 1 2 =", "5 =", "0 9 8 7 6 5 4 ="]  # different lengths: left padding


@pytest.fixture(scope="module")
def policy():
    tokenizer = build_symbol_tokenizer(SYMBOLS)
    return Policy(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)


def options(**changes):
    return SamplingConfig(**{"group_size": 4, "max_new_tokens": 12, **changes})


def test_draw_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -1.0]])
    uniform = (torch.arange(20000) + 0.5) / 20000
    tokens = draw(logits.expand(20000, 5), uniform)
    frequency = torch.bincount(tokens, minlength=5) / 20000
    torch.testing.assert_close(frequency, logits[0].softmax(-1), rtol=0, atol=1e-4)
    assert frequency[2] == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_draw_never_takes_an_impossible_token(uniform):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 400:600] = torch.randn(200, generator=torch.Generator().manual_seed(0))
    assert 400 <= draw(logits, torch.tensor([uniform])).item() < 600


def test_top_k_then_top_p():
    probabilities = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]])
    sampler = Sampler(torch.full((1, 1), 0.999), temperature=1.0, top_k=4, top_p=0.7)
    # top_k leaves .4 .3 .15 .1 (of .95): the mass before the third is .737 ≥ .7, so two stay
    scores = sampler(torch.zeros(1, 1), probabilities.log())
    assert scores.argmax(-1).item() == 1
    assert sampler.logps.item() == pytest.approx(torch.tensor(0.3 / 0.7).log().item(), abs=1e-6)


def test_temperature_enters_the_logps():
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    sampler = Sampler(torch.zeros(1, 1), temperature=0.5)
    token = sampler(torch.zeros(1, 1), logits.clone()).argmax(-1)
    assert sampler.logps.item() == pytest.approx((logits / 0.5).log_softmax(-1)[0, token].item(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_logps_are_the_policys(policy, temperature):
    """Left-padded generation with a cache and one packed forward pass see the same distribution."""
    rollout = generate(policy, PROMPTS, options(temperature=temperature), seed=1)
    groups = [range(first, first + 4) for first in range(0, 12, 4)]
    batch = MicroBatch.pack(rollout, torch.zeros(12), groups, "cpu")
    logps = policy.logps(batch.packed, temperature)
    torch.testing.assert_close(logps, batch.sampling_logps, rtol=0, atol=2e-5)


def test_greedy_takes_the_most_likely_token(policy):
    rollout = generate(policy, PROMPTS, options(temperature=0.0, group_size=2), seed=1)
    for prompt, completion in zip(rollout.prompt_ids, rollout.completion_ids, strict=True):
        ids = list(prompt)
        for token in completion:
            with policy.generation():
                logits = policy.lm(torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert token == logits.argmax().item()
            ids.append(token)


def test_completions_end_at_the_first_eos(policy):
    rollout = generate(policy, PROMPTS, options(group_size=40), seed=2)
    eos = policy.tokenizer.eos_token_id
    assert any(rollout.truncated) and not all(rollout.truncated)
    for ids, cut, logps in zip(rollout.completion_ids, rollout.truncated, rollout.sampling_logps, strict=True):
        assert cut == (eos not in ids) and len(logps) == len(ids)
        assert eos not in ids[:-1] and (cut or ids[-1] == eos)
        assert not cut or len(ids) == 12
    assert not any("<|" in text for text in rollout.texts)


def test_the_seed_decides_and_the_batch_size_does_not(policy):
    first = generate(policy, PROMPTS, options(), seed=(3, 1))
    again = generate(policy, PROMPTS, options(), seed=(3, 1))
    other = generate(policy, PROMPTS, options(), seed=(3, 2))
    pieces = generate(policy, PROMPTS, options(batch_size=5), seed=(3, 1))
    assert first.completion_ids == again.completion_ids != other.completion_ids
    assert all(torch.equal(a, b) for a, b in zip(first.sampling_logps, again.sampling_logps, strict=True))
    assert pieces.completion_ids == first.completion_ids
    assert seed_of(3, 1) != seed_of(31) and 0 <= seed_of("x") < 2**63


def test_chat_messages_and_empty_prompts(policy):
    messages = [{"role": "user", "content": "1 2"}]
    rollout = generate(policy, [messages], options(group_size=1), seed=0)
    assert rollout.prompts == ["1 2\n"] and rollout.prompt_ids == [policy.tokenizer("1 2")["input_ids"]]
    with pytest.raises(ValueError, match="at least one token"):
        generate(policy, [""], options(), seed=0)


def test_a_shipped_generation_config_does_not_reach_the_sampler(policy):
    plain = generate(policy, PROMPTS, options(), seed=4)
    policy.lm.generation_config.repetition_penalty = 5.0
    policy.lm.generation_config.do_sample = True
    penalised = generate(policy, PROMPTS, options(), seed=4)
    assert policy.lm.generation_config.repetition_penalty == 5.0
    policy.lm.generation_config.repetition_penalty = None
    assert penalised.completion_ids == plain.completion_ids


def test_generation_mode_is_left_again(policy):
    policy.lm.train()
    with pytest.raises(RuntimeError, match="stop"), policy.generation():
        assert not policy.lm.training and policy.lm.config._attn_implementation == "sdpa"
        raise RuntimeError("stop")
    assert policy.lm.training and policy.lm.config._attn_implementation == "grpo_packed"
    policy.lm.eval()
