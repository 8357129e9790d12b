"""Tiny models and tokenizers for tests, built locally without downloads."""

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
# Maps each model family to its changes to the default configuration. The comments name the property
# that makes a family useful for tests.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},  # no special property except grouped-query attention
    "qwen2": {"tie_word_embeddings": True},  # biased projections, tied head
    "qwen3": {"head_dim": 16},  # q and k norms, head_dim differs from hidden/heads
    "mistral": {"sliding_window": 6},  # a window shorter than the sequences
    "gemma2": {  # both softcaps, a window in every other layer, query scale, (1+w) norms
        "head_dim": 16,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
    },  # logits divided by 4
    "cohere": {"logit_scale": 0.25},  # logits times 0.25, interleaved RoPE, parallel block
}
SYMBOLS = [*map(str, range(10)), "="]
TEXTS = [
    "What is 12 + 30? The answer is 42.\n#### 42",
    "Janet has 3 apples and buys 4 more.\n#### 7",
] * 10


def tiny_model(
    family: str = "qwen2", *, vocab_size: int = 61, seed: int = 0, **changes: Any
) -> Any:
    """Return a transformers causal LM with random weights, in evaluation mode."""
    import transformers

    torch.manual_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    fields = {**special, **SIZES, **FAMILIES.get(family, {}), "vocab_size": vocab_size, **changes}
    config = transformers.AutoConfig.for_model(family, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Initialize with larger weights. With the small default weights, an error in the attention
    # would hardly change the output, and tests would not detect the error.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tiny_policy(family: str = "llama", *, vocab_size: int | None = None, **changes: Any) -> Any:
    """Return a `Policy` with a tiny random model and a tokenizer of digits and "=" (`SYMBOLS`).

    "3 1 2 =" is a possible prompt.
    """
    from grpo_fast.data.tokenizer import build_symbol_tokenizer
    from grpo_fast.train.policy import Policy

    tokenizer = build_symbol_tokenizer(SYMBOLS)
    return Policy(tiny_model(family, vocab_size=vocab_size or len(tokenizer), **changes), tokenizer)


def tiny_folder(
    path: str | Path, family: str = "qwen2", *, vocab_size: int = 300, **changes: Any
) -> str:
    """Save a tiny model and a BPE tokenizer in transformers format. Return the folder's path.

    The model has random weights.
    """
    from grpo_fast.data.tokenizer import build_bpe_tokenizer

    tokenizer = build_bpe_tokenizer(TEXTS, vocab_size)
    model = tiny_model(family, vocab_size=len(tokenizer), **changes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
