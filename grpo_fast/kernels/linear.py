"""hidden → loss: the chunk loop over rows, one for all devices. Nothing of size N·V ever exists.

For each chunk of C rows: logits = hidden·Wᵀ in fp32 (vendor GEMM) → lse, logp, entropy (row kernel) → coefficients
(tokens.py) → d-logits over the logits (row kernel) → dH = d·W, dW += dᵀ·hidden in fp32. 6·N·V·H flops when the
coefficients of a chunk follow from the chunk (token-level losses, or everything in one chunk), 8·N·V·H otherwise;
2·N·V·H without gradients. Workspace: one chunk, 4·C·V bytes, bounded by `workspace_bytes()` whatever N is, plus an
fp32 dW where the weight has 16 bits.

A row's logp and dH depend on that row, W and its scalars only, bit for bit: each GEMM sees at least ROW_MULTIPLE rows
(zero-padded), so a small batch meets the same GEMM kernel as a large one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.backends import Backend
from grpo_fast.kernels.rows_torch import LogitRule

# Rows per GEMM are a multiple of this: below 8 rows MKL takes another kernel, with another order of summation.
ROW_MULTIPLE = 32
# Vocabulary rows that are widened to fp32 at a time, where the device has no 16-bit GEMM with fp32 output.
WIDEN_ROWS = 16384
# Gather the active rows of a chunk before the gradient GEMMs when fewer than this fraction of them are active.
GATHER_BELOW = 0.9


def workspace_bytes(device: torch.device) -> int:
    """Bytes of logits held at a time: GRPO_FAST_WORKSPACE_MIB, by default 256 MiB on the CPU and 1 GiB on a GPU."""
    default = "1024" if device.type == "cuda" else "256"
    return int(os.environ.get("GRPO_FAST_WORKSPACE_MIB", default)) << 20


class Wanted(NamedTuple):
    """Which gradients somebody will read."""

    hidden: bool
    weight: bool
    bias: bool


# (lse, logps, entropy or None) of some rows, each (C,) fp32
RowStats = tuple[Tensor, Tensor, Tensor | None]
# (logps, entropy, rows of the chunk) → (dL/dlogp, dL/dentropy or None), all (C,)
Coefficients = Callable[[Tensor, Tensor | None, slice], tuple[Tensor, Tensor | None]]


class LinearHead:
    """One pass of T active rows through the head: logits by chunk, and the gradients that come back."""

    def __init__(
        self,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        target_ids: Tensor,  # (T,) int64, of the active rows
        rule: LogitRule,  # temperature: a float, or (T,)
        index: Tensor | None,  # (T,) the active rows of hidden; None: all of them
        backend: Backend,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.target_ids, self.rule, self.index, self.backend = target_ids, rule, index, backend
        self.num_rows = target_ids.shape[0]
        self.vocab_size = weight.shape[0]
        self.compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.chunk_rows = self._chunk_rows()
        self._logits: Tensor | None = None

    def _chunk_rows(self) -> int:
        """Rows per chunk: as many as the workspace holds, evened out over the chunks."""
        row_bytes = max(self.vocab_size, 1) * self.compute_dtype.itemsize
        most = max(workspace_bytes(self.weight.device) // row_bytes, 1)
        chunks = -(-self.num_rows // most) or 1
        even = -(-self.num_rows // chunks)
        return max(padded(even), ROW_MULTIPLE)

    def chunks(self) -> Iterator[slice]:
        """Slices of the active rows, in order."""
        for start in range(0, self.num_rows, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.num_rows))

    @property
    def is_single_chunk(self) -> bool:
        return self.num_rows <= self.chunk_rows

    def hidden_rows(self, rows: slice) -> Tensor:
        """(padded C, H): the hidden rows of a chunk, zero rows added up to a multiple of ROW_MULTIPLE."""
        h = self.hidden[rows] if self.index is None else self.hidden.index_select(0, self.index[rows])
        missing = padded(h.shape[0]) - h.shape[0]
        return torch.nn.functional.pad(h, (0, 0, 0, missing)) if missing else h.contiguous()

    def workspace(self, rows: int) -> Tensor:
        """(rows, V): the one buffer of logits of this pass."""
        if self._logits is None:
            most = padded(min(self.chunk_rows, self.num_rows))
            self._logits = self.hidden.new_empty((most, self.vocab_size), dtype=self.compute_dtype)
        return self._logits[:rows]

    def forward(self, h: Tensor, target_ids: Tensor, rule: LogitRule, return_entropy: bool) -> tuple[Tensor, RowStats]:
        """Raw logits (padded C, V) in the workspace, and lse, logp, entropy of the first C = len(target_ids) rows."""
        z, count = self.workspace(h.shape[0]), target_ids.shape[0]
        if self.backend.linear_logps is not None:
            return z, self.backend.linear_logps(
                h[:count], self.weight, self.bias, target_ids, rule, return_entropy=return_entropy, logits_out=z[:count]
            )
        matmul_wide(h, self.weight, out=z)
        if self.bias is not None:
            z.add_(self.bias)
        return z, self.backend.row_logps(z[:count], target_ids, rule, return_entropy=return_entropy)

    def logps(self, *, return_entropy: bool) -> RowStats:
        """(lse, logps, entropy) of all active rows, (T,) fp32. Without gradients this is the whole work: 2·T·V·H.

        For a single chunk the logits stay in the workspace, ready for `gradients`.
        """
        if self.backend.linear_logps is not None:
            h = self.hidden if self.index is None else self.hidden.index_select(0, self.index)
            return self.backend.linear_logps(
                h, self.weight, self.bias, self.target_ids, self.rule, return_entropy=return_entropy
            )
        parts = []
        for rows in self.chunks():
            _, stats = self.forward(self.hidden_rows(rows), self.target_ids[rows], self.rule.rows(rows), return_entropy)
            parts.append(stats)
        return joined(parts, self.hidden, return_entropy)

    def gradients(
        self, coefficients: Coefficients, wanted: Wanted, *, return_entropy: bool, known: RowStats | None = None
    ) -> tuple[RowStats, GradientSums]:
        """One sweep: logps of every row and the gradients of Σ g·logp + g_H·entropy.

        Args:
            coefficients: gives (g, g_H) of a chunk from its logps and entropy.
            wanted: gradients to form; no work is done for the others.
            return_entropy: compute the entropy (needed by g_H).
            known: (lse, logps, entropy) from an earlier `logps()` of the same rows. The logits of a single chunk are
                then still in the workspace; those of several chunks are computed again, for active rows only.
        """
        sums = GradientSums(self, wanted)
        parts: list[RowStats] = []
        for rows in self.chunks():
            h, z = self.hidden_rows(rows), None
            if known is None:
                z, stats = self.forward(h, self.target_ids[rows], self.rule.rows(rows), return_entropy)
                parts.append(stats)
            else:
                stats = tuple(None if x is None else x[rows] for x in known)  # type: ignore[assignment]
                if self.is_single_chunk and self._logits is not None:
                    z = self.workspace(h.shape[0])
            g, g_entropy = coefficients(stats[1], stats[2], rows)
            sums.add(rows, h, z, stats, g, g_entropy)
        self._logits = None
        return known or joined(parts, self.hidden, return_entropy), sums


class GradientSums:
    """dH by rows, dW and db in fp32 over the chunks of a `LinearHead`."""

    def __init__(self, head: LinearHead, wanted: Wanted) -> None:
        self.head, self.wanted = head, wanted
        hidden, weight = head.hidden, head.weight
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias = weight.new_zeros(weight.shape[0], dtype=head.compute_dtype) if wanted.bias else None

    def add(
        self, rows: slice, h: Tensor, z: Tensor | None, stats: RowStats, g: Tensor, g_entropy: Tensor | None
    ) -> None:
        """Add one chunk. Rows whose coefficients are zero are exact zeros, left out of every GEMM when they are many."""
        keep = (g if g_entropy is None else (g != 0) | (g_entropy != 0)).nonzero().squeeze(1)
        if keep.shape[0] == 0 or not any(self.wanted):
            return
        head = self.head
        index: slice | Tensor = rows if head.index is None else head.index[rows]
        targets, rule = head.target_ids[rows], head.rule.rows(rows)
        lse, logps, entropy = stats
        if keep.shape[0] < GATHER_BELOW * g.shape[0]:
            h = pad_rows(h.index_select(0, keep))
            z = None if z is None else pad_rows(z.index_select(0, keep))
            lse, logps, g, targets = (x.index_select(0, keep) for x in (lse, logps, g, targets))
            entropy, g_entropy = (None if x is None else x.index_select(0, keep) for x in (entropy, g_entropy))
            rule, index = rule.rows(keep), keep + rows.start if isinstance(index, slice) else index[keep]
        if z is None:
            z, _ = head.forward(h, targets, rule, False)
        count = g.shape[0]
        head.backend.row_grad_(z[:count], targets, lse, logps, entropy, g, g_entropy, rule)
        if count < z.shape[0]:
            z[count:].zero_()
        self._multiply(z, h, count, index)

    def _multiply(self, d: Tensor, h: Tensor, count: int, index: slice | Tensor) -> None:
        hidden = self.head.hidden
        if self.wanted.hidden:
            dh = matmul_narrow(d, self.head.weight)[:count].to(hidden.dtype)
            if count == hidden.shape[0] and isinstance(index, slice):
                self.d_hidden = dh
            else:
                if self.d_hidden is None:
                    self.d_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
                self.d_hidden[index] = dh
        if self.wanted.weight:
            self.d_weight = accumulate_outer(self.d_weight, d, h, self.head)
        if self.d_bias is not None:
            self.d_bias += d.sum(0)

    def finish(self, empty: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dH, dW, db) in the dtypes of hidden, weight and bias; `empty` where none was wanted."""
        weight, d_weight, d_bias = self.head.weight, self.d_weight, self.d_bias
        if self.wanted.weight:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        if d_bias is not None and self.head.bias is not None:
            d_bias = d_bias.to(self.head.bias.dtype)
        d_hidden = self.d_hidden
        if self.wanted.hidden and d_hidden is None:
            d_hidden = torch.zeros_like(self.head.hidden, memory_format=torch.contiguous_format)
        return tuple(empty.clone() if x is None else x for x in (d_hidden, d_weight, d_bias))  # type: ignore[return-value]


def padded(count: int) -> int:
    """The next multiple of ROW_MULTIPLE."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    missing = padded(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def joined(parts: list[RowStats], like: Tensor, return_entropy: bool) -> RowStats:
    """Concatenate the (lse, logps, entropy) of the chunks."""
    if len(parts) == 1:
        return parts[0]
    empty = like.new_empty(0, dtype=torch.float32)
    lse, logps = (torch.cat([empty, *(p[i] for p in parts)]) for i in (0, 1))
    return lse, logps, torch.cat([empty, *(p[2] for p in parts)]) if return_entropy else None


def is_wide(x: Tensor) -> bool:
    """True for fp32 and fp64, which GEMMs treat as they are."""
    return x.dtype.itemsize >= 4


def matmul_wide(h: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """out (C, V) fp32 = h (C, H) · weight (V, H)ᵀ, products exact and sums in fp32 for 16-bit inputs."""
    if is_wide(h):
        torch.mm(h, weight.t(), out=out)
    elif h.is_cuda:
        torch.mm(h, weight.t(), out_dtype=torch.float32, out=out)
    else:
        h = h.float()
        for v in range(0, weight.shape[0], WIDEN_ROWS):
            torch.mm(h, weight[v : v + WIDEN_ROWS].float().t(), out=out[:, v : v + WIDEN_ROWS])


def matmul_narrow(d: Tensor, weight: Tensor) -> Tensor:
    """(C, H) = d (C, V) fp32 · weight (V, H); on a GPU d is stored in the weight's 16 bits first."""
    if is_wide(weight):
        return d @ weight
    if weight.is_cuda:
        return d.to(weight.dtype) @ weight
    dh = d.new_zeros((d.shape[0], weight.shape[1]))
    for v in range(0, weight.shape[0], WIDEN_ROWS):
        dh.addmm_(d[:, v : v + WIDEN_ROWS], weight[v : v + WIDEN_ROWS].float())
    return dh


def accumulate_outer(total: Tensor | None, d: Tensor, h: Tensor, head: LinearHead) -> Tensor:
    """total (V, H) fp32 += dᵀ (V, C) · h (C, H). A single chunk on the CPU goes straight to the weight's dtype."""
    if is_wide(h):
        return d.t() @ h if total is None else total.addmm_(d.t(), h)
    if h.is_cuda:
        if total is None:
            return torch.mm(d.to(h.dtype).t(), h, out_dtype=torch.float32)
        return torch.addmm(total, d.to(h.dtype).t(), h, out_dtype=torch.float32, out=total)
    h = h.float()
    if total is None and not head.is_single_chunk:
        total = d.new_zeros(head.weight.shape)
    if total is not None:
        return total.addmm_(d.t(), h)
    total = torch.empty_like(head.weight, memory_format=torch.contiguous_format)
    for v in range(0, total.shape[0], WIDEN_ROWS):
        total[v : v + WIDEN_ROWS] = d[:, v : v + WIDEN_ROWS].t() @ h
    return total
