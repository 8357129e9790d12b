"""Variance of a step's gradient, estimated from the gradients of its groups."""

from __future__ import annotations

import torch

from grpo_fast import LossConfig
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks.distributed import rank, size, sum_, together
from grpo_fast.train.update.batch import StepBatch
from grpo_fast.train.update.gradients import accumulate


def gradient_variance(policy: Policy, batch: StepBatch, config: LossConfig) -> dict[str, float]:
    """Estimate variance and size of the gradient of the policy loss before the first update.

    Each of the n groups gives an independent estimate g_i of the gradient. The loss of a group is
    normalized as if the step consisted of this group only. With the mean ḡ of the estimates::

        grad_variance = Σ|g_i - ḡ|² / (n · (n - 1))    trace of the covariance of ḡ
        grad_signal   = |ḡ|² - grad_variance           unbiased estimate of |E g|², may be negative

    The estimate costs one forward and backward pass over the batch, and memory for two copies of
    the gradients. The gradients of the parameters must be None, and are None afterwards.

    Args:
        policy: the policy that sampled the batch.
        batch: the samples of the step.
        config: the loss. Its KL divergence and entropy bonus are excluded.

    Returns:
        The two metrics, or an empty dict if there are fewer than two groups.
    """
    group_size = batch.group_size
    count = len(batch.advantages) // group_size
    if count < 2:
        return {}
    # 1. Exclude KL divergence and entropy bonus from the loss.
    alone = config.replace(beta=0.0 if config.uses_reference else config.beta, entropy_coef=0.0)
    parameters = policy.trainable()
    total = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    squares = 0.0
    # 2. Sum each group's gradient and its squared norm. The groups are divided among the ranks.
    with together():
        for group in range(rank(), count, size()):
            first = group * group_size
            members = list(range(first, first + group_size))
            accumulate(
                policy, [batch.packed([members])], alone, correct_sampling=False, validate="auto"
            )
            for own, p in zip(total, parameters, strict=True):
                if p.grad is not None:
                    squares += float(p.grad.double().square().sum())
                    own += p.grad.float()
                    p.grad = None
    # 3. Σ|g_i - ḡ|² = Σ|g_i|² - n·|ḡ|². This needs only the sum of the gradients, not each of them.
    squares = float(sum_(torch.tensor(squares, dtype=torch.float64)))
    mean_square = sum(float(sum_(s).double().square().sum()) for s in total) / count**2
    variance = max(0.0, squares - count * mean_square) / (count * (count - 1))
    return {"grad_variance": variance, "grad_signal": mean_square - variance}
