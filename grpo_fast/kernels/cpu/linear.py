"""LM head fused with log-softmax on the CPU (csrc/api/linear.cpp).

    raw = hidden · Wᵀ + bias,  z = transform(raw)  ->  lse, logp, entropy, optionally exponentials

The kernel sums the softmax statistics of a block of logits while the block is in cache. A pass
without gradients therefore stores no logits. A pass with gradients writes one exponential per
logit. An exponential is the gradient with respect to its logit, divided by a factor that all
columns of the row share. gpu/exponentials.py derives this.

Each block of W is read from memory once per group of rows. A stored exponential takes 4 bytes for
fp32 inputs, and 2 bytes for bf16 inputs (POSITIVE16, which has two more significant bits than
bf16). Exponentials that make up more than 1/16 of their row are also returned in fp32.
"""

from __future__ import annotations

from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.cpu.gemm import uses_tiles
from grpo_fast.kernels.types import (
    POSITIVE16,
    Dominant,
    Exponentials,
    HeadInputs,
    RowStats,
    contiguous_rows,
    vector,
)


def _tensors(p: HeadInputs) -> tuple[Tensor | None, ...]:
    """Return hidden, weight, bias and target ids in the form that the C++ operator requires."""
    hidden = contiguous_rows(p.hidden)
    weight = contiguous_rows(p.weight)
    return hidden, weight, vector(p.bias), p.target_ids.contiguous()


def head_logps(
    p: HeadInputs, *, return_entropy: bool, logits_out: Tensor | None = None
) -> RowStats:
    """Compute the lse, the target's log-probability and, if requested, the entropy of every row.

    The result equals `row_logps(hidden @ weight.T + bias, …)`. A target id outside [0, V) is never
    read, and its logp is NaN.

    Args:
        p: the hidden states, the LM head and the targets, in fp32 or bf16.
        return_entropy: also compute the entropy.
        logits_out: (T, V) fp32 destination of the raw logits. The results are bitwise identical
            with and without it.

    Returns:
        lse, logps and entropy (or None), (T,) fp32 each.
    """
    # Pass False and twice None: no exponentials, and no statistics from an earlier call.
    lse, logps, entropy, *_ = loader.operator("linear", "linear_rows")(
        *_tensors(p), logits_out, False, None, None, *p.transform, return_entropy,
        uses_tiles(p.weight),
    )  # fmt: skip
    return lse, logps, entropy if return_entropy else None


def head_exponentials(
    p: HeadInputs, out: Tensor, *, return_entropy: bool = False, known: RowStats | None = None
) -> Exponentials:
    """Compute the statistics of `head_logps` and write the `Exponentials` E to `out`.

    Elements of a 16-bit E that make up more than 1/16 of their row are also returned in fp32.

    Args:
        p: the hidden states, the LM head and the targets.
        out: (T, V) fp32 or POSITIVE16, any row stride.
        return_entropy: also compute the entropy.
        known: statistics of these rows from an earlier call, which are then not computed again.
            `out` is bitwise identical with and without this argument.
    """
    given = (None, None) if known is None else (vector(known[0]), vector(known[1]))
    lse, logps, entropy, unit, target_unit, *dominant = loader.operator("linear", "linear_rows")(
        *_tensors(p), out, True, *given, *p.transform, return_entropy, uses_tiles(p.weight),
    )  # fmt: skip
    stats = known if known is not None else (lse, logps, entropy if return_entropy else None)
    found = Dominant(*dominant) if out.dtype == POSITIVE16 else None
    return Exponentials(stats, unit, target_unit, found)
