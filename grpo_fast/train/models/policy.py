"""The policy, a transformers causal language model with its tokenizer, and its reference model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from grpo_fast import Support, linear_logps
from grpo_fast.attention import (
    Head,
    PackedTree,
    check_rope,
    check_supported,
    disable_dropout,
    fast_layers,
    head_of,
    hidden_by_samples,
    register,
    split_recurrent_layers,
)
from grpo_fast.errors import require
from grpo_fast.rollout import SampledModel
from grpo_fast.train import ranks
from grpo_fast.train.config import ReferenceConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Result = TypeVar("Result")


class Policy(SampledModel):
    """Causal language model that is trained on packed rows.

    Args:
        model: a transformers causal language model, or a peft model that wraps one.
        tokenizer: tokenizer of the model.
        autocast: dtype of the trunk's computations if its weights are fp32, or None.

    Raises:
        ValueError: the model's RoPE depends on the length of the sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, tokenizer, autocast=autocast)
        # Reason why every completion is computed alone, by the model's own forward. None if packed
        # rows are used, in which completions share the computation of their prompt.
        self.unshared: str | None = None
        check_rope(self.lm)
        disable_dropout(self.lm)
        try:
            check_supported(self.lm)
            split_recurrent_layers(self.lm.base_model)
            fast_layers(self.lm.base_model)
            self.lm.set_attn_implementation(register())
        except ValueError as error:
            self.compute_alone(str(error))
        self.is_sharded = self._is_inside = False

    def compute_alone(self, reason: str) -> None:
        """Stop using packed rows, and compute every completion by the model's own forward.

        Args:
            reason: why packed rows of this model would be wrong.
        """
        self.unshared = reason
        self.lm.set_attn_implementation(self.generation_attn)

    @property
    def device(self) -> torch.device:
        return head_of(self.lm).weight.device

    def inside(self, work: Callable[[], Result]) -> Result:
        """Call `work` inside the model's forward pass, where FSDP2 gathers the head's weights.

        Args:
            work: function without arguments. Its result must contain all tensors that depend on
                the model and need a backward pass, because FSDP2 attaches its backward hooks to the
                result.
        """
        if not self.is_sharded or self._is_inside:
            return work()
        self._is_inside = True
        try:
            return self.lm.inside(work)
        finally:
            self._is_inside = False
            # Normally the backward pass releases the gathered weights. Without gradients there is
            # no backward pass, so release them here.
            if not torch.is_grad_enabled():
                self.lm.reshard()

    def hidden(self, packed: PackedTree) -> Tensor:
        """Return the final hidden states of a packed row, shape (T, H)."""

        def hidden() -> Tensor:
            with self._autocast():
                if self.unshared is not None:
                    states = hidden_by_samples(self.lm, packed)
                else:
                    states = self.lm.base_model(**packed.model_inputs).last_hidden_state[0]
            return states if self.autocast is None else states.to(self.autocast)

        return self.inside(hidden)

    def logps(
        self,
        packed: PackedTree,
        temperature: float = 1.0,
        hidden: Tensor | None = None,
        support: Support | None = None,
    ) -> Tensor:
        """Return the log-probabilities of the completion tokens, fp32 of shape (R,).

        Args:
            packed: the packed row.
            temperature: temperature by which the logits are divided.
            hidden: result of `hidden(packed)`. None computes the hidden states.
            support: token ids that the sampler kept, in the format of `linear_logps`. None means
                the whole vocabulary.
        """

        def logps() -> Tensor:
            head = self.head
            states = self.hidden(packed) if hidden is None else hidden
            return linear_logps(
                states, head.weight, packed.target_ids, hidden_rows=packed.predicting,
                bias=head.bias, temperature=temperature, support=support, **head.logit_kwargs,
            )  # fmt: skip

        return self.inside(logps)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the weights of the model over a device mesh with FSDP2.

        Raises:
            ValueError: the model computes every completion alone. Ranks would then run different
                numbers of forward passes and wait for each other forever.
        """
        expected = "ddp, because this model computes every completion alone"
        came = f"fsdp2 or hsdp: {self.unshared}"
        require(self.unshared is None, "distributed", expected, came)
        ranks.shard(self.lm, mesh)
        self.is_sharded = True

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that a checkpoint stores, keyed by name.

        Tied weights appear once. If the base model can be loaded again from its path, only the
        weights of the adapter are returned. A sharded model returns the shards of this rank.
        """
        is_adapter = self.model is not self.lm and bool(self.lm.name_or_path)
        unique = dict[int, tuple[str, Tensor]]()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if tensor.requires_grad or not is_adapter:
                unique.setdefault(id(tensor), (name, tensor))
        return dict(unique.values())

    def frozen_copy(self) -> Policy:
        """Return a frozen copy of the policy for use as the reference. It shares no weights."""
        # Copy only the weights. The tokenizer and the settings are shared with the original.
        twin = copy.copy(self)
        twin.model = twin.lm = copy.deepcopy(self.lm).requires_grad_(False).eval()
        return twin

    def trainable_copy(self) -> Policy:
        """Return a copy of the policy that a critic can train.

        In the copy, the same parameters require grad as in the policy, except an untied LM head.
        """
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model)
        twin.lm = twin.model if self.model is self.lm else twin.model.get_base_model()
        head = twin.lm.get_output_embeddings()
        if head.weight is not twin.lm.get_input_embeddings().weight:
            head.requires_grad_(False)
        return twin

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def save(self, directory: str | Path) -> None:
        """Save the model and the tokenizer in transformers format. An adapter is merged."""
        # Merge the adapter into a copy, because merging changes the model's weights in place.
        model = self.lm
        if self.model is not self.lm:
            adapted = copy.deepcopy(self.model)
            # peft would also merge the adapter of an embedding into a head that is tied to it.
            head = adapted.get_output_embeddings()
            if hasattr(adapted.get_input_embeddings(), "base_layer"):
                head.weight = nn.Parameter(head.weight.detach().clone())
            model = adapted.merge_and_unload()
        with in_silence():
            model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


class Reference:
    """Reference model of the KL divergence.

    It is a frozen copy of the policy, a copy that is synced with the policy, or the policy without
    its adapter. With `kind: none` there is no reference.

    Args:
        policy: the policy after the warm start and before the first training step.
        config: the section `reference`.
    """

    def __init__(self, policy: Policy, config: ReferenceConfig) -> None:
        self.policy = policy
        self.config = config
        # With LoRA, disabling the adapter restores the initial policy.
        is_copy = config.kind != "none" and policy.model is policy.lm
        self.copy = policy.frozen_copy() if is_copy else None

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
        for weight, current in zip(copies, self.policy.model.parameters(), strict=True):
            weight.lerp_(current.to(weight.dtype), self.config.mixing)

    # Without `copy`, the reference is the policy with its adapter disabled.
    def _switched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.copy is not None else self.policy.model.disable_adapter()


@contextmanager
def in_silence() -> Iterator[None]:
    """Disable the progress bars and warnings of transformers.

    The bars would interrupt the run's progress lines. The warnings are not needed, because missing
    weights raise an error.
    """
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()
