"""Functions that find the sliding window of an attention layer, or shrink it for short inputs.

The window of a layer is read from the mask that the model requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from grpo_fast.attention.layout import TreeLayout

SMALLEST = 3  # tokens: smaller than the prompts of every comparison
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
POSITIONS = ("floor_scale", "log_scaling_n_floor", "original_max_position_embeddings")
NAMES = re.compile("window|chunk|floor|original_max")  # attributes that may copy these fields


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


@contextmanager
def small_windows(model: nn.Module, *, positions: bool = True) -> Iterator[None]:
    """Make the windows of a model so small that the short sequences of a comparison exceed them.

    Inside the context, the smallest window or chunk has SMALLEST tokens, the second smallest
    SMALLEST + 1, and so on, so that different sizes remain different. The context changes the sizes
    that a forward pass reads from the configuration or from a module.

    Args:
        model: the model.
        positions: also shrink the positions at which the model changes its computation, for a
            comparison that begins at position 0.
    """
    # 1. Collect the configurations of all modules, and the dictionaries that they contain.
    modules = list(model.modules())
    configs = {id(c): vars(c) for m in modules if (c := getattr(m, "config", None)) is not None}
    owners = list(configs.values())
    for fields in owners:  # the loop appends dictionaries that are inside configurations
        owners += [value for value in fields.values() if isinstance(value, dict)]
    # 2. Replace each window size with a small one, so that equal sizes remain equal and different
    #    sizes remain different.
    names = WINDOWS + POSITIONS * positions
    sizes = {fields.get(name) for fields in owners for name in names}
    known = enumerate(sorted(size for size in sizes if type(size) is int))
    small = {size: min(size, SMALLEST + rank) for rank, size in known}
    sized = [
        (owner, name, size)
        # Change the attributes of modules as well, because modules often copy a size from the
        # configuration.
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
