"""Passes over precomputed logits. They have the methods of `LinearHead`, a pass over an LM head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.head.entropy import FullEntropySweep
from grpo_fast.kernels.head.loop import concat_chunks
from grpo_fast.kernels.head.support import GivenLogits, SupportSweep
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import ActiveRows, RowLoss, RowStats, Wanted, pick
from grpo_fast.loss import values
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

# Size in bytes of a block of logits on the CPU. A block of this size stays in the CPU cache, so
# that the kernel can read it quickly a second time.
CPU_BLOCK_BYTES = 4 << 20


class LogitsSweep:
    """A pass over precomputed logits, which calls the row kernels for one block of rows at a time.

    For a token-level loss, one pass over the logits computes the loss and the gradient. Other
    losses need two passes. Inactive rows get zero gradients.

    Args:
        logits: (N, V), with contiguous rows.
        out: (N, V), the buffer for d-logits, which may be `logits` itself. None allocates a buffer
            when it is needed.
        rows: the active rows.
        route: the kernels of the backend.
    """

    cached = None
    has_entropy_gradient = True
    filtered = None

    @classmethod
    def of(
        cls,
        logits: Tensor,
        out: Tensor | None,
        rows: ActiveRows,
        route: Route,
        full_entropy: bool = False,
    ) -> LogitsSweep | SupportSweep | FullEntropySweep:
        """Create a pass over these rows.

        The class of the pass depends on whether the rows have a support, and on whether entropies
        are over the full vocabulary (`full_entropy`).
        """
        if rows.support is None:
            return cls(logits, out, rows, route)
        if full_entropy:
            full = cls(logits, out, rows._replace(support=None), route)
            return FullEntropySweep(cls.of(logits, None, rows, route), full)
        # Rows without a support use the full vocabulary, so the dense kernels process them.
        others = rows.support.dense_index
        dense = None if others is None else cls(logits, out, rows.select(others), route)
        return SupportSweep(GivenLogits(logits, out, rows, route), rows, dense)

    def __init__(self, logits: Tensor, out: Tensor | None, rows: ActiveRows, route: Route) -> None:
        self.logits = logits
        self.out = out
        self.rows = rows
        self.kernels = route.kernels
        self.targets = rows.to_rows(rows.target_ids, fill=values.IGNORED_TARGET)
        self.transform = rows.transform
        if isinstance(self.transform.temperature, Tensor):
            self.transform = self.transform._replace(
                temperature=rows.to_rows(self.transform.temperature, fill=1)
            )
        self.num_rows = rows.target_ids.shape[0]

    def _blocks(self) -> Iterator[slice]:
        rows = step = self.logits.shape[0]
        if self.logits.device.type == "cpu":
            row_bytes = max(self.logits.shape[1] * self.logits.element_size(), 1)
            # Use at least 16 rows per block, even if the block then exceeds CPU_BLOCK_BYTES.
            step = max(CPU_BLOCK_BYTES // row_bytes, 16)
        for start in range(0, rows, max(step, 1)):
            yield slice(start, min(start + step, rows))

    def _active(self, parts: Sequence[tuple[Any, ...]], has_entropy: bool) -> tuple[Any, ...]:
        """Concatenate the results of all blocks, and select the active rows."""
        fields = concat_chunks(parts, self.logits)
        if not has_entropy:
            fields = (*fields[:2], None, *fields[3:])
        return tuple(map(self.rows.active, fields))

    def _gradient_buffer(self) -> Tensor:
        if self.out is None:
            self.out = torch.empty_like(self.logits, memory_format=torch.contiguous_format)
        return self.out

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """Compute (lse, logps, entropy) of the active rows.

        `keep` has no effect, because the logits are already in memory.
        """
        parts = []
        for b in self._blocks():
            part = self.kernels.row_logps(
                self.logits[b],
                self.targets[b],
                self.transform.rows(b),
                return_entropy=return_entropy,
            )
            parts.append(part)
        lse, logps, entropy = self._active(parts, return_entropy)
        return lse, logps, entropy

    def loss_gradients(
        self, terms: RowTerms, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor]]:
        """Compute a token-level loss and its gradient in one pass.

        In a token-level loss, the gradient of a row depends only on that row.

        Returns:
            The losses of the active rows, and (d-logits,).
        """
        out = self._gradient_buffer()
        spread = terms.map(self.rows.to_rows)
        parts = []
        for b in self._blocks():
            part = self.kernels.row_loss_(
                self.logits[b], out[b], self.targets[b], spread.rows(b), config,
                self.transform.rows(b), return_entropy=config.needs_entropy,
            )  # fmt: skip
            parts.append(part)
        return RowLoss(*self._active(parts, config.needs_entropy)), (out,)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor]:
        """Compute the gradient of Σ g·logp + g_entropy·entropy with respect to the logits.

        Args:
            g: (T,), upstream gradients of the logps.
            g_entropy: (T,), upstream gradients of the entropies, or None.
            known: the result of `logps`.
            wanted: which gradients are needed. If none is needed, the result is an empty tensor.

        Returns:
            A tuple with one element, the gradient.
        """
        if not any(wanted):
            return (self.logits.new_empty(0),)
        out = self._gradient_buffer()
        g, g_entropy, *stats = map(self.rows.to_rows, (g, g_entropy, *known))
        for b in self._blocks():
            of_rows = pick(b, *stats), *pick(b, g, g_entropy), self.transform.rows(b)
            self.kernels.row_grad_(self.logits[b], self.targets[b], *of_rows, out=out[b])
        return (out,)
