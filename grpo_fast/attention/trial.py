"""Inputs and weights for trials, which compare a faster computation with the model's forward.

The result of a trial must not depend on the caller's data, so trials draw random token ids. They
replace fp32 weights with random weights and shrink attention windows, so that errors become
visible. They also place sequences before, at and after every limit in the model's configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.attention.layout import TreeLayout

# Names of configuration fields that may change how a model treats a position.
LIMITS = re.compile(
    r"max_(pos|len|seq|distance)|original|positions$|n_ctx|context_len|window|chunk|floor|extent|local"
)
# Names of configuration fields with the size of a position table, which a position must not exceed.
TABLES = re.compile(r"max_(pos|len|seq|target)|positions$|n_ctx")
FARTHEST = 1 << 40  # no sequence is this long; larger values mean "no limit"
# Positions that every trial tests as well, because a model's code may change its computation at a
# position that the configuration does not name.
SPREAD = tuple(1 << exponent for exponent in (9, 13, 17))
PROMPT, LENGTH = 4, 9  # tokens of a trial's prompt, and of a prompt with its completion
# Size of the pool of random numbers. Large weights are filled by repeating the pool. The size is
# prime, so each row starts at a different position in the pool and no two rows are equal.
POOL = 65_521
WIDE = torch.float32, torch.float64
RANDOM_FACTOR = 10  # random weights amplify rounding by up to this factor


def limits_of(config: object, names: re.Pattern[str] = LIMITS) -> list[int]:
    """Return the sorted limits of positions, lengths and windows in a model configuration."""
    found: set[int] = set()
    fields = list(vars(config).items())
    while fields:
        name, value = fields.pop()
        if isinstance(value, dict):
            fields += [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            fields += [(name, inner) for inner in value]
        elif isinstance(value, (int, float)) and names.search(name) and 1 < value < FARTHEST:
            found.add(int(value))
    return sorted(found)


def starts_of(lm: nn.Module, bound: float = FARTHEST) -> list[int]:
    """Return the positions at which the sequences of a trial begin.

    For each limit in the model's configuration, one sequence crosses the limit within its prompt,
    and one sequence crosses it within its completion.

    Args:
        lm: the model.
        bound: number of positions that the model supports, according to its configuration. It is
            ignored if the model uses rotary embeddings without a table of this many positions.
    """
    starts = {0, *SPREAD}
    for limit in limits_of(lm.config):
        starts |= {max(limit - PROMPT // 2, 0), max(limit - PROMPT - 2, 0)}
    room = room_of(lm, bound)
    return sorted(start for start in starts if start + LENGTH <= room)


def room_of(lm: nn.Module, bound: float) -> float:
    """Return the number of positions that a model accepts.

    A trial must not exceed this number, because reading past the end of a position table on a GPU
    would abort the process.

    Args:
        lm: the model.
        bound: number of positions that the model supports, according to its configuration.
    """
    if not any("rotary" in type(m).__name__.lower() for m in lm.modules()):
        return min([bound, FARTHEST, *limits_of(lm.config, TABLES)])
    tables: list[Tensor] = [m.weight for m in lm.modules() if isinstance(m, nn.Embedding)]
    tables += [x for x in lm.buffers() if x.dim() > 1]
    sizes = (size for table in tables for size in table.shape[:2])
    return bound if any(bound <= size < bound + 8 for size in sizes) else FARTHEST


def draw_groups(number: int, vocabulary: int) -> list[tuple[list[int], list[list[int]]]]:
    """Return `number` random prompts with two completions each, the same in every process."""
    generator = torch.Generator().manual_seed(number)

    def ids(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    return [(ids(PROMPT), [ids(LENGTH - PROMPT) for _ in "ab"]) for _ in range(number)]


def moved_positions(layout: TreeLayout, starts: Sequence[int]) -> Tensor:
    """Return position_ids (1, T) for groups of two completions whose prompts begin at `starts`.

    Args:
        layout: the layout of these groups. A group has one root if its prompt is shared. Otherwise,
            it has two roots, one for each completion.
        starts: the first position of each group.
    """
    per_group = layout.parents.count(-1) // len(starts)
    roots = [n if parent < 0 else parent for n, parent in enumerate(layout.parents)]
    offsets = [starts[root // per_group] for root in roots]
    first = torch.tensor(offsets, device=layout.cu_seqlens.device)
    return layout.position_ids + first[layout.segments]


def worst_gap(policy: Any, gap: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """Measure the gap with the model's weights at position 0, and with random weights everywhere.

    Args:
        policy: an object with `lm`, `positions` and `autocast`.
        gap: function that returns the largest difference in nats between a faster computation and
            the model's forward pass, or NaN if the model's own logps are NaN. Its argument lists
            the first position of each sequence. If the list is empty, the sequences begin at
            position 0.

    Returns:
        The gap with the model's weights at position 0, and the largest of all gaps. Gaps with
        random weights are divided by `RANDOM_FACTOR` first. Both numbers are NaN if the model's
        weights are NaN.
    """
    starts = starts_of(policy.lm, policy.positions)
    at_start = gap(())
    elsewhere = math.nan
    if policy.autocast is None:
        with random_weights(policy.lm) as are_random:
            if are_random:
                elsewhere = max(gap(()), gap(starts)) / RANDOM_FACTOR
    # If random weights could not be used or led to an overflow, use the model's weights.
    if math.isnan(elsewhere):
        elsewhere = gap(starts)
    return at_start, max(at_start, elsewhere)


@contextmanager
def in_fp32(policy: Any) -> Iterator[None]:
    """Disable CPU autocast inside the context, so that a trial can use the tolerance of fp32.

    With autocast, the model's own logits are rounded to bf16. This rounding changes a
    log-probability by up to 0.1 nats, which would hide a wrong formula.

    Args:
        policy: an object with `device` and `autocast`.
    """
    dtype = policy.autocast
    if dtype is None or policy.device.type != "cpu":
        yield
        return
    policy.autocast = None
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        policy.autocast = dtype


@contextmanager
def random_weights(model: nn.Module) -> Iterator[bool]:
    """Give a model random weights inside the context.

    Layers with equal shapes share weights. The context yields True, or False if it changed nothing
    because some weights are not plain fp32 or fp64 tensors. 16-bit weights stay unchanged because
    their rounding errors would hide a wrong formula.
    """
    # 1. Check that the weights are fp32 or fp64, and that their `.data` can be replaced.
    named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    fits = all(
        type(p) is nn.Parameter and p.dtype in WIDE and p.numel() and not p.is_meta
        for _, p in named
    )
    saved = [(p, p.data) for _, p in named]
    try:
        if fits:
            # 2. Share one tensor between layers with equal shapes, so that memory does not grow
            # with depth.
            shared: dict[tuple[object, ...], Tensor] = {}
            for name, p in named:
                key = re.sub(r"\.\d+\.", ".", name), p.shape, p.dtype, p.device
                if key not in shared:
                    shared[key] = _random_weight(name, p, len(shared))
                p.data = shared[key]
        yield fits
    finally:
        # 3. Restore the weights, even after an error.
        for p, data in saved:
            p.data = data


def _random_weight(name: str, like: Tensor, seed: int) -> Tensor:
    """Return a random weight, scaled so that every part of a layer affects the output."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(min(POOL, like.numel()), generator=generator, dtype=like.dtype)
    values = pool.repeat(-(-like.numel() // len(pool)))[: like.numel()].view(like.shape)
    if like.dim() < 2:
        values = 0.25 * values + (not name.endswith("bias"))  # norm weights near 1, biases near 0
    else:
        # Use the geometric mean of the number of inputs and outputs, because some classes store
        # weights as (in, out) and others as (out, in).
        width = min(like.shape[-1], (like.shape[-1] * like.shape[-2]) ** 0.5)
        values = values * (1.5 * width**-0.5)
    return values.to(like.device)
