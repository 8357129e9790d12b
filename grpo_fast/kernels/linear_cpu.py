"""hidden → log-probabilities, and weights for the gradient GEMMs, on the CPU (csrc/linear.cpp).

The product hidden·Wᵀ is taken block by block, and what a softmax needs of a block is summed while it is in cache:
without a gradient no logits exist. With one, every logit is written once, as the weight that is its d-logit up to a
coefficient by row (weights_triton.py has the algebra); no row kernel runs. For bf16 inputs the weights have 16 bits and
two digits more than bf16, which dW's product uses where an element dominates a sum (gemm_cpu.mm_); the weights that
dominate a row of dH come beside them in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels import csrc_loader, gemm_cpu
from grpo_fast.kernels.dominant_weights import DominantWeights
from grpo_fast.kernels.gemm_cpu import detached
from grpo_fast.kernels.rows_cpu import rule_arguments, vector
from grpo_fast.kernels.rows_torch import LogitRule

# Below this many columns the row kernels, which also take the loss's leaf, are as fast and take fewer Python calls.
FUSE_FROM = 2048


@functools.cache
def _door() -> Any:
    csrc_loader.require("linear")
    return torch.ops.grpo_fast_linear.linear_rows.default


def fuses(weight: Tensor) -> bool:
    """Whether this file's kernels are worth it for a head: where the product is ours, and the vocabulary not tiny."""
    return weight.shape[0] >= FUSE_FROM and gemm_cpu.multiplies(weight) and csrc_loader.load("linear") is None


def stores(weight: Tensor) -> torch.dtype | None:
    """The dtype of the weights that `linear_weights` writes for a head; None where it takes none."""
    return gemm_cpu.POSITIVE16 if weight.dtype == torch.bfloat16 else torch.float32


def _rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, rule: LogitRule, *more: Any
) -> tuple:
    out, has_weights, known, return_entropy = more
    lse, logps = (None, None) if known is None else (vector(x) for x in known[:2])
    hidden, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (detached(hidden), detached(weight)))
    return _door()(
        hidden, weight, vector(bias), target_ids.contiguous(), out, has_weights, lse, logps, *rule_arguments(rule),
        return_entropy, weight.dtype == torch.bfloat16 and gemm_cpu.has_tiles(),
    )  # fmt: skip


def linear_logps(
    hidden: Tensor,  # (T, H) fp32 or bf16
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    target_ids: Tensor,  # (T,)
    rule: LogitRule,
    *,
    return_entropy: bool,
    logits_out: Tensor | None = None,  # (T, V) fp32
) -> tuple[Tensor, Tensor, Tensor | None]:
    """lse, log-probability of the target and (when asked for) entropy of every row, each (T,) fp32.

    Equals `row_logps(hidden @ weight.T + bias, …)`. `logits_out` receives the raw logits and changes no bit of the
    other outputs. A target id outside [0, V) is never read: its logp is NaN.

    Raises:
        CsrcUnavailable: the library can neither be found nor compiled.
        RuntimeError: a dtype, shape or stride that the kernels do not take.
    """
    lse, logps, entropy, *_ = _rows(hidden, weight, bias, target_ids, rule, logits_out, False, None, return_entropy)
    return lse, logps, entropy if return_entropy else None


def linear_weights(
    hidden: Tensor,  # (T, H) fp32 or bf16
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    target_ids: Tensor,  # (T,)
    rule: LogitRule,
    out: Tensor,  # (T, V) fp32 or POSITIVE16, any row stride
    *,
    return_entropy: bool = False,
    known: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor, Tensor, DominantWeights | None]:
    """(lse, logps, entropy) as `linear_logps` gives them, unit and target_unit (T,) fp32; the weights E go to `out`.

    Of weights in 16 bits those come on top that make up more than a 16th of their row, before they were rounded.

    The gradient of Σ g·logp with respect to the raw logits is (g·unit)[:, None]·out, with g·target_unit in the targets'
    columns, where out is 0. `known`: the statistics of these rows from another call; they are then not computed again,
    and the bits of `out` are the same.

    Raises:
        CsrcUnavailable: the library can neither be found nor compiled.
        RuntimeError: a dtype, shape or stride that the kernels do not take.
    """
    lse, logps, entropy, unit, target_unit, *dominant = _rows(
        hidden, weight, bias, target_ids, rule, out, True, known, return_entropy
    )
    stats = known if known is not None else (lse, logps, entropy if return_entropy else None)
    return stats, unit, target_unit, DominantWeights(*dominant) if out.dtype == gemm_cpu.POSITIVE16 else None
