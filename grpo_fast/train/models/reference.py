"""The model that the KL term pulls towards, and the weight of that term."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import Head, PackedTree
from grpo_fast.train.config import KLConfig, ModelConfig, ReferenceConfig, require
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy

MOST_RELATIVE_ERROR = 0.2  # of the relative error that one step answers to


class Reference:
    """The reference model: none, a frozen or synced copy, LoRA's adapter off, or another model.

    Args:
        policy: as it is at the start of training (after a warm start).
        another: of `load_another`.
    """

    def __init__(
        self, policy: Policy, config: ReferenceConfig, another: Policy | None = None
    ) -> None:
        self.policy, self.config, self.copy = policy, config, another
        # Without an adapter that began elsewhere, the model is not the start of the run.
        by_adapter = policy.model is not policy.lm and policy.starts_at_base
        if another is None and config.kind != "none" and not by_adapter:
            self.copy = policy.frozen_copy()

    @property
    def head(self) -> Head:
        return (self.copy or self.policy).head

    @torch.no_grad()
    def hidden(self, packed: PackedTree) -> Tensor:
        """(R, H) final hidden states of the rows that predict the completion tokens."""
        with self._switched():
            return (self.copy or self.policy).hidden(packed).index_select(0, packed.predicting)

    @torch.no_grad()
    def logps(
        self, packed: PackedTree, temperature: float, support: Support | None = None
    ) -> Tensor:
        """(R,) fp32 logps of the completion tokens, in the layout the policy is trained in."""
        with self._switched():
            return (self.copy or self.policy).logps(packed, temperature, support=support)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.config.kind != "synced" or self.copy is None or step % self.config.sync_every:
            return
        mine, policys = self.copy.model.parameters(), self.policy.model.parameters()
        for own, theirs in zip(mine, policys, strict=True):
            own.lerp_(theirs.to(own.dtype), self.config.mixing)

    def _switched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.copy is not None else self.policy.without_adapter()


def load_another(config: ReferenceConfig, model: ModelConfig, policy: Policy) -> Policy | None:
    """The frozen model at `config.path`, which answers for the policy's tokens; None without.

    model: of the policy, whose dtype and device it takes.

    Raises ValueError for one with another vocabulary, another head or less room than the policy.
    """
    if config.path is None:
        return None
    own = ModelConfig(
        path=config.path, dtype=model.dtype, autocast=model.autocast, device=model.device,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
    try:
        other = load_policy(own, empty=policy.is_empty)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", "reference.path")) from error
    _check_vocabulary(policy.tokenizer, other.tokenizer)
    rows, came = (x.head.weight.shape[0] for x in (policy, other))
    require(rows == came, "reference.path", f"a head of {rows} rows as the policy's", came)
    expected = f"room for the policy's {policy.positions} tokens"
    require(other.positions >= policy.positions, "reference.path", expected, other.positions)
    other.model.requires_grad_(False).eval()
    return other


def _check_vocabulary(tokenizer: Any, other: Any) -> None:
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    moved = sum(theirs.get(token) != index for token, index in ours.items())
    came = f"one of {len(theirs)}, where {moved} of the policy's have no or another id"
    expected = f"the policy's vocabulary of {len(ours)} tokens"
    require(ours == theirs, "reference.path", expected, came)


class KLWeight:
    """β, the weight of the KL to the reference: fixed, or led towards a target (1909.08593)."""

    def __init__(self, beta: float, config: KLConfig) -> None:
        self.value, self.config = float(beta), config

    def after_step(self, kl: float, completions: int) -> None:
        """β ← β·(1 + completions/horizon·clip(kl/target − 1, ±0.2)); a KL of NaN moves nothing."""
        if self.config.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.config.target - 1, -MOST_RELATIVE_ERROR), MOST_RELATIVE_ERROR)
        # Of a step beyond the horizon no more is counted: the weight would reach 0 and stay there.
        self.value *= 1 + error * min(completions / self.config.horizon, 1.0)
