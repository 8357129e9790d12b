"""Logits of one chunk and their gradient, in two representations with the same methods.

    LogitChunks        Stores raw logits in fp32. A row kernel overwrites them with d-logits (4
                       bytes per logit), or on a GPU writes 16-bit d-logits to a second buffer (6
                       bytes per logit).
    ExponentialChunks  Stores exponentials E (2 bytes per logit in 16 bits, 4 in fp32). The epilogue
                       of the GEMM writes them once. The d-logits are E times a factor per row, so
                       no row kernel runs. gpu/exponentials.py defines E and the factors.

A chunk has C rows. Its buffers have the padded number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.head.gradients import ChunkGradients
from grpo_fast.kernels.head.products import is_full_precision, matmul_logits
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import (
    ChunkRows,
    Coefficients,
    Exponentials,
    RowLoss,
    RowStats,
    pad_rows,
)
from grpo_fast.kernels.workspace import give_back_workspace, take_workspace
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

# A 16-bit dW is computed from exponentials only if the number of targets is at most this fraction
# of the vocabulary size. If the targets of a row of dW nearly cancel the rest, the row is computed
# a second time (see gpu/target_rows.py). More targets could cause too many such rows.
TARGET_SHARE = 1 / 8
# Rows of a buffer for exponentials are padded to a multiple of this number of elements (128 bytes
# in 16 bits), so that they are aligned.
ROW_ELEMENTS = 64


class LogitChunks:
    """A chunk that stores logits, which a row kernel overwrites with d-logits."""

    has_entropy_gradient = True

    def __init__(self, weight: Tensor, bias: Tensor | None, route: Route) -> None:
        self.weight = weight
        self.bias = bias
        self.kernels = route.kernels
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        # On a GPU, the gradient GEMMs of a 16-bit weight need 16-bit d-logits. The row kernel then
        # writes d-logits in 16 bits, so that they are rounded only once.
        self.has_16_bit_gradient = not is_full_precision(weight) and (
            weight.is_cuda or route.backend == "triton"
        )
        gradient_bytes = weight.dtype.itemsize if self.has_16_bit_gradient else 0
        self.bytes_per_logit = self.dtype.itemsize + gradient_bytes
        # Compute loss and d-logits in one row kernel only if there is no `head_logps`. Passes
        # without gradients use `head_logps`. If gradient passes used the row kernel, their logps
        # would differ in the last bits.
        self.in_one_pass = route.kernels.head_logps is None
        self.max_rows = 0  # maximum number of rows of a chunk
        self.buffers = 1  # number of buffers of max_rows rows in the workspace
        self._workspace: Tensor | None = None
        self._gradient_16_bit: Tensor | None = None

    def allows_16_bit_d_weight(self, rows: int) -> bool:
        """Return whether a GPU may write dW in 16 bits if all `rows` rows form one chunk."""
        return self.has_16_bit_gradient

    def workspace(self, rows: int, buffer: int = 0) -> Tensor:
        """Return one of the buffers for the logits of a chunk, (rows, V)."""
        if self._workspace is None:
            # Allocate the workspace once, for the largest chunk, so that smaller chunks can use a
            # part of it.
            count = self.buffers * self.max_rows
            self._workspace = take_workspace(count, self.weight.shape[0], self.weight, self.dtype)
        return self._workspace[buffer * self.max_rows :][:rows]

    def release(self) -> None:
        """Release the workspace, so that the next call can reuse it."""
        give_back_workspace(self._workspace)
        self._workspace = self._gradient_16_bit = None

    def _gradient(self, rows: int) -> Tensor:
        """Return the buffer to which d-logits are written, (rows, V)."""
        if not self.has_16_bit_gradient:
            return self.workspace(rows)
        if self._gradient_16_bit is None:
            self._gradient_16_bit = self.weight.new_empty((self.max_rows, self.weight.shape[0]))
        return self._gradient_16_bit[:rows]

    def raw_logits(self, h: Tensor, *, cached: bool = False) -> Tensor:
        """Compute the raw logits h·Wᵀ + bias in the workspace, in fp32.

        With `cached`, the workspace already contains the logits of the last `raw_logits` call. If
        the weight has no rows, as in an empty vocabulary shard, there is nothing to multiply.
        """
        z = self.workspace(h.shape[0])
        if cached:
            return z
        if self.weight.shape[0]:
            matmul_logits(h, self.weight, out=z)
        if self.bias is not None:
            z.add_(self.bias)
        return z

    def logps(self, at: ChunkRows, *, return_entropy: bool, cached: bool = False) -> RowStats:
        """Compute the lse, logp and entropy of the C rows.

        With `cached`, the workspace already contains the logits of the last `raw_logits` call. The
        logits stay in the workspace, where `gradients` uses them.
        """
        h, target_ids, transform = at
        count = target_ids.shape[0]
        if self.kernels.head_logps is None:
            # Exclude the padding rows, which only the GEMM needs.
            z = self.raw_logits(h, cached=cached)
            return self.kernels.row_logps(
                z[:count], target_ids, transform, return_entropy=return_entropy
            )
        return self.kernels.head_logps(
            h[:count], self.weight, self.bias, target_ids, transform, return_entropy=return_entropy,
            logits_out=self.workspace(h.shape[0])[:count],
        )  # fmt: skip

    def row_loss(
        self, at: ChunkRows, terms: RowTerms, config: LossConfig, *, cached: bool = False
    ) -> tuple[ChunkGradients, RowLoss]:
        """Compute the loss of the C rows and their d-logits.

        With `cached`, the workspace already contains the logits of the last `raw_logits` call.
        """
        h, target_ids, transform = at
        count = target_ids.shape[0]
        has_entropy = config.needs_entropy
        if self.in_one_pass:
            d = self._gradient(h.shape[0])
            z = self.raw_logits(h, cached=cached)
            part = self.kernels.row_loss_(
                z[:count], d[:count], target_ids, terms, config, transform,
                return_entropy=has_entropy,
            )  # fmt: skip
            return ChunkGradients(d), part
        # Compute the statistics, the loss and the gradient one after the other.
        stats = self.logps(at, return_entropy=has_entropy, cached=cached)
        losses, g = self.kernels.row_coefficients(stats[1], terms, config)
        gradients = self.gradients(at, stats, g, terms.grad_entropy, cached=True)
        return gradients, RowLoss(*stats, losses, g)

    def gradients(
        self, at: ChunkRows, known: RowStats, g: Tensor, g_entropy: Tensor | None, *, cached: bool
    ) -> ChunkGradients:
        """Compute the gradient of Σ g·logp + g_entropy·entropy with respect to the logits.

        With `cached`, the workspace still contains the logits of the last `raw_logits` or `logps`
        call, and they are not recomputed.
        """
        h, target_ids, transform = at
        if not cached:
            self.logps(at, return_entropy=False)
        z = self.workspace(h.shape[0])
        d = self._gradient(h.shape[0])
        count = target_ids.shape[0]
        self.kernels.row_grad_(z[:count], target_ids, known, g, g_entropy, transform, out=d[:count])
        return ChunkGradients(d)


class ExponentialChunks(LogitChunks):
    """A chunk that stores exponentials, which a coefficient per row turns into d-logits."""

    has_entropy_gradient = False  # E determines only the gradient of the logps

    def __init__(self, weight: Tensor, bias: Tensor | None, route: Route) -> None:
        assert route.kernels.head_exponentials is not None and route.exponentials is not None
        super().__init__(weight, bias, route)
        self.dtype = route.exponentials
        self.in_one_pass = False
        self.bytes_per_logit = self.dtype.itemsize
        self._filled: Exponentials | None = None

    def allows_16_bit_d_weight(self, rows: int) -> bool:
        """Return whether a GPU may write dW in 16 bits if all `rows` rows form one chunk."""
        return self.kernels.gradients is not None and rows <= TARGET_SHARE * self.weight.shape[0]

    def workspace(self, rows: int, buffer: int = 0) -> Tensor:
        """Return the buffer for the exponentials of a chunk, (rows, V)."""
        vocab = self.weight.shape[0]
        if self._workspace is None:
            # Round up the row length, so that rows are aligned for TMA stores and vector loads.
            columns = -(-vocab // ROW_ELEMENTS) * ROW_ELEMENTS
            self._workspace = take_workspace(self.max_rows, columns, self.weight, self.dtype)
        return self._workspace[:rows, :vocab]

    def _fill(
        self, at: ChunkRows, *, return_entropy: bool = False, known: RowStats | None = None
    ) -> RowStats:
        """Write the exponentials of a chunk to the workspace. Return its row statistics."""
        h, target_ids, transform = at
        count = target_ids.shape[0]
        out = self.workspace(h.shape[0])[:count]
        assert self.kernels.head_exponentials is not None
        self._filled = self.kernels.head_exponentials(
            h[:count], self.weight, self.bias, target_ids, transform, out, known=known,
            return_entropy=return_entropy,
        )  # fmt: skip
        return self._filled.stats

    def logps(self, at: ChunkRows, *, return_entropy: bool, cached: bool = False) -> RowStats:
        """Compute the lse, logp and entropy of the C rows. `cached` is ignored.

        The exponentials are always computed. They stay in the workspace, where `gradients` uses
        them.
        """
        return self._fill(at, return_entropy=return_entropy)

    def gradients(
        self, at: ChunkRows, known: RowStats, g: Tensor, g_entropy: Tensor | None, *, cached: bool
    ) -> ChunkGradients:
        """Return exponentials, and coefficients that convert them to the d-logits of Σ g·logp.

        Entropy gradients are not supported. With `cached`, the workspace still contains the
        exponentials of the last `logps` call, and they are not recomputed.
        """
        assert g_entropy is None
        if not cached:
            self._fill(at, known=known)
        filled = self._filled
        assert filled is not None
        matrix = self.workspace(at.hidden.shape[0])
        if self.kernels.gradients is None:
            # On a CPU, compute the coefficients with torch, and pad them with zeros.
            assert filled.unit is not None and filled.target_unit is not None
            by_row, by_target = (
                pad_rows(torch.where(g == 0, 0.0, g * x)) for x in (filled.unit, filled.target_unit)
            )
        else:
            by_row, by_target = self.kernels.gradients.times(g, filled, at.transform, len(matrix))
        dominant = filled.dominant
        errors = None if dominant is None else dominant.rounding_errors(matrix)
        return ChunkGradients(matrix, Coefficients(by_row, by_target, at.target_ids, errors))
