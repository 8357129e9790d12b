"""Tiny random models of every causal LM class in the installed transformers.

One generic configuration is used for all classes.
"""

from typing import Any

import pytest
import torch
from packaging.version import Version

from tests import tiny

# Sliding window of all models. It is shorter than most test prompts, so it affects their results.
WINDOW = 16
LARGEST = 20_000_000  # parameters; for a larger model, a field of its size is missing in SIZES
# Values of configuration fields, each with the names of its fields.
FIELDS: list[tuple[Any, str]] = [
    (32, "hidden_size d_model n_embd embed_dim emb_dim dim embedding_dim embedding_size hidden_dim"
         " word_embed_proj_dim"),
    (4, "num_hidden_layers n_layer n_layers num_layers num_blocks"),
    (2, "decoder_layers encoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads"
        " encoder_attention_heads swa_num_attention_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    (8, "head_dim kv_channels swa_head_dim global_head_dim"),
    (64, "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim"
         " intermediate_size_mlp"),
    (16, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"
         " expert_ffn_hidden_size dense_intermediate_size moe_shared_expert_intermediate_size"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk"),
    (1, "n_group topk_group num_expert_group"),
    (1, "n_shared_experts num_shared_experts first_k_dense_replace"),
    (16, "q_lora_rank kv_lora_rank qk_head_dim"),
    (8, "qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    (2, "linear_num_key_heads linear_num_value_heads"),
    (8, "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (61, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    # At these positions a model changes its computation. The test sequences are longer, so that
    # they reach the changed computation.
    (24, "floor_scale log_scaling_n_floor"),
    (64, "original_max_position_embeddings"),
    (4, "rotary_dim"),
    (16, "query_pre_attn_scalar"),
    # Windows are shorter than the sequences, so that a wrong mask changes the results.
    (WINDOW, "sliding_window window_size attention_window_size sliding_window_size"
             " attention_chunk_size keep_window_size local_attention_window_len"),
    (2 * WINDOW, "local_attention"),
    (True, "use_sliding_window"),
    (2, "max_window_layers sliding_window_pattern _sliding_window_pattern no_rope_layer_interval"),
    # BERT and its relatives are causal only with this field.
    (True, "is_decoder"),
    (False, "use_cache"),
    (1, "eos_token_id"),
    (2, "bos_token_id"),
    (0, "pad_token_id"),
]  # fmt: skip
SIZES = {name: value for value, names in FIELDS for name in names.split()}
# The next constants contain config fields that replace the generic sizes for some families.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
# In latent attention, queries and keys have width 16, and values have width 8.
MLA = {"head_dim": 8, "num_key_value_heads": 4}
# Recurrent layers and attention. The chunks of Mamba 2 are shorter than most test sequences.
MIX = ["linear_attention"] * 3 + ["full_attention"]
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "kimi_linear": {
        "layer_types": MIX, "num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "olmo_hybrid": {"layer_types": MIX},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
        "chunk_size": 8,
    },
    "granitemoehybrid": {**MAMBA, "layer_types": MIX, "mamba_chunk_size": 8, "mamba_n_groups": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 8, "mamba_n_groups": 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm3": {},
    "bailing_hybrid": {},
}  # fmt: skip
SINKS = "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"
OWN: dict[str, dict[str, Any]] = {
    **HYBRID,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), MLA),
    **dict.fromkeys(("axk1", "axk2", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), MLA),
    "qwen2_moe": {"decoder_sparse_step": 2},  # alternates MoE and plain MLP layers
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}


# Models for tests other than the sweep: the models of `tests.tiny`, and families with special
# properties.
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(tiny.FAMILIES, {}),
    # This family has both layer types, each with its own RoPE, and norms of q and k.
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {},  # every second layer has no RoPE
    "phi3": {},  # has fused projections
    "deepseek_v3": {},  # has latent attention, and experts after a dense layer
    "olmo2": {},  # has norms after the sublayers
    "qwen3_moe": {},  # never drops tokens in its router
}


def causal_lms() -> list[str]:
    """Return the model types that `AutoModelForCausalLM` supports, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# These RoPE types change the rotation angles or scale the attention scores, in contrast to the
# default type. Each family is tested with all of them.
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


def tiny_config(kind: str, *, rope: str | None = None, **changes: Any) -> Any:
    """Return the configuration of a model type, with tiny values in all known size fields.

    Args:
        kind: Model type, such as "qwen2".
        rope: Key into ROPES, whose entry replaces the family's RoPE type.
        **changes: Further fields of the configuration.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[kind], {**OWN.get(kind, {}), "rope": rope, **changes})


def _small_rope(known: dict[str, Any], rope: str | None) -> dict[str, Any]:
    """Return a copy of the RoPE parameters `known` with a small original context length.

    The parameters are nested by layer type if the family has several RoPE types.
    """
    if any(isinstance(part, dict) for part in known.values()):
        return {name: part and _small_rope(part, rope) for name, part in known.items()}
    small = {**known, **ROPES.get(rope or "", {})}
    if small.get("rope_type") in ("yarn", "llama3") or "original_max_position_embeddings" in known:
        small["original_max_position_embeddings"] = SIZES["original_max_position_embeddings"]
    return small


def _shrunk(config_class: Any, own: dict[str, Any]) -> Any:
    known = config_class()
    aliases = getattr(config_class, "attribute_map", None) or {}
    names = {*known.to_dict(), *aliases}
    fields = {k: v for k, v in SIZES.items() if k in names and aliases.get(k) not in SIZES}
    parameters = getattr(known, "rope_parameters", None)
    if parameters:
        fields["rope_parameters"] = _small_rope(parameters, own.get("rope"))
    elif own.get("rope"):
        raise ValueError("no rope_parameters")
    for name in ("text_config", "decoder"):
        if name in (getattr(config_class, "sub_configs", None) or {}):
            fields[name] = _shrunk(type(getattr(known, name)), own)
    return config_class(**{**fields, **{k: v for k, v in own.items() if k in names}})


def family_model(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a random causal LM of this model type in evaluation mode.

    Its weights are large enough that a wrong mask changes the logps. If the class rejects the
    generic sizes, its error is raised.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

    if kind not in CONFIG_MAPPING and Version(__version__) < Version("5.23"):
        pytest.skip(f"transformers {__version__} does not have {kind}")
    config = tiny_config(kind, **changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def small_model(kind: str) -> Any:
    """Return a model of MODELS with two layers and a window shorter than most sequences."""
    if kind in tiny.FAMILIES:
        return tiny.tiny_model(kind)
    model = family_model(kind, num_hidden_layers=2, sliding_window=6, **MODELS[kind])
    # Use the eager experts, because torch's grouped matrix product does not support fp64.
    model.set_experts_implementation("eager")
    return model
