"""One decoding step of a model like Llama: each layer is one call of C++.

A call of a small layer's modules takes longer than its mathematics. This is for transformers models
whose layers have Llama's parameters (also with biases or norms of queries and keys), in fp32 on a
CPU, without hooks. Whether their formula is Llama's, too, is tried on a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_fast.attention.head import Head
from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import decode as cpp
from grpo_fast.kernels.cpu import gemm, layers, loader
from grpo_fast.kernels.cpu.modules import OurForward, epsilon_of
from grpo_fast.rollout.own.cache import RolloutCache

# (B,) token ids, their positions, the cache → (B, H) final hidden states
Step = Callable[[Tensor, Tensor, RolloutCache], Tensor]

CLOSE = 1e-4  # of the largest hidden state: all layers in fp32, summed in another order
TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
NORMS = "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"
LINEAR = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
REQUIRED = {
    f"{name}.weight"
    for name in (*NORMS[:2], *LINEAR, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                 "mlp.down_proj")
}  # fmt: skip
OPTIONAL = {*(f"{name}.weight" for name in NORMS[2:]), *(f"{name}.bias" for name in LINEAR)}

_agreeing: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # the trial, once for a model


class Decoder:
    """A model with its weights packed (as much memory as its gradient takes), and its angles."""

    def __init__(self, trunk: Any, head: Head, cache: RolloutCache) -> None:
        self.trunk, self.head = trunk, head
        self.layers = [(layer.self_attn, weights_of(layer)) for layer in trunk.layers]
        self.packed_head = cpp.pack(head.weight.detach())
        # An angle follows from its position alone: packed attention refuses other embeddings.
        places = torch.arange(max(cache.lengths) + cache.most, device=cache.device)
        angles = trunk.rotary_emb(head.weight, places[None])
        self.cos, self.sin = (a[0].contiguous() for a in angles)  # (positions, D)

    def product(self, hidden: Tensor) -> Tensor:
        """(B, H) → (B, V): hidden·Wᵀ + bias, of the head."""
        logits = cpp.linear(hidden, self.packed_head, len(self.head.weight))
        return logits if self.head.bias is None else logits.add_(self.head.bias)

    def __call__(self, ids: Tensor, positions: Tensor, cache: RolloutCache) -> Tensor:
        x = self.trunk.embed_tokens(ids)
        cos, sin = (angles.index_select(0, positions) for angles in (self.cos, self.sin))
        for attention, weights in self.layers:
            cpp.decode_layer_(x, weights, cos, sin, *cache.in_tiles(cache.layers[attention]))
        return self.trunk.norm(x)


def decoder_of(
    trunk: Any, head: Head, cache: RolloutCache, through_modules: Step
) -> Decoder | None:
    """The decoder for a model and a cache that has its prompts; None: the model is no Llama."""
    if _agreeing.get(trunk) is False or not has_its_form(trunk, head, cache):
        return None
    try:
        decoder = Decoder(trunk, head, cache)
        if trunk not in _agreeing:
            _agreeing[trunk] = agrees(decoder, cache, through_modules)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # its rotary embedding is another
        _agreeing[trunk] = False
    return decoder if _agreeing[trunk] else None


def has_its_form(trunk: Any, head: Head, cache: RolloutCache) -> bool:
    if torch.is_autocast_enabled("cpu") or route.gemm_choice() == "vendor":
        return False
    if (
        gemm.unavailable(torch.float32)
        or loader.unavailable("decode")
        or loader.unavailable("decoder")
    ):
        return False
    return (
        {name for name, _ in trunk.named_children()} == TRUNK
        and layers.is_plain(*trunk.parameters(), head.weight)
        and all(layer.rule.softcap is None for layer in cache.layers.values())
        and all(map(is_untouched, trunk.modules()))
        and all(map(is_like_llamas, trunk.layers))
    )


def is_untouched(module: Any) -> bool:
    """Whether a module has no hooks, and no `forward` of its own but ours."""
    own = vars(module).get("forward")
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (own is None or isinstance(own, OurForward))


def is_like_llamas(layer: Any) -> bool:
    names = {name for name, _ in layer.named_parameters()}
    if not REQUIRED <= names <= REQUIRED | OPTIONAL:
        return False
    act = type(getattr(layer.mlp, "act_fn", None)).__name__
    return act in ("SiLU", "SiLUActivation") and len(set(epsilons(layer))) == 1


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


def agrees(decoder: Decoder, cache: RolloutCache, through_modules: Step) -> bool:
    """Whether both give a trial token of every completion the same hidden state.

    `cache.time` stands still: the first real token overwrites the trial's keys and values.
    """
    rows, device = sum(cache.counts), cache.device
    ids = torch.arange(rows, device=device) % len(decoder.trunk.embed_tokens.weight)
    lengths, counts = cache.numbers
    positions = lengths.repeat_interleave(counts)
    theirs = through_modules(ids, positions, cache)
    ours = decoder(ids, positions, cache)
    return bool((ours - theirs).abs().max() <= CLOSE * theirs.abs().max())
