"""The logits of one chunk and their gradient, in the two forms that the chunk loop of linear.py knows.

    LogitChunks    raw logits in fp32 (vendor GEMM, or hidden → logps kernel with a store), a row kernel writes the
                   d-logits over them; for 16-bit inputs on a GPU beside them, in 16 bits.   4 or 6 bytes per logit held
    WeightChunks   the GEMM's epilogue writes weights E once; d-logits = coefficient of the row · E, so no row kernel
                   runs and nothing is written again (weights_triton.py: bf16; linear_cpu.py). 2 or 4 bytes per logit

Both have the same methods. A chunk has C rows; its buffers have the padded rows of h, of which the last stay unset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import Backend
from grpo_fast.kernels.dominant_weights import DominantWeights
from grpo_fast.kernels.gradient_sums import ChunkGradients, RowCoefficients, pad_rows
from grpo_fast.kernels.memory import give_back_workspace, take_workspace
from grpo_fast.kernels.products import is_wide, matmul_wide
from grpo_fast.kernels.rows_torch import LogitRule, RowLoss, row_coefficients
from grpo_fast.kernels.tokens import FusedInputs

# (lse, logps, entropy or None) of some rows, each (C,) fp32
RowStats = tuple[Tensor, Tensor, Tensor | None]
# The rows of a buffer of weights start on multiples of this many elements: 128 bytes, whatever the vocabulary.
ROW_ELEMENTS = 64


class LogitChunks:
    """d-logits by way of stored logits."""

    def __init__(self, weight: Tensor, bias: Tensor | None, backend: Backend) -> None:
        self.weight, self.bias, self.backend = weight, bias, backend
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        # GEMMs that take 16 bits get d-logits in 16 bits, rounded once, by the row kernel.
        self.has_narrow = not is_wide(weight) and (weight.is_cuda or backend.name == "triton")
        self.bytes_per_logit = self.dtype.itemsize + (weight.dtype.itemsize if self.has_narrow else 0)
        self.most_rows = 0  # rows of the workspace
        self._logits: Tensor | None = None
        self._narrow: Tensor | None = None

    def workspace(self, rows: int) -> Tensor:
        """(rows, V): the one buffer of logits of this pass."""
        if self._logits is None:
            self._logits = take_workspace(self.most_rows, self.weight.shape[0], self.weight, self.dtype)
        return self._logits[:rows]

    def release(self) -> None:
        """Give the workspace back."""
        give_back_workspace(self._logits)
        self._logits = self._narrow = None

    def gradient(self, rows: int) -> Tensor:
        """(rows, V): where the d-logits go."""
        if not self.has_narrow:
            return self.workspace(rows)
        if self._narrow is None:
            self._narrow = self.weight.new_empty(self.most_rows, self.weight.shape[0])
        return self._narrow[:rows]

    def raw_logits(self, h: Tensor, out: Tensor) -> None:
        """out (C, V) = h·Wᵀ + bias in fp32."""
        matmul_wide(h, self.weight, out=out)
        if self.bias is not None:
            out.add_(self.bias)

    def logps(self, h: Tensor, target_ids: Tensor, rule: LogitRule, *, return_entropy: bool) -> RowStats:
        """lse, logp, entropy of the first C = len(target_ids) rows of h (padded C, H); the logits stay."""
        z, count = self.workspace(h.shape[0]), target_ids.shape[0]
        if self.backend.linear_logps is not None:
            return self.backend.linear_logps(
                h[:count], self.weight, self.bias, target_ids, rule, return_entropy=return_entropy, logits_out=z[:count]
            )
        self.raw_logits(h, z)
        return self.backend.row_logps(z[:count], target_ids, rule, return_entropy=return_entropy)

    def row_loss(
        self, h: Tensor, target_ids: Tensor, inputs: FusedInputs, config: LossConfig, rule: LogitRule
    ) -> tuple[ChunkGradients, RowLoss]:
        """The d-logits, and the losses of the first C = len(target_ids) rows."""
        count, has_entropy = target_ids.shape[0], config.needs_entropy
        z, d = self.workspace(h.shape[0]), self.gradient(h.shape[0])
        if self.backend.linear_logps is None:
            self.raw_logits(h, z)
            part = self.backend.row_loss_(
                z[:count], d[:count], target_ids, *inputs, config, rule, return_entropy=has_entropy
            )
            return ChunkGradients(d, None), part
        # A kernel of its own gives the logps wherever no gradient is wanted: the same one must give them here.
        stats = self.logps(h, target_ids, rule, return_entropy=has_entropy)
        losses, g = row_coefficients(stats[1], *inputs[:5], config)
        self.backend.row_grad_(z[:count], target_ids, *stats, g, inputs.grad_entropy, rule, out=d[:count])
        return ChunkGradients(d, None), RowLoss(*stats, losses, g)

    def gradients(
        self,
        h: Tensor,
        target_ids: Tensor,
        rule: LogitRule,
        known: RowStats,
        g: Tensor,
        g_entropy: Tensor | None,
        *,
        held: bool,
    ) -> ChunkGradients:
        """The d-logits of Σ g·logp + g_entropy·entropy; `held`: `logps` of this very chunk came last."""
        if not held:
            self.logps(h, target_ids, rule, return_entropy=False)
        z, d, count = self.workspace(h.shape[0]), self.gradient(h.shape[0]), target_ids.shape[0]
        self.backend.row_grad_(z[:count], target_ids, *known, g, g_entropy, rule, out=d[:count])
        return ChunkGradients(d, None)


class WeightChunks:
    """d-logits as the product of a coefficient by row and of weights that do not depend on the loss."""

    def __init__(self, weight: Tensor, bias: Tensor | None, backend: Backend) -> None:
        assert backend.linear_weights is not None and backend.stores is not None
        self.weight, self.bias, self.door = weight, bias, backend.linear_weights
        self.dtype = backend.stores(weight)
        self.bytes_per_logit = self.dtype.itemsize
        self.most_rows = 0
        self._weights: Tensor | None = None
        self._units: tuple[Tensor, Tensor] | None = None  # (C,): of the weights, of the target's column
        self._dominant: DominantWeights | None = None

    def workspace(self, rows: int) -> Tensor:
        """(rows, V): the one buffer of weights of this pass."""
        vocab = self.weight.shape[0]
        if self._weights is None:
            columns = -(-vocab // ROW_ELEMENTS) * ROW_ELEMENTS
            self._weights = take_workspace(self.most_rows, columns, self.weight, self.dtype)
        return self._weights[:rows, :vocab]

    def release(self) -> None:
        """Give the workspace back."""
        give_back_workspace(self._weights)
        self._weights = None

    def _fill(self, h: Tensor, target_ids: Tensor, rule: LogitRule, **options) -> RowStats:
        count = target_ids.shape[0]
        out = self.workspace(h.shape[0])[:count]
        stats, *units, self._dominant = self.door(h[:count], self.weight, self.bias, target_ids, rule, out, **options)
        self._units = (units[0], units[1])
        return stats

    def _times(self, g: Tensor, target_ids: Tensor, rows: int) -> ChunkGradients:
        assert self._units is not None
        unit, target_unit = (torch.where(g == 0, 0.0, g * x) for x in self._units)
        weights = self.workspace(rows)
        rest = None if self._dominant is None else self._dominant.rest(weights)
        return ChunkGradients(weights, RowCoefficients(pad_rows(unit), pad_rows(target_unit), target_ids, rest))

    def logps(self, h: Tensor, target_ids: Tensor, rule: LogitRule, *, return_entropy: bool) -> RowStats:
        """lse, logp, entropy of the first C = len(target_ids) rows of h (padded C, H); the weights stay."""
        return self._fill(h, target_ids, rule, return_entropy=return_entropy)

    def row_loss(
        self, h: Tensor, target_ids: Tensor, inputs: FusedInputs, config: LossConfig, rule: LogitRule
    ) -> tuple[ChunkGradients, RowLoss]:
        """The d-logits, and the losses of the first C = len(target_ids) rows."""
        stats = self.logps(h, target_ids, rule, return_entropy=config.needs_entropy)
        losses, g = row_coefficients(stats[1], *inputs[:5], config)
        return self._times(g, target_ids, h.shape[0]), RowLoss(*stats, losses, g)

    def gradients(
        self,
        h: Tensor,
        target_ids: Tensor,
        rule: LogitRule,
        known: RowStats,
        g: Tensor,
        g_entropy: Tensor | None,
        *,
        held: bool,
    ) -> ChunkGradients:
        """The d-logits of Σ g·logp; `held`: `logps` of this very chunk came last."""
        assert g_entropy is None
        if not held:
            self._fill(h, target_ids, rule, known=known)
        return self._times(g, target_ids, h.shape[0])
