"""Sizes of a few public models, as fields of their transformers configs: for planning and benchmarks without a hub."""

from __future__ import annotations

from typing import Any

_QWEN2: dict[str, Any] = {"model_type": "qwen2", "max_position_embeddings": 1 << 20, "rope_theta": 1_000_000.0}

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN2, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        **_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
