"""LM head restricted to token sets, in C++, with the interface of support_reference.py."""

from __future__ import annotations

from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.support import HeadRows, SupportRows
from grpo_fast.kernels.types import LogitTransform, contiguous_rows, transform_arguments, vector


def target_places(
    ids: Tensor,  # (nnz,) int64 in [0, V)
    offsets: Tensor,  # (R+1,) int64
    target_ids: Tensor,  # (R,) int64
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Find the position of each target in its token set, in C++.

    `support_reference.target_places` documents the arguments and results.
    """
    operator = loader.operator("support", "support_places")
    found: tuple[Tensor, Tensor] = operator(ids, offsets, target_ids, vocab_size)
    return found


def head_rows(
    hidden: Tensor,  # (N, H) fp32, bf16 or fp16
    index: Tensor | None,  # (R,) int64
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    rows: SupportRows,
    transform: LogitTransform,
    *,
    return_entropy: bool,
    return_slopes: bool,
) -> HeadRows:
    """Compute logits and statistics over token sets in C++, like `support_reference.head_rows`.

    Each weight row is read from memory once.
    """
    raw, lse, logps, entropy, slopes = loader.operator("support", "support_rows")(
        contiguous_rows(hidden), contiguous_rows(weight), vector(bias), rows.ids, rows.offsets,
        rows.places, index, *transform_arguments(transform), return_entropy, return_slopes,
    )  # fmt: skip
    stats = lse, logps, entropy if return_entropy else None
    return HeadRows(raw, stats, slopes if return_slopes else None)


def head_hidden(d: Tensor, weight: Tensor, rows: SupportRows) -> Tensor:
    """Compute dH in C++ from d-logits of token sets, like `support_reference.head_hidden`."""
    operator = loader.operator("support", "support_hidden")
    out: Tensor = operator(d, contiguous_rows(weight), rows.ids, rows.offsets)
    return out


def head_weight(
    d: Tensor,  # (nnz,) fp32
    hidden: Tensor,  # (N, H)
    index: Tensor | None,  # (R,) int64
    rows: SupportRows,
    out: Tensor,  # (V, H)
    *,
    add: bool,
) -> None:
    """Compute dW in C++ from d-logits of token sets, like `support_reference.head_weight`."""
    loader.operator("support", "support_weight_")(
        d, contiguous_rows(hidden), rows.ids, rows.offsets, index, out, add
    )
