"""One decoding step of a model like Llama: each layer is one call of C++.

A call of a small layer's modules takes longer than its mathematics. The decoder serves transformers
models whose layers have Llama's parameters (also with biases or norms of queries and keys), in fp32
on a CPU, without hooks. A trial compares it with the model's modules on random tokens and weights,
before and past every limit of the configuration.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.attention import TreeLayout, small_windows, trial
from grpo_fast.attention.head import Head
from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import decode as cpp
from grpo_fast.kernels.cpu import gemm, layers, loader
from grpo_fast.kernels.cpu.modules import SETTINGS, epsilon_of, is_silu, is_untouched, settings_of
from grpo_fast.rollout.own.cache import RolloutCache

# The trunk, (B,) token ids, their positions, the cache → (B, H) final hidden states
Step = Callable[[Any, Tensor, Tensor, RolloutCache], Tensor]

CLOSE = 1e-4  # of the largest hidden state: all layers in fp32, summed in a different order
TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
NORMS = "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"
LINEAR = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
REQUIRED = {
    f"{name}.weight"
    for name in (*NORMS[:2], *LINEAR, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                 "mlp.down_proj")
}  # fmt: skip
OPTIONAL = {*(f"{name}.weight" for name in NORMS[2:]), *(f"{name}.bias" for name in LINEAR)}

_verdicts: dict[Hashable, bool] = {}  # one for each configuration of a trunk


class Decoder:
    """A model with its weights packed (as much memory as its gradient takes), and its angles.

    Args:
        places: the positions that it can compute, of shape (P,). Calls take indices into them.
    """

    def __init__(self, trunk: Any, head: Head, places: Tensor) -> None:
        self.trunk, self.head = trunk, head
        self.layers = [(layer.self_attn, weights_of(layer)) for layer in trunk.layers]
        # An angle follows from its position alone: packed attention refuses other embeddings.
        angles = trunk.rotary_emb(head.weight, places[None])
        self.cos, self.sin = (a[0].contiguous() for a in angles)  # (P, D)

    @functools.cached_property
    def packed_head(self) -> Tensor:
        return cpp.pack(self.head.weight.detach())

    def product(self, hidden: Tensor) -> Tensor:
        """Return the head's hidden·Wᵀ + bias, of shape (B, V), of hidden states (B, H)."""
        logits = cpp.linear(hidden, self.packed_head, len(self.head.weight))
        return logits if self.head.bias is None else logits.add_(self.head.bias)

    def __call__(self, ids: Tensor, positions: Tensor, cache: RolloutCache) -> Tensor:
        x = self.trunk.embed_tokens(ids)
        cos, sin = (angles.index_select(0, positions) for angles in (self.cos, self.sin))
        for attention, weights in self.layers:
            cpp.decode_layer_(x, weights, cos, sin, *cache.in_tiles(cache.layers[attention]))
        return self.trunk.norm(x)


def decoder_of(trunk: Any, head: Head, cache: RolloutCache, forward: Step) -> Decoder | None:
    """Return the decoder for a model and a cache that has its prompts, None for other models."""
    if not has_its_form(trunk, head, cache):
        return None
    key = configuration_of(trunk)
    try:
        if key not in _verdicts:
            _verdicts[key] = agrees(trunk, head, cache.device, forward)
        places = torch.arange(max(cache.lengths) + cache.most, device=cache.device)
        return Decoder(trunk, head, places) if _verdicts[key] else None
    except Exception:  # a model of another form may fail in any way; its modules compute it
        _verdicts[key] = False
    return None


def has_its_form(trunk: Any, head: Head, cache: RolloutCache) -> bool:
    if torch.is_autocast_enabled("cpu") or route.gemm_choice() == "vendor":
        return False
    if gemm.unavailable(torch.float32) or loader.load("decode") or loader.load("decoder"):
        return False
    return (
        {name for name, _ in trunk.named_children()} == TRUNK
        and layers.is_plain(*trunk.parameters(), head.weight)
        and all(layer.rule.softcap is None for layer in cache.layers.values())
        and all(map(is_untouched, trunk.modules()))
        and all(map(is_like_llamas, trunk.layers))
    )


def configuration_of(trunk: Any) -> Hashable:
    """Return what the verdict depends on: the configuration, and every module's settings."""
    shapes = tuple((name, p.shape) for name, p in trunk.named_parameters())
    return str(vars(trunk.config)), *map(settings_of, trunk.modules()), shapes


def is_like_llamas(layer: Any) -> bool:
    names = {name for name, _ in layer.named_parameters()}
    if not REQUIRED <= names <= REQUIRED | OPTIONAL:
        return False
    return is_silu(getattr(layer.mlp, "act_fn", None)) and len(set(epsilons(layer))) == 1


def epsilons(layer: nn.Module) -> list[float | None]:
    return [epsilon_of(module) for name, module in layer.named_modules() if name in NORMS]


def weights_of(layer: Any) -> cpp.LayerWeights:
    w = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    biases = [w.get(f"{name}.bias") for name in LINEAR]
    if any(bias is not None for bias in biases):
        widths = (len(w[f"{name}.weight"]) for name in LINEAR)
        zeros = w["input_layernorm.weight"].new_zeros
        biases = [zeros(n) if b is None else b for b, n in zip(biases, widths, strict=True)]
    attention, up = layer.self_attn, w["mlp.up_proj.weight"]
    (eps,) = set(epsilons(layer))
    return cpp.LayerWeights(
        norm=w["input_layernorm.weight"],
        qkv=cpp.pack(*(w[f"{name}.weight"] for name in LINEAR)),
        bias=None if biases[0] is None else torch.cat(biases),
        q_norm=w.get("self_attn.q_norm.weight"),
        k_norm=w.get("self_attn.k_norm.weight"),
        out=cpp.pack(w["self_attn.o_proj.weight"]),
        post_norm=w["post_attention_layernorm.weight"],
        gate_up=cpp.pack(w["mlp.gate_proj.weight"], up),
        down=cpp.pack(w["mlp.down_proj.weight"]),
        heads=len(w["self_attn.q_proj.weight"]) // attention.head_dim,
        inner=len(up),
        eps=eps,
    )  # fmt: skip


def agrees(trunk: Any, head: Head, device: torch.device, forward: Step) -> bool:
    """Return whether decoder and modules give trial tokens the same hidden states.

    The trial uses as many layers as have different settings.
    """
    twin = copy.copy(trunk)
    vars(twin)["_modules"] = {**trunk._modules, "layers": trunk.layers[: different_layers(trunk)]}
    starts = trial.starts_of(trunk)
    groups = trial.draw_groups(len(starts), len(trunk.embed_tokens.weight))
    prompts = torch.tensor([prompt for prompt, _ in groups], device=device)
    tokens = torch.tensor([pair for _, pair in groups], device=device)  # (starts, 2, tokens)
    first = torch.tensor(starts, device=device)[:, None]
    places = first + torch.arange(trial.LENGTH, device=device)
    with small_windows(trunk, positions=False), trial.random_weights(twin):
        decoder = Decoder(twin, head, places.flatten())
        # The first prompt passes alone, too: a model may look at the largest position of all.
        for count in (1, len(starts)):
            cache = RolloutCache([trial.PROMPT] * count, [2] * count, tokens.shape[2], device)
            cache.layout = TreeLayout.of(cache.lengths, device)
            own = places[:count, : trial.PROMPT]
            forward(twin, prompts[:count].flatten(), own.flatten(), cache)
            cache.close_prompts()
            indices = torch.arange(count, device=device).repeat_interleave(2) * trial.LENGTH
            for time, ids in enumerate(tokens[:count].flatten(0, 1).T):
                at = indices + trial.PROMPT + time
                theirs = forward(twin, ids, places.flatten()[at], cache)
                ours = decoder(ids, at, cache)
                cache.time += 1
                if not (ours - theirs).abs().max() <= CLOSE * theirs.abs().amax(-1).min():
                    return False
    return True


def different_layers(trunk: Any) -> int:
    """Return how many of the first layers have all settings that occur in any layer."""
    kinds = getattr(trunk.config, "layer_types", None) or [None] * len(trunk.layers)
    needed, seen = 0, set[Hashable]()
    for number, layer in enumerate(trunk.layers):
        settings = [settings_of(m) for m in layer.modules() if m is not layer.self_attn]
        fields = vars(layer.self_attn).items()
        own = tuple(v for name, v in fields if name != "layer_idx" and type(v) in SETTINGS)
        shapes = tuple(p.shape for p in layer.parameters())
        key = kinds[number], *settings, own, shapes
        if key not in seen:
            seen.add(key)
            needed = number + 1
    return needed
