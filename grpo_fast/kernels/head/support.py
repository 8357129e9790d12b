"""Sources of logits for rows that have a token set, which a truncating sampler kept.

A row with a set of k ids costs 6·k·H instead of 6·V·H flops, and the row kernels process k logits.
All rows with a set form one chunk, whose logits take O(nnz) memory. There are two sources of these
logits:

    GatheredSets  gathers the rows of W for the ids in the sets
    GivenSets     looks the logits up in logits that the caller gives (given.py)

A gathered logit takes about 30 times as long as a logit of a dense product (11 to 33 on a core of
an Intel Xeon in fp32 with H = 896), so sets pay off if they have less than about V/30 ids. Rows
without a set use the sources of sources.py.
"""

from __future__ import annotations

from torch import Tensor

from grpo_fast.kernels.head.sources import Chunk, RowSource
from grpo_fast.kernels.head.sums import ChunkGradients, HeadSums
from grpo_fast.kernels.route import Route, kernel_module
from grpo_fast.kernels.types import ActiveRows, HeadTensors, RowStats


class TokenSets(RowSource):
    """Rows that have a token set. Their logits are stored one set after another, (nnz,).

    Args:
        rows: all active rows, with their token sets.
        route: the selected kernels.
    """

    def __init__(self, rows: ActiveRows, route: Route) -> None:
        assert rows.support is not None
        self.support = rows.support
        super().__init__(rows.select(self.support.row_index), route)
        self.offsets = self.support.offsets
        self._stored: tuple[Tensor, RowStats] | None = None

    def chunk(self, index: slice | Tensor, *, stores: bool = True) -> Chunk:
        """Return all rows. A target id is the position of the target in its set."""
        return Chunk(index, self.support.places, self.rows.transform)

    def head_rows(self, at: Chunk, *, return_entropy: bool) -> tuple[Tensor, RowStats]:
        """Return the logits at the ids of every set, (nnz,), and the statistics of every row."""
        raise NotImplementedError

    def logits(self, at: Chunk, *, cached: bool) -> Tensor:
        if not cached or self._stored is None:
            self._stored = self.head_rows(at, return_entropy=True)
        return self._stored[0][None]

    def logps(
        self, at: Chunk, *, return_entropy: bool, stores: bool, cached: bool = False
    ) -> RowStats:
        if cached and self._stored is not None:
            return self._stored[1]
        found = self.head_rows(at, return_entropy=return_entropy)
        self._stored = found if stores else None
        return found[1]

    def gradients(
        self, at: Chunk, known: RowStats, g: Tensor, g_entropy: Tensor | None, *, cached: bool
    ) -> ChunkGradients:
        found = super().gradients(at, known, g, g_entropy, cached=cached)
        self._stored = None  # its logits were overwritten
        return found

    def release(self) -> None:
        self._stored = None


class GatheredSets(TokenSets):
    """Token sets whose logits come from gathered rows of W."""

    def __init__(self, tensors: HeadTensors, rows: ActiveRows, route: Route) -> None:
        super().__init__(rows, route)
        self.support = self.support._replace(hidden_index=self.rows.hidden_index)
        self.tensors = tensors
        self.module = kernel_module("support", route.backend)

    def head_rows(self, at: Chunk, *, return_entropy: bool) -> tuple[Tensor, RowStats]:
        found: tuple[Tensor, RowStats] = self.module.head_rows(
            self.tensors, self.support, at.transform, return_entropy=return_entropy
        )
        return found

    def add(self, sums: HeadSums, at: Chunk, d_logits: ChunkGradients, keep: Tensor | None) -> None:
        """Add the gradients of the rows to dH, dW and db."""
        sums.add_sets(d_logits.matrix, self.support, self.module)
