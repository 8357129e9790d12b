"""hidden → loss: the chunk loop over rows, one for all devices. Nothing of size N·V ever exists.

For each chunk of C rows: hidden·Wᵀ and its statistics lse, logp, entropy → coefficients
(grpo_fast/objective) → d-logits → dH = d·W, dW += dᵀ·hidden in fp32. Chunks come in two kinds
(chunks.py). 6·N·V·H flops when the coefficients of a chunk follow from the chunk (token-level
losses, or everything in one chunk); otherwise the last chunk is kept and the others are formed
again, up to 8·N·V·H; 2·N·V·H without gradients. Workspace: one chunk, bounded by
`workspace_bytes()` whatever N is, plus an fp32 dW where the weight has 16 bits. On a GPU one chunk
that takes no more than these two together needs no fp32 dW, and is preferred.

A row's logp and dH depend on that row, W and its scalars only, bit for bit: each GEMM sees at least
ROW_MULTIPLE rows (zero-padded), so a small batch meets the same GEMM kernel as a large one. (On a
GPU that is so for logps, from a kernel of ours; whether the vendor's dH keeps it for every number
of rows is not measured.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.head.activity import Activity, active_rows, known_active
from grpo_fast.kernels.head.chunks import ExponentialChunks, LogitChunks
from grpo_fast.kernels.head.grad_filter import filtered_shares
from grpo_fast.kernels.head.gradients import GradientSums, gathers
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


class LinearHead:
    """One pass of T active rows through the head: logits by chunk, and the gradients that come
    back.

    Args:
        rows: the targets, their transform, and the rows of hidden that predict them.
        route: what runs.
        tolerance: share of Σ|d-logits| that the gradient GEMMs may leave out (grad_filter.py).
        entropy_gradient: the coefficients will have a dL/dentropy.
        keep_fp32: dH, dW and db are returned as they are summed, in fp32 at least.
        needs_d_weight: dW will be asked for.
        shard: weight and bias are the rows of one rank; the outputs are those of the whole head, dW
            and db those of the rank (vocabulary.py).
    """

    def __init__(
        self,
        tensors: HeadTensors,
        rows: ActiveRows,
        route: Route,
        *,
        tolerance: float | None = None,
        entropy_gradient: bool = False,
        keep_fp32: bool = False,
        needs_d_weight: bool = False,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.tensors = tensors
        self.rows = rows
        self.hidden, self.weight, self.bias = tensors
        self.kernels = route.kernels
        self.head_logps = route.kernels.head_logps
        self.shard = shard
        self.on_gpu = self.weight.is_cuda or route.backend == "triton"
        self.tolerance = tolerance
        self.keep_fp32 = keep_fp32
        self.num_rows = rows.target_ids.shape[0]
        self.chunk = self._chunks_of(route, entropy_gradient)
        self.d_weight_16_bit = (
            self.on_gpu
            and not keep_fp32
            and self.chunk.allows_16_bit_d_weight(padded(self.num_rows))
        )
        self.chunk_rows = self._chunk_rows(needs_d_weight)
        self.chunk.max_rows = padded(min(self.chunk_rows, self.num_rows))
        # The chunk whose logits or exponentials are in the workspace, from `logps`.
        self.cached: slice | None = None
        # (2,) what the filter left out, from the last gradients.
        self.filtered: Tensor | None = None

    def _chunks_of(self, route: Route, entropy_gradient: bool) -> LogitChunks:
        head = self.weight, self.bias, route
        if self.shard is not None:
            return VocabularyChunks(*head, self.shard)
        if route.exponentials is not None and not entropy_gradient:
            return ExponentialChunks(*head)
        return LogitChunks(*head)

    def _chunk_rows(self, needs_d_weight: bool) -> int:
        """All rows where one chunk takes no more than several and their fp32 dW; else as many as
        the workspace holds, evened out. Ranks that share a vocabulary cut by the largest shard.
        """
        bytes_per_logit = self.chunk.bytes_per_logit
        device = self.weight.device
        columns = self.shard.widest if self.shard else self.weight.shape[0]
        row_bytes = max(columns, 1) * bytes_per_logit
        # What the filter leaves of dW is summed in fp32.
        allows_16_bit = self.d_weight_16_bit and self.tolerance is None and self.shard is None
        single_16_bit = needs_d_weight and allows_16_bit
        spared = 4 * self.weight.numel() if single_16_bit else 0
        if spared and self.num_rows * row_bytes <= workspace_bytes(device, bytes_per_logit, spared):
            return max(padded(self.num_rows), padded(1))
        most = max(workspace_bytes(device, bytes_per_logit) // row_bytes, 1)
        chunks = -(-self.num_rows // most) or 1
        return max(padded(-(-self.num_rows // chunks)), padded(1))

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.num_rows, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.num_rows))

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether what is cached gives the gradient of an entropy."""
        return self.chunk.has_entropy_gradient

    @property
    def is_single_chunk(self) -> bool:
        return self.num_rows <= self.chunk_rows

    def _hidden(self, chunk: slice) -> Tensor:
        index = self.rows.hidden_index
        return self.hidden[chunk] if index is None else self.hidden.index_select(0, index[chunk])

    def _rows_of(self, chunk: slice) -> ChunkRows:
        """The rows of a chunk, zero rows added up to a multiple of ROW_MULTIPLE."""
        h = pad_rows(self._hidden(chunk)).contiguous()
        return ChunkRows(h, self.rows.target_ids[chunk], self.rows.transform.rows(chunk))

    def _sums(self, wanted: Wanted) -> GradientSums:
        return GradientSums(
            self.tensors, wanted, index=self.rows.hidden_index,
            repeats=self.rows.repeats, keep_fp32=self.keep_fp32, tolerance=self.tolerance,
            is_single_chunk=self.is_single_chunk and (self.d_weight_16_bit or not self.on_gpu),
            fused_kernels=self.kernels.gradients,
            sum_hidden=self.shard.summed if self.shard else None,
        )  # fmt: skip

    def _finished(self, sums: GradientSums) -> tuple[Tensor, Tensor, Tensor]:
        self.chunk.release()
        if self.tolerance is not None:
            self.filtered = filtered_shares(sums.filtered, self.hidden.device)
        return sums.finish()

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """(lse, logps, entropy) of all active rows, (T,) fp32: 2·T·V·H.

        With `keep` the last chunk stays in the workspace, ready for `gradients`.
        """
        parts = []
        chunks = list(self.chunks())
        if self.head_logps is not None and not keep and self.num_rows:
            chunks = [slice(0, self.num_rows)]
        for chunk in chunks:
            if self.head_logps is not None and not (keep and chunk == chunks[-1]):
                targets = self.rows.target_ids[chunk]
                transform = self.rows.transform.rows(chunk)
                head = self._hidden(chunk), self.weight, self.bias
                stats = self.head_logps(*head, targets, transform, return_entropy=return_entropy)
            else:
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
        """One sweep, 6·T·V·H: row losses and (dH, dW, db), coefficients following row by row."""
        sums = self._sums(wanted)
        parts = []
        # A GPU is not waited for: there a row that only its logp makes inactive (it is clipped)
        # is multiplied, as zeros.
        activity = Activity(known_active(terms, config) if self.on_gpu else None, self.chunk_rows)
        for chunk in self.chunks():
            at = self._rows_of(chunk)
            here = terms.rows(chunk)
            d_logits, part = self.chunk.row_loss(at, here, config)
            if self.on_gpu:
                keep = activity.keep(chunk)
                sums.propagate_nan(part.grad_logps, keep)
            else:
                keep = active_rows(part.grad_logps, here.grad_entropy).nonzero()[:, 0]
            sums.add(chunk, at.hidden, d_logits, len(at.target_ids), keep)
            parts.append(part)
        return RowLoss(*concat_chunks(parts, self.hidden)), self._finished(sums)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dH, dW, db) of Σ g·logp + g_entropy·entropy, all (T,), after `logps` gave `known`.

        The chunk that `logps` kept comes first; the active rows of the others are computed again.
        """
        sums = self._sums(wanted)
        chunks = list(self.chunks()) if any(wanted) else []
        activity = Activity(active_rows(g, g_entropy) if chunks else None, self.chunk_rows)
        index: slice | Tensor
        for chunk in reversed(chunks):
            keep = activity.keep(chunk)
            if keep is not None and keep.shape[0] == 0:
                continue
            at = self._rows_of(chunk)
            index = chunk
            is_cached = chunk == self.cached
            self.cached = None
            if not is_cached and keep is not None and gathers(keep, len(at.target_ids)):
                h, targets, transform = at
                at = ChunkRows(
                    pad_rows(h.index_select(0, keep)), targets[keep], transform.rows(keep)
                )
                index = keep + chunk.start
                keep = None
            stats = pick(index, *known)
            here = pick(index, g, g_entropy)
            d_logits = self.chunk.gradients(at, stats, *here, cached=is_cached)
            sums.add(index, at.hidden, d_logits, len(at.target_ids), keep)
        return self._finished(sums)


def concat_chunks(parts: Sequence[tuple[Any, ...]], like: Tensor) -> tuple[Any, ...]:
    if not parts:
        return tuple(like.new_empty(0, dtype=torch.float32) for _ in range(3))
    if len(parts) == 1:
        return parts[0]
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))
