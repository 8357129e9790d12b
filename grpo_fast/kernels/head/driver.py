"""The driver: a pass over the rows of a call, from logits to loss and gradients, chunk by chunk.

    source  forms the logits of a chunk (sources.py, shards.py, support.py)
    term    computes loss and d-logits from them (terms.py, divergence.py)
    sums    accumulate dH, dW and db, or the gradient of given logits (sums.py, given.py)

Nothing of size (N, V) exists unless the caller gives it. With V columns and hidden size H, the cost
of T rows is 6·T·V·H flops if one pass computes loss and gradient, as for token-level losses and for
a single chunk. Other losses first need the logps of all rows. The last chunk of that first pass is
stored, and the others are recomputed, which costs up to 8·T·V·H. Passes without gradient cost
2·T·V·H. A second term, such as a divergence, needs no second pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.launch import is_capturing
from grpo_fast.kernels.head.given import GivenLogits, GivenSets, LogitSums
from grpo_fast.kernels.head.shards import ShardedHead, VocabularyShard
from grpo_fast.kernels.head.sources import DenseHead, ExponentialHead, RowSource
from grpo_fast.kernels.head.sums import HeadSums, should_gather
from grpo_fast.kernels.head.support import TokenSets, sets_of_head
from grpo_fast.kernels.head.terms import Known, RowTerm, Sum, TokenLevel, sum_of
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import ActiveRows, HeadTensors, RowLoss, RowStats, Wanted
from grpo_fast.kernels.workspace import copy_to_host_async

Sums = HeadSums | LogitSums


class Driver:
    """A pass over all active rows of a call.

    Args:
        rows: the active rows.
        dense: the source of the rows without a token set. With `full_entropy`, of all rows.
        sets: the source of the rows with a token set.
        new_sums: creates the sums of the gradients.
        full_entropy: compute entropies over the full vocabulary, and the logps of the rows with a
            token set over their sets.
    """

    def __init__(
        self,
        rows: ActiveRows,
        dense: RowSource | None,
        sets: TokenSets | None,
        new_sums: Callable[[Wanted], Sums],
        *,
        full_entropy: bool = False,
    ) -> None:
        self.rows = rows
        self.dense = dense
        self.sets = sets
        self.new_sums = new_sums
        self.full_entropy = full_entropy
        self.num_rows = rows.target_ids.shape[0]
        self.has_entropy_gradient = dense is None or dense.has_entropy_gradient
        # The chunk of `dense` whose logits are stored, and whether the logits of `sets` are stored.
        self.stored: slice | None = None
        self.stores_sets = False
        self._full_stats: RowStats | None = None
        self.filtered: Tensor | None = None  # (2,) shares of `HeadSums.filtered_shares`

    def logps(self, *, return_entropy: bool, stores: bool = False) -> RowStats:
        """Compute (lse, logps, entropy) of all active rows, (T,) fp32.

        With `stores`, the logits of the last chunk are kept for `gradients`.
        """
        own: RowStats | None = None
        others: RowStats | None = None
        if self.sets is not None:
            here = return_entropy and not self.full_entropy
            own = self._logps(self.sets, return_entropy=here, stores=stores)
            self.stores_sets = stores
        if self.dense is not None:
            keeps = stores and not self.full_entropy
            others = self._logps(self.dense, return_entropy=return_entropy, stores=keeps)
        if own is None or others is None or self.sets is None:
            found = own or others
            assert found is not None
            return found
        merge = self.sets.support.merge_rows
        if self.full_entropy:
            self._full_stats = others
            index = self.sets.support.row_index
            lse, logps = (
                x if index is None else y.index_copy(0, index, x)
                for x, y in zip(own[:2], others[:2], strict=True)
            )
            return lse, logps, others[2]
        entropy = None if own[2] is None else merge(own[2], others[2])
        return merge(own[0], others[0]), merge(own[1], others[1]), entropy

    def _logps(self, source: RowSource, *, return_entropy: bool, stores: bool) -> RowStats:
        parts = []
        chunks = source.chunks(stores=stores)
        for chunk in chunks:
            # Store the logits of the last chunk only, because there is room for one.
            keeps = stores and chunk == chunks[-1]
            at = source.chunk(chunk, stores=keeps)
            parts.append(
                source.logps(at, return_entropy=return_entropy, stores=keeps, cached=False)
            )
        if stores and source is self.dense:
            self.stored = chunks[-1] if chunks else None
        if not stores:
            source.release()
        lse, logps, entropy = source.collect(parts)
        return lse, logps, entropy if return_entropy else None

    def gradients(self, term: RowTerm, wanted: Wanted) -> tuple[Tensor, ...]:
        """Compute a term and the gradients of its sum.

        Returns:
            (dH, dW, db), or (d-logits,) for given logits. Gradients that were not requested are
            empty.
        """
        sums = self.new_sums(wanted)
        stored = self.stored
        self.stored = None
        stores_sets = self.stores_sets
        self.stores_sets = False
        if self.dense is not None:
            rows = None if self.sets is None else self.sets.support.dense_index
            own = term
            if self.full_entropy:
                own = self._over_vocabulary(term)
                rows = None
            self._accumulate(self.dense, own, rows, stored, sums, wanted)
        if self.sets is not None:
            own = self._without_entropy(term) if self.full_entropy else term
            chunk = slice(0, len(self.sets.support.places)) if stores_sets else None
            index = self.sets.support.row_index
            self._accumulate(self.sets, own, index, chunk, sums, wanted)
        self.filtered = sums.filtered_shares()
        return sums.finish()

    def token_level(
        self, policy: TokenLevel, other: RowTerm | None, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, ...]]:
        """Compute a token-level loss, its gradients and those of another term.

        Returns:
            The statistics, losses and coefficients of all active rows, and the gradients.
        """
        source = self.dense or self.sets
        assert source is not None
        if self.sets is None or self.dense is None:
            gradients = self.gradients(sum_of(other, policy), wanted)
            return RowLoss(*source.collect(policy.parts)), gradients
        # With two sources, read the logits of both before the gradient may overwrite them.
        terms = policy.terms
        stats = self.logps(return_entropy=policy.config.needs_entropy, stores=True)
        losses, g = source.kernels.row_coefficients(stats[1], terms, policy.config)
        known = Known(g, terms.grad_entropy, stats, counts_on_gpu=False)
        return RowLoss(*stats, losses, g), self.gradients(sum_of(other, known), wanted)

    def _accumulate(
        self,
        source: RowSource,
        term: RowTerm,
        rows: Tensor | None,
        stored: slice | None,
        sums: Sums,
        wanted: Wanted,
    ) -> None:
        """Add the gradients of the rows of one source to the sums.

        Args:
            source: the source.
            term: the term of all active rows.
            rows: positions of the source's rows among the active rows; None: all.
            stored: the chunk whose logits are stored.
            sums: the sums.
            wanted: which gradients to compute.
        """
        if not (any(wanted) or term.needs_all_rows):
            source.release()
            return

        def select(x: Tensor) -> Tensor:
            spread: Tensor = source.spread(x if rows is None else x.index_select(0, rows))
            return spread

        term = term.map(select, source)
        chunks = source.chunks(stores=True)
        mask = None
        if source.skips and chunks and (source.on_gpu or not term.needs_all_rows):
            mask = term.mask(source.flops(wanted))
        activity = Activity(mask, source.chunk_rows)
        for chunk in reversed(chunks) if term.goes_back else chunks:
            keep: Tensor | None = None
            index: slice | Tensor = chunk
            is_stored = chunk == stored
            # 1. Skip a chunk without active rows. If few rows are active, form the logits of these
            # rows only.
            if not term.needs_all_rows:
                keep = activity.keep(chunk)
                if keep is not None and keep.shape[0] == 0:
                    continue
                is_sparse = keep is not None and should_gather(keep, chunk.stop - chunk.start)
                if keep is not None and is_sparse and not is_stored:
                    index = keep + chunk.start
                    keep = None
            # 2. Compute the term and its d-logits.
            at = source.chunk(index)
            step = term.step(source, at, cached=is_stored)
            if step.d_logits is None:
                continue
            # 3. Select the rows that take part in the products, and add the gradients. Wait for the
            # number of active rows only now, while a GPU forms the logits.
            if term.needs_all_rows:
                keep = activity.keep(chunk)
            if keep is not None and term.may_hide_nan and isinstance(sums, HeadSums):
                sums.propagate_nan(step.g)
            if source.skips and not source.on_gpu and mask is None:
                keep = step.active().nonzero()[:, 0]
            source.add(sums, at, step.d_logits, keep)
        source.release()

    def _over_vocabulary(self, term: RowTerm) -> RowTerm:
        """Return the part of a term that the full vocabulary computes.

        These are the entropies of all rows, and the logps and divergences of the rows without a
        token set.
        """
        assert self.sets is not None and self.dense is not None
        index = self.sets.support.row_index
        if isinstance(term, Sum):
            own = self._over_vocabulary(term.second)
            return own if index is None else Sum(term.first, own)
        if not isinstance(term, Known):
            raise TypeError(f"{type(term).__name__} computes entropies over the token sets")
        if self._full_stats is None:  # the forward pass ran in a different object
            self._full_stats = self._logps(self.dense, return_entropy=True, stores=False)
        g = torch.zeros_like(term.g) if index is None else term.g.index_fill(0, index, 0.0)
        return Known(g, term.g_entropy, self._full_stats)

    def _without_entropy(self, term: RowTerm) -> RowTerm:
        """Return the part of a term that the token sets compute."""
        if isinstance(term, Sum):
            return Sum(term.first, self._without_entropy(term.second))
        assert isinstance(term, Known)
        return Known(term.g, None, (*term.stats[:2], None))


class Activity:
    """The active rows of each chunk. A row is active if its coefficient is not 0.

    At most one asynchronous read of the device finds the number of active rows of all chunks.

    Args:
        active: (T,) bool; None: all rows are active, and the device is not read.
        chunk_rows: number of rows per chunk.
    """

    def __init__(self, active: Tensor | None, chunk_rows: int) -> None:
        self.active = active
        self.chunk_rows = chunk_rows
        # During CUDA graph capture, the host cannot read the counts, so treat all rows as active.
        if active is None or is_capturing(active):
            self.active = None
            return
        missing = -active.shape[0] % chunk_rows
        padded = torch.nn.functional.pad(active, (0, missing)) if missing else active
        # Start copying the counts to the host now, so that the copy overlaps with the first GEMM.
        self._counts = read_later(padded.view(-1, chunk_rows).sum(1))

    def keep(self, chunk: slice) -> Tensor | None:
        """Return the (n,) int64 indices of active rows in a chunk, or None if all are active."""
        if self.active is None:
            return None
        count = self._counts()[chunk.start // self.chunk_rows]
        if count == chunk.stop - chunk.start:
            return None
        # Use nonzero_static with the known count. `nonzero` would synchronise to find the count.
        return torch.nonzero_static(self.active[chunk], size=count)[:, 0]


def read_later(x: Tensor) -> Callable[[], list[int]]:
    """Start copying the integers of x to the host. Return a function that waits for them."""
    if not x.is_cuda:
        return x.tolist
    # Copy asynchronously, because a blocking copy would wait for all queued kernels.
    host, arrived = copy_to_host_async(x)

    def read() -> list[int]:
        arrived.synchronize()
        return host.tolist()

    return read


def linear_driver(
    tensors: HeadTensors,
    rows: ActiveRows,
    route: Route,
    *,
    shard: VocabularyShard | None = None,
    entropy_gradient: bool = False,
    full_entropy: bool = False,
    keep_fp32: bool = False,
    needs_d_weight: bool = False,
    tolerance: float | None = None,
    buffers: int = 1,
    adds_terms: bool = False,
) -> Driver:
    """Create the driver of an LM head.

    Args:
        tensors: hidden, weight and bias.
        rows: the active rows and their token sets, if any.
        route: the selected kernels.
        shard: this rank's vocabulary shard, if weight and bias are sharded. The statistics and dH
            are then those of the full LM head, and dW and db are those of the shard.
        entropy_gradient: whether the coefficients will include dL/dentropy.
        full_entropy: with token sets, compute entropies over the full vocabulary.
        keep_fp32: return dH, dW and db in the dtype of their sums, at least fp32.
        needs_d_weight: whether dW will be computed.
        tolerance: fraction of Σ|d-logits| that the gradient GEMMs may skip (sums.py).
        buffers: number of buffers for the logits of a chunk. The second holds a teacher's logits.
        adds_terms: whether the term will be a sum.
    """
    support = rows.support
    sets = None if support is None else sets_of_head(tensors, rows, route)
    of_dense: ActiveRows | None = rows
    if support is not None:
        index = support.dense_index
        of_dense = None if index is None else rows.select(index)
        of_dense = rows._replace(support=None) if full_entropy else of_dense
    in_parts = sets is not None
    dense: DenseHead | None = None
    if of_dense is not None:
        options: dict[str, Any] = dict(
            needs_d_weight=needs_d_weight and shard is None, in_parts=in_parts or keep_fp32,
            filters=tolerance is not None, buffers=buffers,
        )  # fmt: skip
        stores_logits = entropy_gradient or full_entropy
        if shard is not None:
            dense = ShardedHead(tensors, of_dense, route, shard, **options)
        elif route.exponentials is not None and not stores_logits:
            dense = ExponentialHead(tensors, of_dense, route, **options)
        else:
            dense = DenseHead(tensors, of_dense, route, **options)
    if sets is not None:
        sets.needs_d_logits = adds_terms or (entropy_gradient and not full_entropy)
    source = sets if dense is None else dense
    assert source is not None

    def new_sums(wanted: Wanted) -> HeadSums:
        return source.sums(
            wanted, in_parts=dense is not None and in_parts, keep_fp32=keep_fp32,
            tolerance=tolerance, overlaps=full_entropy and sets is not None,
        )  # fmt: skip

    return Driver(rows, dense, sets, new_sums, full_entropy=full_entropy and sets is not None)


def logits_driver(
    logits: Tensor,
    out: Tensor | None,
    rows: ActiveRows,
    route: Route,
    *,
    full_entropy: bool = False,
) -> Driver:
    """Create the driver of given logits.

    Args:
        logits: (N, V), with contiguous rows.
        out: (N, V) buffer for d-logits, which may be `logits` itself; None: it is allocated.
        rows: the active rows and their token sets, if any.
        route: the kernels of the backend.
        full_entropy: with token sets, compute entropies over the full vocabulary.
    """
    sums = LogitSums(logits, out)
    support = rows.support
    if support is None:
        return Driver(rows, GivenLogits(logits, rows, route, sums), None, sums.start)
    of_dense = None if support.dense_index is None else rows.select(support.dense_index)
    of_dense = rows._replace(support=None) if full_entropy else of_dense
    dense = None if of_dense is None else GivenLogits(logits, of_dense, route, sums)
    sets = GivenSets(logits, rows, route)
    return Driver(rows, dense, sets, sums.start, full_entropy=full_entropy)
