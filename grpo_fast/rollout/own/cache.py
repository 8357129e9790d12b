"""Key-value cache of a rollout, in which all completions of a prompt share the prompt's entries.

One attention function, registered with transformers, serves both phases of a rollout:

- Prefill: the prompts are packed into one row without padding and use the attention kernels of
  training. For each layer, the cache stores the keys and the values as tensors (N, H_kv, L, D).
- Decoding: the row holds B tokens, one of each completion. Each token attends to the prompt of its
  group and to the earlier tokens of its completion, with one softmax over both. The queries of a
  group share the prompt's keys in one matrix product. The completions' keys and values are written
  in place into tensors (B, H_kv, t, D). In fp32 on a CPU, a C++ kernel uses a tiled layout.

Models are called without a transformers cache and without a mask. A layer passes its settings
(scale, window, softcap) to the attention function in prefill, and the cache stores them for
decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.attention import TreeLayout, packed_attention, window_as_mask, window_of
from grpo_fast.attention.hybrid import State
from grpo_fast.attention.layout import AttentionParams
from grpo_fast.kernels.cpu import decode as cpp

NAME = "grpo_cached"
GROWTH = 128  # tokens by which the buffers of completions grow


def register() -> str:
    """Register the attention function with transformers and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, cached_attention)
    AttentionMaskInterface.register(NAME, window_as_mask)
    return NAME


def cached_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, H_kv, T, D)
    value: Tensor,  # (1, H_kv, T, D)
    attention_mask: object,  # in prefill: `window_as_mask`'s result, or the cache in a hybrid model
    *,
    rollout_cache: RolloutCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:  # (1, T, H, D)
    """Return the attention output of packed prompts in prefill, or of B new tokens in decoding."""
    layout = rollout_cache.layout
    if layout is None:
        out = rollout_cache.decode(module, query[0], key[0], value[0])
        return out.to(value.dtype)[None], None
    if isinstance(attention_mask, RolloutCache):  # in a hybrid model
        attention_mask = layout
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale, window_of(attention_mask, sliding_window), softcap, s_aux)
    layer = rollout_cache.layers.setdefault(module, Layer(params))
    # Convert the keys, because under autocast RoPE returns fp32 keys while the values are 16-bit.
    layer.chunks.append((key[0].to(value.dtype), value[0]))
    return packed_attention(
        module, query, key, value, attention_mask, packed_layout=layout, scaling=scaling,
        sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, **extra,
    )  # fmt: skip


class Layer:
    """Keys and values of one layer.

    Attributes:
        params: scale, window, softcap and sinks of the layer's attention.
        chunks: pairs of keys and values, (H_kv, T, D) each, collected during prefill.
        prompts: keys and values after prefill, (N, H_kv, L, D) each, or in the tiled layout of the
            C++ kernel.
        completions: keys and values, (B, H_kv, room, D) each, or in the tiled layout. Empty before
            the first token.
    """

    def __init__(self, params: AttentionParams) -> None:
        self.params = params
        self.chunks: list[tuple[Tensor, Tensor]] = []
        self.prompts: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]
        self.completions: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]


class RolloutCache:
    """Keys and values of N prompts and of their B completions.

    Args:
        lengths: number of tokens of each prompt.
        counts: number of completions of each prompt, at least 1.
        max_new_tokens: largest number of tokens of a completion.
        device: device of the model.

    Attributes:
        layers: attention module -> its keys and values.
        prompt_states: recurrent layer -> the state at the end of each prompt, during prefill.
        states: recurrent layer -> states of the B completions, while decoding.
        layout: layout of the packed prompts during prefill; None while decoding.
        time: number of tokens of each completion in the cache.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self.lengths = list(lengths)
        self.max_new_tokens = max_new_tokens
        self.device = device
        self.layers: dict[nn.Module, Layer] = {}
        self.prompt_states: dict[nn.Module, list[State]] = {}
        self.states: dict[nn.Module, State] = {}
        self.layout: TreeLayout | None = None
        self.time = 0
        self.seat(counts)

    def seat(self, counts: Sequence[int]) -> None:
        """Assign each of the B completions a cell in a grid with one row for each prompt.

        Every row has as many cells as the largest group has completions. This method sets `taken`,
        the cell of each completion, (B,) int64. If all groups have equal size, `taken` is None:
        the completions then fill the grid, so they need not be copied into it.
        """
        self.counts = list(counts)
        self.seats = max(counts)
        self.taken: Tensor | None = None
        if min(counts) < self.seats:
            taken = [n * self.seats + i for n, count in enumerate(counts) for i in range(count)]
            self.taken = torch.tensor(taken, device=self.device)
        lengths, completions = (torch.tensor(x, device=self.device) for x in (self.lengths, counts))
        self.sizes = lengths, completions  # prompt lengths and numbers of completions, (N,) int64
        longest = max(self.lengths)
        self.ends = lengths.view(-1, 1, 1, 1)
        self.places = torch.arange(longest, device=self.device)
        self.padding = self.places >= self.ends if min(self.lengths) < longest else None

    def close_prompts(self) -> None:
        """Stack all prompts' keys and values, each padded at its end, and switch to decoding."""
        self.layout = None
        longest = max(self.lengths)
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        starts = lengths.cumsum(0) - lengths
        rows = (starts + torch.minimum(self.places[None], lengths - 1)).flatten()
        for layer in self.layers.values():
            packed = [torch.cat(chunk, 1) for chunk in zip(*layer.chunks, strict=True)]
            k, v = (
                x.index_select(1, rows).unflatten(1, (-1, longest)).transpose(0, 1).contiguous()
                for x in packed
            )
            layer.prompts = k, v
            layer.chunks = []
        _, counts = self.sizes
        owners = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
        for module, ends in self.prompt_states.items():
            self.states[module] = State.stack(ends).take(owners)
        self.prompt_states = {}

    def recurrent_layer(
        self,
        module: nn.Module,
        step: Callable[[Tensor, State], tuple[Tensor, State]],
        split: Callable[..., tuple[Tensor, State]],
        hidden: Tensor,  # (1, T, H)
    ) -> Tensor:  # (1, T, H)
        """Compute a recurrent layer on packed prompts in prefill, or on B new tokens in decoding.

        Args:
            module: the layer.
            step: computes the layer on (B, 1, H) from its states.
            split: computes the layer on a packed row, see `hybrid.by_segments`.
            hidden: the layer's input.
        """
        if self.layout is not None:
            out, ends = split(hidden, self.layout, all_end=True)
            self.prompt_states.setdefault(module, []).extend(ends.unstack())
            return out
        out, self.states[module] = step(hidden.transpose(0, 1), self.states[module])
        return out.transpose(0, 1)

    def drop_ended(self, stay: Sequence[int]) -> None:
        """Remove all completions except `stay`, and prompts whose completions are all removed.

        Args:
            stay: indices of the completions to retain, in increasing order.
        """
        prompt_of = [n for n, count in enumerate(self.counts) for _ in range(count)]
        counts = [0] * len(self.counts)
        for row in stay:
            counts[prompt_of[row]] += 1
        prompts = [n for n, count in enumerate(counts) if count]
        longest = max(self.lengths[n] for n in prompts)
        chosen = [torch.tensor(x, device=self.device) for x in (prompts, stay)]
        for layer in self.layers.values():
            if len(prompts) < len(self.counts):
                # In the layout of the C++ kernel, axis 2 counts tiles of several tokens, so the
                # slice may retain more tokens than needed.
                k, v = (x.index_select(0, chosen[0])[:, :, :longest] for x in layer.prompts)
                layer.prompts = k.contiguous(), v.contiguous()
            if layer.completions:
                k, v = (x.index_select(0, chosen[1]) for x in layer.completions)
                layer.completions = k, v
        self.states = {module: state.take(chosen[1]) for module, state in self.states.items()}
        self.lengths = [self.lengths[n] for n in prompts]
        self.seat([counts[n] for n in prompts])

    def decode(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add one token per completion to a layer's cache, and return the attention output.

        Args:
            module: the layer's attention module.
            q: (H, B, D) queries.
            k: (H_kv, B, D) keys.
            v: (H_kv, B, D) values.

        Returns:
            The attention output, (B, H, D).
        """
        layer = self.layers[module]
        heads = k.shape[0]
        scale, window, softcap, sinks = layer.params
        # 1. Use the C++ kernel if it supports the layer. It needs keys and values of equal width,
        #    but their widths differ in latent attention.
        if softcap is None and sinks is None and k.shape == v.shape and cpp.runs(v):
            # Round to the dtype of the values first, then compute in fp32.
            q, k, v = (x.to(v.dtype).float() for x in (q, k, v))
            return cpp.decode_(q, k, v, *self.kernel_args(layer))
        # 2. Compute the scores of the prompt's tokens and of the completion's tokens in the window.
        q = q.to(v.dtype).transpose(0, 1).unflatten(1, (heads, -1))  # (B, H_kv, H/H_kv, D)
        first = 0 if window is None else max(0, self.time + 1 - window)
        completion_k, completion_v = (x[:, :, first:] for x in self.extend(layer, k, v))
        prompt_k, prompt_v = layer.prompts
        on_prompt = product(self.to_grid(q), prompt_k.mT)
        on_completion = self.to_grid(product(q, completion_k.mT))
        scores = torch.cat([on_prompt, on_completion], -1).mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        masked = self.masked_places(window)
        if masked is not None:
            scores[..., : prompt_k.shape[2]].masked_fill_(masked, -torch.inf)
        # 3. Apply one softmax to the scores of both parts, then add their weighted sums of values.
        if sinks is not None:  # a column of each head's sink, for every completion of the grid
            column = sinks.to(scores.dtype).view(1, heads, 1, -1)
            column = column.expand(len(scores), -1, self.seats, -1).flatten(2)[..., None]
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1).to(v.dtype)
        if sinks is not None:
            weights = weights[..., :-1]
        on_prompt, on_completion = weights.split([prompt_k.shape[2], completion_k.shape[2]], -1)
        out = self.to_rows(product(on_prompt, prompt_v))
        out = out + product(self.to_rows(on_completion), completion_v)
        return out.flatten(1, 2)

    def kernel_args(self, layer: Layer) -> tuple[Any, ...]:
        """Return a layer's arguments for the C++ kernels, with room for one more token."""
        if not layer.completions:
            layer.prompts = cpp.tiles_of(*(x.float() for x in layer.prompts))
        if not layer.completions or layer.completions[0].shape[2] * cpp.TILE == self.time:
            room = min(self.max_new_tokens, self.time + GROWTH)
            count = sum(self.counts)
            layer.completions = cpp.grow_tiles(layer.completions, layer.prompts, count, room)
        scale, window, *_ = layer.params
        return layer.prompts, layer.completions, *self.sizes, self.time, scale, window

    def extend(self, layer: Layer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the newest keys and values of the completions, (H_kv, B, D) each, to a layer.

        Returns:
            All keys and values of the completions, (B, H_kv, t + 1, D) each.
        """
        if not layer.completions or layer.completions[0].shape[2] == self.time:
            room = min(self.max_new_tokens, self.time + GROWTH)
            grown = [x.new_empty(x.shape[1], x.shape[0], room, x.shape[2]) for x in (k, v)]
            for new, old in zip(grown, layer.completions, strict=False):
                new[:, :, : self.time] = old
            layer.completions = grown[0].to(v.dtype), grown[1]
        for cached, new in zip(layer.completions, (k, v), strict=True):
            cached[:, :, self.time] = new.transpose(0, 1)
        keys, values = (x[:, :, : self.time + 1] for x in layer.completions)
        return keys, values

    def masked_places(self, window: int | None) -> Tensor | None:
        """Return a mask of the prompt positions that the next token does not attend to.

        These positions are padding or outside of the token's window.

        Returns:
            (N, 1, 1, L) bool, True at positions to mask. None if no position is masked.
        """
        if window is None:
            return self.padding
        now = self.ends + self.time
        return (self.places >= self.ends) | (self.places <= now - window)

    def to_grid(self, x: Tensor) -> Tensor:
        """Copy rows of the completions into a grid of zeros, and return the grid.

        Args:
            x: (B, H_kv, r, d), r rows for each completion.

        Returns:
            (N, H_kv, G·r, d), where G is the largest number of completions of a prompt.
        """
        if self.taken is not None:
            grid = x.new_zeros(len(self.counts) * self.seats, *x.shape[1:])
            x = grid.index_copy_(0, self.taken, x)
        return x.unflatten(0, (-1, self.seats)).transpose(1, 2).flatten(2, 3)

    def to_rows(self, x: Tensor) -> Tensor:
        """Return the rows of the completions, (B, H_kv, r, d). This is the inverse of `to_grid`."""
        x = x.unflatten(2, (self.seats, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.taken is None else x.index_select(0, self.taken)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a·b, accumulated and returned in fp32, or in fp64 for fp64 inputs."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        flat = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return flat.unflatten(0, a.shape[:2])
    return a.float() @ b.float()
