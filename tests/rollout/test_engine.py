"""The protocol of engines: random numbers by place, the engine of a run, what a rollout carries."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import rollout as rollouts
from grpo_fast.rollout import Completion, Engine, Sampling, awake
from grpo_fast.rollout.engine import uniforms

PROMPTS = ["3 1 2 =", "5 =", "0 9 8 7 6 5 4 ="]


class Recorded(Engine):
    """Notes what it is asked to do; its completions are the EOS alone."""

    def __init__(self, short: int = 0) -> None:
        self.calls: list = []
        self.short = short

    def sample(self, request):
        self.calls.append("generate")
        count = len(request.prompts) * request.group_size - self.short
        return [Completion([1], torch.zeros(1), "eos", 7)] * count

    def update(self, policy, version):
        self.calls.append(f"update {version}")

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")

    def close(self):
        self.calls.append("close")


@pytest.mark.parametrize("length", [1, 7, 64])
def test_random_numbers_follow_the_place(length):
    whole = uniforms((3, 1), 5, length, group_size=4, places=None).view(5, 4, length)
    for places in ([0], [4], [1, 3], [0, 1, 2, 3, 4], []):
        share = uniforms((3, 1), len(places), length, group_size=4, places=places)
        assert torch.equal(share.view(-1, 4, length), whole[places])


def test_shares_of_a_batch_sample_what_the_whole_does(policy):
    options = Sampling(max_new_tokens=8)
    whole = rollouts.generate(policy, PROMPTS, options, group_size=2, seed=5)
    found = []
    for places in ([0, 2], [1]):
        chosen = [PROMPTS[i] for i in places]
        share = rollouts.generate(policy, chosen, options, group_size=2, seed=5, places=places)
        found.append(share.completion_ids)
    (a, b, e, f), (c, d) = found
    assert [a, b, c, d, e, f] == whole.completion_ids


@pytest.mark.parametrize("places", [[0], [1, 0, 2], [0, 0, 1], [-1, 0, 1]])
def test_places_that_do_not_fit_are_refused(policy, places):
    with pytest.raises(ValueError, match="places: expected 3 rising places from 0"):
        rollouts.generate(policy, PROMPTS, Sampling(), group_size=1, seed=0, places=places)


def test_a_rollout_carries_what_the_engine_said(policy):
    engine = Recorded()
    found = rollouts.generate(policy, PROMPTS, Sampling(), group_size=2, seed=0, engine=engine)
    assert found.weight_versions == [7] * 6 and found.kept == [None] * 6
    assert not any(found.truncated) and found.lengths == [1] * 6
    with pytest.raises(RuntimeError, match="Recorded: expected 3 completions, got 2"):
        rollouts.generate(policy, PROMPTS, Sampling(), group_size=1, seed=0, engine=Recorded(1))


def test_an_engine_is_awake_with_the_weights_and_sleeps_after_an_error():
    with Recorded() as engine:
        with pytest.raises(RuntimeError, match="stop"), awake(engine, None, 3):
            engine.generate([[1]], Sampling(), group_size=1, seed=0)
            raise RuntimeError("stop")
    assert engine.calls == ["wake", "update 3", "generate", "sleep", "close"]
