"""The policy: a transformers causal LM with its tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpo_fast import Support, linear_logps
from grpo_fast.attention import (
    PackedTree,
    check_supported,
    disable_dropout,
    fast_layers,
    head_of,
    register,
    shared_prompt_supported,
)
from grpo_fast.errors import require
from grpo_fast.rollout import SampledModel
from grpo_fast.train.ranks import distributed, sharding

Result = TypeVar("Result")


class Policy(SampledModel):
    """A causal LM for training on packed rows.

    Args:
        model: a transformers causal LM, or a peft model around one.
        autocast: dtype the trunk runs in over fp32 weights, or None.
        home: the device that a model without weights is meant for.

    Raises ValueError for a model that packed attention or the fused head would compute wrongly.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        autocast: torch.dtype | None = None,
        home: torch.device | None = None,
    ) -> None:
        super().__init__(model, tokenizer, autocast=autocast)
        self.home = home
        self.kind = type(self.lm)  # of transformers; a sharded model's type is another
        check_supported(self.lm)
        # Why completions cannot share their prompt; None: they can.
        self.unshared = shared_prompt_supported(self.lm)
        disable_dropout(self.lm)
        fast_layers(self.lm.base_model)
        self.lm.set_attn_implementation(register())
        self.starts_at_base = True  # an adapter, if the policy has one, began at zero
        self.is_sharded = self._is_apart = self._is_inside = False

    @property
    def is_empty(self) -> bool:
        return head_of(self.lm).weight.is_meta

    @property
    def device(self) -> torch.device:
        return self.home if self.is_empty else self.head.weight.device

    def inside(self, work: Callable[[], Result]) -> Result:
        """Run `work()` inside the model's forward, so that FSDP2 gathers the head's shards.

        The tensors that it returns, with a graph, are those that lead back into the model.
        """
        if not self.is_sharded or self._is_inside:
            return work()
        self._is_inside = True
        try:
            return self.lm.inside(work)
        finally:
            self._is_inside = False
            if not torch.is_grad_enabled():  # no backward pass follows, which would do it
                self.lm.reshard()

    def hidden(self, packed: PackedTree) -> Tensor:
        """(T, H) final hidden states; rows `packed.predicting` predict the completion tokens."""
        return self.inside(lambda: self._hidden(packed))

    def _hidden(self, packed: PackedTree) -> Tensor:
        with self._autocast():
            states = self.lm.base_model(**packed.model_inputs).last_hidden_state[0]
        return states if self.autocast is None else states.to(self.autocast)

    def logps(
        self,
        packed: PackedTree,
        temperature: float = 1.0,
        hidden: Tensor | None = None,
        support: Support | None = None,
    ) -> Tensor:
        """(R,) fp32 log-probabilities of the completion tokens; no logits stored under no_grad.

        Args:
            hidden: what `hidden(packed)` gave, where that is known already.
            support: of the completion tokens, as in `linear_logps`.
        """

        def logps() -> Tensor:
            head, states = self.head, self.hidden(packed) if hidden is None else hidden
            return linear_logps(
                states, head.weight, packed.target_ids, hidden_rows=packed.predicting,
                bias=head.bias, temperature=temperature, support=support, **head.rule,
            )  # fmt: skip

        return self.inside(logps)

    def shard(self, mesh: Any) -> None:
        sharding.shard(self.lm, mesh, self.device)
        self.is_sharded = True

    def weights(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint holds, by name, of tied ones the first: the model's; over a
        base that is loaded from a path the adapter's alone. A sharded model has this rank's shards.
        """
        is_adapter = self.model is not self.lm and bool(self.lm.name_or_path)
        unique = dict[int, tuple[str, Tensor]]()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if tensor.requires_grad or not is_adapter:
                unique.setdefault(id(tensor), (name, tensor))
        return dict(unique.values())

    def agreed(self) -> AbstractContextManager[None]:
        """A context in which one rank's error is raised on all, where all make this forward pass:
        that of sharded weights, but not in a rollout.
        """
        in_step = self.is_sharded and not self._is_apart
        return distributed.together() if in_step else nullcontext()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let each rank make passes of its own, with all of the weights of a sharded model."""
        with sharding.unsharded(self.lm) if self.is_sharded else nullcontext(), self.apart():
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let each rank make forward passes of its own, as in rollouts, whose lengths differ."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def without_adapter(self) -> AbstractContextManager[None]:
        require(self.model is not self.lm, "model.lora", "a peft model", "a plain one")
        return self.model.disable_adapter()

    def frozen_copy(self) -> Policy:
        """A copy without gradients that shares nothing with this policy: the reference model."""
        twin = copy.copy(self)
        twin.model = twin.lm = copy.deepcopy(self.lm).requires_grad_(False).eval()
        return twin

    def trainable_copy(self) -> Policy:
        """A copy that trains what this policy trains, apart from the head that makes logits."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model)
        twin.lm = twin.model if self.model is self.lm else twin.model.get_base_model()
        twin.freeze_head()
        return twin

    def freeze_head(self) -> None:
        """Leave the weights of the logits out of training, unless they are the embedding's, too."""
        head = self.lm.get_output_embeddings()
        if head.weight is not self.lm.get_input_embeddings().weight:
            head.requires_grad_(False)

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def save(self, directory: str | Path) -> None:
        model = self.lm
        if self.model is not self.lm:
            model = copy.deepcopy(self.model).merge_and_unload()
        with in_silence():
            model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


@contextmanager
def in_silence() -> Iterator[None]:
    """Without transformers' bars, which would run through the run's own, and its table of missing
    weights, which our own refusal sums up.
    """
    from transformers.utils import logging

    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()
