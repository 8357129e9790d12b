"""A causal LM as our loop samples from it; its owner gets it back unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_fast.attention import Head, head_of
from grpo_fast.errors import require


class SampledModel:
    """A transformers causal LM, or a peft model around one, as `TransformersEngine` uses it.

    Args:
        tokenizer: of its prompts; None: they are token ids, and `eos_ids` are given.
        eos_ids: the token ids that end a completion; None: the tokenizer's and the model's.
        attn: attention for `generate`; "auto": the model's own (eager where it has a softcap).
        autocast: dtype that the model runs in over fp32 weights, or None.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        eos_ids: Iterable[int] | None = None,
        attn: str = "auto",
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.tokenizer, self.autocast = model, tokenizer, autocast
        configs = getattr(model, "peft_config", {}).values()
        changes_inputs = any(config.is_prompt_learning for config in configs)
        require(not changes_inputs, "model", "inputs as they are", "peft's prompt learning")
        self.lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        softcap = getattr(self.lm.config, "attn_logit_softcapping", None)
        usual = "eager" if softcap is not None else self.lm.config._attn_implementation
        self.generation_attn = usual if attn == "auto" else attn
        if eos_ids is None:
            require(tokenizer is not None, "tokenizer", "the model's", None)
            self.eos_ids, self.pad_id = special_ids(self.lm, tokenizer)
        else:
            self.eos_ids = frozenset(eos_ids)
            self.pad_id = min(self.eos_ids)
        self.positions = positions(self.lm.config.get_text_config())

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def head(self) -> Head:
        """Weight, bias and logit rule of the head, in the dtype of the hidden states."""
        head = head_of(self.lm)
        if self.autocast is None:
            return head
        bias = None if head.bias is None else head.bias.to(self.autocast)
        return head._replace(weight=head.weight.to(self.autocast), bias=bias)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Evaluation mode with a cache-capable attention and a plain generation config; then back.

        The attention is exchanged between whole steps only, never between a forward pass and its
        backward.
        """
        lm, attention = self.lm, self.lm.config._attn_implementation
        modes, saved = [(m, m.training) for m in lm.modules()], lm.generation_config
        # A shipped generation config may hold penalties and warpers; the sampler is ours alone.
        lm.generation_config = type(saved)()
        lm.set_attn_implementation(self.generation_attn)
        lm.eval()
        try:
            with torch.no_grad(), self._autocast():
                yield
        finally:
            lm.generation_config = saved
            lm.set_attn_implementation(attention)
            for module, training in modes:
                module.training = training

    def own_logps(self, rows: Sequence[Sequence[int]], starts: Sequence[int] = ()) -> Tensor:
        """Return logps of all tokens but the first by the model's own forward pass.

        Call it in `generation()`.

        Args:
            rows: token ids of N sequences of equal length L.
            starts: the position of each sequence's first token; empty: the model's default.

        Returns:
            fp32 logps, of shape (N, L-1).
        """
        ids, places = torch.tensor(rows, device=self.device), {}
        if starts:
            first = torch.tensor(starts, device=self.device)[:, None]
            places["position_ids"] = first + torch.arange(ids.shape[1], device=self.device)
        logits = self.lm(input_ids=ids, use_cache=False, **places).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def _autocast(self) -> AbstractContextManager[Any]:
        on = self.autocast is not None  # off inside a caller's autocast, too
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=on)


def special_ids(lm: Any, tokenizer: Any) -> tuple[frozenset[int], int]:
    """Every id that ends a completion (tokenizer's, generation config's), and one for padding."""
    eos: set[int] = set()
    for value in (tokenizer.eos_token_id, getattr(lm.generation_config, "eos_token_id", None)):
        eos |= set(value) if isinstance(value, (list, tuple)) else {value} - {None}
    are_ids = all(type(token) is int and token >= 0 for token in eos)
    require(are_ids, "eos_token_id", "token ids", ", ".join(map(repr, eos)))
    require(eos, "tokenizer", "an EOS token, which ends completions", "none")
    pad = tokenizer.pad_token_id
    return frozenset(eos), min(eos) if pad is None else pad


def positions(config: Any) -> float:
    """The longest prompt, in tokens: inf where the config names no bound."""
    bound = getattr(config, "max_position_embeddings", None)
    if not isinstance(bound, int):
        return math.inf
    # Qwen2.5 is stretched (YaRN) by these two alone: max_position_embeddings stays as it was.
    rope = getattr(config, "rope_parameters", None) or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    is_stretched = isinstance(factor, (int, float))
    return max(bound, int(factor * (original or bound))) if is_stretched else bound
