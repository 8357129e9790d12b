"""The reference model of the KL divergence, and the weight β of the divergence."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import Head, PackedTree
from grpo_fast.errors import require
from grpo_fast.train.config import KLConfig, ModelConfig, ReferenceConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_RELATIVE_ERROR = 0.2  # limit of |kl / target - 1|; larger errors of a step are clipped


class Reference:
    """Reference model of the KL divergence.

    It is a different model, a frozen copy of the policy, a copy that is synced with the policy, or
    the policy without its adapter. With `kind: none` there is no reference.

    Args:
        policy: the policy after the warm start and before the first training step.
        config: the section `reference`.
        another: a different model, from `load_another`. None uses the policy as the reference.
    """

    def __init__(
        self, policy: Policy, config: ReferenceConfig, another: Policy | None = None
    ) -> None:
        self.policy = policy
        self.config = config
        self.copy = another
        # Disabling the adapter restores the initial policy only if the adapter was new. If training
        # continues a saved adapter, a copy is needed.
        by_adapter = policy.model is not policy.lm and policy.starts_at_base
        if another is None and config.kind != "none" and not by_adapter:
            self.copy = policy.frozen_copy()

    @property
    def head(self) -> Head:
        return (self.copy or self.policy).head

    @torch.no_grad()
    def hidden(self, packed: PackedTree) -> Tensor:
        """Return the reference's hidden states that predict the completion tokens, shape (R, H)."""
        with self._switched():
            return (self.copy or self.policy).hidden(packed).index_select(0, packed.predicting)

    @torch.no_grad()
    def logps(
        self, packed: PackedTree, temperature: float, support: Support | None = None
    ) -> Tensor:
        """Return the reference's log-probabilities of the completion tokens, fp32 of shape (R,).

        Args:
            packed: the packed row that the policy trains on. Both models then round alike, because
                they compute tensors of the same shapes.
            temperature: temperature by which the logits are divided.
            support: token ids that the sampler kept, or None.
        """
        with self._switched():
            return (self.copy or self.policy).logps(packed, temperature, support=support)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move a synced reference towards the policy if an update is due after this step."""
        if self.config.kind != "synced" or self.copy is None or step % self.config.sync_every:
            return
        copies = self.copy.model.parameters()
        for copy, current in zip(copies, self.policy.model.parameters(), strict=True):
            copy.lerp_(current.to(copy.dtype), self.config.mixing)

    # Without `copy`, the reference is the policy with its adapter disabled.
    def _switched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.copy is not None else self.policy.model.disable_adapter()


def load_another(config: ReferenceConfig, model: ModelConfig, policy: Policy) -> Policy | None:
    """Load a different model as the frozen reference.

    Args:
        config: the section `reference`.
        model: the section `model`. The reference uses the same dtypes and device.
        policy: the policy.

    Returns:
        The model at `config.path`, or None if no path is set.

    Raises:
        ValueError: the model's vocabulary, head size or length limit does not fit the policy.
    """
    if config.path is None:
        return None
    shared = model.model_dump(include={"dtype", "autocast", "device", "trust_remote_code"})
    own = ModelConfig(path=config.path, **shared)
    try:
        other = load_policy(own, empty=policy.is_empty)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", "reference.path")) from error
    # Both models must have the same token ids and the same number of logits. The reference must
    # accept rows as long as the policy's.
    _check_vocabulary(policy.tokenizer, other.tokenizer)
    rows = policy.head.weight.shape[0]
    came = other.head.weight.shape[0]
    require(rows == came, "reference.path", f"a head of {rows} rows as the policy's", came)
    expected = f"a length limit of at least the policy's {policy.positions} tokens"
    require(other.positions >= policy.positions, "reference.path", expected, other.positions)
    other.model.requires_grad_(False).eval()
    return other


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError unless two tokenizers have the same tokens with the same ids."""
    ours = tokenizer.get_vocab()
    theirs = other.get_vocab()
    moved = sum(theirs.get(token) != index for token, index in ours.items())
    came = f"{len(theirs)} tokens, and {moved} of the policy's have a different id or none"
    expected = f"the policy's vocabulary of {len(ours)} tokens"
    require(ours == theirs, "reference.path", expected, came)


class KLWeight:
    """The weight β of the KL divergence, constant or adapted to a target KL (arXiv 1909.08593).

    Args:
        beta: initial weight.
        config: the section `kl`.
    """

    def __init__(self, beta: float, config: KLConfig) -> None:
        self.value = float(beta)
        self.config = config

    def after_step(self, kl: float, completions: int) -> None:
        """Multiply β by a factor that moves the KL towards its target.

        The new β is β · (1 + min(completions / horizon, 1) · clip(kl / target - 1, ±0.2)).

        Args:
            kl: mean KL of the step. NaN leaves β unchanged.
            completions: number of completions of the step.
        """
        if self.config.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.config.target - 1, -MOST_RELATIVE_ERROR), MOST_RELATIVE_ERROR)
        # Without the limit of 1, a step with many completions could set β to 0. It would then
        # remain 0, because β is only ever multiplied.
        self.value *= 1 + error * min(completions / self.config.horizon, 1.0)
