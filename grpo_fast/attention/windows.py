"""The window of a layer, read from the mask that a model requests, and small windows for trials."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

SMALLEST = 3  # tokens: a window that the prompts of every trial outgrow
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
POSITIONS = ("floor_scale", "log_scaling_n_floor", "original_max_position_embeddings")
NAMES = re.compile("window|chunk|floor|original_max")  # of their copies in modules


def window_as_mask(
    *_: Any, config: Any, mask_function: Callable, **request: Any
) -> int | Callable | None:
    """Return which mask a model requests: the mask function registered with `packed_attention`.

    Returns:
        None for a causal mask, the size of a sliding window, or `mask_function` itself for any
        other mask (chunks, a custom rule), which the layer refuses.

    Raises:
        ValueError: a padding mask.
    """
    if request.get("attention_mask") is not None:
        instead = "packed attention takes no padding mask; pack the sequences instead"
        raise ValueError(f"attention_mask: {instead}")
    size = request.get("local_size")
    is_plain = size in (None, getattr(config, "sliding_window", None))
    return size if is_plain and not request.get("use_vmap") else mask_function


def window_of(attention_mask: Any, sliding_window: int | None) -> int | None:
    """Return the window of a layer: its mask's (from `window_as_mask`), else its keyword's.

    Raises:
        ValueError: mask and keyword have different windows, or the mask is more than a window.
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
def small_windows(model: nn.Module, *, positions: bool = True) -> Iterator[None]:
    """Shrink windows and chunks to a few tokens, so that a short trial is longer than they are.

    Affects sizes that a forward pass reads from the configuration or from a module. The smallest
    becomes SMALLEST tokens and the next one more, so sizes that differ still differ.

    Args:
        positions: whether to shrink limits of positions, too, for a trial that begins at 0.
    """
    modules = list(model.modules())
    configs = {id(c): vars(c) for m in modules if (c := getattr(m, "config", None)) is not None}
    owners = list(configs.values())
    for fields in owners:  # grows: dictionaries inside configurations
        owners += [value for value in fields.values() if isinstance(value, dict)]
    names = WINDOWS + POSITIONS * positions
    sizes = {fields.get(name) for fields in owners for name in names}
    known = enumerate(sorted(size for size in sizes if type(size) is int))
    small = {size: min(size, SMALLEST + rank) for rank, size in known}
    sized = [
        (owner, name, size)
        for owner in (*owners, *map(vars, modules))
        for name, size in owner.items()
        if type(size) is int and size in small and NAMES.search(str(name))
    ]
    try:
        for fields, name, size in sized:
            fields[name] = small[size]
        yield
    finally:
        for fields, name, size in sized:
            fields[name] = size
