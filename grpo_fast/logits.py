"""logits → loss: one sweep of the row kernels over given logits, block by block of rows.

Token-local losses read every row once and write its gradient once, in one kernel. Other losses read every row twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import Backend
from grpo_fast.kernels.linear import RowStats, joined
from grpo_fast.kernels.rows_torch import RowLoss
from grpo_fast.kernels.tokens import FusedInputs, TokenLoss
from grpo_fast.prepare import ActiveTokens
from grpo_fast.validation import IGNORED_TARGET

# Bytes of logits that one sweep takes at a time on the CPU, so that the second door reads from cache.
CPU_BLOCK_BYTES = 4 << 20


class LogitsSweep:
    """The row kernels over given logits, block by block of rows."""

    def __init__(
        self, logits: Tensor, out: Tensor | None, tokens: ActiveTokens, config: LossConfig, kernels: Backend
    ) -> None:
        self.logits, self.out, self.tokens, self.config, self.kernels = logits, out, tokens, config, kernels
        assert tokens.target_ids is not None
        self.targets = tokens.to_rows(tokens.target_ids, fill=IGNORED_TARGET)  # what the mask switched off is inert
        rule = tokens.rule
        if isinstance(rule.temperature, Tensor) and tokens.rows is not None:
            filled = rule.temperature.new_ones(tokens.num_rows)
            rule = rule._replace(temperature=filled.index_copy_(0, tokens.rows, rule.temperature))
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

    def one_pass(self, inputs: FusedInputs) -> RowLoss:
        """Token-local losses: every row is read once and its gradient written once. Of the active rows, (T,) each."""
        assert self.out is not None
        spread = inputs.map(self.tokens.to_rows)  # weight 0 where a row is not active
        parts = []
        for block in self.blocks():
            chunk = spread.map(lambda x, block=block: x[block])  # type: ignore[misc]
            part = self.kernels.row_loss_(
                self.logits[block], self.out[block], self.targets[block], *chunk, self.config, self.rule.rows(block),
                return_entropy=self.config.needs_entropy,
            )  # fmt: skip
            parts.append(part)
        rows = joined(parts, self.logits)
        if self.tokens.rows is None:
            return rows
        # The sums would count the rows that are switched off.
        lse, logps, entropy, losses, grad_logps = (None if x is None else self.tokens.active(x) for x in rows[:5])
        return RowLoss(lse, logps, entropy, losses, grad_logps)
