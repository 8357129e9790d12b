"""Attention of packed rows for any transformers model, with plain rows, shared prompts or trees.

    prepare(model)
    model(input_ids, position_ids=layout.position_ids, use_cache=False, packed_layout=layout)

Keep the attention implementation registered until the backward pass has ended, because gradient
checkpointing calls it again in the backward pass.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_fast.attention.agree import packed_pair
from grpo_fast.attention.dispatch import packed_rows_attention
from grpo_fast.attention.hybrid import recurrent_layers, split_recurrent_layers
from grpo_fast.attention.layout import TreeLayout
from grpo_fast.attention.packing import PackedTree
from grpo_fast.kernels.reference import final_logits
from grpo_fast.kernels.types import LogitTransform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Name under which the function is registered. It must not contain "flash", "sdpa", "flex_attention"
# or "|", because transformers gives these a special meaning.
NAME = "grpo_packed"

RECURRENT = {"linear_attention", "conv", "mamba", "hybrid"}
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "attention", "mlp", "moe", *RECURRENT}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Largest accepted difference in nats between a log-probability that is computed with a `Head` and
# the one that the model itself computes, for each dtype of the computation.
CHECK_TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05
}  # fmt: skip
# Configuration fields with the bound of the logits.
SOFTCAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
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
    is_hybrid = _layer_types(getattr(module, "config", None)) & RECURRENT
    if is_hybrid and not isinstance(attention_mask, TreeLayout):
        name = type(module).__name__
        raise ValueError(
            f"{name}: this model has recurrent layers, which would mix the sequences of a "
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


def window_as_mask(
    *_: object, config: object, mask_function: Callable, **request: Any
) -> int | Callable | None:
    """Return the size of the sliding window that a model requests, instead of a mask tensor.

    transformers calls this function when a model requests an attention mask.

    Args:
        config: the model's configuration.
        mask_function: the mask that transformers would build.
        request: other keyword arguments of transformers.

    Returns:
        None for a causal mask without a window, and an int for a sliding window. For all other
        masks, such as chunks, `mask_function` is returned, which the layer then rejects.

    Raises:
        ValueError: the caller passed a padding mask.
    """
    if request.get("attention_mask") is not None:
        instead = "packed attention takes no padding mask; pack the sequences instead"
        raise ValueError(f"attention_mask: {instead}")
    # transformers passes a sliding window to a mask function as local_size.
    size = request.get("local_size")
    is_plain = size in (None, getattr(config, "sliding_window", None))
    return size if is_plain and not request.get("use_vmap") else mask_function


def window_of(attention_mask: object, sliding_window: int | None) -> int | None:
    """Return the number of tokens in the sliding window of a layer, or None without a window.

    Args:
        attention_mask: the result of `window_as_mask`, or the layout of the row in a hybrid model.
        sliding_window: the keyword argument of the layer. It is used if the mask has no window.

    Raises:
        ValueError: the mask and the keyword argument have different windows, or the mask is neither
            causal nor a window.
    """
    if attention_mask is None or isinstance(attention_mask, TreeLayout):
        return sliding_window
    if not isinstance(attention_mask, int) or attention_mask < 1:
        raise ValueError(
            "attention_mask: expected a causal mask or a sliding window of at least "
            f"one token, got {attention_mask!r:.40}"
        )
    if sliding_window not in (None, attention_mask):
        differ = f"{attention_mask} tokens in its mask, {sliding_window} in its call"
        raise ValueError(f"sliding_window: this layer has two windows, {differ}")
    return attention_mask


def check_supported(model: PreTrainedModel) -> None:
    """Raise a ValueError if packed attention would give wrong results for a model.

    This is the case for models with recurrent layers that cannot be split, with unknown kinds of
    layers, and models whose RoPE depends on the sequence length.
    """
    check_rope(model)
    config = model.config
    kinds = _layer_types(config)
    is_recurrent = getattr(model, "_is_stateful", False) or kinds & RECURRENT
    if is_recurrent and not recurrent_layers(model):
        name = f"model_type {config.model_type}"
        raise ValueError(f"{name}: its recurrent state would run across packed segments")
    other = kinds - SUPPORTED_LAYERS
    if other:
        raise ValueError(f"layer_types: expected {sorted(SUPPORTED_LAYERS)}, got {sorted(other)}")


def _layer_types(config: object) -> set[str]:
    return set(getattr(config, "layer_types", None) or [])


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


# ------------------------------------------------------------------------------ The LM head
class Head(NamedTuple):
    """LM head of a model: logits = softcap·tanh(logit_scale·(hidden·weightᵀ + bias)/softcap).

    Attributes:
        weight: (V, H). The weight.
        bias: (V,). The bias, or None.
        softcap: bound of the logits. None: no bound.
        logit_scale: factor by which the logits are multiplied.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float

    @property
    def logit_kwargs(self) -> dict[str, Any]:
        """Return softcap and logit_scale as keyword arguments for the loss functions."""
        return {"softcap": self.softcap, "logit_scale": self.logit_scale}

    def logits_of(self, product: Tensor) -> Tensor:
        """Return the logits (N, V) in fp32 for hidden·weightᵀ + bias."""
        return final_logits(product.float(), LogitTransform(self.logit_scale, self.softcap))[0]


def check_tolerance(dtype: torch.dtype) -> float:
    """Return the accepted difference in nats between two computations of a logp in `dtype`."""
    return CHECK_TOLERANCE.get(dtype, CHECK_TOLERANCE[torch.bfloat16])


def head_of(lm: PreTrainedModel) -> Head:
    """Return the LM head of a transformers causal LM.

    The result includes the transforms that models apply after the head: the fields in SOFTCAPS
    (Gemma, RecurrentGemma, xLSTM), `logit_scale` (Cohere, multiplies), `logits_scaling` (Granite,
    divides) and `lm_head_multiplier` (Falcon-H1, multiplies). If your model has a different
    transform, check once that `linear_logps` with this head gives the logps of the model.

    Args:
        lm: a transformers causal LM.

    Returns:
        The head. Its weight is the model's parameter, so gradients reach the model.

    Raises:
        ValueError: the output embeddings are not a plain nn.Linear. Either a LoRA adapter is on
            them, or FSDP2 wraps them as a separate group, whose hooks would not run.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from grpo_fast.attention import head_of
        >>> config = Qwen2Config(
        ...     vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1,
        ... )
        >>> head = head_of(Qwen2ForCausalLM(config))
        >>> head.weight.shape, head.logit_kwargs
        (torch.Size([100, 16]), {'softcap': None, 'logit_scale': 1.0})
    """
    layer = lm.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"lm_head: expected torch.nn.Linear as output embeddings, got {type(layer).__name__} "
            "(with LoRA: leave lm_head out of target_modules and modules_to_save; with LoRA and "
            "tied embeddings: also leave out trainable_token_indices and ensure_weight_tying; with "
            "FSDP2: do not wrap lm_head separately, so that it belongs to the root module's group)"
        )
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        value = getattr(lm.config, name, None)
        if value is not None:
            scale *= 1 / float(value) if name == "logits_scaling" else float(value)
    softcaps = (getattr(lm.config, name, None) for name in SOFTCAPS)
    softcap = next((bound for bound in softcaps if bound is not None), None)
    return Head(layer.weight, layer.bias, None if softcap is None else float(softcap), scale)


# ------------------------------------------- Options that save memory and do not change results
def offload_checkpoints(model: PreTrainedModel) -> None:
    """Store the inputs of checkpointed layers in host memory until the backward pass.

    transformers has a similar option, but it requires pinned memory and therefore a GPU. Calling
    this function again has no effect.

    Args:
        model: A transformers model whose gradient checkpointing is enabled.
    """
    for module in model.modules():
        recompute = getattr(module, "_gradient_checkpointing_func", None)
        if recompute is not None and getattr(recompute, "func", None) is not _offloaded:
            module._gradient_checkpointing_func = functools.partial(_offloaded, recompute)


def _offloaded(recompute: Callable[..., object], *args: object, **kwargs: object) -> object:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return recompute(*args, **kwargs)


def tile_mlps(model: nn.Module, rows: int) -> None:
    """Make every dense MLP compute at most `rows` token rows at a time, to save memory.

    Such a group of rows is a tile. Each tile is computed again in the backward pass.

    Args:
        model: A transformers model.
        rows: Largest number of token rows in a tile.

    Raises:
        ValueError: The model has no dense MLP named `mlp` or `feed_forward`.
    """
    named = (m for n, m in model.named_modules() if n.split(".")[-1] in ("mlp", "feed_forward"))
    mlps = [module for module in named if _is_dense(module)]
    if not mlps:
        kind = type(model).__name__
        raise ValueError(f"tiled_mlp: {kind} has no dense MLP that could be tiled")
    for module in mlps:
        # Bind the method to the module with MethodType. When the trainer copies the model to make
        # the reference model, a bound method is bound to the copied module. A closure would still
        # use the original module.
        module.forward = types.MethodType(functools.partial(_tiled, rows), module)


def _is_dense(module: nn.Module) -> bool:
    """Return whether an MLP has at least two linear layers and no weights in other layers."""
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    linear = sum(isinstance(child, nn.Linear) for child in module.children())
    return linear >= 2 and not any(list(child.parameters()) for child in others)


def _tiled(rows: int, module: nn.Module, x: Tensor) -> Tensor:  # (…, T, h) → (…, T, h)
    plain = functools.partial(type(module).forward, module)
    if x.shape[-2] <= rows:
        return plain(x)
    tiles = x.split(rows, dim=-2)
    # Keep the default preserve_rng_state=True. An MLP may have dropout in TRL, and the second
    # computation of a tile must repeat it.
    return torch.cat([checkpoint(plain, tile, use_reentrant=False) for tile in tiles], dim=-2)
