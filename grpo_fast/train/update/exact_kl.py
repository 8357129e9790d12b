"""The exact KL of a micro-batch: what `kl_estimator: exact` adds to the loss of the policy term."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import LossConfig, Support, TeacherHead, linear_divergence
from grpo_fast.attention import Head
from grpo_fast.objective.kl import EXACT
from grpo_fast.train.update.batch import MicroBatch


class ExactKL(NamedTuple):
    """Two 0-d tensors."""

    weighted: Tensor  # Σ_t w_t·KL_t, with a gradient; w_t weighs the policy term, too
    mean: Tensor  # over the active tokens


def policy_term(config: LossConfig) -> LossConfig:
    """What is left for the loss: the same without the KL where that is exact."""
    if config.kl_estimator not in EXACT:
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
    """The KL to the reference at the active tokens of a micro-batch with `ref_hidden`.

    Args:
        hidden: the policy's, of the packed row.
        weights: of the completion tokens, in the whole optimizer step.
    """
    assert batch.ref_hidden is not None
    mask, temperature = batch.completion_mask, float(config.temperature)
    bias = None if ref_head.bias is None else ref_head.bias.detach()
    reference = TeacherHead(
        batch.ref_hidden[mask], ref_head.weight.detach(), bias, temperature, ref_head.softcap,
        ref_head.logit_scale,
    )  # fmt: skip
    with torch.set_grad_enabled(config.beta != 0):
        kl = linear_divergence(
            hidden, head.weight, reference, EXACT[config.kl_estimator], weights=weights[mask],
            hidden_rows=batch.packed.predicting[mask], bias=head.bias, temperature=temperature,
            softcap=head.softcap, logit_scale=head.logit_scale,
            support=None if batch.support is None else selected(batch.support, mask),
        )  # fmt: skip
    mean = kl.values.sum(dtype=torch.float64).float() / max(len(kl.values), 1)
    return ExactKL(kl.loss, mean)


def selected(support: Support, mask: Tensor) -> Support:  # (R,) bool
    """The sets of some of its tokens."""
    counts = support.offsets.diff()
    ids = support.ids[mask.repeat_interleave(counts)]
    return Support(ids, torch.nn.functional.pad(counts[mask].cumsum(0), (1, 0)))
