"""Tests of complete PPO runs: invariances of the results, and the saved files."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import AdamW

from grpo_fast.train import batch as budget
from grpo_fast.train import loop
from grpo_fast.train import run as trainer
from grpo_fast.train.config import KLConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.critic import Critic, load_critic
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.reference import KLWeight
from grpo_fast.train.optimizer import Optimizer, schedule
from grpo_fast.train.plan import Shape, predict
from tests.train.tiny_runs import adapted, sort

PPO = ["advantages=gae", "critic={bootstrap: false}"]
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
        calls = spied(loop, "make_step")
        rows = sort(folder, *overrides)
        updates = [
            {"step": step.number, **each.losses.result(), "grad_norm": each.norm, "rate": each.rate}
            for step, _ in (call.result for call in calls)
            for each in step.updates
        ]
        return rows, updates

    return train


@pytest.mark.parametrize(
    "overrides",
    [
        ["critic={kind: model, lr: 0.003, loss: huber}", *PASSES, "shuffle=groups"],
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


def test_lora_with_a_critic_of_either_kind(tmp_path):
    words = [*adapted(tmp_path), "inner_iterations=2"]
    for kind in ("shared", "model"):
        run = tmp_path / kind
        own = [f"critic.kind={kind}", f"output_dir={run}"]
        loop.train(load_recipe("gsm8k-smollm2-1.7b", [*words, *own]))
        head = load_file(run / "critic" / "value_head.safetensors")
        assert head["weight"].abs().max() > 0
        assert (run / "critic" / "model.safetensors").is_file() == (kind == "model")
        if kind == "model":  # the adapter is merged, so the folder loads as a critic
            names = load_file(run / "critic" / "model.safetensors").keys()
            assert not any("lora" in name for name in names)
            again = load_recipe(str(run / "config.yaml"), [f"critic.path={run / 'critic'}"])
            policy = load_policy(again.model)
            found = load_critic(again.critic, again.model, policy)
            assert torch.equal(found.head.weight.cpu(), head["weight"])
            theirs, own = ([p.requires_grad for p in lm.parameters()]
                           for lm in (policy.lm, found.trunk.lm))  # fmt: skip
            assert sum(own) == sum(theirs)


def test_critic_path(tmp_path):
    """Check that `critic.path` loads a saved critic and refuses a folder without a valid critic."""
    options = [*PPO, "critic.kind=model", "log.save_model=true"]
    sort(tmp_path / "run", *options)
    critic = tmp_path / "run" / "critic"
    row = sort(tmp_path / "again", *options, f"critic.path={critic}")[0]
    assert row["value/mean"] != 0
    with pytest.raises(ValueError, match="critic.path: expected a model"):
        sort(tmp_path / "none", *options, f"critic.path={tmp_path / 'nowhere'}")
    (critic / "value_head.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="critic.path: expected a value head of width 32"):
        sort(tmp_path / "damaged", *options, f"critic.path={critic}")


def test_the_critics_own_rate(tmp_path, spied):
    made = spied(Optimizer, "__init__")
    sort(tmp_path / "a", *PPO, "critic.lr=0.25", "steps=1", "minibatches=2")
    sort(tmp_path / "b", *PPO, "steps=1")
    found = [(config.lr, total) for _, _, config, total in (call.args for call in made)]
    assert found == [(1e-3, 2), (0.25, 2), (1e-3, 1), (1e-3, 1)]
    assert len(made[1].args[1]) == 2


def test_out_of_memory_keeps_the_values_advantages_and_logps(tmp_path, monkeypatch):
    """Check that running out of memory in the second update does not change stored columns.

    The values, returns, advantages and old log-probs were computed before the first update, and
    must not be computed again with the changed weights.
    """
    seen, calls = [], [0]
    original = trainer.accumulate

    def failing(policy, minibatch, *arguments, **options):
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("planted")
        seen.append({})
        for micro in minibatch:
            for name in ("old_logps", "values", "returns", "token_advantages"):
                of_each = micro.packed.split(micro.column(name))
                seen[-1] |= {(name, i): x for i, x in zip(micro.chosen, of_each, strict=True)}
        return original(policy, minibatch, *arguments, **options)

    options = [*PPO, "inner_iterations=2", "steps=1", "optim.lr=0.01", *KL]
    whole = sort(tmp_path / "whole", *options)
    monkeypatch.setattr(trainer, "accumulate", failing)
    monkeypatch.setattr(budget, "log", type("Quiet", (), {"warning": lambda *_: None}))
    halved = sort(tmp_path / "halved", *options)
    assert calls[0] == 3
    before, after = seen
    assert before.keys() == after.keys()
    assert [key for key, x in before.items() if not torch.equal(x, after[key])] == []
    for name in ("loss", "value/loss", "approx_kl", "grad_norm", "value/mean"):
        assert whole[0][name] == pytest.approx(halved[0][name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("options", [[], [*PPO, "kl.into=reward"]], ids=["loss", "reward"])
def test_beta_adapts_and_the_adapted_weight_is_used(tmp_path, options):
    """Check the logged KL weight β of a run with `kl.target`, and that the loss uses this weight.

    In a step of n completions, β changes by at most 20% · n / horizon.
    """
    rows = sort(
        tmp_path / "run", *KL, *options, "kl.target=0.02", "kl.horizon=64", "optim.lr=0.01",
        "loss.loss_type=dapo", "loss.entropy_coef=0", "steps=5",
    )  # fmt: skip
    assert rows[0]["beta"] == 0.1 != rows[-1]["beta"]
    for a, b in zip(rows, rows[1:], strict=False):
        error = min(max(a["kl"] / 0.02 - 1, -0.2), 0.2)
        assert b["beta"] == pytest.approx(a["beta"] * (1 + 16 / 64 * error), rel=1e-6)
    for row in rows if not options else ():
        expected = row["policy_loss"] + row["beta"] * row["kl"]
        assert row["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_step_without_a_kl_keeps_the_weight_and_a_large_one_changes_it_by_a_fifth():
    weight = KLWeight(0.1, KLConfig(target=0.01, horizon=100))
    weight.after_step(math.nan, 50)
    assert weight.value == 0.1
    weight.after_step(0.0, 10**6)
    assert weight.value == pytest.approx(0.1 * 0.8)


def test_the_kl_in_the_reward_is_not_in_the_loss(tmp_path, lines):
    """Check that with kl.into=reward the loss has no KL term, but the returns depend on the KL."""
    options = [*PPO, *KL, "loss.loss_type=dapo", "loss.entropy_coef=0", "optim.lr=0.01", *PASSES,
               "steps=2"]  # fmt: skip
    loss, losses = lines(tmp_path / "loss", *options)
    options += ["kl.into=reward"]
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


def test_the_memory_of_a_critic_and_of_a_reference_without_weight():
    """Check that the predicted memory has a separate critic, and a reference even if β = 0."""
    shape = Shape(2, 32, 64, 32, 16, 100, 10_000)

    def fixed(*overrides):
        return predict(shape, load_recipe("sort", [*overrides]), "cpu").fixed

    assert fixed(*PPO) == fixed() == 10_000 * (4 + 4 + 8)
    assert fixed(*PPO, "critic.kind=model") == 2 * fixed()
    assert fixed("reference.kind=frozen") == fixed() + 10_000 * 4
