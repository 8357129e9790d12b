"""Packed rows for a transformers model that goes on taking everything else: padded batches, generation with a cache.

A trainer's model serves many callers (generation, callbacks, evaluation), so its attention is not exchanged: it is
replaced once by a function that computes packed rows where a layout comes with the call, and hands every other call to
the attention the model had. Gradient checkpointing recomputes a layer with the keywords of its first run, so it takes
the same branch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.attention import PackedLayout, packed_attention

# Masks are made before the layers run and do not see the layout.
_packing: ContextVar[bool] = ContextVar("grpo_fast_packing", default=False)
PREFIX = "grpo_packed_or_"


@contextmanager
def packing() -> Iterator[None]:
    """Calls of a prepared model in this block bring a layout and need no mask."""
    token = _packing.set(True)
    try:
        yield
    finally:
        _packing.reset(token)


def take_packed_rows(model: Any) -> str:
    """Prepare this model (and no other); returns the name of the attention it had."""
    before = model.config._attn_implementation
    if not before.startswith(PREFIX):
        model.set_attn_implementation(_register_over(before))
    return before


@contextmanager
def own_attention(model: Any, name: str) -> Iterator[None]:
    """The attention the model had, for code that goes by its name (generation: paged, flash, static caches)."""
    prepared = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(prepared)


def _register_over(original: str) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if options.get("packed_layout") is not None:
            return packed_attention(module, query, key, value, None, **options)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        theirs = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        return theirs(module, query, key, value, attention_mask, **options)

    def mask(*args: Any, **options: Any) -> Any:
        return None if _packing.get() else ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **options)

    # transformers gives names with "flash", "sdpa", "flex_attention" or "|" a meaning of their own.
    name = PREFIX + original.encode().hex()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


@dataclass(frozen=True)
class Pack:
    """A padded batch (B, P+K), prompts on the left and completions on the right, as one row without padding.

    R counts the scored completion tokens, in the order of the padded batch, row by row.
    """

    input_ids: Tensor  # (1, T)
    layout: PackedLayout
    predicting: Tensor  # (R,) packed row whose hidden state predicts each scored token
    target_ids: Tensor  # (R,)
    cu_seqlens: Tensor  # (B+1,) int32: the scored tokens of each completion
    scored: Tensor  # (B, K) bool

    def padded(self, x: Tensor) -> Tensor:
        """(R,) → (B, K), zeros where nothing is scored."""
        return x.new_zeros(self.scored.shape).masked_scatter(self.scored, x)


def pack_padded(
    input_ids: Tensor,  # (B, P+K)
    attention_mask: Tensor,  # (B, P+K)
    scored: Tensor,  # (B, K)
) -> Pack | None:
    """Pack the real tokens of a padded batch; completions with the same prompt share it.

    The order of the packed row is made on the host: one copy from the device, none afterwards. Returns None when a
    completion has no prompt token, so that nothing predicts its first one.
    """
    device, length = input_ids.device, scored.shape[1]
    real, ids = attention_mask.bool().cpu(), input_ids.cpu()
    scored = scored.bool() & attention_mask[:, -length:].bool()
    wanted = scored.cpu()
    # A row that scores nothing needs no forward pass; one is kept so that the loss still hangs on every parameter.
    used = wanted.any(1).nonzero()[:, 0].tolist() or [0]
    if not all(real[b, : real.shape[1] - length].any() for b in used):
        return None
    lengths = real[used].sum(1)
    flat = ids[used][real[used]]
    # Packed row of every padded slot of a used row: the tokens so far, less one.
    slots = torch.full(real.shape, -1)
    slots[used] = real[used].flatten().cumsum(0).sub(1).view(len(used), -1)
    predicting = slots[:, -length:][wanted] - 1
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), wanted.sum(1).cumsum(0)]).int()
    return Pack(
        flat[None].to(device), PackedLayout.of(lengths.tolist(), device), predicting.to(device),
        ids[:, -length:][wanted].to(device), cu_seqlens.to(device), scored,
    )  # fmt: skip
