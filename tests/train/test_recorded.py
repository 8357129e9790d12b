"""Tests of recorded rollouts: one step against dense passes, checkpoints, damaged files."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_fast import LossConfig, Support, group_advantages, linear_logps
from grpo_fast.attention import pack_tree
from grpo_fast.data import load_traces
from grpo_fast.data.splits import Splits
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.collect.recorded import RecordedCollector
from grpo_fast.train.config import RolloutConfig, RunConfig
from grpo_fast.train.config.words import validated
from grpo_fast.train.loop import train
from grpo_fast.train.metrics.clock import Clock
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder, tiny_policy
from tests.train.tiny_runs import steps_of
from tests.train.tiny_steps import accumulate, batch_of, taken

RECORDED = Path(__file__).parents[1] / "integrations" / "recorded" / "verifiers-0.4.0.jsonl"


def records():
    return [json.loads(line) for line in RECORDED.read_text().splitlines()]


def settings(tmp_path, **changes):
    return {
        "output_dir": str(tmp_path / "run"), "model": {"path": "none"},
        "data": {"task": "traces", "path": str(RECORDED)}, "advantages": "centered",
        "rollout": {"group_size": 2, "prompts_per_step": 2}, "steps": 1,
        "optim": {"lr": 1e-2, "schedule": "constant"}, "log": {"progress": False}, **changes,
    }  # fmt: skip


def unsampled(node):
    node.update(mask=[False] * len(node["mask"]), logprobs=[])


def collector(policy, path, **options):
    config = RolloutConfig(**{"group_size": 2, "prompts_per_step": 2, **options})
    fields = {"model": {"path": "none"}, "rollout": {"group_size": 2}}
    source = validated(RunConfig, {**fields, "data": {"task": "traces", "path": str(path)}}).data
    queue = PromptQueue(Splits(source, 0).train)
    advantages = Advantages("centered", {}, config.group_size, {})
    return RecordedCollector(
        str(path), config, policy, None, None, queue, advantages, seed=0, steps=1
    )


@pytest.fixture
def policy():
    """Return a tiny policy whose vocabulary contains all recorded token ids."""
    return tiny_policy(vocab_size=61)


@pytest.mark.parametrize("credited", [0, 2, 4], ids=["rewards", "both", "credit"])
@pytest.mark.parametrize("budget", [1000, 60])
def test_one_step_is_that_of_the_flattened_samples(policy, tmp_path, credited, budget):
    """Check the gradient of one training step on recorded traces.

    It must equal the gradient of the mean of -advantage · logp over the sampled tokens. The
    reference computes each branch of a trace separately, without packing.
    """
    traces = records()
    for number, trace in enumerate(traces[:credited]):
        for node in trace["nodes"]:
            node["advantages"] = [math.sin(number + i) for i in range(len(node["logprobs"]))]
    path = write_lines(tmp_path / "t.jsonl", *traces)
    samples, _ = collector(policy, path).next(1, Clock())
    options = {"group_size": 2, "trees": True, "budget": budget}
    batch = batch_of(samples, samples.advantages, **options)
    totals = batch.totals[0]
    accumulate(policy, batch.minibatches[0], LossConfig(), totals=totals)
    found = {n: p.grad.clone() for n, p in policy.lm.named_parameters() if p.grad is not None}
    policy.lm.zero_grad()
    policy.lm.set_attn_implementation("eager")
    rewards = torch.tensor([1.0, 0, 0, 1])
    worth = group_advantages(rewards, "centered", group_size=2)
    total, count = 0.0, 0
    for number, trace in enumerate(load_traces(path)):
        for branch in trace.branches:
            at = branch.trained.nonzero()[:, 0]
            logits = policy.lm(input_ids=branch.ids[None], use_cache=False).logits[0]
            logps = taken(logits[at - 1], branch.ids[at].tolist())
            advantage = worth[number] if branch.advantages is None else branch.advantages
            total, count = total - (advantage * logps).sum(), count + len(at)
    (total / count).backward()
    assert len(batch.micro_batches) == 1 if budget == 1000 else len(batch.micro_batches) > 2
    for name, p in policy.lm.named_parameters():
        if p.grad is not None:
            assert (found[name] - p.grad).abs().max() <= 1e-5 * max(1, p.grad.abs().max()), name
    rows = sum(micro.trunk_tokens for micro in batch.micro_batches)
    flat = sum(len(b.ids) - 1 for t in load_traces(path) for b in t.branches)
    assert rows < flat if budget == 1000 else rows <= flat
    assert totals.items == count == 88


def test_a_run_trains_on_traces(tmp_path):
    """Check that a training run on recorded traces changes the weights.

    A run that stops and resumes must have the same losses as an uninterrupted run.
    """
    config = settings(tmp_path, steps=3, inner_iterations=2, checkpoint={"every": 1})
    config["model"] = {"path": tiny_folder(tmp_path / "model")}
    config["rollout"] |= {"prompts_per_step": 1, "correct_sampling": True}
    summary = train(validated(RunConfig, config))
    assert summary["steps"] == 3 and summary["num_tokens"] > 0
    rows = steps_of(tmp_path / "run")
    assert [row["reward"] for row in rows] == [0.5] * 3 and rows[0]["grad_norm"] > 0
    again = {**config, "output_dir": str(tmp_path / "other"), "steps": 2}
    train(validated(RunConfig, again))
    train(validated(RunConfig, {**again, "steps": 3, "resume": "auto"}))
    others = steps_of(tmp_path / "other")
    assert [row["loss"] for row in others] == [row["loss"] for row in rows]
    weights = [load_file(f"{tmp_path}/{name}/model.safetensors") for name in ("run/model", "model")]
    assert all(not torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_sampling_masks_are_the_support(policy, monkeypatch):
    """Check that log-probs are computed over the recorded sets of tokens that the sampler kept.

    The log-probs of a packed tree must equal the log-probs of separate rows.
    """
    from grpo_fast.data import traces as module

    read = module.load_traces

    def masked(path):
        found = read(path)
        branch = found[0].branches[0]
        sets = [torch.tensor(sorted({t, 5, 9})).int() for t in branch.ids[branch.trained].tolist()]
        kept = torch.cat(sets), torch.tensor([len(s) for s in sets])
        found[0].branches[0] = branch._replace(support=kept)
        return found

    monkeypatch.setattr("grpo_fast.train.collect.recorded.load_traces", masked)
    samples, _ = collector(policy, RECORDED).next(1, Clock())
    batch = batch_of(samples, samples.advantages, group_size=2, trees=True)
    (micro,) = batch.micro_batches
    assert isinstance(micro.support, Support)
    tree = policy.logps(micro.packed, 1.0, support=micro.support)
    chosen = [samples.sample(i) for i in micro.chosen]
    flat = pack_tree(chosen, apart=range(len(chosen)))
    assert flat.layout.total > micro.packed.layout.total
    torch.testing.assert_close(tree, policy.logps(flat, 1.0, support=micro.support))
    hidden = policy.hidden(micro.packed)
    rows = micro.packed.predicting
    dense = linear_logps(hidden, policy.head.weight, flat.target_ids, hidden_rows=rows)
    assert (tree[:12] > dense[:12]).all()


def test_rollouts_that_are_not_sampled_need_no_room_for_new_tokens(tmp_path):
    """Check that the model's number of positions limits the length of recorded traces.

    `max_new_tokens` must not limit them, because nothing is sampled.
    """
    config = settings(tmp_path, model={"path": tiny_folder(tmp_path / "model")})
    config["rollout"] |= {"max_new_tokens": 4096}
    assert train(validated(RunConfig, config))["steps"] == 1
    traces = records()
    node = traces[-1]["nodes"][0]
    node.update(token_ids=node["token_ids"] * 100, mask=node["mask"] * 100)
    again = {**config, "output_dir": str(tmp_path / "other")}
    again["data"] = {"task": "traces", "path": str(write_lines(tmp_path / "t.jsonl", *traces))}
    with pytest.raises(ValueError, match="at most 512 tokens in a branch .* in 'task-1'"):
        train(validated(RunConfig, again))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatches": 2}, "data.task=traces conflicts with minibatches=2"),
        ({"data": {"task": "traces"}}, "path: expected a source for task traces, got None"),
        ({"data": {"task": "sort"}}, "rewards: expected a weight that is not 0, got no reward"),
    ],
)
def test_settings_that_exclude_traces_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        validated(RunConfig, settings(tmp_path, **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(), "expected 2 traces of each task .* got 1 of 'task-1'"),
        (lambda t: t[1].update(rewards={}), "expected a reward for each trace, or advantages in"),
        (lambda t: [unsampled(n) for x in t[:2] for n in x["nodes"]],
         "expected a sampled token in 'task-0', got none"),
        (lambda t: t[0]["nodes"][1]["token_ids"].__setitem__(2, 4000), "token ids from 0 to 60"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_trained_on(policy, tmp_path, change, message):
    traces = records()
    change(traces)
    with pytest.raises(ValueError, match=message):
        collector(policy, write_lines(tmp_path / "t.jsonl", *traces))
