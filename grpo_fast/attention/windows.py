"""The window of a layer: read from the mask that a model asks for, and made small for self-checks.

A transformers model names a layer's sliding window in one or two places: in the mask that it builds
for the layer (always: this is what eager attention computes), and as a keyword of the attention
function (many models). `window_as_mask` lets the first travel to the layer, whose attention then
knows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

SMALLEST = 3  # tokens: a window that the prompts of every self-check outgrow
FIELDS = ("sliding_window", "sliding_window_size", "attention_chunk_size")


def window_as_mask(
    *_: Any,
    config: Any,
    mask_function: Callable,
    attention_mask: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **__: Any,
) -> int | Callable | None:
    """The mask function beside `packed_attention`: builds no mask, but says which one is wanted.

    Returns None for a causal mask, the size of a sliding window, or `mask_function` itself, which
    the layer refuses: chunks, or a rule of the model's own. Raises ValueError for padding.
    """
    if attention_mask is not None:
        raise ValueError(
            "attention_mask: packed attention takes no padding mask; pack the sequences instead"
        )
    is_plain = local_size is None or local_size == getattr(config, "sliding_window", None)
    return local_size if is_plain and not use_vmap else mask_function


def window_of(
    attention_mask: int | Callable | None,  # as `window_as_mask` made it
    sliding_window: int | None,  # the layer's keyword
) -> int | None:
    """The window of a layer; where only one of mask and keyword names it, that one.

    Raises ValueError where they differ, and for a mask that is more than a window.
    """
    if attention_mask is None:
        return sliding_window
    if not isinstance(attention_mask, int) or attention_mask < 1:
        raise ValueError(
            "attention_mask: packed attention knows causal masks and sliding windows of at least "
            f"one token; this layer asks for {attention_mask}"
        )
    if sliding_window not in (None, attention_mask):
        raise ValueError(
            f"sliding_window: this layer's mask has a window of {attention_mask} tokens, its "
            f"attention is called with {sliding_window}"
        )
    return attention_mask


@contextmanager
def small_windows(model: nn.Module) -> Iterator[None]:
    """Windows and chunks of this model shrink to a few tokens, so that a short check outgrows them.

    The smallest has SMALLEST tokens, the next one more: sizes that differ go on to differ.
    """
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
    sizes = {vars(config).get(name) for config in configs.values() for name in FIELDS}
    known = sorted(size for size in sizes if type(size) is int and size > 0)
    small = {size: min(size, SMALLEST + rank) for rank, size in enumerate(known)}
    held = [
        (vars(owner), name, size)
        for owner in (*configs.values(), *modules)
        for name, size in vars(owner).items()
        if ("window" in name or "chunk" in name) and type(size) is int and size in small
    ]
    try:
        for fields, name, size in held:
            fields[name] = small[size]
        yield
    finally:
        for fields, name, size in held:
            fields[name] = size
