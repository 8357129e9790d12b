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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.launch import is_capturing
from grpo_fast.kernels.head.given import GivenLogits, GivenSets, LogitSums
from grpo_fast.kernels.head.shards import ShardedHead, VocabularyShard
from grpo_fast.kernels.head.sources import DenseHead, ExponentialHead, RowSource
from grpo_fast.kernels.head.sums import HeadSums, should_gather
from grpo_fast.kernels.head.support import sets_of_head
from grpo_fast.kernels.head.terms import Known, RowTerm, TokenLevel, sum_of
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import ActiveRows, HeadTensors, RowLoss, RowStats, Wanted, elements_at
from grpo_fast.kernels.workspace import copy_to_host_async

Sums = HeadSums | LogitSums


class Driver:
    """A pass over all active rows of a call.

    Args:
        sources: pairs of a source and the positions of its rows among the active rows. The
            positions are None if the source has all rows.
        new_sums: creates the sums of the gradients.
    """

    def __init__(
        self, sources: Sequence[tuple[RowSource, Tensor | None]], new_sums: Callable[[Wanted], Sums]
    ) -> None:
        self.sources = sources
        self.new_sums = new_sums
        self.num_rows = sum(source.num_rows for source, _ in sources)
        self.has_entropy_gradient = all(source.has_entropy_gradient for source, _ in sources)
        self.filtered: Tensor | None = None  # (2,) shares of `HeadSums.filtered_shares`

    def logps(self, *, return_entropy: bool, stores: bool = False) -> RowStats:
        """Compute (lse, logps, entropy) of all active rows, (T,) fp32.

        With `stores`, the logits of the last chunk of each source are kept for `gradients`.
        """
        found = [
            self._logps(source, return_entropy=return_entropy, stores=stores)
            for source, _ in self.sources
        ]
        if len(found) == 1:
            return found[0]

        def merged(parts: Sequence[Tensor]) -> Tensor:
            # Leave the tensor uninitialised, because each row belongs to exactly one source.
            rows = parts[0].new_empty(self.num_rows)
            for (_, index), x in zip(self.sources, parts, strict=True):
                assert index is not None
                rows.index_copy_(0, index, x)
            return rows

        lse, logps, entropy = zip(*found, strict=True)
        return merged(lse), merged(logps), merged(entropy) if return_entropy else None

    def _logps(self, source: RowSource, *, return_entropy: bool, stores: bool) -> RowStats:
        parts = []
        chunks = source.chunks(stores=stores)
        for chunk in chunks:
            # Store the logits of the last chunk only, because there is room for one.
            keeps = stores and chunk == chunks[-1]
            at = source.chunk(chunk, stores=keeps)
            parts.append(source.logps(at, return_entropy=return_entropy, stores=keeps))
        if stores:
            source.stored = chunks[-1] if chunks else None
        else:
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
        for source, index in self.sources:
            self._accumulate(source, term, index, sums, wanted)
        self.filtered = sums.filtered_shares()
        return sums.finish()

    def token_level(
        self, policy: TokenLevel, other: RowTerm | None, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, ...]]:
        """Compute a token-level loss, its gradients and those of another term.

        Returns:
            The statistics, losses and coefficients of all active rows, and the gradients.
        """
        source, _ = self.sources[0]
        if len(self.sources) == 1:
            gradients = self.gradients(sum_of(other, policy), wanted)
            return RowLoss(*source.collect(policy.parts)), gradients
        # With two sources, there is no other term. Read the logits of both sources before the
        # gradient may overwrite them.
        terms = policy.terms
        stats = self.logps(return_entropy=policy.config.needs_entropy, stores=True)
        losses, g = source.kernels.row_coefficients(stats[1], terms, policy.config)
        known = Known(g, terms.grad_entropy, stats, counts_on_gpu=False)
        return RowLoss(*stats, losses, g), self.gradients(known, wanted)

    def _accumulate(
        self, source: RowSource, term: RowTerm, rows: Tensor | None, sums: Sums, wanted: Wanted
    ) -> None:
        """Add the gradients of the rows of one source to the sums.

        `rows` are the positions of the source's rows among the active rows; None: all.
        """
        stored = source.stored
        source.stored = None
        if not (any(wanted) or term.needs_all_rows):
            source.release()
            return

        def select(x: Tensor) -> Tensor:
            return source.spread(elements_at(x, rows))

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
            step = term.step(source, at._replace(cached=True) if is_stored else at)
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
    keep_fp32: bool = False,
    needs_d_weight: bool = False,
    tolerance: float | None = None,
    buffers: int = 1,
) -> Driver:
    """Create the driver of an LM head.

    Args:
        tensors: hidden, weight and bias.
        rows: the active rows and their token sets, if any.
        route: the selected kernels.
        shard: this rank's vocabulary shard, if weight and bias are sharded. The statistics and dH
            are then those of the full LM head, and dW and db are those of the shard.
        entropy_gradient: whether the coefficients will include dL/dentropy.
        keep_fp32: return dH, dW and db in the dtype of their sums, at least fp32.
        needs_d_weight: whether dW will be computed.
        tolerance: fraction of Σ|d-logits| that the gradient GEMMs may skip (sums.py).
        buffers: number of buffers for the logits of a chunk. The second holds a teacher's logits.
    """
    support = rows.support
    is_mixed = support is not None and support.dense_index is not None
    sources: list[tuple[RowSource, Tensor | None]] = []
    dense: DenseHead | None = None
    if support is None or is_mixed:
        index = None if support is None else support.dense_index
        own = rows if index is None else rows.select(index)
        # Skipping columns of small gradients needs an fp32 dW.
        spares = needs_d_weight and shard is None and tolerance is None
        options: dict[str, Any] = dict(
            in_parts=is_mixed or keep_fp32, spares=spares, buffers=buffers
        )
        if shard is not None:
            dense = ShardedHead(tensors, own, route, shard, **options)
        elif route.exponentials is not None and not entropy_gradient:
            dense = ExponentialHead(tensors, own, route, **options)
        else:
            dense = DenseHead(tensors, own, route, **options)
        sources.append((dense, index))
    if support is not None:
        sets = sets_of_head(tensors, rows, route)
        sets.needs_d_logits = entropy_gradient
        sources.append((sets, support.row_index))

    def new_sums(wanted: Wanted) -> HeadSums:
        return HeadSums(
            tensors, wanted, route.kernels.gradients, repeats=rows.repeats, in_parts=is_mixed,
            is_single_chunk=dense is not None and dense.is_single_chunk, keep_fp32=keep_fp32,
            tolerance=tolerance, sum_hidden=None if shard is None else shard.summed,
        )  # fmt: skip

    return Driver(sources, new_sums)


def logits_driver(logits: Tensor, out: Tensor | None, rows: ActiveRows, route: Route) -> Driver:
    """Create the driver of given logits.

    Args:
        logits: (N, V), with contiguous rows.
        out: (N, V) buffer for d-logits, which may be `logits` itself; None: it is allocated.
        rows: the active rows and their token sets, if any.
        route: the kernels of the backend.
    """
    sums = LogitSums(logits, out)
    support = rows.support
    sources: list[tuple[RowSource, Tensor | None]] = []
    if support is None or support.dense_index is not None:
        index = None if support is None else support.dense_index
        own = rows if index is None else rows.select(index)
        sources.append((GivenLogits(logits, own, route, sums), index))
    if support is not None:
        sources.append((GivenSets(logits, rows, route), support.row_index))
    return Driver(sources, sums.start)
