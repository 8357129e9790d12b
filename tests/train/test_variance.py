"""`grad_variance` against per-group gradients in fp64, by autograd through the whole model."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.rollout import Sampling, generate
from grpo_fast.train.update.gradients import gradient_variance
from tests.tiny import tiny_policy
from tests.train.tiny_runs import sort
from tests.train.tiny_steps import batch_of

GROUP, PROMPTS = 3, ["1 2 3", "4 5", "6 7 8 9"]


@pytest.fixture
def policy():
    return tiny_policy()


def drawn(policy, prompts=PROMPTS):
    return generate(policy, prompts, Sampling(max_new_tokens=6), group_size=GROUP, seed=3)


def expected(policy, rollout, advantages):
    """Each group's gradient of −Σ A·logp / (its tokens), one row per group."""
    lm = copy.deepcopy(policy.lm).double()
    lm.set_attn_implementation("eager")
    rows = []
    for first in range(0, len(advantages), GROUP):
        total, tokens = 0.0, 0
        for i in range(first, first + GROUP):
            prompt, completion = rollout.prompt_ids[i], rollout.completion_ids[i]
            logits = lm(input_ids=torch.tensor([prompt + completion])).logits[0]
            logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            taken = logps.gather(-1, torch.tensor(completion)[:, None])
            total = total - advantages[i].double() * taken.sum()
            tokens += len(completion)
        grads = torch.autograd.grad(total / tokens, list(lm.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def test_variance_and_signal_are_those_of_the_mean_over_groups(policy):
    rollout, advantages = drawn(policy), torch.randn(len(PROMPTS) * GROUP)
    config = LossConfig(loss_type="reinforce", entropy_coef=0.1, beta=0.2)
    found = gradient_variance(policy, batch_of(rollout, advantages), config)
    assert all(p.grad is None for p in policy.trainable())
    rows = expected(policy, rollout, advantages)
    variance = rows.var(0, unbiased=True).sum() / len(rows)
    assert found["grad_variance"] == pytest.approx(float(variance), rel=1e-4)
    signal = rows.mean(0).square().sum() - variance
    assert found["grad_signal"] == pytest.approx(float(signal), rel=1e-3, abs=1e-6)


def test_groups_that_agree_have_no_variance_and_one_group_has_none_to_tell(policy):
    rollout = drawn(policy, ["1 2 3"])
    advantages = torch.randn(GROUP)
    assert gradient_variance(policy, batch_of(rollout, advantages), LossConfig()) == {}
    for each in dataclasses.fields(rollout):
        setattr(rollout, each.name, getattr(rollout, each.name) * 2)
    twice = gradient_variance(policy, batch_of(rollout, advantages.repeat(2)), LossConfig())
    assert twice["grad_variance"] <= 1e-6 * twice["grad_signal"]


def test_measuring_changes_nothing(tmp_path):
    plain = sort(tmp_path / "a")
    measured = sort(tmp_path / "b", "log.grad_variance=true")
    for before, after in zip(plain, measured, strict=True):
        assert after.pop("grad_variance") > 0
        after.pop("grad_signal")
        assert before == after
