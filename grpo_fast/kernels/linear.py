"""hidden → loss: the chunk loop over rows, one for all devices. Nothing of size N·V ever exists.

For each chunk of C rows: logits = hidden·Wᵀ in fp32 (vendor GEMM) → lse, logp, entropy (row kernel) → coefficients
(tokens.py) → d-logits over the logits (row kernel) → dH = d·W, dW += dᵀ·hidden in fp32. 6·N·V·H flops when the
coefficients of a chunk follow from the chunk (token-level losses, or everything in one chunk); otherwise the last
chunk's logits are kept and those of the others formed again, up to 8·N·V·H; 2·N·V·H without gradients. Workspace: one
chunk, 4·C·V bytes, bounded by `workspace_bytes()` whatever N is, plus an fp32 dW where the weight has 16 bits.

A row's logp and dH depend on that row, W and its scalars only, bit for bit: each GEMM sees at least ROW_MULTIPLE rows
(zero-padded), so a small batch meets the same GEMM kernel as a large one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import Backend
from grpo_fast.kernels.grad_filter import WORTH_BELOW, Filtered, column_masses, heavy_columns
from grpo_fast.kernels.memory import on_huge_pages, workspace_bytes
from grpo_fast.kernels.products import accumulate_outer, matmul_narrow, matmul_wide
from grpo_fast.kernels.rows_torch import LogitRule, RowLoss, RowSums, row_coefficients
from grpo_fast.kernels.tokens import FusedInputs

# Rows per GEMM are a multiple of this: below 8 rows MKL takes another kernel, with another order of summation.
ROW_MULTIPLE = 32
# Gather the active rows of a chunk before the gradient GEMMs when fewer than this fraction of them are active.
GATHER_BELOW = 0.9


class Wanted(NamedTuple):
    """Which gradients somebody will read."""

    hidden: bool
    weight: bool
    bias: bool


# (lse, logps, entropy or None) of some rows, each (C,) fp32
RowStats = tuple[Tensor, Tensor, Tensor | None]


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
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.target_ids, self.rule, self.index, self.backend = target_ids, rule, index, backend
        self.rows_repeat, self.grad_filter = rows_repeat, grad_filter
        self.filtered = Filtered.none(hidden) if grad_filter is not None else None
        self.num_rows = target_ids.shape[0]
        self.vocab_size = weight.shape[0]
        self.compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.chunk_rows = self._chunk_rows()
        self._logits: Tensor | None = None
        self.held: slice | None = None  # the chunk whose raw logits are in the workspace, from `logps`

    def _chunk_rows(self) -> int:
        """Rows per chunk: as many as the workspace holds, evened out over the chunks."""
        row_bytes = max(self.vocab_size, 1) * self.compute_dtype.itemsize
        most = max(workspace_bytes(self.weight.device) // row_bytes, 1)
        chunks = -(-self.num_rows // most) or 1
        even = -(-self.num_rows // chunks)
        return max(padded(even), ROW_MULTIPLE)

    def heavy_columns(self, d: Tensor) -> Tensor | None:
        """The columns of (C, V) d-logits that `grad_filter` leaves for the gradient GEMMs; None for all of them."""
        if self.grad_filter is None or self.filtered is None:
            return None
        columns, dropped, total = heavy_columns(column_masses(d), self.grad_filter)
        rows, kept = d.shape[0], columns.shape[0]
        if kept >= WORTH_BELOW * self.vocab_size:
            self.filtered = self.filtered.add(0.0, total, rows, self.vocab_size, self.vocab_size)
            return None
        self.filtered = self.filtered.add(dropped, total, rows, kept, self.vocab_size)
        return columns

    def chunks(self) -> Iterator[slice]:
        """Slices of the active rows, in order."""
        for start in range(0, self.num_rows, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.num_rows))

    @property
    def is_single_chunk(self) -> bool:
        return self.num_rows <= self.chunk_rows

    def gathers(self, keep: Tensor, count: int) -> bool:
        """Whether so few of `count` rows are kept that copying them beats multiplying zeros."""
        return keep.shape[0] < GATHER_BELOW * count

    def hidden_rows(self, rows: slice) -> Tensor:
        """(padded C, H): the hidden rows of a chunk, zero rows added up to a multiple of ROW_MULTIPLE."""
        h = self.hidden[rows] if self.index is None else self.hidden.index_select(0, self.index[rows])
        missing = padded(h.shape[0]) - h.shape[0]
        return torch.nn.functional.pad(h, (0, 0, 0, missing)) if missing else h.contiguous()

    def workspace(self, rows: int) -> Tensor:
        """(rows, V): the one buffer of logits of this pass."""
        if self._logits is None:
            most = padded(min(self.chunk_rows, self.num_rows))
            self._logits = on_huge_pages(self.hidden.new_empty((most, self.vocab_size), dtype=self.compute_dtype))
        return self._logits[:rows]

    def raw_logits(self, h: Tensor, out: Tensor) -> None:
        """out (C, V) = h·Wᵀ + bias in fp32."""
        matmul_wide(h, self.weight, out=out)
        if self.bias is not None:
            out.add_(self.bias)

    def forward(self, h: Tensor, target_ids: Tensor, rule: LogitRule, return_entropy: bool) -> tuple[Tensor, RowStats]:
        """Raw logits (padded C, V) in the workspace, and lse, logp, entropy of the first C = len(target_ids) rows."""
        z, count = self.workspace(h.shape[0]), target_ids.shape[0]
        if self.backend.linear_logps is not None:
            return z, self.backend.linear_logps(
                h[:count], self.weight, self.bias, target_ids, rule, return_entropy=return_entropy, logits_out=z[:count]
            )
        self.raw_logits(h, z)
        return z, self.backend.row_logps(z[:count], target_ids, rule, return_entropy=return_entropy)

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """(lse, logps, entropy) of all active rows, (T,) fp32. Without gradients this is the whole work: 2·T·V·H.

        With `keep` the last chunk's logits stay in the workspace, ready for `gradients`.
        """
        parts, store_free = [], self.backend.linear_logps is not None
        chunks = list(self.chunks())
        if store_free and not keep and self.num_rows:
            chunks = [slice(0, self.num_rows)]
        for rows in chunks:
            h, targets, rule = self.hidden_rows(rows), self.target_ids[rows], self.rule.rows(rows)
            if self.backend.linear_logps is not None and not (keep and rows == chunks[-1]):
                h = h[: targets.shape[0]]
                stats = self.backend.linear_logps(
                    h, self.weight, self.bias, targets, rule, return_entropy=return_entropy
                )
            else:
                _, stats = self.forward(h, targets, rule, return_entropy)
                self.held = rows
            parts.append(stats)
        if not keep:
            self.held = self._logits = None
        return joined(parts, self.hidden)

    def row_loss(
        self, h: Tensor, target_ids: Tensor, inputs: FusedInputs, config: LossConfig, rule: LogitRule
    ) -> tuple[Tensor, RowLoss]:
        """d-logits (padded C, V) in the workspace, and the losses of the first C = len(target_ids) rows."""
        count, has_entropy = target_ids.shape[0], config.needs_entropy
        if self.backend.linear_logps is None:
            z = self.workspace(h.shape[0])
            self.raw_logits(h, z)
            chunk = z[:count]
            return z, self.backend.row_loss_(
                chunk, chunk, target_ids, *inputs, config, rule, return_entropy=has_entropy
            )
        # A kernel of its own gives the logps wherever no gradient is wanted: the same one must give them here.
        z, stats = self.forward(h, target_ids, rule, has_entropy)
        losses, g = row_coefficients(stats[1], *inputs[:5], config)
        self.backend.row_grad_(z[:count], target_ids, *stats, g, inputs.grad_entropy, rule)
        return z, RowLoss(*stats, losses, g)

    def loss_gradients(
        self, inputs: FusedInputs, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, Tensor, Tensor]]:
        """One sweep, 6·T·V·H: row losses and (dH, dW, db) of a loss whose coefficients follow row by row."""
        sums, parts = GradientSums(self, wanted), []
        for rows in self.chunks():
            h, targets, rule = self.hidden_rows(rows), self.target_ids[rows], self.rule.rows(rows)
            chunk = inputs if self.is_single_chunk else inputs.map(lambda x, rows=rows: x[rows])  # type: ignore[misc]
            z, part = self.row_loss(h, targets, chunk, config, rule)
            count = targets.shape[0]
            is_full = part.sums is not None and part.sums.active == count
            keep = None if is_full else active_rows(part.grad_logps, chunk.grad_entropy)
            sums.add(rows, h, z, count, keep)
            parts.append(part)
        return joined(parts, self.hidden), sums.finish()

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dH, dW, db) of Σ g·logp + g_entropy·entropy, all (T,), after a sweep of `logps` that gave `known`.

        The chunk that `logps` kept comes first; the logits of the others are computed again, for active rows only.
        """
        sums = GradientSums(self, wanted)
        for rows in reversed(list(self.chunks())) if any(wanted) else ():
            keep = active_rows(g[rows], None if g_entropy is None else g_entropy[rows])
            if keep.shape[0] == 0:
                continue
            h, count = self.hidden_rows(rows), self.target_ids[rows].shape[0]
            index: slice | Tensor = rows
            is_held, self.held = rows == self.held, None
            if not is_held and self.gathers(keep, count):
                h, count = pad_rows(h.index_select(0, keep)), keep.shape[0]
                index, keep = keep + rows.start, torch.arange(count, device=keep.device)
            lse, logps, entropy = (None if x is None else x[index] for x in known)
            targets, rule = self.target_ids[index], self.rule.rows(index)
            if is_held:
                z = self.workspace(h.shape[0])
            else:
                z, _ = self.forward(h, targets, rule, False)
            g_chunk, h_chunk = g[index], None if g_entropy is None else g_entropy[index]
            self.backend.row_grad_(z[:count], targets, lse, logps, entropy, g_chunk, h_chunk, rule)
            sums.add(index, h, z, count, keep)
        return sums.finish()


class GradientSums:
    """dH by rows, dW and db in fp32 over the chunks of a `LinearHead`."""

    def __init__(self, head: LinearHead, wanted: Wanted) -> None:
        self.head, self.wanted = head, wanted
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None

    def add(self, rows: slice | Tensor, h: Tensor, d: Tensor, count: int, keep: Tensor | None) -> None:
        """Add one chunk.

        Args:
            rows: the chunk among the T active rows.
            h: (padded C, H) its hidden rows. d: (padded C, V) its d-logits.
            count: C, the rows that are no padding.
            keep: those with a coefficient, None for all; the others are exact zeros, left out of every GEMM when they
                are many.
        """
        if keep is not None and keep.shape[0] == 0:
            return
        index = rows if self.head.index is None else self.head.index[rows]
        if keep is not None and self.head.gathers(keep, count):
            h, d = (pad_rows(x.index_select(0, keep)) for x in (h, d))
            index, count = keep + index.start if isinstance(index, slice) else index[keep], keep.shape[0]
        elif count < d.shape[0]:
            d[count:].zero_()
        self._multiply(d, h, count, index)

    def _multiply(self, d: Tensor, h: Tensor, count: int, index: slice | Tensor) -> None:
        hidden, weight = self.head.hidden, self.head.weight
        columns = self.head.heavy_columns(d[:count])
        if columns is not None:
            d, weight = d.index_select(1, columns), weight.index_select(0, columns)
        if self.wanted.hidden:
            dh = matmul_narrow(d, weight)[:count]
            if self.head.rows_repeat:
                assert isinstance(index, Tensor)
                if self.d_hidden is None:
                    self.d_hidden = torch.zeros(hidden.shape, dtype=self.head.compute_dtype, device=hidden.device)
                # With accumulate=True equal rows are summed in their order, on a GPU too (index_add_ is not).
                self.d_hidden.index_put_((index,), dh.to(self.d_hidden.dtype), accumulate=True)
            elif count == hidden.shape[0] and isinstance(index, slice):
                self.d_hidden = dh.to(hidden.dtype)
            else:
                if self.d_hidden is None:
                    self.d_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
                self.d_hidden[index] = dh.to(hidden.dtype)
        if columns is not None:
            self._add_columns(columns, d, h)
            return
        if self.wanted.weight:
            self.d_weight = accumulate_outer(self.d_weight, d, h, weight, is_only=self.head.is_single_chunk)
        if self.wanted.bias:
            self.d_bias = d.sum(0) if self.d_bias is None else self.d_bias + d.sum(0)

    def _add_columns(self, columns: Tensor, d: Tensor, h: Tensor) -> None:
        """dW and db of the columns that `grad_filter` leaves; every column occurs once, so no order is in question."""
        vocab, dtype = self.head.vocab_size, self.head.compute_dtype
        if self.wanted.weight:
            if self.d_weight is None:
                self.d_weight = d.new_zeros((vocab, h.shape[1]), dtype=dtype)
            own = h.new_empty((columns.shape[0], h.shape[1]), dtype=dtype)
            self.d_weight.index_add_(0, columns, accumulate_outer(None, d, h, own, is_only=True))
        if self.wanted.bias:
            self.d_bias = d.new_zeros(vocab, dtype=dtype) if self.d_bias is None else self.d_bias
            self.d_bias.index_add_(0, columns, d.sum(0, dtype=dtype))

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dH, dW, db) in the dtypes of hidden, weight and bias; empty where none was wanted."""
        head = self.head
        results = []
        for sum_, like, is_wanted in (
            (self.d_hidden, head.hidden, self.wanted.hidden),
            (self.d_weight, head.weight, self.wanted.weight),
            (self.d_bias, head.bias, self.wanted.bias),
        ):
            if not is_wanted:
                results.append(head.hidden.new_empty(0))
            elif sum_ is None:
                results.append(torch.zeros_like(like, memory_format=torch.contiguous_format))
            else:
                results.append(sum_ if sum_.dtype == like.dtype else sum_.to(like.dtype))
        return results[0], results[1], results[2]


def padded(count: int) -> int:
    """The next multiple of ROW_MULTIPLE."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    missing = padded(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


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
