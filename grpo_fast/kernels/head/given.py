"""Sources of logits that the caller gives, and their gradient.

The row kernels read the given logits and write the gradient, (N, V), which may be the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.head.sources import Chunk, RowSource
from grpo_fast.kernels.head.sums import ChunkGradients
from grpo_fast.kernels.head.support import TokenSets
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import ActiveRows, Wanted

# Size in bytes of a block of given logits on the CPU. A block of this size stays in the CPU cache,
# so that the kernel can read it quickly a second time.
CPU_BLOCK_BYTES = 4 << 20


class LogitSums:
    """The gradient with respect to given logits, (N, V). The row kernels write it.

    Args:
        logits: (N, V).
        out: (N, V) buffer of the gradient, which may be `logits`; None: it is allocated.
    """

    def __init__(self, logits: Tensor, out: Tensor | None) -> None:
        self.logits = logits
        self.out = out
        self.is_wanted = False
        self.is_filled = False  # whether every row of `out` has been written

    def start(self, wanted: Wanted) -> LogitSums:
        """Begin a new gradient."""
        self.is_wanted = any(wanted)
        self.is_filled = False
        return self

    def buffer(self) -> Tensor:
        """Return the gradient. The caller must write all rows if `is_filled` is False."""
        if self.out is None:
            self.out = torch.empty_like(self.logits, memory_format=torch.contiguous_format)
        return self.out

    def filtered_shares(self) -> None:
        """Return None, because no column of given logits is skipped."""

    def finish(self) -> tuple[Tensor, ...]:
        """Return (d-logits,)."""
        return (self.buffer() if self.is_wanted else self.logits.new_empty(0),)


class GivenLogits(RowSource):
    """Logits that the caller gives.

    The row kernels process all N rows, in blocks. Rows without a target get zero gradients.

    Args:
        logits: (N, V), with contiguous rows.
        rows: the active rows.
        route: the kernels of the backend.
        sums: the gradient, to which the row kernels write.
    """

    in_one_pass = True

    def __init__(self, logits: Tensor, rows: ActiveRows, route: Route, sums: LogitSums) -> None:
        super().__init__(rows, route)
        self.given = logits
        self.sums = sums
        # Rows without a target have an id that is in no vocabulary.
        self.targets = rows.to_rows(rows.target_ids, fill=-1)

    def chunks(self, *, stores: bool) -> list[slice]:
        """Return blocks of rows that stay in the cache of a CPU."""
        rows = step = self.given.shape[0]
        if self.given.device.type == "cpu":
            row_bytes = max(self.given.shape[1] * self.given.element_size(), 1)
            # Use at least 16 rows per block, even if the block then exceeds CPU_BLOCK_BYTES.
            step = max(CPU_BLOCK_BYTES // row_bytes, 16)
        return [slice(i, min(i + step, rows)) for i in range(0, rows, max(step, 1))]

    def spread(self, x: Tensor) -> Tensor:
        return self.rows.to_rows(x)

    def collect(self, parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(map(self.rows.active, super().collect(parts)))

    def chunk(self, index: slice | Tensor, *, stores: bool = True) -> Chunk:
        return Chunk(index, self.targets[index])

    def logits(self, at: Chunk) -> Tensor:
        return self.given[at.rows]

    def gradient(self, at: Chunk) -> Tensor:
        self.sums.is_filled = True  # every block is written
        return self.sums.buffer()[at.rows]


class GivenSets(TokenSets):
    """Token sets whose logits the caller gives, (N, V)."""

    def __init__(self, logits: Tensor, rows: ActiveRows, route: Route) -> None:
        super().__init__(rows, route)
        self.given = logits
        index = self.rows.active_index
        # Without an index, the active rows are all rows of the given logits, in order.
        index = torch.arange(rows.num_rows, device=logits.device) if index is None else index
        self.at = index[self.support.rows], self.support.ids

    def raw(self) -> Tensor:
        return self.given[self.at].to(torch.promote_types(self.given.dtype, torch.float32))

    def add(self, sums: Any, at: Chunk, d_logits: ChunkGradients, keep: Tensor | None) -> None:
        """Add the d-logits of the rows to the gradient."""
        out: Tensor = sums.buffer()
        if not sums.is_filled:
            out.zero_()
        sums.is_filled = True
        out[self.at] += d_logits.matrix.to(out.dtype)
