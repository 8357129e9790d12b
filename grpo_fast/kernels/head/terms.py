"""Terms of the loss: from the logits and the statistics of rows to the loss and its d-logits.

    TokenLevel   a token-level policy loss with its KL and its entropy bonus. The coefficients of a
                 row depend on that row only, so one pass computes loss and gradient.
    Known        Σ (g·logp + g_entropy·entropy) with known coefficients. Sequence-level losses and
                 the backward pass of logps use it after a first pass.
    Divergences  Σ weights·D, the divergences from a teacher (divergence.py)
    Sum          a sum of two terms, whose d-logits are added before the matrix products

A term has the values of all its rows. The driver selects the rows of a source with `map`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.head.sources import Chunk, RowSource
from grpo_fast.kernels.head.sums import ChunkGradients
from grpo_fast.kernels.types import RowLoss, RowStats, pick
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES

# On a GPU, the host reads the number of active rows only if the gradient GEMMs of all rows take at
# least this many flops, about 1 ms on an H100. For smaller GEMMs, skipping rows does not save
# enough time to pay for the launches that count the rows and for the wait.
READ_FROM = 7e11


class Step(NamedTuple):
    """The gradient of a term in one chunk."""

    d_logits: ChunkGradients | None  # None: no gradient is needed
    g: Tensor  # (C,) coefficients; a row whose coefficients are all 0 has no gradient
    g_entropy: Tensor | None = None  # (C,)

    def active(self) -> Tensor:
        """Return a mask of the rows with a nonzero coefficient, (C,) bool."""
        return active_rows(self.g, self.g_entropy)


class RowTerm:
    """A term of the loss.

    Attributes:
        needs_all_rows: whether a row without gradient must be computed, because it has a value.
        may_hide_nan: whether a row that `mask` excludes may have the coefficient NaN.
        goes_back: whether the last chunk is processed first. The first pass may have stored its
            logits.
    """

    needs_all_rows = False
    may_hide_nan = False
    goes_back = False

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> RowTerm:
        """Return a copy of the term that holds only the values of one source's rows."""
        raise NotImplementedError

    def mask(self, flops: float) -> Tensor | None:
        """Return a mask of the rows that can have a gradient, (T,) bool. None: all, or unknown.

        `flops` is the number of flops of the gradient products of all rows.
        """
        return None

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Compute the values of a chunk and its d-logits."""
        raise NotImplementedError


class TokenLevel(RowTerm):
    """A token-level loss. After the pass, `parts` has the `RowLoss` of each chunk.

    Args:
        terms: the per-row inputs of the loss.
        config: the loss.
    """

    needs_all_rows = True
    may_hide_nan = True

    def __init__(self, terms: RowTerms, config: LossConfig) -> None:
        self.terms = terms
        self.config = config
        self.parts: list[RowLoss] = []

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> TokenLevel:
        term = TokenLevel(self.terms.map(select), self.config)
        term.parts = self.parts
        return term

    def mask(self, flops: float) -> Tensor | None:
        """Return a mask of the rows that may have a nonzero coefficient, whatever their logp is.

        On a GPU, rows are selected by advantages and weights, which are known before the pass. A
        row may also have the coefficient 0 because of its logp (by clipping). Such a row stays in
        the GEMMs as zeros, because finding it would make the host wait for the GPU.
        """
        # Keep rows with advantage 0 if there is a KL or entropy term, which also gives them a
        # gradient.
        terms = self.terms
        has_more = terms.kl_weights is not None or terms.grad_entropy is not None
        if has_more or not OBJECTIVES[self.config.loss_type].follows_advantage:
            return None
        if not saves_time(terms.advantages, flops):
            return None
        return torch.logical_and(terms.advantages, terms.policy_weights)

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Compute statistics, losses and d-logits of a chunk."""
        assert isinstance(at.rows, slice)
        here = RowTerms(*pick(at.rows, *self.terms))
        d, part = source.loss(at, here, self.config)
        self.parts.append(part)
        return Step(d, part.grad_logps, here.grad_entropy)


class Known(RowTerm):
    """Σ (g·logp + g_entropy·entropy) with known coefficients.

    Args:
        g: coefficient of each logp, (T,).
        g_entropy: coefficient of each entropy, (T,). None for a term without entropy.
        stats: (lse, logps, entropy) of all rows. The entropy may be None without `g_entropy`.
        counts_on_gpu: whether the host waits for a GPU to count the rows with a coefficient of 0,
            so that these rows can be left out of the products.
    """

    goes_back = True

    def __init__(
        self, g: Tensor, g_entropy: Tensor | None, stats: RowStats, *, counts_on_gpu: bool = True
    ) -> None:
        self.g = g
        self.g_entropy = g_entropy
        self.stats = stats
        self.counts_on_gpu = counts_on_gpu

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> Known:
        g, lse, logps = map(select, (self.g, *self.stats[:2]))
        optional = self.g_entropy, self.stats[2]
        g_entropy, entropy = (None if x is None else select(x) for x in optional)
        return Known(g, g_entropy, (lse, logps, entropy), counts_on_gpu=self.counts_on_gpu)

    def mask(self, flops: float) -> Tensor | None:
        """Return a mask of the rows with a nonzero coefficient."""
        if self.g.is_cuda and not (self.counts_on_gpu and saves_time(self.g, flops)):
            return None
        return active_rows(self.g, self.g_entropy)

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Compute the d-logits of a chunk from the known statistics."""
        g, g_entropy = pick(at.rows, self.g, self.g_entropy)
        known = pick(at.rows, *self.stats)
        d = source.gradients(at, known, g, g_entropy)
        return Step(d, g, g_entropy)


class Sum(RowTerm):
    """The sum of two terms. The first must leave a chunk's logits in the workspace for the second.

    Whether a row has a gradient is known after the pass, so there is no mask.
    """

    def __init__(self, first: RowTerm, second: RowTerm) -> None:
        self.first = first
        self.second = second
        self.needs_all_rows = first.needs_all_rows or second.needs_all_rows
        self.goes_back = second.goes_back

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> Sum:
        return Sum(self.first.map(select, source), self.second.map(select, source))

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Add the d-logits of both terms."""
        a = self.first.step(source, at)
        b = self.second.step(source, at._replace(cached=True))
        if a.d_logits is None or b.d_logits is None:
            return b if a.d_logits is None else a
        count = len(at.target_ids)
        a.d_logits.matrix[:count] += b.d_logits.matrix[:count]
        g = (a.active() | b.active()).float()
        return Step(a.d_logits, g)


def sum_of(first: RowTerm | None, second: RowTerm) -> RowTerm:
    """Return the sum of two terms, of which the first may be None."""
    return second if first is None else Sum(first, second)


def saves_time(x: Tensor, flops: float) -> bool:
    """Return whether skipping rows can save time.

    `x` is any tensor on the device of the gradient GEMMs. `flops` is the number of flops of these
    GEMMs for all rows.
    """
    return not x.is_cuda or flops >= READ_FROM


def active_rows(g: Tensor, g_entropy: Tensor | None) -> Tensor:
    """Return a mask of the rows with a nonzero coefficient, (T,) bool."""
    return g != 0 if g_entropy is None else (g != 0) | (g_entropy != 0)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:  # (T,) each
    """Return Σ weights·values, 0-d fp64. Rows with weight 0 add nothing, even if they are NaN."""
    return torch.where(weights == 0, 0.0, weights.double() * values.double()).sum()
