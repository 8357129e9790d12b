"""Keys and values of a rollout: each prompt's once for all its completions, and each completion's.

One attention function, registered with transformers, serves both halves of a rollout:

    prefill   the prompts packed in one row, without padding, by the kernels of training; their
              keys and values are kept, (N, H_kv, L, D) for each layer
    decoding  a row of B tokens, one of each completion: on the prompt of its group, where the
              queries of a whole group meet one copy of the keys in one matrix product, and on its
              own tokens, (B, H_kv, t, D), written in place; one softmax over both. fp32 on a CPU
              goes through our own kernel, which keeps the same in tiles

Models are called without a cache of their own and without a mask. A layer's rule (scale, window,
softcap) arrives in prefill, and the cache keeps it for decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_fast.attention import TreeLayout, packed_attention, window_as_mask, window_of
from grpo_fast.kernels.cpu import decode as cpp

NAME = "grpo_cached"
GROWTH = 128  # tokens by which the room for completions grows


def register() -> str:
    """Register the attention with transformers (again: harmless) and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, cached_attention)
    AttentionMaskInterface.register(NAME, window_as_mask)
    return NAME


def cached_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, H_kv, T, D)
    value: Tensor,  # (1, H_kv, T, D)
    attention_mask: Any,  # in prefill as `window_as_mask` made it
    *,
    rollout_cache: RolloutCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:  # (1, T, H, D)
    """Attention of the prompts on themselves, or of B tokens on what the cache holds."""
    layout = rollout_cache.layout
    if layout is None:
        out = rollout_cache.decode(module, query[0], key[0], value[0])
        return out.to(value.dtype)[None], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scale, window_of(attention_mask, sliding_window), softcap)
    rollout_cache.keep(module, key[0], value[0], rule)
    return packed_attention(
        module, query, key, value, attention_mask, packed_layout=layout, scaling=scaling,
        sliding_window=sliding_window, softcap=softcap, **extra,
    )  # fmt: skip


class Rule(NamedTuple):
    """softmax(mask(softcap(scale·q·kᵀ))); a query sees `window` keys at most, its own included."""

    scale: float
    window: int | None
    softcap: float | None


class Layer:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.parts: list[tuple[Tensor, Tensor]] = []  # (H_kv, T, D) of the prompts, packed
        self.prompts: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]  # (N, H_kv, L, D)
        self.own: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]  # (B, H_kv, room, D)


class RolloutCache:
    """Keys and values of N prompts and of their completions, for the rollout.

    Args:
        lengths: of the prompts.
        counts: completions of each prompt, side by side; each at least 1.
        most: tokens of a completion at most.
    """

    def __init__(
        self, lengths: Sequence[int], counts: Sequence[int], most: int, device: torch.device
    ) -> None:
        self.lengths, self.most, self.device = list(lengths), most, device
        self.layers: dict[nn.Module, Layer] = {}
        self.layout: TreeLayout | None = None  # of the prompts that pass through; None: decoding
        self.time = 0  # tokens of each completion that the cache holds
        self.seat(counts)

    def seat(self, counts: Sequence[int]) -> None:
        """Arrange the B rows as a grid of N prompts with as many seats as the largest group has.

        `taken`: the seat of each row; None: every seat is taken.
        """
        self.counts, self.seats = list(counts), max(counts)
        self.taken: Tensor | None = None
        if min(counts) < self.seats:
            taken = [n * self.seats + i for n, count in enumerate(counts) for i in range(count)]
            self.taken = torch.tensor(taken, device=self.device)
        lengths, completions = (torch.tensor(x, device=self.device) for x in (self.lengths, counts))
        self.numbers = lengths, completions  # (N,) int64 each
        ends, longest = lengths.view(-1, 1, 1, 1), max(self.lengths)
        self.ends, self.places = ends, torch.arange(longest, device=self.device)
        self.padding = self.places >= ends if min(self.lengths) < longest else None

    def keep(self, module: nn.Module, key: Tensor, value: Tensor, rule: Rule) -> None:
        """Keys and values of the prompts of `layout`, as one layer made them, and its rule."""
        # Under autocast RoPE leaves keys in fp32 beside values in 16 bits.
        self.layers.setdefault(module, Layer(rule)).parts.append((key.to(value.dtype), value))

    def close_prompts(self) -> None:
        """Stack the keys and values of all prompts, padded at the end. Decoding begins."""
        self.layout, longest = None, max(self.lengths)
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        starts = lengths.cumsum(0) - lengths
        rows = (starts + torch.minimum(self.places[None], lengths - 1)).flatten()
        for layer in self.layers.values():
            packed = [torch.cat(part, 1) for part in zip(*layer.parts, strict=True)]
            k, v = (
                x.index_select(1, rows).unflatten(1, (-1, longest)).transpose(0, 1).contiguous()
                for x in packed
            )
            layer.prompts, layer.parts = (k, v), []

    def drop(self, stay: Sequence[int]) -> None:
        """Keep the completions `stay` alone, rising row numbers, and the prompts they have."""
        prompt_of = [n for n, count in enumerate(self.counts) for _ in range(count)]
        counts = [0] * len(self.counts)
        for row in stay:
            counts[prompt_of[row]] += 1
        prompts = [n for n, count in enumerate(counts) if count]
        longest = max(self.lengths[n] for n in prompts)
        chosen = [torch.tensor(x, device=self.device) for x in (prompts, stay)]
        for layer in self.layers.values():
            if len(prompts) < len(self.counts):
                # In tiles this keeps more than is needed: a tile holds several tokens.
                k, v = (x.index_select(0, chosen[0])[:, :, :longest] for x in layer.prompts)
                layer.prompts = k.contiguous(), v.contiguous()
            if layer.own:
                k, v = (x.index_select(0, chosen[1]) for x in layer.own)
                layer.own = k, v
        self.lengths = [self.lengths[n] for n in prompts]
        self.seat([counts[n] for n in prompts])

    def decode(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(H, B, D) and (H_kv, B, D) twice → (B, H, D): one more token of each completion."""
        layer, heads = self.layers[module], k.shape[0]
        rule = layer.rule
        # The kernel has no room for values shorter than keys (latent attention).
        if rule.softcap is None and k.shape == v.shape and cpp.runs(v):
            return cpp.decode_(q.to(v.dtype), k.to(v.dtype), v, *self.in_tiles(layer))
        q = q.to(v.dtype).transpose(0, 1).unflatten(1, (heads, -1))  # (B, H_kv, H/H_kv, D)
        first = 0 if rule.window is None else max(0, self.time + 1 - rule.window)
        own_k, own_v = (x[:, :, first:] for x in self.extend(layer, k, v))
        prompt_k, prompt_v = layer.prompts
        own = self.to_grid(product(q, own_k.mT))
        scores = torch.cat([product(self.to_grid(q), prompt_k.mT), own], -1).mul_(rule.scale)
        if rule.softcap is not None:
            scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        unseen = self.unseen(rule.window)
        if unseen is not None:
            scores[..., : prompt_k.shape[2]].masked_fill_(unseen, -torch.inf)
        weights = scores.softmax(-1).to(v.dtype)
        on_prompt, on_own = weights.split([prompt_k.shape[2], own_k.shape[2]], -1)
        out = self.to_rows(product(on_prompt, prompt_v)) + product(self.to_rows(on_own), own_v)
        return out.flatten(1, 2)

    def in_tiles(self, layer: Layer) -> tuple[Any, ...]:
        """The arguments of the C++ kernels for a layer, which gets room for one more token."""
        if not layer.own:
            layer.prompts = cpp.tiles_of(*layer.prompts)
        if not layer.own or layer.own[0].shape[2] * cpp.TILE == self.time:
            room = min(self.most, self.time + GROWTH)
            layer.own = cpp.grow_tiles(layer.own, layer.prompts, sum(self.counts), room)
        rule = layer.rule
        return layer.prompts, layer.own, *self.numbers, self.time, rule.scale, rule.window

    def extend(self, layer: Layer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(H_kv, B, D) of the newest tokens into the layer: (B, H_kv, t + 1, D) of all."""
        if not layer.own or layer.own[0].shape[2] == self.time:
            room = min(self.most, self.time + GROWTH)
            grown = [x.new_empty(x.shape[1], x.shape[0], room, x.shape[2]) for x in (k, v)]
            for new, old in zip(grown, layer.own, strict=False):
                new[:, :, : self.time] = old
            layer.own = grown[0].to(v.dtype), grown[1]
        for cached, new in zip(layer.own, (k, v), strict=True):
            cached[:, :, self.time] = new.transpose(0, 1)
        own_k, own_v = (x[:, :, : self.time + 1] for x in layer.own)
        return own_k, own_v

    def unseen(self, window: int | None) -> Tensor | None:
        """(N, 1, 1, L) bool: the prompt's places that its completions do not see, if any."""
        if window is None:
            return self.padding
        now = self.ends + self.time
        return (self.places >= self.ends) | (self.places <= now - window)

    def to_grid(self, x: Tensor) -> Tensor:
        """(B, H_kv, r, d) of the rows → (N, H_kv, G·r, d); zeros where a seat is free."""
        if self.taken is not None:
            grid = x.new_zeros(len(self.counts) * self.seats, *x.shape[1:])
            x = grid.index_copy_(0, self.taken, x)
        return x.unflatten(0, (-1, self.seats)).transpose(1, 2).flatten(2, 3)

    def to_rows(self, x: Tensor) -> Tensor:
        """The inverse: (N, H_kv, G·r, d) → (B, H_kv, r, d)."""
        x = x.unflatten(2, (self.seats, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.taken is None else x.index_select(0, self.taken)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b with sums and result in fp32 or better."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        flat = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return flat.unflatten(0, a.shape[:2])
    return a.float() @ b.float()
