"""LM head restricted to token sets, computed from gathered weight rows in O(nnz) memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.route import Route, kernel_module
from grpo_fast.kernels.support import HeadRows
from grpo_fast.kernels.types import (
    ActiveRows,
    HeadTensors,
    LogitTransform,
    Wanted,
    add_rows_,
    scaled_rows,
)
from grpo_fast.kernels.workspace import zeros


class SupportGradient(NamedTuple):
    """Gradient of the loss with respect to the logits of the token sets."""

    d_logits: Tensor  # (nnz,)
    g: Tensor  # (R,) coefficient of each row's logp
    slopes: Tensor | None = None  # (R, H), dH = g·slopes; None: compute dH from d_logits


class GatheredHead:
    """LM head for rows with a token set. It reads only the rows of W for the ids in the sets.

    With `keep_fp32`, gradients are returned in the dtype of their sums.
    """

    def __init__(
        self, tensors: HeadTensors, rows: ActiveRows, route: Route, *, keep_fp32: bool
    ) -> None:
        assert rows.support is not None
        self.tensors = tensors
        self.support = rows.support
        self.keep_fp32 = keep_fp32
        self.hidden, self.weight, self.bias = tensors
        self.row_kernels = kernel_module("support", route.backend)
        self.kernels = route.kernels
        self.index = rows.select(self.support.row_index).hidden_index
        self.repeats = rows.repeats
        self.sum_dtype = torch.promote_types(self.hidden.dtype, torch.float32)

    def rows(
        self, transform: LogitTransform, *, return_entropy: bool, return_slopes: bool
    ) -> HeadRows:
        """Compute the logits at the ids of every set, and the statistics of every row.

        With `return_slopes`, also compute the derivative of each logp with respect to hidden.
        """
        found: HeadRows = self.row_kernels.head_rows(
            self.hidden, self.index, self.weight, self.bias, self.support, transform,
            return_entropy=return_entropy, return_slopes=return_slopes,
        )  # fmt: skip
        return found

    def no_gradients(self) -> tuple[Tensor, ...]:
        """Return empty tensors in place of the gradients."""
        return self.tensors.no_gradients()

    def gradients(
        self, of_rows: SupportGradient, wanted: Wanted, others: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """Compute the gradients (dH, dW, db) of the rows that have a token set.

        If `others` is given, it contains the gradients of the rows that have no token set, and the
        new gradients are added to it.
        """
        d_hidden, d_weight, d_bias = self.no_gradients() if others is None else others
        d, g, slopes = of_rows
        is_first = others is None
        if wanted.hidden:
            if slopes is None:
                # With an entropy gradient, there are no slopes, because dH is then not a multiple
                # of d logp/d hidden. Compute dH from the d-logits instead. They already contain the
                # coefficients, so set g to 1.
                slopes = self.row_kernels.head_hidden(d, self.weight, self.support)
                g = torch.ones_like(g)
            d_hidden = self._hidden(slopes, g, None if is_first else d_hidden)
        if wanted.weight:
            d_weight, add = self._new_weight() if is_first else (d_weight, True)
            self.row_kernels.head_weight(
                d, self.hidden, self.index, self.support, d_weight, add=add
            )
        if wanted.bias:
            d_bias = d.new_zeros(len(self.weight)) if is_first else d_bias
            add_rows_(d_bias, self.support.ids, d)
        return self._narrowed(d_hidden, d_weight, d_bias)

    def _narrowed(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Convert dH, dW and db to the dtypes of the inputs, unless `keep_fp32` is set."""
        likes = (self.hidden if x is None else x for x in self.tensors)
        pairs = zip(sums, likes, strict=True)
        return tuple(x if self.keep_fp32 else x.to(like.dtype) for x, like in pairs)

    def _new_weight(self) -> tuple[Tensor, bool]:
        """Allocate dW.

        Returns:
            dW, and whether the kernel must add to it instead of overwriting it. On a CPU, the
            kernel adds, because dW contains zeros.
        """
        dtype = self.sum_dtype if self.keep_fp32 else self.weight.dtype
        # On a CPU, use fresh memory pages, which already contain zeros. The kernel then writes only
        # the rows of tokens that are in a set.
        if self.weight.is_cpu:
            return zeros(self.weight.shape, dtype), True
        return self.weight.new_empty(self.weight.shape, dtype=dtype), False

    def _hidden(self, slopes: Tensor, g: Tensor, total: Tensor | None) -> Tensor:
        """Compute dH from g·slopes.

        Return a new (N, H) tensor, or add dH to `total` and return `total`.
        """
        if total is not None or self.repeats:
            # Add the rows instead of copying them, because several targets may share a row of
            # `hidden`.
            assert self.index is not None
            total = slopes.new_zeros(self.hidden.shape) if total is None else total
            add_rows_(total, self.index, scaled_rows(slopes, g))
            return total
        dtype = self.sum_dtype if self.keep_fp32 else self.hidden.dtype
        if self.kernels.gradients is None:
            rows = scaled_rows(slopes, g).to(dtype)
        else:
            rows = self.kernels.gradients.scaled_hidden(slopes, g, dtype)
        if self.index is None:
            return rows
        return rows.new_zeros(self.hidden.shape).index_copy_(0, self.index, rows)
