"""The reference model of the KL divergence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import Head, PackedTree
from grpo_fast.errors import require
from grpo_fast.train.config import ModelConfig, ReferenceConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        # With LoRA, disabling the adapter restores the initial policy.
        if another is None and config.kind != "none" and policy.model is policy.lm:
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
        other = load_policy(own)
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
