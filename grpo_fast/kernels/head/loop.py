"""Chunked pass over the LM head, from hidden states to loss and gradients without (N, V) tensors.

For each chunk of C rows, the pass computes the logits hidden·Wᵀ and their lse, logp and entropy.
From them, the loss functions in objective/ compute coefficients, which give the d-logits d. The
gradients are dH = d·W and dW += dᵀ·hidden, in fp32. A chunk is stored as logits or as exponentials
(chunks.py).

The cost is 6·N·V·H flops if the coefficients of a chunk depend on that chunk only. This is the case
for token-level losses and for a single chunk. Otherwise, the last chunk is cached and the others
are recomputed, which costs up to 8·N·V·H. Passes without gradient cost 2·N·V·H.

The workspace holds one chunk. `workspace_bytes()` limits its size for any N. 16-bit weights also
need an fp32 dW. On a GPU, all rows may instead form a single chunk, which needs no fp32 dW. This is
done if it takes no more memory than a smaller chunk and an fp32 dW.

By default, the logp and dH of a row depend only on that row, W and its scalars, bit for bit:

- On a CPU, the matrix product of csrc ensures this. In fp64, without AVX2 and FMA, and with
  GRPO_FAST_GEMM=vendor, torch computes the products. The last bits may then depend on the number of
  rows and of threads.
- On a GPU, a Triton kernel ensures it for logps. The vendor's GEMM computes dH there, and its bits
  were not compared between batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.head.activity import Activity, active_rows, known_active, saves_time
from grpo_fast.kernels.head.chunks import ExponentialChunks, LogitChunks
from grpo_fast.kernels.head.grad_filter import filtered_shares
from grpo_fast.kernels.head.gradients import GradientSums, should_gather
from grpo_fast.kernels.head.vocabulary import VocabularyChunks, VocabularyShard
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import (
    ActiveRows,
    ChunkRows,
    HeadTensors,
    RowLoss,
    RowStats,
    Wanted,
    pad_rows,
    padded,
    pick,
)
from grpo_fast.kernels.workspace import workspace_bytes
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig


@dataclass(eq=False)
class LinearHead:
    """A pass of T active rows through the LM head, which computes logits and gradients by chunk.

    Args:
        tensors: hidden, weight and bias.
        rows: targets, logit transform, and the rows of `hidden` that predict the targets.
        route: the selected kernels.
        tolerance: fraction of Σ|d-logits| that the gradient GEMMs may skip (grad_filter.py).
        entropy_gradient: whether the coefficients will include dL/dentropy.
        keep_fp32: return dH, dW and db in the dtype of their sums, at least fp32.
        needs_d_weight: whether dW will be computed.
        shard: this rank's vocabulary shard, if weight and bias are sharded. The statistics and dH
            are then those of the full LM head, and dW and db are those of the shard
            (vocabulary.py).
    """

    tensors: HeadTensors
    rows: ActiveRows
    route: Route
    _: KW_ONLY
    tolerance: float | None = None
    entropy_gradient: bool = False
    keep_fp32: bool = False
    needs_d_weight: bool = False
    shard: VocabularyShard | None = None

    def __post_init__(self) -> None:
        self.hidden, self.weight, self.bias = self.tensors
        self.kernels = self.route.kernels
        self.on_gpu = self.weight.is_cuda or self.route.backend == "triton"
        self.num_rows = self.rows.target_ids.shape[0]
        self.chunk = self._new_chunk()
        allowed = self.chunk.allows_16_bit_d_weight(padded(self.num_rows))
        self.d_weight_16_bit = self.on_gpu and not self.keep_fp32 and allowed
        self.chunk_rows = self._chunk_rows()
        # Whether the representation of a chunk supports the gradient of an entropy.
        self.has_entropy_gradient = self.chunk.has_entropy_gradient
        self.chunk.max_rows = padded(min(self.chunk_rows, self.num_rows))
        # The chunk whose logits or exponentials the last `logps` call left in the workspace.
        self.cached: slice | None = None
        # The (2,) result of `filtered_shares`, set by the last gradient computation.
        self.filtered: Tensor | None = None

    def _new_chunk(self) -> LogitChunks:
        """Create the object that stores a chunk as logits or as exponentials (chunks.py)."""
        head = self.weight, self.bias, self.route
        if self.shard is not None:
            return VocabularyChunks(*head, self.shard)
        if self.route.exponentials is not None and not self.entropy_gradient:
            return ExponentialChunks(*head)
        return LogitChunks(*head)

    def _chunk_rows(self) -> int:
        """Return the number of rows per chunk.

        All rows form one chunk if this takes no more memory than several chunks and their fp32 dW.
        Otherwise, chunks have equal size and fit into the workspace. Ranks that share a vocabulary
        use the size of the largest shard, so that they run the same number of collective calls.
        """
        bytes_per_logit = self.chunk.bytes_per_logit
        device = self.weight.device
        columns = self.shard.widest if self.shard else self.weight.shape[0]
        row_bytes = max(columns, 1) * bytes_per_logit
        # The gradient filter adds up dW in fp32, so a 16-bit dW is not possible with it.
        allows_16_bit = self.d_weight_16_bit and self.tolerance is None and self.shard is None
        # A single chunk does not need an fp32 dW, so its logits may use the memory that the fp32 dW
        # would take.
        spared = 4 * self.weight.numel() if self.needs_d_weight and allows_16_bit else 0
        if spared and self.num_rows * row_bytes <= workspace_bytes(device, bytes_per_logit, spared):
            return max(padded(self.num_rows), padded(1))
        most = max(workspace_bytes(device, bytes_per_logit) // row_bytes, 1)
        # Divide the rows evenly, because a small last chunk would need a full pass over W and dW
        # for a few rows.
        chunks = -(-self.num_rows // most) or 1
        return max(padded(-(-self.num_rows // chunks)), padded(1))

    def _flops(self, wanted: Wanted) -> int:
        """Return the number of flops of the gradient GEMMs of all rows."""
        return 2 * self.num_rows * self.weight.numel() * (wanted.hidden + wanted.weight)

    def chunks(self) -> Iterator[slice]:
        """Yield the range of rows of each chunk."""
        for start in range(0, self.num_rows, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.num_rows))

    def _hidden(self, chunk: slice) -> Tensor:
        index = self.rows.hidden_index
        return self.hidden[chunk] if index is None else self.hidden.index_select(0, index[chunk])

    def _rows_of(self, chunk: slice) -> ChunkRows:
        """Return the inputs of a chunk, zero-padded to a multiple of ROW_MULTIPLE rows."""
        h = pad_rows(self._hidden(chunk)).contiguous()
        return ChunkRows(h, self.rows.target_ids[chunk], self.rows.transform.rows(chunk))

    def _sums(self, wanted: Wanted) -> GradientSums:
        """Create the object that sums the gradients of this head over all chunks."""
        is_single_chunk = self.num_rows <= self.chunk_rows
        return GradientSums(
            self.tensors, wanted, index=self.rows.hidden_index,
            repeats=self.rows.repeats, keep_fp32=self.keep_fp32, tolerance=self.tolerance,
            is_single_chunk=is_single_chunk and (self.d_weight_16_bit or not self.on_gpu),
            fused_kernels=self.kernels.gradients,
            sum_hidden=self.shard.summed if self.shard else None,
        )  # fmt: skip

    def _finished(self, sums: GradientSums) -> tuple[Tensor, Tensor, Tensor]:
        """Release the workspace and return the final gradients."""
        self.chunk.release()
        if self.tolerance is not None:
            self.filtered = filtered_shares(sums.filtered, self.hidden.device)
        return sums.finish()

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """Compute (lse, logps, entropy) of all active rows, (T,) fp32, with 2·T·V·H flops.

        With `keep`, the last chunk stays in the workspace, and `gradients` can use it.
        """
        parts = []
        chunks = list(self.chunks())
        head_logps = self.kernels.head_logps
        if head_logps is not None and not keep and self.num_rows:
            # Process all rows at once if only statistics are needed. `head_logps` stores no logits,
            # so its memory does not grow with the number of rows.
            chunks = [slice(0, self.num_rows)]
        for chunk in chunks:
            # 1. Use `head_logps` for a chunk that need not be cached.
            if head_logps is not None and not (keep and chunk == chunks[-1]):
                targets = self.rows.target_ids[chunk]
                transform = self.rows.transform.rows(chunk)
                head = self._hidden(chunk), self.weight, self.bias
                stats = head_logps(*head, targets, transform, return_entropy=return_entropy)
            else:
                # 2. Otherwise, also store the chunk's logits or exponentials in the workspace.
                stats = self.chunk.logps(self._rows_of(chunk), return_entropy=return_entropy)
                self.cached = chunk
            parts.append(stats)
        if not keep:
            self.cached = None
            self.chunk.release()
        return concat_chunks(parts, self.hidden)

    def loss_gradients(
        self, terms: RowTerms, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, Tensor, Tensor]]:
        """Compute row losses and (dH, dW, db) in one pass of 6·T·V·H flops.

        The coefficient of a row must depend on that row only.
        """
        sums = self._sums(wanted)
        parts = []
        # On a GPU, select rows by advantages and weights, which are known now. A row may also have
        # the coefficient 0 because of its logp (by clipping). Such a row stays in the GEMMs as
        # zeros, because finding it would make the host wait for the GPU.
        active = known_active(terms, config, self._flops(wanted)) if self.on_gpu else None
        activity = Activity(active, self.chunk_rows)
        for chunk in self.chunks():
            at = self._rows_of(chunk)
            here = terms.rows(chunk)
            # 1. Compute logits, statistics, loss and d-logits of the chunk.
            d_logits, part = self.chunk.row_loss(at, here, config)
            # 2. Select the rows that take part in the GEMMs.
            if self.on_gpu:
                keep = activity.keep(chunk)
                sums.propagate_nan(part.grad_logps, keep)
            else:
                keep = active_rows(part.grad_logps, here.grad_entropy).nonzero()[:, 0]
            # 3. Add the gradients of the chunk to dH, dW and db.
            sums.add(chunk, at.hidden, d_logits, len(at.target_ids), keep)
            parts.append(part)
        return RowLoss(*concat_chunks(parts, self.hidden)), self._finished(sums)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (dH, dW, db) of Σ (g·logp + g_entropy·entropy).

        `known` contains the statistics that `logps` returned. The logits of a cached chunk are
        reused, and those of all other chunks are recomputed.
        """
        sums = self._sums(wanted)
        chunks = list(self.chunks()) if any(wanted) else []
        skips = chunks and saves_time(g, self._flops(wanted))
        activity = Activity(active_rows(g, g_entropy) if skips else None, self.chunk_rows)
        index: slice | Tensor
        # Start with the last chunk, because its logits may still be in the workspace.
        for chunk in reversed(chunks):
            keep = activity.keep(chunk)
            # 1. Skip a chunk without active rows.
            if keep is not None and keep.shape[0] == 0:
                continue
            at = self._rows_of(chunk)
            index = chunk
            is_cached = chunk == self.cached
            self.cached = None
            # If few rows are active, recompute the logits of these rows only.
            if not is_cached and keep is not None and should_gather(keep, len(at.target_ids)):
                h, targets, transform = at
                at = ChunkRows(
                    pad_rows(h.index_select(0, keep)), targets[keep], transform.rows(keep)
                )
                index = keep + chunk.start
                keep = None
            # 2. Compute the d-logits from the known statistics, and add the gradients to the sums.
            stats = pick(index, *known)
            here = pick(index, g, g_entropy)
            d_logits = self.chunk.gradients(at, stats, *here, cached=is_cached)
            sums.add(index, at.hidden, d_logits, len(at.target_ids), keep)
        return self._finished(sums)


def concat_chunks(parts: Sequence[tuple[Any, ...]], like: Tensor) -> tuple[Any, ...]:
    """Concatenate the results of all chunks. Return empty tensors if there are no chunks."""
    if not parts:
        return tuple(like.new_empty(0, dtype=torch.float32) for _ in range(3))
    if len(parts) == 1:
        return parts[0]
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))
