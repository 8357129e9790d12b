"""Decoding steps of Llama-like models, with one C++ call per layer.

In a small model, calling a layer's modules takes longer than computing the layer. The decoder
supports transformers models on a CPU with fp32 weights. Their layers must have Llama's parameters
and no hooks. Biases, and norms of queries and keys, are optional. Under autocast to bf16, the
decoder multiplies in bf16 and rounds where the modules round.

Before its first use, the decoder is compared with the model's modules on random tokens and weights.
The comparison includes positions before and after every position limit in the configuration.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_fast.attention import Head, TreeLayout, small_windows
from grpo_fast.attention.agree import LENGTH, PROMPT, draw_groups, random_weights, starts_of
from grpo_fast.kernels import route
from grpo_fast.kernels.agree import Pair
from grpo_fast.kernels.cpu import decode as cpp
from grpo_fast.kernels.cpu import gemm, layers, loader
from grpo_fast.kernels.cpu.layers import epsilon_of, is_untouched
from grpo_fast.rollout.own.cache import RolloutCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A function (trunk, (B,) token ids, (B,) positions, cache) -> (B, H) final hidden states.
Step = Callable[["PreTrainedModel", Tensor, Tensor, RolloutCache], Tensor]

# Largest accepted difference between decoder and modules, relative to the largest entry of a hidden
# state. The two add fp32 numbers in different orders, so in bf16 they sometimes round differently.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
NORMS = "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"
LINEAR = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
REQUIRED = {
    f"{name}.weight"
    for name in (*NORMS[:2], *LINEAR, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                 "mlp.down_proj")
}  # fmt: skip
BIASES = [f"{name}.bias" for name in LINEAR]
OPTIONAL = {*(f"{name}.weight" for name in NORMS[2:]), *BIASES}
# Attributes of these types are the settings of a module. They may change its formula.
SETTINGS = frozenset((bool, int, float, str, type(None)))

_verdicts: dict[Hashable, bool] = {}  # configuration of a trunk -> whether the decoder agrees


class Decoder:
    """Decoder with a packed copy of the weights in the dtype of the head's weight.

    Args:
        trunk: the model without its LM head.
        head: weight, bias and logit transform of the LM head.
        places: (P,) int64, all positions that may occur. Calls receive indices into this vector.
    """

    def __init__(self, trunk: PreTrainedModel, head: Head, places: Tensor) -> None:
        self.trunk = trunk
        self.head = head
        self.dtype = head.weight.dtype
        self.layers = [(layer.self_attn, weights_of(layer, self.dtype)) for layer in trunk.layers]
        # Compute the angles of all positions in advance. This is possible because packed attention
        # accepts only position embeddings that depend on nothing but the position.
        angles = trunk.rotary_emb(trunk.embed_tokens.weight, places[None])
        self.cos, self.sin = (a[0].contiguous() for a in angles)  # (P, D)

    @functools.cached_property
    def packed_head(self) -> Tensor:
        return cpp.pack(self.head.weight.detach())

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits before scale and softcap, (B, V), for hidden states (B, H)."""
        logits = cpp.linear(hidden.float(), self.packed_head, len(self.head.weight))
        return logits if self.head.bias is None else logits.add_(self.head.bias)

    def __call__(self, ids: Tensor, positions: Tensor, cache: RolloutCache) -> Tensor:
        """Return the final hidden states, (B, H), for one new token of each completion.

        Args:
            ids: (B,) int64 token ids.
            positions: (B,) int64 indices into `places`.
            cache: the keys and values, which receive the new tokens.
        """
        x = self.trunk.embed_tokens(ids)
        cos, sin = (angles.index_select(0, positions) for angles in (self.cos, self.sin))
        for attention, weights in self.layers:
            cpp.decode_layer_(x, weights, cos, sin, *cache.kernel_args(cache.layers[attention]))
        return self.trunk.norm(x)


def decoder_of(
    trunk: PreTrainedModel, head: Head, cache: RolloutCache, forward: Step
) -> Decoder | None:
    """Return a decoder for the model, or None if the model is not supported.

    Args:
        trunk: the model without its LM head.
        head: weight, bias and logit transform of the LM head.
        cache: the cache after prefill.
        forward: computes a step with the model's modules, for the comparison.
    """
    if not is_supported(trunk, head, cache):
        return None
    key = configuration_of(trunk), head.weight.dtype
    try:
        if key not in _verdicts:
            _verdicts[key] = difference(trunk, head, cache.device, forward) is None
        places = torch.arange(max(cache.lengths) + cache.max_new_tokens, device=cache.device)
        return Decoder(trunk, head, places) if _verdicts[key] else None
    except Exception:  # an unusual model may raise any error: use its modules instead
        _verdicts[key] = False
    return None


def is_supported(trunk: PreTrainedModel, head: Head, cache: RolloutCache) -> bool:
    """Return whether the decoder supports this model and its C++ kernels are available."""
    dtype = head.weight.dtype
    if route.gemm_choice() == "vendor" or torch.is_autocast_enabled("cpu") != layers.in_bf16():
        return False
    wanted = torch.bfloat16 if layers.in_bf16() else torch.float32
    if dtype != wanted or gemm.unavailable(dtype):
        return False
    if loader.unavailable("decode") or loader.unavailable("decoder"):
        return False
    return (
        {name for name, _ in trunk.named_children()} == TRUNK
        and layers.is_plain(*trunk.parameters())
        and layers.is_plain(head.weight, dtype=dtype)
        and all(layer.params.softcap is None for layer in cache.layers.values())
        and all(map(is_untouched, trunk.modules()))
        and all(map(is_llama_layer, trunk.layers))
    )


def configuration_of(trunk: PreTrainedModel) -> Hashable:
    """Return the key under which the result of a model's comparison is cached."""
    shapes = tuple((name, p.shape) for name, p in trunk.named_parameters())
    return str(vars(trunk.config)), *map(settings_of, trunk.modules()), shapes


def settings_of(module: nn.Module) -> Hashable:
    """Return the class, the forward function and the settings of a module.

    The index of an attention module selects its entry of a cache, so it is not a setting.
    """
    kind = type(module)
    index = "layer_idx" if hasattr(module, "q_proj") else ""
    settings = [v for name, v in vars(module).items() if name != index and type(v) in SETTINGS]
    return kind, kind.forward, *settings


def is_llama_layer(layer: Any) -> bool:
    """Return whether a layer has Llama's parameters, SiLU, and one epsilon in all norms.

    The projections of q, k and v must all have a bias, or none of them.
    """
    names = {name for name, _ in layer.named_parameters()}
    if not REQUIRED <= names <= REQUIRED | OPTIONAL or len(names & {*BIASES}) not in (0, 3):
        return False
    x = torch.linspace(-8, 8, 33, dtype=torch.float32, device="cpu")
    act = getattr(layer.mlp, "act_fn", None)
    is_silu = act is not None and torch.allclose(act(x), F.silu(x))
    return is_silu and len(set(epsilons(layer))) == 1


def epsilons(layer: nn.Module) -> list[float | None]:
    return [epsilon_of(module) for name, module in layer.named_modules() if name in NORMS]


def weights_of(layer: Any, dtype: torch.dtype) -> cpp.LayerWeights:
    w = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def pack(*weights: Tensor) -> Tensor:
        return cpp.pack(*(weight.to(dtype) for weight in weights))

    biases = [w[name] for name in BIASES if name in w]
    attention, up = layer.self_attn, w["mlp.up_proj.weight"]
    (eps,) = set(epsilons(layer))
    return cpp.LayerWeights(
        norm=w["input_layernorm.weight"],
        qkv=pack(*(w[f"{name}.weight"] for name in LINEAR)),
        bias=torch.cat(biases).to(dtype).float() if biases else None,
        q_norm=w.get("self_attn.q_norm.weight"),
        k_norm=w.get("self_attn.k_norm.weight"),
        out=pack(w["self_attn.o_proj.weight"]),
        post_norm=w["post_attention_layernorm.weight"],
        gate_up=pack(w["mlp.gate_proj.weight"], up),
        down=pack(w["mlp.down_proj.weight"]),
        heads=len(w["self_attn.q_proj.weight"]) // attention.head_dim,
        inner=len(up),
        eps=eps,
        tiles=dtype == torch.bfloat16 and gemm.has_tiles(),
    )  # fmt: skip


def difference(
    trunk: PreTrainedModel, head: Head, device: torch.device, forward: Step
) -> str | None:
    """Return how decoder and modules differ in the hidden states of random tokens, or None.

    The comparison uses random weights. It uses only the model's first layers, as many as are
    needed to include every combination of layer settings.
    """
    # 1. Copy the trunk with fewer layers, and choose random tokens and the positions to test.
    twin = copy.copy(trunk)
    vars(twin)["_modules"] = {**trunk._modules, "layers": trunk.layers[: different_layers(trunk)]}
    starts = starts_of(trunk)
    groups = draw_groups(len(starts), len(trunk.embed_tokens.weight))
    prompts = torch.tensor([prompt for prompt, _ in groups], device=device)
    tokens = torch.tensor([pair for _, pair in groups], device=device)  # (starts, 2, tokens)
    first = torch.tensor(starts, device=device)[:, None]
    places = first + torch.arange(LENGTH, device=device)
    # 2. Prefill the prompts, then decode the tokens with the decoder and with the modules.
    ours, theirs = [], []
    with small_windows(trunk, positions=False), random_weights(twin):
        decoder = Decoder(twin, head, places.flatten())
        # Also run the first prompt alone, because a model's output may depend on the largest
        # position in the batch.
        for count in (1, len(starts)):
            cache = RolloutCache([PROMPT] * count, [2] * count, tokens.shape[2], device)
            cache.layout = TreeLayout.of(cache.lengths, device)
            prompt_places = places[:count, :PROMPT]
            forward(twin, prompts[:count].flatten(), prompt_places.flatten(), cache)
            cache.close_prompts()
            indices = torch.arange(count, device=device).repeat_interleave(2) * LENGTH
            for time, ids in enumerate(tokens[:count].flatten(0, 1).T):
                at = indices + PROMPT + time
                theirs.append(forward(twin, ids, places.flatten()[at], cache))
                ours.append(decoder(ids, at, cache))
                cache.time += 1
    return Pair(lambda: ours, lambda: theirs, (), CLOSE[decoder.dtype]).difference()


def different_layers(trunk: PreTrainedModel) -> int:
    """Return the smallest n such that the first n layers include all distinct layer settings."""
    kinds = getattr(trunk.config, "layer_types", None) or [None] * len(trunk.layers)
    found = []
    for kind, layer in zip(kinds[: len(trunk.layers)], trunk.layers, strict=True):
        shapes = [p.shape for p in layer.parameters()]
        found.append([kind, *map(settings_of, layer.modules()), shapes])
    return max(found.index(settings) for settings in found) + 1
