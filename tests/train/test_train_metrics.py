"""Tests of the names in metrics.jsonl, and of the warning about the sampler."""

import pytest
import torch

from grpo_fast.rollout import Completion, Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train import loop
from grpo_fast.train.metrics import SamplerWatch
from tests.train.resuming import config_of
from tests.train.tiny_runs import logged, sort

KL = ["loss.beta=0.1", "reference.kind=frozen", "inner_iterations=2", "minibatches=2"]
# These metrics must have the same names as in TRL, because dashboards use the names. The metric
# perf/peak_memory_gib is missing here, because only runs on a GPU log it.
NAMES = {
    *"loss grad_norm learning_rate num_tokens step_time reward reward_std kl entropy".split(),
    *"policy_loss frac_reward_zero_std completions/clipped_ratio".split(),
    *"perf/rollout_tok_s perf/train_tok_s".split(),
    *(
        f"completions/{how}_{which}length"
        for how in ("mean", "min", "max")
        for which in ("", "terminated_")
    ),
    *(f"rewards/sort_positions/{how}" for how in ("mean", "std")),
    *(
        f"clip_ratio/{side}_{how}"
        for side in ("low", "high", "region")
        for how in ("mean", "min", "max")
    ),
    *(f"sampling/sampling_logp_difference/{how}" for how in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{how}" for how in ("min", "mean", "max")),
}

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_every_name_is_there(tmp_path):
    sort(tmp_path, "loss.compute_entropy=true", "steps=2", *KL)
    for row in (line for line in logged(tmp_path) if "loss" in line):
        assert NAMES <= row.keys(), sorted(NAMES - row.keys())


# ------------------------------------ The warning about different log-probs of sampler and trainer
PAIRS = [(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0])), (torch.zeros(2),) * 2]


def moved(by):
    return [(ours, samplers + by) for ours, samplers in PAIRS]


def test_it_is_said_once_and_only_when_far_apart(caplog):
    watch = SamplerWatch(Sampling())
    for step, pairs in enumerate(([], [(torch.zeros(0),) * 2], PAIRS, moved(0.049))):
        watch.look(step, pairs)
    assert not caplog.messages
    watch.look(5, moved(-0.3))
    watch.look(6, moved(0.3))
    (said,) = caplog.messages
    assert said.startswith("step 5: the sampler's and the trainer's logps are 0.3 nats apart")
    assert "stale weights" in said and "top_p" not in said
    SamplerWatch(Sampling(top_k=4)).look(1, moved(1.0))
    assert "the mass that top_k and top_p leave out" in caplog.text


def test_a_run_with_stale_weights_says_so(tmp_path, monkeypatch, caplog):
    original = TransformersEngine.generate

    def stale(self, *arguments, **options):
        done = original(self, *arguments, **options)
        return [Completion(one.ids, one.logps - 0.5, *one[2:]) for one in done]

    monkeypatch.setattr(TransformersEngine, "generate", stale)
    loop.train(config_of(tmp_path / "run", "steps=2", "eval.every=0"))
    assert caplog.text.count("nats apart per token") == 1 and "step 1:" in caplog.text
