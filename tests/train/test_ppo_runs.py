"""Tests of complete PPO runs: invariances of the results, and the saved files."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import AdamW

from grpo_fast.train import run as trainer
from grpo_fast.train.critic import Critic
from grpo_fast.train.folder import checkpoints_in
from grpo_fast.train.update import Optimizer, schedule
from tests.train.runs import sort

PPO = ["advantages=gae", "critic={}"]
FILE = "model-00001-of-00001.safetensors"
PASSES = ["inner_iterations=2", "minibatches=2", "shuffle=completions"]
KL = ["reference.kind=frozen", "loss.beta=0.1"]

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def lines(spied):
    """Return a function that trains with the recipe `sort`.

    The function returns a list with the metrics of each step, and a list with the metrics of each
    optimizer update.
    """

    def train(folder, *overrides):
        calls = spied(trainer.Run, "_update")
        rows = sort(folder, *overrides)
        updates = [
            {"step": call.args[1], **call.result.result(), "grad_norm": call.result.grad_norm,
             "rate": call.result.learning_rate}
            for call in calls
        ]  # fmt: skip
        return rows, updates

    return train


@pytest.mark.parametrize(
    "overrides",
    [
        ["critic={kind: model, lr: 0.003, loss: huber}", *PASSES],
        ["rollout.group_size=1", "rollout.prompts_per_step=16"],
        ["model.autocast=bfloat16", *PASSES],
        ["model.gradient_checkpointing=true", "critic.kind=model"],
    ],
)
def test_every_step_says_what_its_values_are_worth(tmp_path, spied, overrides):
    """Check that every step logs the metrics of the value function.

    The critic must return values in fp32, even under autocast.
    """
    calls = spied(Critic, "values")
    first = sort(tmp_path / "a", *PPO, *overrides)
    assert {call.result.dtype for call in calls} == {torch.float32}
    for row in first:
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert {f"value/{x}" for x in ("loss", "mean", "error", "clip_ratio")} <= row.keys()
    assert any("value/explained_variance" in row for row in first)
    assert first[0]["value/mean"] == 0 != first[1]["value/mean"]  # the value head starts at zero


@pytest.mark.parametrize("kind", ["shared", "model"])
def test_lora_with_a_critic_of_either_kind(tmp_path, kind):
    words = [f"critic={{kind: {kind}, kl_in_reward: true}}", "model.lora.r=4", "checkpoint.every=1"]
    sort(tmp_path / "run", "advantages=gae", *words, *PASSES, *KL)
    stored = load_file(checkpoints_in(tmp_path / "run")[0] / "weights" / FILE)
    assert stored["critic.head.weight"].abs().max() > 0
    assert any(name.startswith("critic.trunk.") for name in stored) == (kind == "model")


def test_the_critics_own_rate(tmp_path, spied):
    made = spied(Optimizer, "__init__")
    sort(tmp_path / "a", *PPO, "critic.lr=0.25", "steps=1", "minibatches=2")
    sort(tmp_path / "b", *PPO, "steps=1")
    found = [(config.lr, total) for _, _, config, total in (call.args for call in made)]
    assert found == [(1e-3, 2), (0.25, 2), (1e-3, 1), (1e-3, 1)]
    assert len(made[1].args[1]) == 2


def test_the_kl_in_the_reward_is_not_in_the_loss(tmp_path, lines):
    """Check that with critic.kl_in_reward the KL is in the returns and not in the loss."""
    options = [*PPO, *KL, "loss.loss_type=dapo", "loss.entropy_coef=0", "optim.lr=0.01", *PASSES,
               "steps=2"]  # fmt: skip
    loss, losses = lines(tmp_path / "loss", *options)
    options += ["critic.kl_in_reward=true"]
    reward, rewards = lines(tmp_path / "reward", *options)
    for updates, weight in ((losses, 0.1), (rewards, 0.0)):
        for row in updates:
            expected = row["policy_loss"] + weight * row["kl"] + 0.5 * row["value/loss"]
            assert row["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert loss[0]["reward"] == reward[0]["reward"]
    assert loss[0]["value/error"] == pytest.approx(reward[0]["value/error"])  # step 1 has no KL
    heavy = sort(tmp_path / "heavy", *options, "loss.beta=50")
    light = sort(tmp_path / "light", *options, "loss.beta=1e-9")
    assert heavy[1]["value/error"] > 1.01 * light[1]["value/error"]


def test_the_rate_that_is_logged_is_the_one_that_was_used(tmp_path, monkeypatch, lines):
    used, step = [], AdamW.step

    def recorded(self):
        used.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(AdamW, "step", recorded)
    rows, updates = lines(tmp_path / "a", "minibatches=2")
    assert [row["learning_rate"] for row in rows] == used[1::2]
    assert [row["rate"] for row in updates] == used
    assert used[0] == 1e-3


def test_the_metrics_of_a_step_are_means_over_its_updates(tmp_path, lines):
    rows, updates = lines(tmp_path / "a", *PPO, *PASSES)
    assert [row["step"] for row in updates] == [1] * 4 + [2] * 4 + [3] * 4
    for number, row in enumerate(rows):
        mine = updates[4 * number : 4 * number + 4]
        for name in ("loss", "policy_loss", "value/loss", "grad_norm"):
            assert row[name] == pytest.approx(sum(u[name] for u in mine) / 4, rel=1e-5, abs=1e-7)


def test_an_early_stop_judges_the_whole_pass_and_the_schedule_goes_on(tmp_path, lines):
    """Check that `max_approx_kl` limits the mean KL over all minibatches of a pass.

    The limit must not apply to the last minibatch alone. The learning rates of the next step must
    be those that the step would have if no update had been skipped.
    """
    options = [*PPO, "optim.lr=0.02", "inner_iterations=4", "minibatches=4", "steps=2",
               "tokens_per_microbatch=20"]  # fmt: skip
    _, updates = lines(tmp_path / "free", *options)
    kls = [(row["approx_kl"], row["active_tokens"]) for row in updates]
    passes = [kls[i : i + 4] for i in range(0, 16, 4)]
    means = [sum(k * n for k, n in part) / sum(n for _, n in part) for part in passes]
    lasts = [part[-1][0] for part in passes]
    assert means[0] < lasts[0]
    limit = (means[0] + lasts[0]) / 2  # between the first pass's mean and its last value
    _, updates = lines(tmp_path / "stopped", *options, f"max_approx_kl={limit}")
    expected = next(i for i, mean in enumerate(means) if mean > limit) + 1
    first, second = ([row for row in updates if row["step"] == step] for step in (1, 2))
    assert expected > 1 and len(first) == 4 * expected < 16
    assert second[0]["rate"] == pytest.approx(0.02 * schedule("linear", 16, 0, 32), rel=1e-9)


def test_shuffled_minibatches_differ_from_pass_to_pass_and_from_step_to_step(tmp_path, spied):
    calls = spied(trainer, "accumulate")
    sort(tmp_path / "a", *PPO, *PASSES, "steps=2")
    sort(tmp_path / "b", *PPO, *PASSES, "steps=2", "seed=1")
    parts = [sorted(i for micro in call.args[1] for i in micro.chosen) for call in calls]
    passes = [parts[i : i + 2] for i in range(0, 8, 2)]
    assert all(sorted(a + b) == list(range(16)) for a, b in passes)
    assert len({tuple(a) for a, _ in passes}) == 4 and parts[8:] != parts[:8]
