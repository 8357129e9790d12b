"""The model that the KL term pulls towards, and the weight of that term."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import Head, PackedTree
from grpo_fast.train.config import KLConfig, ModelConfig, ReferenceConfig
from grpo_fast.train.models.loading import load_policy, load_tokenizer
from grpo_fast.train.models.policy import Policy

MOST_RELATIVE_ERROR = 0.2  # of the relative error that one step answers to


class Reference:
    """None, a frozen copy, one synced at times, LoRA's adapter off, or another model.

    Args:
        policy: the policy as it is at the start of training (after a warm start).
        config: kind, for `synced` how often and how much, and the path of another model.
        model: of which another model takes dtype and device.

    Raises:
        ValueError: another model that is not there, or that has another vocabulary.
    """

    def __init__(
        self, policy: Policy, config: ReferenceConfig, model: ModelConfig | None = None
    ) -> None:
        self.policy, self.config = policy, config
        by_adapter = policy.model is not policy.lm
        self.copy: Policy | None = None
        if config.path is not None:
            self.copy = _another(policy, config.path, model)
        elif config.kind != "none" and not by_adapter:
            self.copy = policy.frozen_copy()

    @property
    def head(self) -> Head:
        """Its head, which turns `hidden` into logits."""
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
        """synced: every `sync_every` steps, reference = mixing·policy + (1 − mixing)·reference."""
        if self.config.kind != "synced" or self.copy is None or step % self.config.sync_every:
            return
        mine, policys = self.copy.model.parameters(), self.policy.model.parameters()
        for own, theirs in zip(mine, policys, strict=True):
            own.lerp_(theirs.to(own.dtype), self.config.mixing)

    def _switched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.copy is not None else self.policy.without_adapter()


def check_reference(config: ReferenceConfig, model: ModelConfig, tokenizer: Any) -> None:
    """Raise a ValueError, before a run begins, for another model that has another vocabulary."""
    if config.path is None:
        return
    with _named():
        theirs = load_tokenizer(_settings(config.path, model))
    _check_vocabulary(tokenizer, theirs)


def _another(policy: Policy, path: str, model: ModelConfig | None) -> Policy:
    """The frozen model at `path`, which answers for the policy's tokens."""
    with _named():
        other = load_policy(_settings(path, model), empty=policy.is_empty)
    _check_vocabulary(policy.tokenizer, other.tokenizer)
    rows, came = (x.head.weight.shape[0] for x in (policy, other))
    if rows != came:
        raise ValueError(f"reference.path: expected a head of {rows} rows as the policy's, came "
                         f"{came}")  # fmt: skip
    if other.positions < policy.positions:
        expected = f"room for the policy's {policy.positions} tokens"
        raise ValueError(f"reference.path: expected {expected}, came {other.positions}")
    other.model.requires_grad_(False).eval()
    return other


def _settings(path: str, model: ModelConfig | None) -> ModelConfig:
    if model is None:
        return ModelConfig(path=path)
    return ModelConfig(
        path=path, dtype=model.dtype, autocast=model.autocast, device=model.device,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip


def _check_vocabulary(tokenizer: Any, other: Any) -> None:
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    moved = sum(theirs.get(token) != index for token, index in ours.items())
    raise ValueError(
        f"reference.path: expected the policy's vocabulary of {len(ours)} tokens, came one of "
        f"{len(theirs)}, where {moved} of the policy's have no or another id"
    )


@contextmanager
def _named() -> Iterator[None]:
    """Refusals of a model name the key that it came by."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", "reference.path")) from error


class KLWeight:
    """β, the weight of the KL to the reference: fixed, or led towards a KL that is wanted.

    Args:
        beta: at the start.
        config: `target`, where it adapts, and `horizon`, over which it does (1909.08593).
    """

    def __init__(self, beta: float, config: KLConfig) -> None:
        self.value, self.config = float(beta), config

    def after_step(self, kl: float, completions: int) -> None:
        """β ← β·(1 + completions/horizon·clip(kl/target − 1, ±0.2)); a KL of NaN moves nothing."""
        if self.config.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.config.target - 1, -MOST_RELATIVE_ERROR), MOST_RELATIVE_ERROR)
        # Of a step beyond the horizon no more is counted: the weight would reach 0 and stay there.
        self.value *= 1 + error * min(completions / self.config.horizon, 1.0)
