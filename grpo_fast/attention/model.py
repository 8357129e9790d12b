"""Attention of packed rows for any transformers model, with plain rows, shared prompts or trees.

    prepare(model)
    model(input_ids, position_ids=layout.position_ids, use_cache=False, packed_layout=layout)

Keep the attention implementation registered until the backward pass has ended, because gradient
checkpointing calls it again in the backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_fast.attention.agree import packed_pair
from grpo_fast.attention.dispatch import packed_rows_attention
from grpo_fast.attention.head import check_tolerance
from grpo_fast.attention.hybrid import may_be_hybrid, recurrent_layers, split_recurrent_layers
from grpo_fast.attention.layout import TreeLayout
from grpo_fast.attention.packing import PackedTree
from grpo_fast.attention.windows import window_as_mask, window_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Name under which the function is registered. It must not contain "flash", "sdpa", "flex_attention"
# or "|", because transformers gives these a special meaning.
NAME = "grpo_packed"

RECURRENT = {"linear_attention", "conv", "mamba", "hybrid"}
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "attention", "mlp", "moe", *RECURRENT}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Attributes that set the noise on the inputs of MoE routers (Mixtral, PhiMoE).
JITTER = {"jitter_noise", "input_jitter_noise"}


def register() -> str:
    """Register packed attention and its mask function with transformers.

    Use `prepare` if you do not know the model. It also checks that packed rows are right. A model
    whose layers never call transformers' attention interface (Mamba, BLOOM, Falcon, GPT-J) ignores
    the layout of a packed row without an error. Calling the function again has no effect.

    Returns:
        The name for `model.set_attn_implementation`.

    Example:
        >>> from grpo_fast.attention import register
        >>> register()
        'grpo_packed'
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, window_as_mask)
    return NAME


def prepare(model: PreTrainedModel) -> None:
    """Prepare a transformers causal LM for packed rows, and compare a packed row with its own pass.

    This registers and sets packed attention, and splits the recurrent layers of hybrid models.
    Without `packed_layout`, the recurrent layers compute what they did before. Call this before
    FSDP2 shards the model.

    Args:
        model: a transformers causal LM.

    Raises:
        ValueError: packed rows of this model would be wrong. The model is then unchanged, except
            for its recurrent layers.

    Example:
        >>> prepare(model)
        >>> pack = pack_groups(groups, device=model.device)
        >>> hidden = model.model(**pack.model_inputs).last_hidden_state[0]
    """
    check_supported(model)
    split_recurrent_layers(model.base_model)
    # A model with packed attention or without weights cannot compute the expected result.
    if model.config._attn_implementation != NAME and model.device.type != "meta":
        _check_packed_row(model)
    model.set_attn_implementation(register())


@torch.no_grad()
def _check_packed_row(model: PreTrainedModel) -> None:
    """Raise a ValueError if the hidden states of a packed row differ from those of its sequences.

    The model is in evaluation mode meanwhile, because its own pass may have dropout.
    """
    trunk = model.base_model
    own = model.config._attn_implementation
    training = model.training

    def packed(pack: PackedTree) -> Tensor:
        model.set_attn_implementation(register())
        return trunk(**pack.model_inputs).last_hidden_state[0, pack.predicting].float()

    def alone(rows: list[list[int]], _: Sequence[int]) -> Tensor:
        # transformers 5.17 lets gemma2 use SDPA, which ignores its softcap.
        model.set_attn_implementation("eager")
        ids = torch.tensor(rows, device=model.device)[:, :-1]
        return trunk(input_ids=ids, use_cache=False).last_hidden_state.float()

    dtype = torch.bfloat16 if torch.is_autocast_enabled(model.device.type) else trunk.dtype
    model.eval()
    try:
        difference = packed_pair(model, packed, alone, check_tolerance(dtype)).difference()
    finally:
        model.set_attn_implementation(own)
        model.train(training)
    if difference is not None:
        raise ValueError(
            f"model_type {model.config.model_type}: packed rows do not support its layers. "
            f"Compared with separate sequences, {difference}"
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, H_kv, T, D)
    value: Tensor,  # (1, H_kv, T, D)
    attention_mask: object,  # the result of `window_as_mask`
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_layout: TreeLayout | None = None,
    s_aux: Tensor | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, where each segment attends to itself and its ancestors.

    `register` registers this function with transformers.

    Args:
        module: the attention layer.
        query: queries, (1, H, T, D).
        key: keys, (1, H_kv, T, D).
        value: values, (1, H_kv, T, D_v), where D_v is at most D.
        attention_mask: the result of `window_as_mask`, which is None or the size of a sliding
            window.
        dropout: must be 0.
        scaling: number by which the scores are multiplied. None: D^-0.5.
        sliding_window: the window of the layer, used if the mask has no window.
        softcap: bound of the scores. None: no bound.
        packed_layout: the segments of the row and their parents.
        s_aux: attention sinks, with one number for each head.
        extra: other keyword arguments of transformers.

    Returns:
        The attention output, (1, T, H, D), and None instead of attention weights.

    Raises:
        ValueError: the result would be wrong because of a missing layout, a mask that is neither
            causal nor a window, several rows, a cache, dropout, a position bias, or a
            bidirectional layer.
    """
    if packed_layout is None:
        raise ValueError("packed_layout: expected a TreeLayout as keyword of model(...), got None")
    kinds = set(getattr(getattr(module, "config", None), "layer_types", None) or [])
    is_hybrid = may_be_hybrid(type(module).__module__) or kinds & RECURRENT
    if is_hybrid and not isinstance(attention_mask, TreeLayout):
        name = type(module).__name__
        raise ValueError(
            f"{name}: this model may have recurrent layers, which would mix the sequences of a "
            "packed row: call grpo_fast.attention.prepare(model) first, and pass no attention_mask"
        )
    window = window_of(attention_mask, sliding_window)
    tokens = packed_layout.total
    # Reject batches of several rows. Also reject a KV cache, which would add keys that the layout
    # does not describe.
    if query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != tokens:
        raise ValueError(
            f"packed_layout: holds {tokens} tokens in one row, got query {tuple(query.shape)} and "
            f"key {tuple(key.shape)} (use_cache must be False)"
        )
    if dropout:
        raise ValueError(f"dropout: expected 0 in packed attention, got {dropout}")
    for name in ("position_bias", "cache"):
        if extra.get(name) is not None:
            raise ValueError(f"{name}: not supported by packed attention")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__}: packed attention is causal, this layer is not")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # Convert to the dtype of V. Under autocast, RoPE returns fp32 queries and keys, but V is in a
    # 16-bit dtype.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    # Pad V with zeros if its last dimension is smaller than that of the keys, as in latent
    # attention (DeepSeek). The padding is removed below.
    if value.shape[-1] < key.shape[-1]:
        v = F.pad(v, (0, key.shape[-1] - value.shape[-1]))
    out = packed_rows_attention(
        q, k, v, packed_layout, scale=scale, window=window, softcap=softcap, sinks=s_aux
    )
    return out[None, ..., : value.shape[-1]], None


def check_supported(model: PreTrainedModel) -> None:
    """Raise a ValueError if packed attention would give wrong results for a model.

    This is the case for models with recurrent layers that cannot be split, with unknown kinds of
    layers, and models whose RoPE depends on the sequence length.
    """
    check_rope(model)
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or [])
    is_recurrent = getattr(model, "_is_stateful", False) or kinds & RECURRENT
    if is_recurrent and not recurrent_layers(model):
        name = f"model_type {config.model_type}"
        raise ValueError(f"{name}: its recurrent state would run across packed segments")
    other = kinds - SUPPORTED_LAYERS
    if other:
        raise ValueError(f"layer_types: expected {sorted(SUPPORTED_LAYERS)}, got {sorted(other)}")


def check_rope(model: PreTrainedModel) -> None:
    """Raise a ValueError if a model's RoPE depends on the length of the sequence.

    Its hidden states then depend on later tokens, so a sampler and one forward pass disagree.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    for part in [rope, *(p for p in rope.values() if isinstance(p, dict))]:
        kind = part.get("rope_type")
        if kind in LENGTH_DEPENDENT_ROPE:
            raise ValueError(
                f"rope_type: {kind!r} depends on the length, so logits would depend on later tokens"
            )


def shared_prompt_supported(model: PreTrainedModel) -> str | None:
    """Return why packed attention does not support a model, or None if it does."""
    try:
        check_supported(model)
    except ValueError as error:
        return str(error)
    return None


def disable_dropout(model: nn.Module) -> None:
    """Set dropout and router jitter to 0.

    With dropout or jitter, two computations of logps with the same weights would differ.
    """
    rates: set[float] = set()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            rates.add(module.p)
            module.p = 0.0
        for name, rate in vars(module).items():
            if isinstance(rate, float) and ("dropout" in name or name in JITTER):
                rates.add(rate)
                vars(module)[name] = 0.0
    if any(rates):
        log.warning("dropout is switched off, router jitter too; rates were %s", sorted(rates))
