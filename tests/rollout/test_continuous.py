"""transformers' continuous batching as an engine: its logps, its ends, its errors."""

import time
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.rollout import NonFiniteLogits, Sampling
from grpo_fast.rollout.engine import say_that_kept_is_unknown
from grpo_fast.rollout.own import continuous
from grpo_fast.rollout.own.continuous import ContinuousEngine, ContinuousOptions
from grpo_fast.train import loop
from grpo_fast.train.config.data import HeldOut
from grpo_fast.train.models.policy import Policy
from tests.tiny import tiny_policy
from tests.train.resuming import config_of
from tests.train.tiny_steps import logits_of, taken

PROMPTS = [[3, 4, 5, 6], [7, 8]]
SMALL = ContinuousOptions(page_size=32, pages=64, max_batch_tokens=64, timeout=60)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(vocab_size=61)


def engine_of(policy, options=SMALL):
    return ContinuousEngine(policy, SimpleNamespace(continuous=options))


def test_logps_are_the_policys_and_completions_end_with_their_eos(policy):
    engine = engine_of(policy)
    engine.update(policy, 4)
    options = Sampling(max_new_tokens=8, temperature=0.8, top_k=9)
    found = engine.generate(PROMPTS, options, group_size=4, seed=(1, 2))
    again = engine.generate(PROMPTS, options, group_size=4, seed=(1, 2))
    assert [one.ids for one in found] == [one.ids for one in again]
    assert len(found) == 8 and len({tuple(one.ids) for one in found}) > 2
    assert {one.weight_version for one in found} == {4} and found[0].kept is None
    for n, one in enumerate(found):
        prompt = PROMPTS[n // 4]
        rows = logits_of(policy, prompt, one.ids) / 0.8
        rows = rows.masked_fill(rows < rows.topk(9).values[:, -1:], -torch.inf)
        torch.testing.assert_close(one.logps, taken(rows, one.ids), rtol=0, atol=2e-5)
        assert (one.finish_reason == "eos") == (one.ids[-1] == 1)
        assert 1 not in one.ids[:-1] and (one.finish_reason == "eos" or len(one.ids) == 8)
    assert policy.lm.config._attn_implementation == "grpo_packed"
    greedy = Sampling(max_new_tokens=1, temperature=0)
    (one,) = engine_of(policy).generate(PROMPTS[:1], greedy, group_size=1, seed=0)
    logits = logits_of(policy, PROMPTS[0], one.ids)[0]
    assert one.ids == [int(logits.argmax())]
    assert float(one.logps) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)


class OldConfig:
    """ContinuousBatchingConfig as transformers 5.17 has it, by what matters here."""

    def __init__(self, block_size=256, num_blocks=None, max_batch_tokens=None,
                 return_logprobs=False, seed=None):  # fmt: skip
        self.asked = block_size, num_blocks, max_batch_tokens, return_logprobs, seed


class NewConfig(OldConfig):
    """And as later ones do."""

    def __init__(self, page_size=256, auto_switch_to_flash=True, **rest):
        assert auto_switch_to_flash is False
        super().__init__(page_size, **rest)


@pytest.mark.parametrize("config", [OldConfig, NewConfig])
def test_the_batches_are_asked_for_in_the_words_of_the_installed_transformers(
    policy, monkeypatch, config
):
    """The pages, and the attention that was chosen: 5.17 would take flash attention."""
    monkeypatch.setattr("transformers.ContinuousBatchingConfig", config)
    continuous.config_fields.cache_clear()
    assert engine_of(policy)._batching(7).asked == (32, 64, 64, True, 7)
    names = ("sdpa", "paged|eager", "flash_attention_2")
    asked = [continuous.asked_for(name) for name in names]
    continuous.config_fields.cache_clear()
    wanted = ("paged|sdpa", "paged|eager", "flash_attention_2")
    assert asked == list(wanted if config is OldConfig else names)


def test_it_is_said_once_that_kept_tokens_are_unknown_where_they_are_wanted(policy, caplog):
    say_that_kept_is_unknown.cache_clear()
    unwanted = HeldOut(max_new_tokens=1, top_p=0.9)  # as an evaluation asks
    for sampling in (Sampling(max_new_tokens=1), unwanted):
        engine_of(policy).generate(PROMPTS, sampling, group_size=1, seed=0)
    assert "top_p" not in caplog.text
    for _ in range(2):
        options = Sampling(max_new_tokens=1, top_p=0.9)
        engine_of(policy).generate(PROMPTS, options, group_size=1, seed=0)
    assert caplog.text.count("top_p and top_k kept") == 1


def test_a_cpu_is_told_how_much_memory_to_take(policy):
    with pytest.raises(ValueError, match=r"rollout.continuous: expected pages and max_batch_tok"):
        engine_of(policy, ContinuousOptions())
    wide = Policy(policy.lm, policy.tokenizer, autocast=torch.bfloat16)
    with pytest.raises(ValueError, match="model.autocast: expected none beside continuous"):
        engine_of(wide)


class Manager:
    """In place of transformers' manager: gives these results, then nothing."""

    def __init__(self, results=(), running=True):
        self.results, self.running, self.idle_from = list(results), running, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def add_requests(self, inputs, **_):
        return [f"r{i}" for i in range(len(inputs))]

    def get_result(self, timeout):
        if self.results:
            return self.results.pop(0)
        self.idle_from = self.idle_from or time.monotonic()
        assert time.monotonic() - self.idle_from < 5, "still waited for"
        return None

    def is_running(self):
        return self.running


def finished(name, ids=(5,), logprobs=(-1.0,), error=None):
    return SimpleNamespace(
        request_id=name, is_finished=lambda: True, generated_tokens=list(ids),
        logprobs=list(logprobs), error=error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("manager", "error", "says"),
    [
        (Manager([finished("r0")], running=False), RuntimeError, "its thread has ended"),
        (Manager([finished("r0")]), TimeoutError, "no completion in 0.01 seconds"),
        (Manager([finished("r1", error="no room"), finished("r0")]), RuntimeError, "no room"),
        (Manager([finished("r1", logprobs=[torch.nan]), finished("r0")]), NonFiniteLogits, "NaN"),
    ],
)
def test_what_goes_wrong_is_said_and_never_waited_for(policy, monkeypatch, manager, error, says):
    context = "continuous_batching_context_manager"
    monkeypatch.setattr(policy.lm, context, lambda **_: manager, raising=False)
    engine = engine_of(policy, SMALL.model_copy(update={"timeout": 0.01}))
    with pytest.raises(error, match=says):
        engine.generate(PROMPTS, Sampling(max_new_tokens=1), group_size=1, seed=0)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_samples_by_it(tmp_path):
    small = "rollout.continuous={page_size: 32, pages: 64, max_batch_tokens: 64}"
    words = ["steps=1", "eval.n=1", "rollout.engine=continuous", small]
    summary = loop.train(config_of(tmp_path / "run", *words))
    assert summary["steps"] == 1
