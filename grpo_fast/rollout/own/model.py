"""Wrapper that prepares a causal LM for sampling and leaves the model unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.attention import NAME, Head, head_of
from grpo_fast.errors import require
from grpo_fast.kernels.cpu.gemm import shared_copies

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class SampledModel:
    """A transformers causal LM, or a peft model around one, prepared for `TransformersEngine`.

    Args:
        model: the model.
        tokenizer: the model's tokenizer. Without a tokenizer, `eos_ids` is required, prompts must
            be token ids, and the texts of completions are empty.
        eos_ids: token ids that end a completion. None uses the EOS ids of the tokenizer and the
            model.
        attn: attention implementation for transformers' `generate`. "auto" uses the model's
            implementation, "sdpa" in place of "grpo_packed", or "eager" if the model has an
            attention softcap.
        autocast: dtype in which a model with fp32 weights computes, or None.

    Raises:
        ValueError: no EOS token is known, `eos_ids` are not token ids, or the model uses peft's
            prompt learning.
    """

    template_kwargs: Mapping[str, object] = MappingProxyType({})  # arguments of the chat template

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        eos_ids: Iterable[int] | None = None,
        attn: str = "auto",
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.autocast = autocast
        configs = getattr(model, "peft_config", {}).values()
        fits = not any(config.is_prompt_learning for config in configs)
        require(fits, "model", "a model with unchanged inputs", "peft's prompt learning")
        self.lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        softcap = getattr(self.lm.config, "attn_logit_softcapping", None)
        usual = "eager" if softcap is not None else self.lm.config._attn_implementation
        if usual == NAME:  # the function for packed rows cannot read a KV cache
            usual = "sdpa"
        self.generation_attn = usual if attn == "auto" else attn
        if eos_ids is None:
            require(tokenizer is not None, "tokenizer", "the model's, or eos_ids", None)
            self.eos_ids, self.pad_id = special_ids(self.lm, tokenizer)
        else:
            require(isinstance(eos_ids, Iterable), "eos_ids", "token ids", repr(eos_ids))
            self.eos_ids = checked_ids("eos_ids", eos_ids)
            require(self.eos_ids, "eos_ids", "at least one token id that ends a completion", "none")
            self.pad_id = min(self.eos_ids)
        self.positions = positions(self.lm.config.get_text_config())

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.lm.device

    @property
    def head(self) -> Head:
        """Weight, bias and logit transform of the LM head, in the dtype of the hidden states."""
        head = head_of(self.lm)
        if self.autocast is None:
            return head
        bias = None if head.bias is None else head.bias.to(self.autocast)
        return head._replace(weight=head.weight.to(self.autocast), bias=bias)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Switch the model to evaluation mode and to the attention for sampling.

        Mode, attention and generation config are restored at the end.

        Do not call this between a forward pass and its backward. Gradient checkpointing would
        recompute with a different attention implementation.
        """
        lm = self.lm
        attention = lm.config._attn_implementation
        modes = [(m, m.training) for m in lm.modules()]
        saved = lm.generation_config
        # Use a default generation config. The model's config may contain penalties or other logits
        # processors, which would change the distribution.
        lm.generation_config = type(saved)()
        lm.set_attn_implementation(self.generation_attn)
        lm.eval()
        try:
            with torch.no_grad(), self._autocast(), shared_copies():
                yield
        finally:
            lm.generation_config = saved
            lm.set_attn_implementation(attention)
            for module, training in modes:
                module.training = training

    def model_logps(self, rows: Sequence[Sequence[int]], starts: Sequence[int] = ()) -> Tensor:
        """Return log-probabilities of token sequences, computed by one forward pass.

        Call this inside `with policy.generation():`.

        Args:
            rows: token ids of N sequences of equal length L.
            starts: position of each sequence's first token. Empty means the model's default.

        Returns:
            (N, L-1) fp32, for all tokens but the first.
        """
        ids = torch.tensor(rows, device=self.device)
        places = {}
        if starts:
            first = torch.tensor(starts, device=self.device)[:, None]
            places["position_ids"] = first + torch.arange(ids.shape[1], device=self.device)
        logits = self.lm(input_ids=ids, use_cache=False, **places).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def _autocast(self) -> torch.autocast:
        on = self.autocast is not None  # False also disables an autocast of the caller
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=on)


def checked_ids(name: str, ids: Iterable[Any]) -> frozenset[int]:
    """Return token ids as a set, or raise a ValueError that names the invalid argument."""
    listed = [*ids]
    are_ids = all(type(token) is int and token >= 0 for token in listed)
    require(are_ids, name, "token ids", ", ".join(map(repr, listed)))
    return frozenset(listed)


def special_ids(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[frozenset[int], int]:
    """Return all EOS ids of the tokenizer and the generation config, and the padding id."""
    found: set[Any] = set()
    for value in (tokenizer.eos_token_id, getattr(lm.generation_config, "eos_token_id", None)):
        found |= set(value) if isinstance(value, (list, tuple)) else {value} - {None}
    eos = checked_ids("eos_token_id", found)
    require(eos, "tokenizer", "an EOS token that ends completions", "none")
    pad = tokenizer.pad_token_id
    return eos, min(eos) if pad is None else pad


def positions(config: PreTrainedConfig) -> float:
    """Return the number of positions of a model, or inf if its configuration has no limit."""
    bound = getattr(config, "max_position_embeddings", None)
    if not isinstance(bound, int):
        return math.inf
    # Configurations with YaRN, such as those of Qwen2.5, extend the position range through
    # `rope_parameters` and leave max_position_embeddings unchanged.
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if not isinstance(factor, (int, float)):
        return bound
    original = rope.get("original_max_position_embeddings") or bound
    return max(bound, int(factor * original))
