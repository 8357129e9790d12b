"""Logits of a head in a sampler's support, and their gradients, from the rows of W that the ids
name. Memory beside gradients: O(nnz), and slopes as large as dH.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.route import Route, support_doors
from grpo_fast.kernels.support import HeadRows, SupportRows
from grpo_fast.kernels.types import ActiveRows, LogitRule, Wanted, add_rows_, scaled_rows
from grpo_fast.kernels.workspace import unset, zeros


class GatheredHead:
    """The supported rows of a head.

    Args:
        hidden, weight, bias: (N, H), (V, H), (V,).
        rows: all active ones.
        route: what runs.
        is_wide: gradients are returned as they are summed, in fp32 at least.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: ActiveRows,
        route: Route,
        *,
        is_wide: bool,
    ) -> None:
        assert rows.support is not None
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.support: SupportRows = rows.support
        self.doors, self.is_wide = support_doors(route.backend), is_wide
        self.surround, self.repeats = route.kernels.gradients, rows.repeats
        self.index = rows.select(self.support.own).hidden_index
        self.sum_dtype = torch.promote_types(hidden.dtype, torch.float32)

    def rows(self, rule: LogitRule, *, return_entropy: bool, return_slopes: bool) -> HeadRows:
        """Logits and statistics of the supported rows, and slopes when asked for."""
        return self.doors.head_rows(
            self.hidden, self.index, self.weight, self.bias, self.support, rule,
            return_entropy=return_entropy, return_slopes=return_slopes,
        )  # fmt: skip

    def nothing(self) -> tuple[Tensor, ...]:
        """Gradients that nobody wants."""
        return (self.hidden.new_empty(0),) * 3

    def gradients(
        self,
        d: Tensor,
        g: Tensor,
        slopes: Tensor | None,
        wanted: Wanted,
        others: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, ...]:
        """(dH, dW, db).

        Args:
            d: (nnz,) the d-logits.
            g: (R,) the coefficient of each row's logp.
            slopes: (R, H) what dH is g times; None: it follows from d.
            others: the same of other rows, in fp32 at least, to which these are added.
        """
        d_hidden, d_weight, d_bias = self.nothing() if others is None else others
        is_first = others is None
        if wanted.hidden:
            if slopes is None:
                slopes, g = self.doors.head_hidden(d, self.weight, self.support), torch.ones_like(g)
            d_hidden = self._hidden(slopes, g, None if is_first else d_hidden)
        if wanted.weight:
            d_weight, add = self._new_weight() if is_first else (d_weight, True)
            self.doors.head_weight(d, self.hidden, self.index, self.support, d_weight, add=add)
        if wanted.bias:
            d_bias = d.new_zeros(len(self.weight)) if is_first else d_bias
            add_rows_(d_bias, self.support.ids, d)
        found = d_hidden, d_weight, d_bias
        if self.is_wide:
            return found
        likes = self.hidden, self.weight, self.hidden if self.bias is None else self.bias
        return tuple(x.to(like.dtype) for x, like in zip(found, likes, strict=True))

    def _new_weight(self) -> tuple[Tensor, bool]:
        """Memory for dW, and whether it is zeros to be added to."""
        dtype = self.sum_dtype if self.is_wide else self.weight.dtype
        if self.weight.is_cpu:
            return zeros(self.weight.shape, dtype), True
        return unset(self.weight.new_empty, self.weight.shape, dtype=dtype), False

    def _hidden(self, slopes: Tensor, g: Tensor, total: Tensor | None) -> Tensor:
        """(N, H) g times the slopes of the supported rows, added to `total`."""
        if total is not None or self.repeats:
            total = slopes.new_zeros(self.hidden.shape) if total is None else total
            add_rows_(total, self._places(g), scaled_rows(slopes, g))
            return total
        dtype = self.sum_dtype if self.is_wide else self.hidden.dtype
        new = self.hidden.new_empty if len(g) == len(self.hidden) else self.hidden.new_zeros
        total = unset(new, self.hidden.shape, dtype=dtype)
        if self.surround is None:
            total[self._places(g)] = scaled_rows(slopes, g).to(dtype)
            return total
        return self.surround.scaled_hidden(slopes, g, total, self.index)

    def _places(self, g: Tensor) -> Tensor:
        return torch.arange(len(g), device=g.device) if self.index is None else self.index
