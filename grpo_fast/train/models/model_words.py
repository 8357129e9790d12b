"""Facts for rollouts from a model's configuration and tokenizer: attention, EOS, positions."""

from __future__ import annotations

import math
from typing import Any


def generation_attention(lm: Any) -> str:
    softcap = getattr(lm.config, "attn_logit_softcapping", None)
    return "eager" if softcap is not None else lm.config._attn_implementation


def special_ids(lm: Any, tokenizer: Any) -> tuple[frozenset[int], int]:
    """Every id that ends a completion (tokenizer's, generation config's), and one for padding."""
    eos: set[int] = set()
    for value in (tokenizer.eos_token_id, getattr(lm.generation_config, "eos_token_id", None)):
        eos |= set(value) if isinstance(value, (list, tuple)) else {value} - {None}
    if not all(type(token) is int and token >= 0 for token in eos):
        raise ValueError(f"eos_token_id: expected token ids, got {', '.join(map(repr, eos))}")
    if not eos:
        raise ValueError("tokenizer: has no EOS token, so no completion could end")
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
