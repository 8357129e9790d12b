"""hidden → log-probabilities, and exponentials for the gradient GEMMs (csrc/api/linear.cpp).

What a softmax needs of a block of hidden·Wᵀ is summed while it is in cache: without a gradient no
logits exist. With one, every logit is written once, as the exponential that is its d-logit up to a
coefficient by row (gpu/exponentials.py has the algebra). For bf16 inputs the exponentials have 16
bits and two digits more than bf16; those that dominate a row of dH come beside them in fp32.
"""

from __future__ import annotations

from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.cpu.gemm import uses_tiles
from grpo_fast.kernels.types import (
    POSITIVE16,
    Dominant,
    Exponentials,
    LogitTransform,
    RowStats,
    contiguous_rows,
    transform_arguments,
    vector,
)


def _rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    transform: LogitTransform,
    out: Tensor | None,
    has_weights: bool,
    known: RowStats | None,
    return_entropy: bool,
) -> tuple[Tensor, ...]:
    lse, logps = (None, None) if known is None else (vector(x) for x in known[:2])
    hidden = contiguous_rows(hidden)
    weight = contiguous_rows(weight)
    results: tuple[Tensor, ...] = loader.operator("linear", "linear_rows")(
        hidden, weight, vector(bias), target_ids.contiguous(), out, has_weights, lse, logps,
        *transform_arguments(transform), return_entropy, uses_tiles(weight),
    )  # fmt: skip
    return results


def head_logps(
    hidden: Tensor,  # (T, H) fp32 or bf16
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    target_ids: Tensor,  # (T,)
    transform: LogitTransform,
    *,
    return_entropy: bool,
    logits_out: Tensor | None = None,  # (T, V) fp32
) -> RowStats:
    """lse, log-probability of the target and (when asked for) entropy of every row, each (T,) fp32.

    Equals `row_logps(hidden @ weight.T + bias, …)`. `logits_out` receives the raw logits and
    changes no bit of the other outputs. A target id outside [0, V) is never read: its logp is NaN.
    """
    lse, logps, entropy, *_ = _rows(
        hidden, weight, bias, target_ids, transform, logits_out, False, None, return_entropy
    )
    return lse, logps, entropy if return_entropy else None


def head_exponentials(
    hidden: Tensor,  # (T, H) fp32 or bf16
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    target_ids: Tensor,  # (T,)
    transform: LogitTransform,
    out: Tensor,  # (T, V) fp32 or POSITIVE16, any row stride
    *,
    return_entropy: bool = False,
    known: RowStats | None = None,
) -> Exponentials:
    """The statistics that `head_logps` gives, and `Exponentials` E, written to `out`.

    Of a matrix in 16 bits those come on top that make up more than a 16th of their row. `known`:
    the statistics of these rows from another call; the bits of `out` are the same.
    """
    lse, logps, entropy, unit, target_unit, *dominant = _rows(
        hidden, weight, bias, target_ids, transform, out, True, known, return_entropy
    )
    stats = known if known is not None else (lse, logps, entropy if return_entropy else None)
    return Exponentials(
        stats, unit, target_unit, Dominant(*dominant) if out.dtype == POSITIVE16 else None
    )
