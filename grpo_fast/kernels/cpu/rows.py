"""Row kernels in C++ for the CPU (csrc/api/rows.cpp): the doors of reference.py.

`row_logps` reads the logits from memory once; `row_grad_` and `row_loss_` read and write them once.
One exponential per element and sweep (two under a soft cap). A row's result depends on that row
only, bitwise.
"""

from __future__ import annotations

import functools

from torch import Tensor

from grpo_fast.kernels.cpu import leaves, loader
from grpo_fast.kernels.types import LogitRule, RowLoss, RowStats, detached, rule_arguments, vector
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES


def row_logps(
    logits: Tensor,  # (C, V) fp32, bf16 or fp16; any row stride
    target_ids: Tensor,  # (C,) int64
    rule: LogitRule,
    *,
    return_entropy: bool,
    offsets: Tensor | None = None,  # (C+1,): unequal rows one after another in (1, nnz)
) -> RowStats:
    """See reference.row_logps. A target id outside [0, V) is never read: its logp is NaN."""
    lse, logps, entropy = loader.door("rows", "row_logps")(
        detached(logits), target_ids.contiguous(), *rule_arguments(rule), return_entropy, offsets
    )
    return lse, logps, entropy if return_entropy else None


def row_grad_(
    logits: Tensor,  # (C, V)
    target_ids: Tensor,  # (C,) int64
    stats: RowStats,
    grad_logps: Tensor,  # (C,) fp32
    grad_entropy: Tensor | None,  # (C,) fp32
    rule: LogitRule,
    *,
    out: Tensor | None = None,  # (C, V), dtype of the logits
    offsets: Tensor | None = None,  # as in `row_logps`
) -> Tensor:  # (C, V)
    out = logits if out is None else out
    lse, logps, entropy = (vector(x) for x in stats)
    entropy = None if grad_entropy is None else entropy
    loader.door("rows", "row_grad_")(
        detached(logits), detached(out), target_ids.contiguous(), lse, logps, entropy,
        vector(grad_logps), vector(grad_entropy), *rule_arguments(rule), offsets,
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=256)
def leaf_arguments(key: str) -> tuple[float, ...]:
    """(objective, kl, kl_times_ratio, p0, …, p3, kl_most, kl_reach) of the C++ doors by a key."""
    config = LossConfig.from_key(key)
    objective = leaves.objective_leaves().index(OBJECTIVES[config.loss_type].function)
    estimator = leaves.kl_leaves().index(KL_ESTIMATORS[config.kl_estimator])
    params = (*config.params, *[0.0] * leaves.MAX_PARAMS)[: leaves.MAX_PARAMS]
    return objective, estimator, config.kl_times_ratio, *params, *config.kl_limits


def row_loss_(
    logits: Tensor,  # (C, V)
    out: Tensor,  # (C, V), dtype of the logits
    target_ids: Tensor,  # (C,) int64
    terms: RowTerms,
    config: LossConfig,
    rule: LogitRule,
    *,
    return_entropy: bool,
) -> RowLoss:
    """`row_logps`, the loss of every row, and `row_grad_`, while the row is in cache, bit for bit.

    See reference.row_loss_. The leaves run in double, from C++ printed off their source.
    """
    lse, logps, entropy, losses, grad_logps = loader.door("rows", "row_loss_")(
        detached(logits), detached(out), target_ids.contiguous(), *(vector(x) for x in terms),
        *leaf_arguments(config.key), *rule_arguments(rule), return_entropy,
    )  # fmt: skip
    return RowLoss(lse, logps, entropy if return_entropy else None, losses, grad_logps)
