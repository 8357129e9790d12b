"""The exact KL of a micro-batch: what `kl_estimator: exact` adds to the loss of the policy term."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import LossConfig, Support
from grpo_fast.attention import Head
from grpo_fast.kernels.types import LogitRule
from grpo_fast.loss.exact_kl import linear_exact_kl
from grpo_fast.objective.kl import EXACT
from grpo_fast.train.update.batch import MicroBatch


class ExactKL(NamedTuple):
    """Two 0-d tensors."""

    weighted: Tensor  # Σ_t w_t·KL_t, with a gradient; w_t weighs the policy term, too
    mean: Tensor  # over the active tokens


def policy_term(config: LossConfig) -> LossConfig:
    """What is left for the loss: the same without the KL where that is exact."""
    if config.kl_estimator != EXACT:
        return config
    return config.replace(beta=0.0, kl_estimator=LossConfig.kl_estimator)


def exact_kl(
    hidden: Tensor,  # (T, H)
    head: Head,
    ref_head: Head,
    batch: MicroBatch,
    weights: Tensor,  # (R,)
    config: LossConfig,
) -> ExactKL:
    """KL(policy ‖ reference) at the active tokens of a micro-batch with `ref_hidden`.

    Args:
        hidden: the policy's, of the packed row.
        weights: of the completion tokens, in the whole optimizer step.
    """
    assert batch.ref_hidden is not None
    mask = batch.completion_mask
    rule, ref_rule = (
        LogitRule(x.logit_scale, x.softcap, float(config.temperature)) for x in (head, ref_head)
    )
    with torch.set_grad_enabled(config.beta != 0):
        # index_select: gradients of a row that several completions share are added in their order.
        kl = linear_exact_kl(
            hidden.index_select(0, batch.packed.predicting[mask]), head.weight,
            batch.ref_hidden[mask], ref_head.weight,
            bias=head.bias, ref_bias=ref_head.bias, rule=rule, ref_rule=ref_rule,
            support=None if batch.support is None else selected(batch.support, mask),
        )  # fmt: skip
    mean = kl.detach().sum(dtype=torch.float64).float() / max(len(kl), 1)
    return ExactKL((weights[mask] * kl).sum(), mean)


def selected(support: Support, mask: Tensor) -> Support:  # (R,) bool
    """The sets of some of its tokens."""
    counts = support.offsets.diff()
    ids = support.ids[mask.repeat_interleave(counts)]
    return Support(ids, torch.nn.functional.pad(counts[mask].cumsum(0), (1, 0)))
