"""Pairs and conditions that compare a faster computation with the model's forward.

The result of a comparison must not depend on the caller's data, so the inputs are random token ids.
Fp32 weights are replaced with random weights and attention windows are shrunk, so that errors
become visible. Sequences begin before, at and after every limit in the model's configuration.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast.attention.packing import PackedTree, pack_groups
from grpo_fast.kernels.agree import Pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names of configuration fields that may change how a model treats a position.
LIMITS = re.compile(
    r"max_(pos|len|seq|distance)|original|positions$|n_ctx|context_len|window|chunk|floor|extent|local"
)
# Names of configuration fields with the size of a position table, which a position must not exceed.
TABLES = re.compile(r"max_(pos|len|seq|target)|positions$|n_ctx")
FARTHEST = 1 << 40  # no sequence is this long; larger values mean "no limit"
# Positions that every comparison includes as well, because the code of a model may change its
# computation at a position that the configuration does not name.
SPREAD = tuple(1 << exponent for exponent in (9, 13, 17))
PROMPT, LENGTH = 4, 9  # tokens of a prompt, and of a prompt with its completion
# Size of the pool of random numbers. Large weights are filled by repeating the pool. The size is
# prime, so each row starts at a different position in the pool and no two rows are equal.
POOL = 65_521
WIDE = torch.float32, torch.float64
# Configuration fields that `small_windows` shrinks. COPIES matches attributes of modules that may
# be copies of these fields.
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
POSITIONS = ("floor_scale", "log_scaling_n_floor", "original_max_position_embeddings")
COPIES = re.compile("window|chunk|floor|original_max")
SMALLEST = 3  # tokens: smaller than the prompts of every comparison
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
    """Return the positions at which the sequences of a comparison begin.

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

    A comparison must not exceed this number, because reading past the end of a position table on a
    GPU would abort the process.

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


def packed_pair(
    lm: PreTrainedModel,
    ours: Callable[[PackedTree], Tensor],
    theirs: Callable[[list[list[int]], Sequence[int]], Tensor],
    bar: float,
    starts: Sequence[int] = (),
    *,
    shared: bool = True,
    in_nats: bool = False,
) -> Pair:
    """Return a packed row and its sequences in separate batches.

    Args:
        lm: the model.
        ours: a function of the packed row. It returns the results of its R completion tokens.
        theirs: a function of the token ids, (N, L), and the positions of their first tokens, (N).
            The positions are empty if all sequences begin at position 0. It returns the results of
            all tokens but the first, (N, L - 1).
        bar: largest allowed difference.
        starts: the first position of each group. If it is empty, there is one group at position 0,
            whose completions have different lengths.
        shared: whether completions share the computation of their prompt.
        in_nats: whether the results are log-probabilities.
    """
    table = lm.get_output_embeddings() or lm.get_input_embeddings()  # a base model has no head
    groups = draw_groups(max(len(starts), 1), len(table.weight))
    if not starts:
        ((prompt, (first, second)),) = groups
        groups = [(prompt, [first, second[:3]])]
    pack = pack_groups(groups, shared=shared, device=lm.device)
    rows = [prompt + ids for prompt, pair in groups for ids in pair]
    places = [start for start in starts for _ in "ab"]
    # Compute the first group in a separate batch, because the results of some models depend on the
    # largest position in a batch. The rows of a batch have equal lengths.
    size = 2 if starts else 1
    batches = [(rows[:size], places[:size]), (rows[size:], places[size:])]
    if starts:
        layout = copy.copy(pack.layout)
        # A group has one root if its prompt is shared. Otherwise, it has two.
        per_group = layout.parents.count(-1) // len(starts)
        roots = [n if parent < 0 else parent for n, parent in enumerate(layout.parents)]
        first_places = torch.tensor([starts[root // per_group] for root in roots])
        moved = layout.position_ids + first_places.to(lm.device)[layout.segments]
        vars(layout)["position_ids"] = moved
        pack = dataclasses.replace(pack, layout=layout)

    def packed() -> Tensor:
        with small_windows(lm, positions=not starts):
            return ours(pack)

    def alone() -> Tensor:
        with small_windows(lm, positions=not starts):
            found = [theirs(*batch)[:, PROMPT - 1 :] for batch in batches if batch[0]]
        return torch.cat([x.flatten(0, 1) for x in found])

    return Pair(packed, alone, (), bar, in_nats=in_nats)


def worst_gap(
    lm: nn.Module,
    pair_at: Callable[[Sequence[int]], Pair],
    starts: Sequence[int] = (),
    *,
    uses_random: bool = True,
) -> float:
    """Return the largest gap with the model's weights at position 0, and with random ones anywhere.

    Args:
        lm: the model.
        pair_at: function that returns the pair for sequences with the given first positions. If
            the list is empty, the sequences begin at position 0.
        starts: the first positions, see `starts_of`. If it is empty, only position 0 is compared.
        uses_random: whether random weights are used.

    Returns:
        The largest gap. Gaps with random weights are divided by `RANDOM_FACTOR` first. The result
        is NaN if the model's results are NaN at position 0.
    """
    at_start = pair_at(()).gap()
    elsewhere = math.nan
    if uses_random:
        with random_weights(lm) as are_random:
            if are_random:
                gaps = [pair_at(x).gap() for x in ((), starts)[: 1 + bool(starts)]]
                elsewhere = max(gaps) / RANDOM_FACTOR
    # If random weights could not be used or led to an overflow, use the model's weights.
    if math.isnan(elsewhere) and starts:
        elsewhere = pair_at(starts).gap()
    return max(at_start, elsewhere)  # a NaN of `elsewhere` is ignored


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
        if type(size) is int and size in small and COPIES.search(str(name))
    ]
    try:
        for fields, name, size in sized:
            fields[name] = small[size]
        yield
    finally:
        for fields, name, size in sized:
            fields[name] = size


@contextmanager
def in_fp32(policy: Any) -> Iterator[None]:
    """Disable CPU autocast inside the context, so that a comparison can use the tolerance of fp32.

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
