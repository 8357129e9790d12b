"""The reference model of the KL term: none, a frozen copy, a copy synced at times, or LoRA's adapter switched off."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.attention import PackedGroups
from grpo_fast.train.config import ReferenceConfig
from grpo_fast.train.policy import Policy


class Reference:
    """Log-probabilities under the reference, and its updates.

    Args:
        policy: the policy as it is at the start of training (after a warm start).
        config: kind, and for `synced` how often and how much.
    """

    def __init__(self, policy: Policy, config: ReferenceConfig) -> None:
        self.policy, self.config = policy, config
        self.by_adapter = policy.model is not policy.lm
        self.copy = None if self.by_adapter or config.kind == "none" else policy.frozen_copy()

    @torch.no_grad()
    def logps(self, packed: PackedGroups, temperature: float) -> Tensor:
        """(R,) fp32 log-probabilities of the completion tokens, in the layout the policy is trained in."""
        if self.copy is not None:
            return self.copy.logps(packed, temperature)
        with self.policy.without_adapter():
            return self.policy.logps(packed, temperature)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """synced: every `sync_every` steps, reference = mixing·policy + (1 − mixing)·reference."""
        if self.config.kind != "synced" or self.copy is None or step % self.config.sync_every:
            return
        for mine, theirs in zip(self.copy.model.parameters(), self.policy.model.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), self.config.mixing)
