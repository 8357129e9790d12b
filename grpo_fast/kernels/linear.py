"""hidden → loss: the chunk loop over rows, one for all devices. Nothing of size N·V ever exists.

For each chunk of C rows: hidden·Wᵀ and its statistics lse, logp, entropy → coefficients (tokens.py) → d-logits →
dH = d·W, dW += dᵀ·hidden in fp32. Chunks come in two kinds (chunks.py): stored logits that a row kernel turns into
d-logits, and on a GPU, for bf16, 16-bit weights that are d-logits up to a coefficient by row. 6·N·V·H flops when the
coefficients of a chunk follow from the chunk (token-level losses, or everything in one chunk); otherwise the last chunk
is kept and the others are formed again, up to 8·N·V·H; 2·N·V·H without gradients. Workspace: one chunk, bounded by
`workspace_bytes()` whatever N is, plus an fp32 dW where the weight has 16 bits.

A row's logp and dH depend on that row, W and its scalars only, bit for bit: each GEMM sees at least ROW_MULTIPLE rows
(zero-padded), so a small batch meets the same GEMM kernel as a large one. (On a GPU that is so for logps, from a kernel
of ours; whether the vendor's dH keeps it for every number of rows is not measured.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import Backend
from grpo_fast.kernels.capture import is_capturing
from grpo_fast.kernels.chunks import LogitChunks, RowStats, WeightChunks
from grpo_fast.kernels.grad_filter import Filtered
from grpo_fast.kernels.gradient_sums import ROW_MULTIPLE, GradientSums, Wanted, gathers, pad_rows, padded
from grpo_fast.kernels.memory import workspace_bytes
from grpo_fast.kernels.rows_torch import LogitRule, RowLoss, RowSums
from grpo_fast.kernels.tokens import FusedInputs

__all__ = ["LinearHead", "RowStats", "Wanted"]


class LinearHead:
    """One pass of T active rows through the head: logits by chunk, and the gradients that come back."""

    def __init__(
        self,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        target_ids: Tensor,  # (T,) int64, of the active rows
        rule: LogitRule,  # temperature: a float, or (T,)
        index: Tensor | None,  # (T,) the row of hidden that predicts each target; None: row t predicts target t
        backend: Backend,
        *,
        rows_repeat: bool = False,  # a row of hidden may predict several targets: its gradients are summed
        grad_filter: float | None = None,  # share of Σ|d-logits| that the gradient GEMMs may leave out
        entropy_gradient: bool = False,  # the coefficients will have a dL/dentropy
        wide_gradients: bool = False,  # dH, dW and db are returned as they are summed, in fp32 at least
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.target_ids, self.rule, self.index = target_ids, rule, index
        self.backend = backend.for_head(weight)
        self.rows_repeat, self.grad_filter, self.wide_gradients = rows_repeat, grad_filter, wide_gradients
        self.filtered = Filtered.none(hidden) if grad_filter is not None else None
        self.num_rows = target_ids.shape[0]
        self.vocab_size = weight.shape[0]
        self.compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        has_weights = self.backend.stores is not None and self.backend.stores(weight) is not None
        kind = WeightChunks if has_weights and not entropy_gradient else LogitChunks
        self.chunk: LogitChunks | WeightChunks = kind(weight, bias, self.backend)
        self.has_entropy_gradient = isinstance(self.chunk, LogitChunks)
        self.chunk_rows = self._chunk_rows()
        self.chunk.most_rows = padded(min(self.chunk_rows, self.num_rows))
        self.held: slice | None = None  # the chunk whose logits or weights are in the workspace, from `logps`

    def _chunk_rows(self) -> int:
        """Rows per chunk: as many as the workspace holds, evened out over the chunks."""
        row_bytes = max(self.vocab_size, 1) * self.chunk.bytes_per_logit
        most = max(workspace_bytes(self.weight.device, self.chunk.bytes_per_logit) // row_bytes, 1)
        chunks = -(-self.num_rows // most) or 1
        even = -(-self.num_rows // chunks)
        return max(padded(even), ROW_MULTIPLE)

    def chunks(self) -> Iterator[slice]:
        """Slices of the active rows, in order."""
        for start in range(0, self.num_rows, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.num_rows))

    def gradient_dtype(self, of: Tensor) -> torch.dtype:
        """The dtype of the gradient of hidden, weight or bias."""
        return self.compute_dtype if self.wide_gradients else of.dtype

    @property
    def is_single_chunk(self) -> bool:
        return self.num_rows <= self.chunk_rows

    def hidden_rows(self, rows: slice) -> Tensor:
        """(C, H): the hidden rows of a chunk."""
        return self.hidden[rows] if self.index is None else self.hidden.index_select(0, self.index[rows])

    def padded_rows(self, rows: slice) -> Tensor:
        """(padded C, H): zero rows added up to a multiple of ROW_MULTIPLE."""
        return pad_rows(self.hidden_rows(rows)).contiguous()

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """(lse, logps, entropy) of all active rows, (T,) fp32. Without gradients this is the whole work: 2·T·V·H.

        With `keep` the last chunk stays in the workspace, ready for `gradients`.
        """
        parts, chunks = [], list(self.chunks())
        store_free = self.backend.linear_logps
        if store_free is not None and not keep and self.num_rows:
            chunks = [slice(0, self.num_rows)]
        for rows in chunks:
            targets, rule = self.target_ids[rows], self.rule.rows(rows)
            if store_free is not None and not (keep and rows == chunks[-1]):
                h = self.hidden_rows(rows)
                stats = store_free(h, self.weight, self.bias, targets, rule, return_entropy=return_entropy)
            else:
                stats = self.chunk.logps(self.padded_rows(rows), targets, rule, return_entropy=return_entropy)
                self.held = rows
            parts.append(stats)
        if not keep:
            self.held = None
            self.chunk.release()
        return joined(parts, self.hidden)

    def loss_gradients(
        self, inputs: FusedInputs, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, Tensor, Tensor]]:
        """One sweep, 6·T·V·H: row losses and (dH, dW, db) of a loss whose coefficients follow row by row."""
        sums, parts = GradientSums(self, wanted), []
        for rows in self.chunks():
            h, targets, rule = self.padded_rows(rows), self.target_ids[rows], self.rule.rows(rows)
            chunk = inputs if self.is_single_chunk else inputs.map(lambda x, rows=rows: x[rows])  # type: ignore[misc]
            d_logits, part = self.chunk.row_loss(h, targets, chunk, config, rule)
            count = targets.shape[0]
            is_full = part.sums is not None and part.sums.active == count
            keep = None if is_full or is_capturing(h) else active_rows(part.grad_logps, chunk.grad_entropy)
            sums.add(rows, h, d_logits, count, keep)
            parts.append(part)
        self.chunk.release()
        return joined(parts, self.hidden), sums.finish()

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dH, dW, db) of Σ g·logp + g_entropy·entropy, all (T,), after a sweep of `logps` that gave `known`.

        The chunk that `logps` kept comes first; the others are computed again, for active rows only.
        """
        sums = GradientSums(self, wanted)
        for rows in reversed(list(self.chunks())) if any(wanted) else ():
            keep = None
            if not is_capturing(g):
                keep = active_rows(g[rows], None if g_entropy is None else g_entropy[rows])
                if keep.shape[0] == 0:
                    continue
            h, count = self.padded_rows(rows), self.target_ids[rows].shape[0]
            index: slice | Tensor = rows
            is_held, self.held = rows == self.held, None
            if not is_held and keep is not None and gathers(keep, count):
                h, count = pad_rows(h.index_select(0, keep)), keep.shape[0]
                index, keep = keep + rows.start, torch.arange(count, device=keep.device)
            lse, logps, entropy = (None if x is None else x[index] for x in known)
            targets, rule = self.target_ids[index], self.rule.rows(index)
            g_chunk, h_chunk = g[index], None if g_entropy is None else g_entropy[index]
            d_logits = self.chunk.gradients(h, targets, rule, (lse, logps, entropy), g_chunk, h_chunk, held=is_held)
            sums.add(index, h, d_logits, count, keep)
        self.chunk.release()
        return sums.finish()


def active_rows(g: Tensor, g_entropy: Tensor | None) -> Tensor:
    """The rows with a coefficient that is not 0."""
    return (g if g_entropy is None else (g != 0) | (g_entropy != 0)).nonzero()[:, 0]


def joined(parts: list, like: Tensor) -> Any:
    """Concatenate the fields of the chunks' statistics (and add up their sums); a field that is None stays None."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        lse, logps, entropy = (like.new_empty(0, dtype=torch.float32) for _ in range(3))
        return lse, logps, entropy
    fields = [None if x[0] is None else join(x) for x in zip(*parts, strict=True)]
    return type(parts[0])(*fields) if hasattr(parts[0], "_fields") else tuple(fields)


def join(column: tuple) -> Any:
    return torch.cat(column) if isinstance(column[0], Tensor) else functools.reduce(RowSums.add, column)
