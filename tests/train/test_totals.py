"""Tests of a step's normalizers, metrics and gradient variance against direct computation."""

import copy
import dataclasses
import math

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.rollout import Samples, Sampling, generate
from grpo_fast.train.batch import Totals
from grpo_fast.train.update import gradient_variance
from tests.pairs import pairs
from tests.tiny import tiny_policy
from tests.train.test_ppo_step import CUT, GROUP, SCORES, make_batch
from tests.train.tiny_runs import sort
from tests.train.tiny_steps import batch_of, gradients, taken

NO_VERDICT = 2


@pairs(mask_truncated=[False, True], updates=[1, 3], ranks=[1, 2, 4])  # 4 ranks: one is idle
def test_totals_count_what_the_masks_do(mask_truncated, updates, ranks):
    scores = SCORES.clone()
    scores[NO_VERDICT] = math.nan
    options = dict(mask_truncated=mask_truncated, updates=updates, budget=14, ranks=ranks)
    steps = [make_batch(scores, rank=rank, **options) for rank in range(ranks)]
    lengths, idle = steps[0].samples.lengths, 0
    for k in range(updates):
        everywhere = [micro for step in steps for micro in step.minibatches[k]]
        real = [micro for micro in everywhere if not micro.is_idle]
        chosen = sorted(i for micro in real for i in micro.chosen)
        assert chosen == list(steps[0].parts[k])
        left_out = {NO_VERDICT, *(CUT if mask_truncated else [])}
        items = sum(lengths[i] for i in chosen if i not in left_out)
        trunk = sum(micro.trunk_tokens for micro in real)
        expected = Totals(items, len(chosen), trunk)
        assert [step.totals[k] for step in steps] == [expected] * ranks
        assert items == sum(micro.active_tokens for micro in everywhere)
        idle += len(everywhere) - len(real)
    assert (idle > 0) == (ranks > 1)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_mean_over_prompts(updates, ranks):
    """Check the divisors of the aggregation `prompt_mean`.

    The loss multiplies them by completions / G. With the product, all prompts of a minibatch have
    the same weight, and so do all tokens of a prompt.
    """
    steps = [make_batch(SCORES, updates=updates, budget=14, rank=rank, ranks=ranks)
             for rank in range(ranks)]  # fmt: skip
    for step in steps:
        step.shuffle("7")  # distributes the groups over the minibatches
    lengths = steps[0].samples.lengths
    for k in range(updates):
        parts = steps[0].parts[k]
        prompts = {i // GROUP for i in parts}
        for micro in (micro for step in steps for micro in step.minibatches[k]):
            for i, divisor in zip(micro.chosen, micro.prompt_items.tolist(), strict=True):
                tokens = sum(lengths[j] for j in parts if j // GROUP == i // GROUP)
                assert divisor * len(parts) / GROUP == pytest.approx(len(prompts) * tokens)


def test_a_step_without_a_token_that_counts_moves_nothing():
    policy, batch = tiny_policy(), make_batch(torch.full((9,), math.nan))
    assert batch.totals[0].items == 1
    seen, found = gradients(policy, batch.minibatches[0], LossConfig(), totals=batch.totals[0])
    assert seen["loss"] == 0 and not any(gradient.any() for gradient in found.values())


# ------------------------------------------------------------------------- Variance of the gradient
PROMPTS = ["1 2 3", "4 5", "6 7 8 9"]


@pytest.fixture
def policy():
    return tiny_policy()


def drawn(policy, prompts=PROMPTS):
    return generate(policy, prompts, Sampling(max_new_tokens=6), group_size=GROUP, seed=3)


def expected(policy, rollout, advantages):
    """Compute the policy gradient of each group, without packing and in fp64.

    The loss of a group is −Σ A·logp, divided by the number of its tokens.

    Returns:
        One gradient per group, shape (groups, parameters).
    """
    lm = copy.deepcopy(policy.lm).double()
    lm.set_attn_implementation("eager")
    rows = []
    for first in range(0, len(advantages), GROUP):
        total, tokens = 0.0, 0
        for i in range(first, first + GROUP):
            prompt, completion = rollout.prompt_ids[i], rollout.completion_ids[i]
            logits = lm(input_ids=torch.tensor([prompt + completion])).logits[0]
            logps = taken(logits[len(prompt) - 1 : -1], completion)
            total = total - advantages[i].double() * logps.sum()
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
    both = Samples.cat([rollout, dataclasses.replace(rollout, group=rollout.group + 1)])
    twice = gradient_variance(policy, batch_of(both, advantages.repeat(2)), LossConfig())
    assert twice["grad_variance"] <= 1e-6 * twice["grad_signal"]


def test_measuring_changes_nothing(tmp_path):
    plain = sort(tmp_path / "a")
    measured = sort(tmp_path / "b", "log.grad_variance=true")
    for before, after in zip(plain, measured, strict=True):
        assert after.pop("grad_variance") > 0
        after.pop("grad_signal")
        assert before == after
