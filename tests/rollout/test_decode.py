"""Tests that our decoding loop samples the same tokens as transformers' `generate`.

The attention runs in torch or in C++, and the modules of the model compute the rest. The C++
decoder, which computes full layers, has its tests in `test_decoder.py`.
"""

import logging

import pytest
import torch

from grpo_fast.attention import Head
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.kernels.cpu import decode as cpp
from grpo_fast.kernels.cpu import loader
from grpo_fast.rollout import NonFiniteLogits, Sampling
from grpo_fast.rollout.own import decode
from grpo_fast.rollout.own import engine as hf
from grpo_fast.train.policy import Policy
from tests.tiny import FAMILIES, tiny_model, tiny_policy
from tests.train.tiny_steps import taken

# The first prompt is longer than the sliding windows of the tiny models (6 tokens).
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [20, 21, 22, 23]]


@pytest.fixture(autouse=True, params=["torch", "csrc"])
def attention(request, monkeypatch):
    monkeypatch.setattr(decode, "decoder_of", lambda *_: None)
    if request.param == "torch":
        monkeypatch.setattr(cpp, "runs", lambda x: False)
    elif reason := loader.unavailable("decode"):
        pytest.skip(f"C++ kernels: {reason}")
    return request.param


def policy_of(family="llama", **changes):
    return tiny_policy(family, **{"vocab_size": 61, **changes})


@pytest.fixture(scope="module")
def policy():
    return policy_of()


def ending_often(policy, ids):
    """Make all tokens in `ids` end a completion, so that many completions end early.

    Return the policy.
    """
    policy.eos_ids = frozenset(ids)
    return policy


def both(policy, monkeypatch, prompts=PROMPTS, *, group_size=4, seed=1, **options):
    """Sample with our decoding loop and with transformers' `generate`. Return both results."""
    sampling = Sampling(**{"max_new_tokens": 12, **options})
    found = []
    for why in (None, "requested by a test"):
        monkeypatch.setitem(hf._differences, policy.lm, {hf.LOOP: why})
        engine = hf.TransformersEngine(policy)
        found.append(engine.generate(prompts, sampling, group_size=group_size, seed=seed))
    return found


def assert_same(ours, theirs, tolerance=2e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
        torch.testing.assert_close(a.logps, b.logps, rtol=0, atol=tolerance)
        assert (a.support is None) == (b.support is None)
        if a.support is not None:
            assert all(map(torch.equal, a.support, b.support))
            torch.testing.assert_close(a.mass, b.mass)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_samples_what_it_samples_in_transformers(family, monkeypatch):
    policy = policy_of(family)
    with policy.generation():
        assert hf.difference_of(policy, hf.LOOP) is None
    ours, theirs = both(policy, monkeypatch)
    assert_same(ours, theirs)


OPTIONS = [
    {"group_size": 1}, {"max_new_tokens": 1}, {"temperature": 0.0}, {"top_p": 0.7},
    {"temperature": 0.6, "top_k": 5}, {"min_p": 0.3, "top_k": 20, "top_p": 0.9},
    {"top_k": 9, "top_p": 0.8}, {"batch_size": 1}, {"prompts": PROMPTS[:1]},
    {"batch_size": 5},  # a batch ends within a group
    {"prompts": [PROMPTS[0], PROMPTS[0][::-1]]},  # prompts of equal length need no padding
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(policy, monkeypatch, options):
    assert_same(*both(policy, monkeypatch, **options))


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2 has sliding windows
def test_ended_completions_leave_without_changing_the_others(family, monkeypatch):
    policy = ending_often(policy_of(family), range(1, 16))
    calls, drop_ended = [], decode.RolloutCache.drop_ended

    def counted(cache, stay):
        drop_ended(cache, stay)
        calls.append((len(stay), cache.taken is not None, len(cache.counts)))

    monkeypatch.setattr(decode.RolloutCache, "drop_ended", counted)
    ours, theirs = both(policy, monkeypatch, max_new_tokens=16, group_size=5)
    assert_same(ours, theirs)
    assert len(calls) >= 3 and any(ragged for _, ragged, _ in calls)
    assert len({prompts for _, _, prompts in calls}) > 1  # some prompts leave the batch
    assert 1 in {len(one.ids) for one in ours}  # some completions end at the first token


def test_prompts_pass_in_several_rows_and_room_grows_with_completions(policy, monkeypatch, spied):
    monkeypatch.setattr(decode, "PREFILL_TOKENS", 8)
    calls = spied(decode, "forward")
    assert_same(*both(policy, monkeypatch))
    # The first two forward passes read the prompts (14 tokens). The third pass reads one token of
    # each of the 12 completions.
    assert [len(call.args[1]) for call in calls][:3] == [9, 5, 12]
    monkeypatch.setattr("grpo_fast.rollout.own.cache.GROWTH", 3)
    assert_same(*both(policy, monkeypatch, max_new_tokens=20))


def test_rare_checks_for_ended_completions_change_nothing(policy, monkeypatch):
    monkeypatch.setattr(decode, "CHECK_EVERY", {"cpu": 5})
    assert_same(*both(policy, monkeypatch))


def test_a_lora_adapter(monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen2"), config)
    wrapped = Policy(model, build_symbol_tokenizer(["0", "1"]))
    ours, theirs = both(wrapped, monkeypatch)
    assert_same(ours, theirs)
    with model.disable_adapter():
        assert both(wrapped, monkeypatch)[0][0].ids != ours[0].ids


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_16_bits(how, monkeypatch):
    """Check that logps recorded while sampling in bf16 are close to those of an fp32 forward pass.

    The forward pass computes the logps of the sampled tokens. Sampling again in fp32 could give
    other tokens if two tokens are nearly equally likely.
    """
    model = tiny_model("llama")
    if how == "weights":
        model = model.to(torch.bfloat16)
    autocast = torch.bfloat16 if how == "autocast" else None
    policy = Policy(model, build_symbol_tokenizer(["0", "1"]), autocast=autocast)
    sampling = Sampling(max_new_tokens=8)
    monkeypatch.setitem(hf._differences, policy.lm, {hf.LOOP: None})
    found = hf.TransformersEngine(policy).generate(PROMPTS, sampling, group_size=2, seed=0)
    fp32_model = model.float()
    for n, one in enumerate(found):
        ids = torch.tensor([PROMPTS[n // 2] + one.ids])
        with policy.generation(), torch.autocast("cpu", enabled=False):
            logits = fp32_model(ids, use_cache=False).logits[0]
        expected = taken(logits[-1 - len(one.ids) : -1], one.ids)
        assert one.logps.dtype == torch.float32
        torch.testing.assert_close(one.logps, expected, rtol=0, atol=0.25)


def halves_logits(monkeypatch):
    original = Head.logits_of
    monkeypatch.setattr(Head, "logits_of", lambda head, hidden: 0.5 * original(head, hidden))


def refuses_a_layer(monkeypatch):
    def refuses(*_, **__):
        raise ValueError("s_aux: not supported by packed attention")

    monkeypatch.setattr("grpo_fast.rollout.own.cache.packed_attention", refuses)


@pytest.mark.parametrize(
    ("fault", "reason"), [(halves_logits, "differs by"), (refuses_a_layer, "s_aux: not supported")]
)
def test_a_model_that_the_loop_does_not_compute_falls_back(monkeypatch, caplog, fault, reason):
    """Check that transformers' `generate` is used if our decoding loop fails or is wrong.

    The reason must be logged once.
    """
    policy = policy_of("llama", seed=3)
    fault(monkeypatch)
    sampling = Sampling(max_new_tokens=4)
    with caplog.at_level(logging.WARNING, logger="grpo_fast.rollout.own.engine"):
        first = hf.TransformersEngine(policy).generate(PROMPTS, sampling, group_size=2, seed=0)
        again = hf.TransformersEngine(policy).generate(PROMPTS, sampling, group_size=2, seed=0)
    assert len(first) == 6 and [one.ids for one in first] == [one.ids for one in again]
    (message,) = caplog.messages
    assert "rollouts do not use our loop" in message and reason in message


@pytest.mark.parametrize("seed", range(12))
def test_the_comparison_of_a_model_ignores_eos(seed, monkeypatch):
    """Check that the comparison of our decoding loop with transformers does not stop at EOS.

    Every token of the model is an EOS token. The comparison must still find a wrong decoding loop.
    """
    vocab, heads = (5, 14, 61, 8)[seed // 3 % 4], (1, 2, 4)[(seed + seed // 3) % 3]
    policy = policy_of(seed=seed, vocab_size=vocab, num_key_value_heads=heads)
    policy.lm.to((torch.float32, torch.bfloat16, torch.float64)[seed % 3])
    ending_often(policy, range(vocab))
    with policy.generation():
        assert hf.difference_of(policy, hf.LOOP) is None
    step = decode.forward

    def forgets_the_latest(policy, ids, positions, cache):
        return step(policy, ids if cache.layout is not None else 0 * ids, positions, cache)

    monkeypatch.setattr(decode, "forward", forgets_the_latest)
    del hf._differences[policy.lm]
    with policy.generation():
        assert hf.difference_of(policy, hf.LOOP) is not None


def test_nan_logits_are_refused(policy, monkeypatch):
    original = Head.logits_of
    calls = []

    def broken(head, hidden):
        calls.append(0)
        logits = original(head, hidden)
        return logits * float("nan") if len(calls) == 3 else logits

    monkeypatch.setattr(Head, "logits_of", broken)
    monkeypatch.setitem(hf._differences, policy.lm, {hf.LOOP: None})
    engine = hf.TransformersEngine(policy)
    with pytest.raises(NonFiniteLogits, match="the policy's logits are NaN"):
        engine.generate(PROMPTS, Sampling(max_new_tokens=4), group_size=2, seed=0)


def test_no_prompts(policy):
    assert hf.TransformersEngine(policy).generate([], Sampling(), group_size=2, seed=0) == []
