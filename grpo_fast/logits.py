"""logits → loss: one sweep of the row kernels over given logits, block by block of rows.

Token-local losses read every row once and write its gradient once: one kernel where the backend has one, else a block of
rows at a time that stays in cache between the two doors. Other losses read every row twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import Backend
from grpo_fast.kernels.linear import RowStats
from grpo_fast.kernels.tokens import TokenBatch, TokenLoss, token_loss
from grpo_fast.prepare import ActiveTokens

# Bytes of logits that one sweep takes at a time on the CPU, so that the second door reads from cache.
CPU_BLOCK_BYTES = 4 << 20


class LogitsSweep:
    """The row kernels over given logits, block by block of rows."""

    def __init__(
        self, logits: Tensor, out: Tensor | None, tokens: ActiveTokens, config: LossConfig, kernels: Backend
    ) -> None:
        self.logits, self.out, self.tokens, self.config, self.kernels = logits, out, tokens, config, kernels
        assert tokens.target_ids is not None
        self.targets = tokens.to_rows(tokens.target_ids)
        rule = tokens.rule
        if isinstance(rule.temperature, Tensor) and tokens.index is not None:
            filled = rule.temperature.new_ones(tokens.num_rows)
            rule = rule._replace(temperature=filled.index_copy_(0, tokens.index, rule.temperature))
        self.rule = rule

    def blocks(self) -> Iterator[slice]:
        rows = self.logits.shape[0]
        step = rows
        if self.logits.device.type == "cpu":
            step = max(CPU_BLOCK_BYTES // max(self.logits.shape[1] * self.logits.element_size(), 1), 16)
        for start in range(0, rows, max(step, 1)):
            yield slice(start, min(start + step, rows))

    def active_stats(self, parts: list[RowStats]) -> RowStats:
        empty = self.logits.new_empty(0, dtype=torch.float32)
        lse, logps = (self.tokens.active(torch.cat([empty, *(p[i] for p in parts)])) for i in (0, 1))
        if not self.config.needs_entropy:
            return lse, logps, None
        return lse, logps, self.tokens.active(torch.cat([empty, *(p[2] for p in parts if p[2] is not None)]))

    def row_logps(self, block: slice) -> RowStats:
        return self.kernels.row_logps(
            self.logits[block], self.targets[block], self.rule.rows(block), return_entropy=self.config.needs_entropy
        )

    def logps(self) -> RowStats:
        return self.active_stats([self.row_logps(block) for block in self.blocks()])

    def row_grad(self, block: slice, stats: RowStats, g: Tensor, g_entropy: Tensor | None) -> None:
        assert self.out is not None
        lse, logps, entropy = stats
        self.kernels.row_grad_(
            self.logits[block], self.targets[block], lse, logps, entropy, g, g_entropy, self.rule.rows(block),
            out=self.out[block],
        )  # fmt: skip

    def gradient(self, result: TokenLoss, stats: RowStats) -> None:
        """Second sweep, when the coefficients needed the first one's result."""
        spread = self.tokens.to_rows
        lse, logps, g = spread(stats[0]), spread(stats[1]), spread(result.grad_logps)
        entropy = None if stats[2] is None else spread(stats[2])
        g_entropy = None if result.grad_entropy is None else spread(result.grad_entropy)
        for block in self.blocks():
            cut = (lse[block], logps[block], None if entropy is None else entropy[block])
            self.row_grad(block, cut, g[block], None if g_entropy is None else g_entropy[block])

    def one_pass(self) -> RowStats:
        """Token-local losses: every row is read once and its gradient written once."""
        corrected = self.tokens.batch.sampling_logps is not None and self.config.sampling_correction is not None
        if self.kernels.row_loss_ is not None and not corrected:
            return self.one_kernel()
        rows_batch = self.full_batch()
        parts = []
        for block in self.blocks():
            stats = self.row_logps(block)
            part = token_loss(stats[1], stats[2], rows_batch.rows(block), self.config)
            active = rows_batch.weights[block] != 0
            g = torch.where(active, part.grad_logps, 0.0)
            g_entropy = None if part.grad_entropy is None else torch.where(active, part.grad_entropy, 0.0)
            self.row_grad(block, stats, g, g_entropy)
            parts.append(stats)
        return self.active_stats(parts)

    def full_batch(self) -> TokenBatch:
        """The batch spread over all N rows, weight 0 where a row is not active."""
        batch, spread = self.tokens.batch, self.tokens.to_rows
        entropy_weight = batch.entropy_weight
        if entropy_weight is None:
            entropy_weight = 1.0 / batch.weights.new_full((), float(max(batch.weights.shape[0], 1)))

        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else spread(x)

        return batch._replace(
            advantages=spread(batch.advantages),
            weights=spread(batch.weights),
            entropy_weight=entropy_weight,
            segments=spread(batch.segments),
            old_logps=maybe(batch.old_logps),
            ref_logps=maybe(batch.ref_logps),
            sampling_logps=maybe(batch.sampling_logps),
        )

    def one_kernel(self) -> RowStats:
        """One kernel reads the row, finds its coefficient and writes its gradient."""
        assert self.kernels.row_loss_ is not None and self.out is not None
        batch, config = self.full_batch(), self.config
        kl_weights = batch.weights * config.beta if config.uses_reference else torch.zeros_like(batch.weights)
        g_entropy = None
        if config.entropy_coef:
            g_entropy = torch.where(batch.weights != 0, -config.entropy_coef * batch.entropy_weight, 0.0)
        stats = self.kernels.row_loss_(
            self.logits, self.out, self.targets, batch.advantages, batch.weights, kl_weights,
            batch.old_logps, batch.ref_logps, g_entropy, config, self.rule, return_entropy=config.needs_entropy,
        )  # fmt: skip
        return self.active_stats([stats])
