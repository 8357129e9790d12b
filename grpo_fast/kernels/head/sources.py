"""Sources of logits: the base class, and a dense LM head.

A `RowSource` forms the logits of some rows, and receives the gradient with respect to them. It
processes its rows in chunks, whose logits are in its workspace. There are four kinds of sources:

    DenseHead    hidden states and an LM head (this module). `ExponentialHead` stores exponentials.
    ShardedHead  a DenseHead whose vocabulary is sharded over ranks (shards.py)
    TokenSets    the ids that a truncating sampler kept for each row (support.py)
    GivenLogits  logits that the caller gives (given.py)

A DenseHead forms the logits of a chunk by hidden·Wᵀ, in fp32. Its gradients are dH = d·W and
dW += dᵀ·hidden, with d-logits d (sums.py). By default, the logp and dH of a row depend only on that
row, W and its scalars, bit for bit:

- On a CPU, the matrix product of csrc ensures this. In fp64, without AVX2 and FMA, and with
  GRPO_FAST_GEMM=vendor, torch computes the products. The last bits may then depend on the number of
  rows and of threads.
- On a GPU, a Triton kernel ensures it for logps. The vendor's GEMM computes dH there, and its bits
  were not compared between batch sizes.

The workspace holds one chunk. `workspace_bytes()` limits its size for any number of rows. 16-bit
weights also need an fp32 dW. On a GPU, all rows may instead form a single chunk, which needs no
fp32 dW. This is done if it takes no more memory than a smaller chunk and an fp32 dW.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.head.products import is_full_precision, matmul_logits
from grpo_fast.kernels.head.sums import ChunkGradients, HeadSums
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import (
    ActiveRows,
    Coefficients,
    Exponentials,
    HeadInputs,
    HeadTensors,
    LogitRows,
    RowLoss,
    RowStats,
    Wanted,
    pad_rows,
    padded,
    rows_at,
)
from grpo_fast.kernels.workspace import give_back_workspace, take_workspace, workspace_bytes
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig

# A 16-bit dW is computed from exponentials only if the number of targets is at most this fraction
# of the vocabulary size. If the targets of a row of dW nearly cancel the rest, the row is computed
# a second time (see gpu/target_rows.py). More targets could cause too many such rows.
TARGET_SHARE = 1 / 8
# Rows of a buffer for exponentials are padded to a multiple of this number of elements (128 bytes
# in 16 bits), so that they are aligned.
ROW_ELEMENTS = 64


class Chunk(NamedTuple):
    """C rows of a source."""

    rows: slice | Tensor  # positions among the rows of the source
    target_ids: Tensor  # (C,) int64; token sets: the position of each target in its set
    hidden: Any = None  # (padded C, H) tensor of a dense head
    cached: bool = False  # whether the workspace of the source contains the logits


class RowSource:
    """Rows of logits that are formed chunk by chunk.

    This base class has the methods of a source that consists of a single chunk.

    Args:
        rows: the active rows whose logits the source forms.
        route: the selected kernels.

    Attributes:
        on_gpu: whether the host should not wait for the values of a chunk.
        chunk_rows: number of rows of each chunk but the last.
        skips: whether the sums of the source can leave rows out.
        has_entropy_gradient: whether `gradients` accepts coefficients of the entropies.
        in_one_pass: whether one row kernel computes statistics, loss and d-logits.
        offsets: (C+1,) bounds of rows of unequal length. None: all rows have V logits.
        stored: the chunk whose logits the last call of `Driver.logps` has stored.
    """

    on_gpu = True
    skips = False
    has_entropy_gradient = True
    in_one_pass = False
    offsets: Tensor | None = None
    stored: slice | None = None

    def __init__(self, rows: ActiveRows, route: Route) -> None:
        self.rows = rows
        self.kernels = route.kernels
        self.num_rows = rows.target_ids.shape[0]

    @property
    def chunk_rows(self) -> int:
        return 1

    def chunks(self, *, stores: bool) -> list[slice]:
        """Return the chunks. Without `stores`, no logits of these chunks are needed later."""
        return [slice(0, self.num_rows)]

    def spread(self, x: Tensor) -> Tensor:
        """Convert one value per active row to one value per row of the source."""
        return x

    def collect(self, parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Concatenate per-row results of all chunks, and return those of the active rows."""
        if not parts:
            return tuple(self.rows.target_ids.new_empty(0, dtype=torch.float32) for _ in range(3))
        if len(parts) == 1:
            return parts[0]
        return tuple(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))

    def chunk(self, index: slice | Tensor, *, stores: bool = True) -> Chunk:
        """Return the rows at these positions. `stores` is the argument of `logps`."""
        raise NotImplementedError

    def logits(self, at: Chunk) -> Tensor:
        """Return the raw logits of a chunk, (C, V), or (1, nnz) for token sets."""
        raise NotImplementedError

    def logit_rows(self, at: Chunk, z: Tensor) -> LogitRows:
        """Return raw logits of a chunk in the form that the row kernels read."""
        return LogitRows(z, at.target_ids, self.rows.transform, self.offsets)

    def gradient(self, at: Chunk) -> Tensor | None:
        """Return the buffer for the d-logits, (padded C, V). None: they overwrite the logits."""
        return None

    def logps(self, at: Chunk, *, return_entropy: bool, stores: bool) -> RowStats:
        """Compute the statistics of a chunk. With `stores`, keep its logits for `gradients`."""
        rows = self.logit_rows(at, self.logits(at))
        return self.kernels.row_logps(rows, return_entropy=return_entropy)

    def loss(
        self, at: Chunk, terms: RowInputs, config: LossConfig
    ) -> tuple[ChunkGradients, RowLoss]:
        """Compute the statistics, a token-level loss and its d-logits."""
        has_entropy = config.needs_entropy
        if self.in_one_pass:
            z = self.logits(at)
            d = self.gradient(at)
            assert d is not None
            part = self.kernels.row_loss_(
                self.logit_rows(at, z), d[: len(z)], terms, config, return_entropy=has_entropy
            )
            return ChunkGradients(d), part
        # Compute the statistics, the loss and the gradient one after the other.
        stats = self.logps(at, return_entropy=has_entropy, stores=True)
        losses, g = self.kernels.row_coefficients(stats[1], terms, config)
        gradients = self.gradients(at._replace(cached=True), stats, g, terms.grad_entropy)
        return gradients, RowLoss(*stats, losses, g)

    def gradients(
        self, at: Chunk, known: RowStats, g: Tensor, g_entropy: Tensor | None
    ) -> ChunkGradients:
        """Compute the d-logits of Σ g·logp + g_entropy·entropy from known statistics."""
        z = self.logits(at)
        d = self.gradient(at)
        out = z if d is None else d[: len(z)]
        self.kernels.row_grad_(self.logit_rows(at, z), known, g, g_entropy, out)
        return ChunkGradients(z[0] if d is None else d)

    def add(self, sums: Any, at: Chunk, d_logits: ChunkGradients, keep: Tensor | None) -> None:
        """Add the gradient of a chunk to the sums. Rows outside of `keep` have d-logits of 0."""

    def flops(self, wanted: Wanted) -> int:
        """Return the number of flops of the gradient products of all rows."""
        return 0

    def release(self) -> None:
        """Release the workspace, so that the next call can reuse it."""


class DenseHead(RowSource):
    """A dense LM head. It stores the logits of a chunk in fp32.

    A row kernel overwrites the logits with d-logits (4 bytes per logit). On a GPU, it writes 16-bit
    d-logits to a second buffer (6 bytes per logit).

    Args:
        tensors: hidden, weight and bias.
        rows: targets, logit transform, and the rows of `hidden` that predict the targets.
        route: the selected kernels.
        in_parts: whether dW is a sum in fp32, so that a single chunk must not round it.
        spares: whether a single chunk may use the memory that several chunks need for an fp32 dW.
        buffers: number of fp32 buffers in the workspace. The second holds a teacher's logits.
    """

    skips = True
    row_elements = 1  # rows of the workspace are padded to a multiple of this number of elements

    def __init__(
        self,
        tensors: HeadTensors,
        rows: ActiveRows,
        route: Route,
        *,
        in_parts: bool = False,
        spares: bool = False,
        buffers: int = 1,
    ) -> None:
        super().__init__(rows, route)
        self.hidden, self.weight, self.bias = tensors
        self.buffers = buffers
        self.on_gpu = self.weight.is_cuda or route.backend == "triton"
        # On a GPU, the gradient GEMMs of a 16-bit weight need 16-bit d-logits. The row kernel then
        # writes d-logits in 16 bits, so that they are rounded only once.
        self.has_16_bit_gradient = self.on_gpu and not is_full_precision(self.weight)
        # Compute loss and d-logits in one row kernel only if there is no `head_logps`. Passes
        # without gradients use `head_logps`. If gradient passes used the row kernel, their logps
        # would differ in the last bits.
        self.in_one_pass = route.kernels.head_logps is None
        self.dtype = self._stored_dtype(route)
        d_weight_16_bit = self.on_gpu and not in_parts and self._allows_16_bit_d_weight()
        self._spares = spares and d_weight_16_bit
        # Whether dW may be rounded if all rows are in one chunk.
        self._may_round = d_weight_16_bit or not self.on_gpu
        self._workspace: Tensor | None = None
        self._gradient_16_bit: Tensor | None = None

    def _stored_dtype(self, route: Route) -> torch.dtype:
        return torch.promote_types(self.weight.dtype, torch.float32)

    def _allows_16_bit_d_weight(self) -> bool:
        """Return whether a GPU may write dW in 16 bits if all rows form one chunk."""
        return self.has_16_bit_gradient

    @property
    def bytes_per_logit(self) -> int:
        gradient_bytes = self.weight.dtype.itemsize if self.has_16_bit_gradient else 0
        return self.buffers * self.dtype.itemsize + gradient_bytes

    @property
    def widest(self) -> int:
        """Return the number of columns that determines the size of a chunk."""
        return self.weight.shape[0]

    @property
    def is_single_chunk(self) -> bool:
        """Return whether all rows are in one chunk, and its dW may be rounded."""
        return self._may_round and self.num_rows <= self.chunk_rows

    @property
    def max_rows(self) -> int:
        return padded(min(self.chunk_rows, self.num_rows))

    # A pass of `head_logps` does not need the number, so it is computed on first use.
    @functools.cached_property
    def chunk_rows(self) -> int:
        """The number of rows per chunk.

        All rows form one chunk if this takes no more memory than several chunks and their fp32 dW.
        Otherwise, chunks have equal size and fit into the workspace. Ranks that share a vocabulary
        use the size of the largest shard, so that they run the same number of collective calls.
        """
        bytes_per_logit = self.bytes_per_logit
        device = self.weight.device
        row_bytes = max(self.widest, 1) * bytes_per_logit
        # A single chunk does not need an fp32 dW, so its logits may use the memory that the fp32 dW
        # would take.
        spared = 4 * self.weight.numel() if self._spares else 0
        if spared and self.num_rows * row_bytes <= workspace_bytes(device, bytes_per_logit, spared):
            return max(padded(self.num_rows), padded(1))
        most = max(workspace_bytes(device, bytes_per_logit) // row_bytes, 1)
        # Divide the rows evenly, because a small last chunk would need a full pass over W and dW
        # for a few rows.
        chunks = -(-self.num_rows // most) or 1
        return max(padded(-(-self.num_rows // chunks)), padded(1))

    # ---- Rows and chunks

    def flops(self, wanted: Wanted) -> int:
        return 2 * self.num_rows * self.weight.numel() * (wanted.hidden + wanted.weight)

    def chunks(self, *, stores: bool) -> list[slice]:
        count = self.num_rows
        # `head_logps` stores no logits, so its memory does not grow with the number of rows.
        if not stores and self.kernels.head_logps is not None:
            return [slice(0, count)] if count else []
        step = self.chunk_rows
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def chunk(self, index: slice | Tensor, *, stores: bool = True) -> Chunk:
        """Return the rows at these positions.

        If logits are stored, the rows are padded with zeros to a multiple of ROW_MULTIPLE rows.
        """
        at = self._hidden_rows(index)
        source = self.hidden
        h = rows_at(source, at) if isinstance(at, slice) else source.index_select(0, at)
        h = pad_rows(h).contiguous() if stores or self.kernels.head_logps is None else h
        return Chunk(index, rows_at(self.rows.target_ids, index), h)

    def _hidden_rows(self, index: slice | Tensor) -> slice | Tensor:
        """Return the rows of `hidden` that predict the targets at these positions."""
        of_rows = self.rows.hidden_index
        return index if of_rows is None else of_rows[index]

    # ---- Memory

    def workspace(self, rows: int, buffer: int = 0) -> Tensor:
        """Return one of the buffers for the logits of a chunk, (rows, V)."""
        vocab = self.weight.shape[0]
        if self._workspace is None:
            # Allocate the workspace once, for the largest chunk, so that smaller chunks can use a
            # part of it.
            count = self.buffers * self.max_rows
            columns = -(-vocab // self.row_elements) * self.row_elements
            self._workspace = take_workspace(count, columns, self.weight, self.dtype)
        start = buffer * self.max_rows
        found = rows_at(self._workspace, slice(start, start + rows))
        return found if found.shape[1] == vocab else found[:, :vocab]

    def release(self) -> None:
        give_back_workspace(self._workspace)
        self._workspace = self._gradient_16_bit = None

    def gradient(self, at: Chunk) -> Tensor:
        """Return the buffer to which d-logits are written, (padded C, V)."""
        rows = at.hidden.shape[0]
        if not self.has_16_bit_gradient:
            return self.workspace(rows)
        if self._gradient_16_bit is None:
            self._gradient_16_bit = self.weight.new_empty((self.max_rows, self.weight.shape[0]))
        return self._gradient_16_bit[:rows]

    # ---- Logits and their gradient

    def logits(self, at: Chunk) -> Tensor:
        """Form the raw logits h·Wᵀ + bias in the workspace, (C, V) fp32.

        If the weight has no rows, as in an empty vocabulary shard, there is nothing to multiply.
        """
        z = self.workspace(at.hidden.shape[0])
        count = at.target_ids.shape[0]
        if at.cached:
            return z[:count]
        if self.kernels.head_logps is not None:
            self.logps(at, return_entropy=False, stores=True)
            return z[:count]
        if self.weight.shape[0]:
            matmul_logits(at.hidden, self.weight, out=z)
        if self.bias is not None:
            z.add_(self.bias)
        # Exclude the padding rows, which only the GEMM needs.
        return z[:count]

    def logps(self, at: Chunk, *, return_entropy: bool, stores: bool) -> RowStats:
        head_logps = self.kernels.head_logps
        if head_logps is None:
            return super().logps(at, return_entropy=return_entropy, stores=stores)
        p = self._inputs(at)
        out = self.workspace(at.hidden.shape[0])[: len(p.hidden)] if stores else None
        return head_logps(p, return_entropy=return_entropy, logits_out=out)

    def _inputs(self, at: Chunk) -> HeadInputs:
        """Return the inputs of the kernels that start from hidden states, without padding rows."""
        h = rows_at(at.hidden, slice(0, at.target_ids.shape[0]))
        return HeadInputs(h, self.weight, self.bias, at.target_ids, self.rows.transform)

    def add(self, sums: HeadSums, at: Chunk, d_logits: ChunkGradients, keep: Tensor | None) -> None:
        """Add the gradients of a chunk to dH, dW and db."""
        rows = self._hidden_rows(at.rows)
        sums.add(rows, at.hidden, d_logits, at.target_ids.shape[0], keep)


class ExponentialHead(DenseHead):
    """A dense LM head that stores exponentials E instead of logits.

    The epilogue of the GEMM writes them once, in 2 bytes per logit in 16 bits and 4 in fp32. The
    d-logits are E times a factor per row, so no row kernel runs. gpu/linear.py defines E and
    the factors.
    """

    has_entropy_gradient = False  # E determines only the gradient of the logps
    row_elements = ROW_ELEMENTS
    _filled: Exponentials | None = None

    def _stored_dtype(self, route: Route) -> torch.dtype:
        assert route.exponentials is not None
        self.has_16_bit_gradient = False  # no d-logits are written
        return route.exponentials

    def _allows_16_bit_d_weight(self) -> bool:
        is_small = padded(self.num_rows) <= TARGET_SHARE * self.weight.shape[0]
        return self.kernels.gradients is not None and is_small

    def _fill(self, at: Chunk, matrix: Tensor | None = None, **options: Any) -> Exponentials:
        """Write the exponentials of a chunk to `matrix`, which is its part of the workspace."""
        assert self.kernels.head_exponentials is not None
        matrix = self.workspace(at.hidden.shape[0]) if matrix is None else matrix
        out = rows_at(matrix, slice(0, at.target_ids.shape[0]))
        self._filled = self.kernels.head_exponentials(self._inputs(at), out, **options)
        return self._filled

    def logps(self, at: Chunk, *, return_entropy: bool, stores: bool) -> RowStats:
        if stores:
            return self._fill(at, return_entropy=return_entropy).stats
        return super().logps(at, return_entropy=return_entropy, stores=False)

    def loss(
        self, at: Chunk, terms: RowInputs, config: LossConfig
    ) -> tuple[ChunkGradients, RowLoss]:
        """Compute the loss of the C rows, and the coefficients of their exponentials."""
        if self.kernels.gradients is None:
            return super().loss(at, terms, config)
        assert terms.grad_entropy is None  # the fused kernel has no entropy term
        # One kernel computes the statistics, the loss and the coefficients.
        matrix = self.workspace(at.hidden.shape[0])
        options = {"return_entropy": config.needs_entropy, "loss": (terms, config)}
        found = self._fill(at, matrix, **options)
        assert found.loss is not None
        losses, g, by_row, by_target = found.loss
        gradients = ChunkGradients(matrix, Coefficients(by_row, by_target, at.target_ids))
        return gradients, RowLoss(*found.stats, losses, g)

    def gradients(
        self, at: Chunk, known: RowStats, g: Tensor, g_entropy: Tensor | None
    ) -> ChunkGradients:
        """Return exponentials, and coefficients that convert them to the d-logits of Σ g·logp."""
        assert g_entropy is None
        matrix = self.workspace(at.hidden.shape[0])
        if not at.cached:
            self._fill(at, matrix, known=known)
        filled = self._filled
        assert filled is not None
        if self.kernels.gradients is None:
            # On a CPU, compute the coefficients with torch, and pad them with zeros.
            assert filled.unit is not None and filled.target_unit is not None
            by_row, by_target = (
                pad_rows(torch.where(g == 0, 0.0, g * x)) for x in (filled.unit, filled.target_unit)
            )
        else:
            by_row, by_target = self.kernels.gradients.times(
                g, filled, self.rows.transform, matrix.shape[0]
            )
        dominant = filled.dominant
        errors = None if dominant is None else dominant.rounding_errors(matrix)
        return ChunkGradients(matrix, Coefficients(by_row, by_target, at.target_ids, errors))
