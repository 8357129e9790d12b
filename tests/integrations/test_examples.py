"""Tests of grpo_fast/examples against plain torch or against the code of the other trainer.

Recorded traces of verifiers are packed into one row, whose loss must equal the loss of the same
samples in separate rows. The Lightning example is tested in test_two_processes.py.
"""

import copy
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

from grpo_fast import LossConfig, grpo_loss, linear_grpo_loss
from grpo_fast.attention import head_of, register
from grpo_fast.examples import openrlhf_loss, plain_loop, prime_rl_loss, verifiers_traces
from grpo_fast.examples.hf_trainer import PolicyTrainer
from grpo_fast.examples.verifiers_traces import branches, pack_traces
from tests import grpo_reference
from tests.attention.test_trees import by_sample
from tests.command_line import ROOT
from tests.integrations import packages
from tests.tiny import tiny_model


def updates(model, batch, advantages, optimizer, ref=None, max_norm=math.inf, **options):
    """Make two updates on a batch in plain torch, and return the metrics of each update.

    The old logps are computed before the first update.
    """
    with torch.no_grad():
        old = grpo_reference.token_logps(model, batch)[0]
    history = []
    for _ in range(2):
        loss, _, metrics = grpo_reference.grpo(model, batch, advantages, old, ref, **options)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        history.append({**metrics, "loss": loss.detach(), "grad_norm": norm})
    return history


def reference_loop(model, prompts, *, steps, group_size, max_new_tokens, learning_rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    history = []
    for _ in range(steps):
        model.eval()
        repeated = prompts.repeat_interleave(group_size, 0)
        ids = model.generate(repeated, do_sample=True, top_k=0, max_new_tokens=max_new_tokens)
        labels = ids.clone()
        labels[:, : prompts.shape[1]] = -100
        for row in labels:
            ends = (row == model.config.eos_token_id).nonzero()
            if len(ends):
                row[int(ends[0]) + 1 :] = -100
        rewards = plain_loop.even_ids(labels[:, prompts.shape[1] :])
        advantages = grpo_reference.group_advantages(rewards, group_size)
        model.train()
        for metrics in updates(model, {"input_ids": ids, "labels": labels}, advantages, optimizer):
            del metrics["grad_norm"]
            history.append({**metrics, "reward": rewards.mean()})
    return history


def test_plain_loop_equals_the_tutorial():
    model = tiny_model("qwen2", vocab_size=31)
    twin = copy.deepcopy(model)
    options = dict(steps=2, group_size=4, max_new_tokens=8, learning_rate=1e-2)
    prompts = torch.tensor([[3, 4, 5], [7, 8, 9]])
    config = LossConfig(loss_type="grpo", compute_entropy=True)
    torch.manual_seed(5)
    history = plain_loop.train(model, prompts, plain_loop.even_ids, config, **options)
    torch.manual_seed(5)
    expected = reference_loop(twin, prompts, **options)
    assert len(history) == len(expected) == 4
    for mine, theirs in zip(history, expected, strict=True):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
    assert max(h["clip_ratio/region_mean"] for h in history) > 0
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        # A few weights may differ. AdamW makes a full step even if a gradient is near 0, so
        # rounding may flip the direction of some steps.
        assert ((a - b).abs() > 1e-4).float().mean() < 0.01


def test_plain_loop_as_a_script():
    command = [sys.executable, "-m", "grpo_fast.examples.plain_loop"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    line = r"update \d+: loss [+-]\d\.\d{4}, reward (\d\.\d{3})"
    rewards = [float(re.fullmatch(line, x)[1]) for x in done.stdout.splitlines()]
    assert len(rewards) == 20 and rewards[-1] > rewards[0] + 0.05


def arguments(folder, **changes):
    options = dict(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=2, learning_rate=0.05, optim="sgd", lr_scheduler_type="constant",
        max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to=[],
        remove_unused_columns=False, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return TrainingArguments(**{**options, **changes})


def examples(model) -> list[dict[str, torch.Tensor]]:
    batch = grpo_reference.rows(8, vocabulary=61)
    # In each step, the first micro-batch has far fewer tokens than the second. The mean over all
    # tokens, which is the right loss, then differs from the mean of the two micro-batch means.
    batch["labels"][[0, 1, 4, 5], 8:] = -100
    advantages = grpo_reference.group_advantages(batch.pop("rewards"), 4)
    with torch.no_grad():
        old = grpo_reference.token_logps(model, batch)[0]
    old = old + 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(2))
    batch |= {"advantages": advantages, "old_logps": old}
    return [{name: column[i] for name, column in batch.items()} for i in range(8)]


def tutorial_step(model, rows) -> torch.Tensor:
    """Make an SGD step on these rows in plain torch, and return the loss.

    Afterwards, the parameters still hold their gradients in `.grad`.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    given = batch, batch["advantages"], batch["old_logps"], None
    loss, *_ = grpo_reference.grpo(model, *given, by_token=True)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.05 * p.grad
    return loss


def test_hf_trainer_equals_the_tutorial(tmp_path):
    """Check that two micro-batches give the same weights as one pass over all tokens of a step.

    Also check that unsuitable configurations raise an error.
    """
    model = tiny_model("qwen2", num_hidden_layers=1)
    twin, data = copy.deepcopy(model), examples(model)
    # Some models set this flag to False. The loss must still be divided by the tokens of the step.
    model.accepts_loss_kwargs = False
    config = LossConfig(loss_type="dapo", compute_entropy=True)
    rows = {"train_dataset": data, "eval_dataset": data[:2]}
    trainer = PolicyTrainer(model, arguments(tmp_path), loss_config=config, **rows)
    order = list(range(8))
    trainer._get_train_sampler = lambda *_: order
    trainer.train()
    for step in (data[:4], data[4:]):
        tutorial_step(twin, step)
    for x, y in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    logs = trainer.state.log_history[0]
    assert logs["clip_ratio/region_mean"] > 0 and "entropy" in logs and "loss" in logs
    assert "eval_loss" in trainer.evaluate()
    model = tiny_model("qwen2", num_hidden_layers=1)
    with pytest.raises(ValueError, match="aggregation: expected 'token_mean_global'"):
        PolicyTrainer(model, arguments(tmp_path), loss_config=LossConfig(loss_type="grpo"))
    with pytest.raises(ValueError, match="remove_unused_columns: expected False"):
        wrong = arguments(tmp_path, remove_unused_columns=True)
        PolicyTrainer(model, wrong, loss_config=LossConfig())


# Bounds for each OpenRLHF correction. They exclude some of the tokens or sequences, but not all.
BANDS = {"ratio": (0.8, 1.2), "binary_kl": (0.0, 0.02), "tv": [0.0, 0.06]}
CORRECTIONS = [{"is_correction_level": "off"}]
CORRECTIONS += [
    {"is_correction_level": level, "is_correction_gating": gating, "is_correction_threshold": band}
    for level in ("token", "seq") for gating, band in BANDS.items()
]  # fmt: skip
CORRECTIONS += [{**CORRECTIONS[1], "is_correction_mode": "clip"}]


def openrlhf_batch(step: float) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    old = -2.5 * torch.rand(6, 9, generator=random) - 0.01
    mask = torch.rand(6, 9, generator=random) > 0.25
    mask[2] = False
    return {
        "log_probs": (old + step * torch.randn(6, 9, generator=random)).clamp(max=-1e-3),
        "old_log_probs": old,
        "advantages": torch.randn(6, 9, generator=random),
        "action_mask": mask,
        "rollout_log_probs": (old + 0.3 * torch.randn(6, 9, generator=random)).clamp(max=-1e-3),
    }


def of_policy_loss(loss, data: dict, **counts) -> tuple:
    log_probs = data["log_probs"].clone().requires_grad_()
    results = loss(**{**data, "log_probs": log_probs}, **counts)
    results[0].backward()
    return *(x if x is None else x.detach() for x in results), log_probs.grad


def test_openrlhfs_loss():
    """Check that our loss and OpenRLHF's loss are equal for every correction and option.

    The test uses small and large changes of the logps. The losses are divided once by the number of
    tokens in the batch, and once by the number of tokens on all ranks.
    """
    with packages.skipping():
        theirs = packages.load_openrlhf_loss().PolicyLoss
    counts = {"dp_size": 4, "batch_num_tokens": 211.0, "global_batch_size": 24.0}
    for correction, kind, dual_clip, by_token, step, given in itertools.product(
        CORRECTIONS, ("ppo", "gspo"), (None, 1.5), (True, False), (0.4, 3.0), ({}, counts)
    ):
        loss = theirs(
            clip_eps_low=0.1, clip_eps_high=0.25, dual_clip=dual_clip, token_level_loss=by_token,
            policy_loss_type=kind, **correction,
        )  # fmt: skip
        data = openrlhf_batch(step)
        expected = of_policy_loss(loss, data, **given)
        found = of_policy_loss(openrlhf_loss.PolicyLoss(loss), data, **given)
        for mine, value in zip(found, expected, strict=True):
            assert (mine is None) == (value is None)
            if value is not None:
                torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)
    loss.unknown_option = 1
    with pytest.raises(ValueError, match="unknown_option"):
        openrlhf_loss.PolicyLoss(loss)


class LossInputs(SimpleNamespace):
    pass


class LossOutputs(SimpleNamespace):
    pass


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_prime_rls_documented_loss(beta):
    """Check that our loss is the PPO loss in the documentation of prime-rl, plus a teacher KL."""
    random = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(11, generator=random)
    new = (old + 0.3 * torch.randn(11, generator=random)).requires_grad_()
    mask = torch.rand(11, generator=random) > 0.3
    advantages = torch.randn(11, generator=random)
    x = LossInputs(
        trainer_logprobs=new, inference_logprobs=old, advantages=advantages, loss_mask=mask,
        teacher_logprobs=old - 0.2 if beta else None,
    )  # fmt: skip
    out = prime_rl_loss.policy_loss(x, loss_type="grpo", epsilon_low=0.2, beta=beta)
    (gradient,) = torch.autograd.grad(out.loss, new)
    ratio = torch.exp(new - old)
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if beta:
        d = x.teacher_logprobs - new
        terms = terms + beta * (d.exp() - d - 1)
    expected = terms[mask].sum()
    assert isinstance(out, LossOutputs)
    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=1e-6)
    (wanted,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert all(isinstance(v, Tensor) and v.dim() == 0 for v in out.metrics.values())
    x.teacher_logprobs = None if beta else old
    with pytest.raises(ValueError, match="teacher_logprobs: expected"):
        prime_rl_loss.policy_loss(x, loss_type="grpo", beta=beta)
    with pytest.raises(ValueError, match="aggregation: expected no option"):
        prime_rl_loss.policy_loss(x, aggregation="sequence_mean")


RECORDED = Path(__file__).parent / "recorded" / "verifiers-0.4.0.jsonl"
NAMES = {"pack_traces": pack_traces, "LossConfig": LossConfig, "linear_grpo_loss": linear_grpo_loss}


def records():
    """Return four traces that verifiers 0.4.0 recorded, two for each of two tasks.

    Each trace has two branches, which share the first turn. One branch continues with a tool's
    result and a second turn. The other branch continues with a different result and two more turns.
    """
    return [json.loads(line) for line in RECORDED.read_text().splitlines()]


def flattened(model, samples, advantages, old):
    """Compute the loss of samples in separate rows, and return it with the model's gradients."""
    ends = torch.tensor([0, *(sum(trained) for _, trained in samples)]).cumsum(0).int()
    logps = by_sample(model, samples)
    out = grpo_loss(logps, advantages, LossConfig(), old_logps=old, cu_seqlens=ends)
    model.zero_grad()
    out.loss.backward()
    return out.loss.detach(), [p.grad.clone() for p in model.parameters()]


def test_traces_of_verifiers():
    """Check the example in the docstring of the module."""
    model, advantages = tiny_model("llama"), [1.0, -1.0, -0.5, 0.5]
    names = {"model": model, "traces": records(), "advantages": advantages, **NAMES}
    lines = verifiers_traces.__doc__.splitlines()
    exec("\n".join(line[4:] for line in lines if line.startswith("    ")), names)
    found = [p.grad.clone() for p in model.parameters()]
    pack = names["pack"]
    nodes = [node for record in records() for node in record["nodes"]]
    # A prefix that several branches share must be packed once. The last token of each branch must
    # not be packed, because it predicts nothing.
    assert pack.layout.total == sum(len(n["token_ids"]) for n in nodes) - 2 * 13 - 8
    assert len(pack.target_ids) == sum(map(sum, (n["mask"] for n in nodes)))
    # For comparison, build one sample with all turns for each branch. A turn that two branches
    # share is trained in only one of the two samples.
    samples, old, worth = [], [], []
    for record, advantage in zip(records(), advantages, strict=True):
        for path, shared in (([0, 1, 4, 5], ()), ([0, 1, 2, 3, 6, 7], (1,))):
            ids, mask = [], []
            for i in path:
                node = record["nodes"][i]
                ids += node["token_ids"]
                mask += [m and i not in shared for m in node["mask"]]
                old += [] if i in shared else node["logprobs"]
            samples.append((ids, mask))
            worth += [advantage] * sum(mask)
    loss, gradients = flattened(model, samples, torch.tensor(worth), torch.tensor(old))
    torch.testing.assert_close(names["out"].loss.detach(), loss, rtol=0, atol=1e-5)
    for mine, gradient in zip(found, gradients, strict=True):
        assert (mine - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max())
    with pytest.raises(ValueError, match="advantages: expected 4 numbers, got 2"):
        pack_traces(records(), [1, 2])


def wire(values, dtype):
    array = np.asarray(values, dtype=dtype)
    return {"__nd__": True, "dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}


def test_sampling_masks_and_routes_come_over_the_wire():
    """Check that a recorded sampling mask becomes the support of the loss.

    Also check that tokens with equal ids but different expert routes do not share rows.
    """
    traces, model = records()[:2], tiny_model("llama")
    plain, inputs = pack_traces(traces, [1, -1])
    assert inputs["support"] is None
    node = traces[1]["nodes"][3]
    sampled = [t for t, m in zip(node["token_ids"], node["mask"], strict=True) if m]
    sets = [sorted({t, 7, 9}) for t in sampled]
    ids, sizes = sum(sets, []), [len(s) for s in sets]
    node["sampling_mask"] = {"ids": wire(ids, "int32"), "counts": wire(sizes, "int32")}
    pack, inputs = pack_traces(traces, [1, -1])
    counts = inputs["support"].offsets.diff().tolist()
    of_node = [n for n in counts if n]
    assert of_node == sizes and len(counts) == len(pack.target_ids)
    place = counts.index(of_node[0])
    assert pack.target_ids[place : place + len(sampled)].tolist() == sampled
    assert inputs["support"].ids.tolist() == ids
    model.set_attn_implementation(register())
    hidden = model.model(**pack.model_inputs).last_hidden_state[0]
    config = LossConfig()
    out = linear_grpo_loss(hidden, head_of(model).weight, config=config, **inputs)
    assert torch.isfinite(out.loss)
    for trace, first in zip(traces, (1, 2), strict=True):
        experts = np.zeros((12, 2, 1), dtype=np.uint8)
        experts[-3:] = first
        trace["nodes"][0]["routed_experts"] = wire(experts, "uint8")
    apart, _ = pack_traces(traces, [1, -1])
    assert apart.layout.total == plain.layout.total + 13


def test_branches_that_are_not_trained():
    """Check that an agent that is not trainable and an abandoned compaction add no branch."""
    record = records()[1]
    assert branches(record["nodes"]) == [[0, 1, 4, 5], [0, 1, 2, 3, 6, 7]]
    record["nodes"][5]["semantic_parents"] = [{"node": 4, "type": "compaction_attempt"}]
    assert branches(record["nodes"]) == [[0, 1, 2, 3, 6, 7]]
    judge = {**records()[0], "agent": {"trainable": False}}
    pack, _ = pack_traces([judge, record], [1, 1])
    assert pack.lengths == (15,)
    record["nodes"][3]["parent"] = 6
    with pytest.raises(ValueError, match="parent: expected an earlier node, got 6"):
        branches(record["nodes"])
    record = records()[0]
    record["nodes"][3]["logprobs"].pop()
    with pytest.raises(ValueError, match="logprobs: expected 10 numbers, got 9"):
        pack_traces([record], [1])
