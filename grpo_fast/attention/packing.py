"""From samples to packed rows: a prefix stands once, a loss term knows the row that predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import Copies, TreeLayout
from grpo_fast.attention.trie import MERGE_COST, Segments, Trie
from grpo_fast.errors import require

# Token ids: a list of ints or a 1-D tensor of integers.
Ids = Sequence[int] | Tensor
# A prompt and its completions.
Group = tuple[Ids, Sequence[Ids]]
# The ids of a sample, and of each whether it is trained: bools, or 0 and 1.
Sample = tuple[Ids, Sequence[bool] | Sequence[int] | Tensor]


@dataclass(frozen=True)
class PackedTree:
    """B samples in one row: the trunk sees T tokens, the head R predictions, one for each trained
    token of each sample, in the caller's order.

    The trunk does not see a sample's last trained token and what follows it: they predict nothing.
    """

    input_ids: Tensor  # (1, T) int64
    layout: TreeLayout
    predicting: Tensor  # (R,) int64: row of T that predicts each trained token; it may repeat
    target_ids: Tensor  # (R,) int64: the trained tokens
    cu_seqlens: Tensor  # (B+1,) int32: samples in R
    lengths: tuple[int, ...]  # trained tokens of the B samples, on the host

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The keywords of `model(...)`: input_ids, position_ids, use_cache=False, packed_layout."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.layout.position_ids,
            "use_cache": False,
            "packed_layout": self.layout,
        }

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """(R, …) values of trained tokens → B views (trained tokens of the sample, …)."""
        total, shape = sum(self.lengths), tuple(values.shape)
        require(shape[0] == total, "values", f"one row for each of {total} tokens", shape)
        return values.split(self.lengths)

    @cached_property
    def distinct(self) -> Distinct:
        """The U predictions that differ in row or target, where samples share trained tokens."""
        pairs = torch.stack([self.predicting, self.target_ids])
        unique, terms = pairs.unique(dim=1, return_inverse=True)
        return Distinct(unique[0], unique[1], terms)


class Distinct(NamedTuple):
    """U predictions behind R loss terms: `spread(linear_logps(…))` computes each once."""

    predicting: Tensor  # (U,) int64
    target_ids: Tensor  # (U,) int64
    terms: Tensor  # (R,) int64: the prediction of each term

    def spread(self, logps: Tensor) -> Tensor:
        """(U,) logps → (R,), one for each term; differentiable."""
        return _Spread.apply(logps, self.terms)


class _Spread(torch.autograd.Function):
    """logps[terms], whose slopes are summed in the order of the terms: the same bits every time."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, terms: Tensor) -> Tensor:
        ctx.copies = terms, len(logps)
        return logps[terms]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Copies.of(*ctx.copies).sum_copies(grad), None


@dataclass(frozen=True)
class PackedGroups(PackedTree):
    """The completions of groups in one row: each is a sample whose own tokens are trained."""

    group_sizes: tuple[int, ...]  # completions of each group, as they were given

    def split_groups(self, values: Tensor) -> list[tuple[Tensor, ...]]:
        views, ends = self.split(values), [0, *accumulate(self.group_sizes)]
        return [views[a:b] for a, b in pairwise(ends)]


def pack_tree(
    samples: Sequence[Sample],
    *,
    apart: Sequence[int | Tensor] | None = None,
    merge_cost: float = MERGE_COST,
    device: torch.device | str = "cpu",
) -> PackedTree:
    """Pack samples into one row in which equal prefixes stand once, whoever sampled them.

    A trained token that several samples share counts once for each; to count it once, mask it in
    all but one of them.

    Args:
        samples: (ids, trained) each; `trained` has a bool for every id. One of them all has to be.
        apart: a number for each sample, or one for each of its ids: prefixes that differ in them
            share no rows, because the model is given other inputs beside the ids (images, adapters,
            replayed routes).
        merge_cost: a prefix becomes a segment if it saves this part of the rows behind it; else it
            is copied. 0 shares every token.

    Raises:
        ValueError: no sample, one without ids, a mask of another length, a trained token at
            position 0 (nothing predicts it), none trained at all.
    """
    checked, trie = trie_of(samples, apart)
    is_any = any(len(trained) for _, trained in checked)
    require(is_any, "samples", "at least one trained token", "none")
    return PackedTree(**_pack(trie.segments(merge_cost), checked, device))


def pack_groups(
    groups: Sequence[Group], *, shared: bool = True, device: torch.device | str = "cpu"
) -> PackedGroups:
    """Pack groups into one row, each prompt once (`shared`) or once per completion: the tree of two
    levels. Completions stay apart, and so do equal prompts of different groups.

    Args:
        groups: (prompt_ids, [completion_ids, …]) each; at least one completion, no sequence empty.
        shared: False gives the plain packed layout with the same outputs (a segment: prompt +
            completion without its last token).

    Raises:
        ValueError: no group, a group without completions, an empty prompt or completion.
    """
    require(len(groups), "groups", "at least one (prompt_ids, [completion_ids, …])", "none")
    lengths = [(len(prompt), [len(c) for c in completions]) for prompt, completions in groups]
    check_lengths(lengths)
    samples = []
    for prompt, completions in groups:
        before = _tensor(prompt)
        for ids in map(_tensor, completions):
            trained = torch.arange(len(before), len(before) + len(ids))
            samples.append((torch.cat([before, ids]), trained))
    segments = Trie.of_groups(lengths, shared=shared).segments(0)
    sizes = tuple(len(completions) for _, completions in lengths)
    return PackedGroups(**_pack(segments, samples, device), group_sizes=sizes)


def _pack(
    segments: Segments,
    samples: Sequence[tuple[Tensor, Tensor]],  # ids, and the positions that are trained
    device: torch.device | str,
) -> dict[str, Any]:
    parents, starts, ends, first, last = segments
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    layout = TreeLayout.of(lengths, device, parents=parents)
    offsets = [row - start for row, start in zip(layout.starts, starts, strict=False)]
    rows = []
    for segment, (_, trained) in zip(last, samples, strict=True):
        path = []
        while segment >= 0:
            path.append(segment)
            segment = parents[segment]
        bounds = torch.tensor([starts[s] for s in path[-2::-1]], dtype=torch.int64)
        offset = torch.tensor([offsets[s] for s in path[::-1]], dtype=torch.int64)
        positions = trained - 1  # a token is predicted by the one before it
        # From the right: the position where a segment begins lies in that one.
        rows.append(positions + offset[torch.bucketize(positions, bounds, right=True)])
    pieces = [samples[n][0][a:b] for n, a, b in zip(first, starts, ends, strict=True)]
    sizes = [len(trained) for _, trained in samples]
    return {
        "input_ids": torch.cat(pieces)[None].to(device),
        "layout": layout,
        "predicting": torch.cat(rows).to(device),
        "target_ids": torch.cat([ids[trained] for ids, trained in samples]).to(device),
        "cu_seqlens": torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device),
        "lengths": tuple(sizes),
    }


def check_sample(name: str, ids: Any, trained: Any) -> tuple[Tensor, Tensor]:
    """The ids of a sample (n,) and the positions that are trained; ValueError with `name`."""
    try:
        ids, mask = (torch.as_tensor(x, device="cpu") for x in (ids, trained))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected token ids and a bool for each, got {error}") from error
    is_whole = not ids.is_floating_point() and ids.dtype != torch.bool
    fits = ids.dim() == 1 and len(ids) and is_whole and ids.min() >= 0
    require(fits, name, "token ids, at least one", f"{tuple(ids.shape)} {ids.dtype}")
    fits = mask.shape == ids.shape and bool(((mask == 0) | (mask == 1)).all())
    came = f"a mask of shape {tuple(mask.shape)}, {mask.dtype}"
    require(fits, name, f"a bool for each of {len(ids)} ids", came)
    expected = "no trained token at position 0, where nothing stands before it"
    require(not mask[0], name, expected, "one")
    return ids.long(), mask.nonzero()[:, 0]


def trie_of(
    samples: Sequence[Sample], apart: Sequence[int | Tensor] | None
) -> tuple[list[tuple[Tensor, Tensor]], Trie]:
    """The samples, checked, and the trie of their rows before the last trained token."""
    checked = [check_sample(f"samples[{n}]", *sample) for n, sample in enumerate(samples)]
    words = [ids[: trained[-1]] if len(trained) else ids[:0] for ids, trained in checked]
    if apart is not None:
        fits, expected = len(apart) == len(words), f"a number for each of {len(words)} samples"
        require(fits, "apart", expected, len(apart))
        for n, x in enumerate(apart):
            number = torch.as_tensor(x, dtype=torch.int64).expand(len(checked[n][0]))
            words[n] = torch.stack([words[n], number[: len(words[n])]], 1)
    return checked, Trie.of_ids(words)


def check_lengths(lengths: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Refuse, naming the group: an empty prompt, a group without completions, an empty one."""
    for group, (prompt, completions) in enumerate(lengths):
        name, came = f"groups[{group}]", f"lengths {list(completions)[:8]}"
        require(prompt >= 1, name, "a prompt of at least one token", "an empty one")
        fits = len(completions) and min(completions) >= 1
        require(fits, name, "at least one completion and none empty", came)


def _tensor(ids: Ids) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device="cpu")
