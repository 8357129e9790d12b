"""The window of a layer: read from the mask that a model asks for, and made small for checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

SMALLEST = 3  # tokens: a window that the prompts of every self-check outgrow
FIELDS = ("sliding_window", "sliding_window_size", "attention_chunk_size")


def window_as_mask(
    *_: Any, config: Any, mask_function: Callable, **asked: Any
) -> int | Callable | None:
    """The mask function beside `packed_attention`: builds no mask, but says which one is wanted.

    Returns None for a causal mask, the size of a sliding window, or `mask_function` itself, which
    the layer refuses: chunks, or a rule of the model's own. Raises ValueError for padding.
    """
    if asked.get("attention_mask") is not None:
        instead = "packed attention takes no padding mask; pack the sequences instead"
        raise ValueError(f"attention_mask: {instead}")
    size = asked.get("local_size")
    is_plain = size in (None, getattr(config, "sliding_window", None))
    return size if is_plain and not asked.get("use_vmap") else mask_function


def window_of(attention_mask: Any, sliding_window: int | None) -> int | None:
    """The window of a layer: its mask's (as `window_as_mask` made it), else its keyword's.

    Raises ValueError where both have one and differ, and for a mask that is more than a window.
    """
    if attention_mask is None:
        return sliding_window
    if not isinstance(attention_mask, int) or attention_mask < 1:
        raise ValueError(
            "attention_mask: packed attention knows causal masks and sliding windows of at least "
            f"one token; this layer asks for {attention_mask!r:.40}"
        )
    if sliding_window not in (None, attention_mask):
        differ = f"{attention_mask} tokens in its mask, {sliding_window} in its call"
        raise ValueError(f"sliding_window: this layer has two windows, {differ}")
    return attention_mask


@contextmanager
def small_windows(model: nn.Module) -> Iterator[None]:
    """Windows and chunks of this model shrink to a few tokens, so that a short check outgrows them.

    The smallest has SMALLEST tokens, the next one more: sizes that differ go on to differ.
    """
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
    sizes = {vars(config).get(name) for config in configs.values() for name in FIELDS}
    known = enumerate(sorted(size for size in sizes if type(size) is int))
    small = {size: min(size, SMALLEST + rank) for rank, size in known}
    sized = [
        (vars(owner), name, size)
        for owner in (*configs.values(), *modules)
        for name, size in vars(owner).items()
        if ("window" in name or "chunk" in name) and type(size) is int and size in small
    ]
    try:
        for fields, name, size in sized:
            fields[name] = small[size]
        yield
    finally:
        for fields, name, size in sized:
            fields[name] = size
