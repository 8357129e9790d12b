"""From samples to packed rows: every distinct prefix stands once, and every loss term knows the row
that predicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import TreeLayout
from grpo_fast.attention.trie import MERGE_COST, Segments, Trie

# Token ids: a list of ints or a 1-D tensor of integers.
Ids = Sequence[int] | Tensor
# A prompt and its completions.
Group = tuple[Ids, Sequence[Ids]]
# The ids of a sample, and of each whether it is trained: bools, or 0 and 1.
Sample = tuple[Ids, Sequence[bool] | Sequence[int] | Tensor]


@dataclass(frozen=True)
class PackedTree:
    """B samples in one row: the trunk sees T tokens, the head R predictions, one for each trained
    token of each sample.

    The last trained token of a sample and what follows it predict nothing, so the trunk does not
    see them. R terms are in the caller's order of samples; the order within T is the layout's.
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
        """(R, …) values of trained tokens → B views (trained tokens of the sample, …), in the
        caller's order.
        """
        if values.shape[0] != sum(self.lengths):
            raise ValueError(
                f"values: expected one row for each of {sum(self.lengths)} tokens, came "
                f"{tuple(values.shape)}"
            )
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
        ctx.terms, ctx.size = terms, len(logps)
        return logps[terms]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ordered = grad[ctx.terms.argsort(stable=True)]
        counts = ctx.terms.bincount(minlength=ctx.size)
        return torch.segment_reduce(ordered, "sum", lengths=counts, initial=0), None


@dataclass(frozen=True)
class PackedGroups(PackedTree):
    """The completions of groups in one row: each is a sample whose own tokens are trained."""

    group_sizes: tuple[int, ...]  # completions of each group, as they were given

    def split_groups(self, values: Tensor) -> list[tuple[Tensor, ...]]:
        """The views of `split`, group by group."""
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

    Loss terms are not merged: a trained token that several samples share counts once for each. To
    count it once, mask it in all but one of them.

    Args:
        samples: (ids, trained) each; `trained` has a bool for every id. A sample may have none
            that is trained, but one of them all has to.
        apart: a number for each sample, or one for each of its ids: prefixes that differ in them
            share no rows, because the model is given other inputs beside the ids (images, adapters,
            replayed routes).
        merge_cost: a prefix becomes a segment if it saves this part of the rows behind it; else it
            is copied. 0 shares every token.
        device: of the tensors that come out.

    Raises:
        ValueError: no sample, one without ids, a mask of another length, a trained token at
            position 0 (nothing predicts it), none trained at all.
    """
    checked = [check_sample(f"samples[{n}]", *sample) for n, sample in enumerate(samples)]
    if not any(len(trained) for _, trained in checked):
        raise ValueError("samples: expected at least one trained token, came none")
    trunks = trunks_of(checked)
    return PackedTree(
        **_pack(
            Trie.of_ids(told_apart(trunks, apart)).segments(merge_cost),
            trunks.__getitem__,
            [trained - 1 for _, trained in checked],
            [ids[trained] for ids, trained in checked],
            device,
        )
    )


def pack_groups(
    groups: Sequence[Group], *, shared: bool = True, device: torch.device | str = "cpu"
) -> PackedGroups:
    """Pack groups into one row, each prompt once (`shared`) or once per completion: the tree of two
    levels. Completions stay apart, and so do equal prompts of different groups.

    A prompt with fewer than two completions of more than one token has nothing to share: it becomes
    a plain segment.

    Args:
        groups: (prompt_ids, [completion_ids, …]) each; at least one completion, no sequence empty.
        shared: False gives the plain packed layout with the same outputs (a segment: prompt +
            completion without its last token).
        device: of the tensors that come out.

    Raises:
        ValueError: no group, a group without completions, an empty prompt or completion.
    """
    if not len(groups):
        raise ValueError(
            "groups: expected at least one (prompt_ids, [completion_ids, …]), came none"
        )
    lengths = [(len(prompt), [len(c) for c in completions]) for prompt, completions in groups]
    check_lengths(lengths)
    prompts = [_tensor(prompt) for prompt, _ in groups]
    owner = [group for group, (_, sizes) in enumerate(lengths) for _ in sizes]
    targets = [_tensor(ids) for _, completions in groups for ids in completions]
    return PackedGroups(
        **_pack(
            Trie.of_groups(lengths, shared=shared).segments(0),
            lambda n: torch.cat([prompts[owner[n]], targets[n]]),
            [
                torch.arange(len(ids)) + len(prompts[g]) - 1
                for g, ids in zip(owner, targets, strict=True)
            ],
            targets,
            device,
        ),
        group_sizes=tuple(len(sizes) for _, sizes in lengths),
    )


def _pack(
    segments: Segments,
    ids: Callable[[int], Tensor],  # of a sample
    predicting: Sequence[Tensor],  # of each sample the positions that predict
    targets: Sequence[Tensor],
    device: torch.device | str,
) -> dict[str, Any]:
    """The fields of a `PackedTree`."""
    parents, starts, ends, samples, last = segments
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    layout = TreeLayout.of(lengths, device, parents=parents)
    offsets = [row - start for row, start in zip(layout.starts, starts, strict=False)]
    rows = []
    for segment, positions in zip(last, predicting, strict=True):
        path = []
        while segment >= 0:
            path.append(segment)
            segment = parents[segment]
        bounds = torch.tensor([starts[s] for s in path[-2::-1]], dtype=torch.int64)
        offset = torch.tensor([offsets[s] for s in path[::-1]], dtype=torch.int64)
        rows.append(positions + offset[torch.bucketize(positions, bounds, right=True)])
    pieces = [ids(n)[a:b] for n, a, b in zip(samples, starts, ends, strict=True)]
    sizes = [len(x) for x in targets]
    return {
        "input_ids": torch.cat(pieces)[None].to(device),
        "layout": layout,
        "predicting": torch.cat(rows).to(device),
        "target_ids": torch.cat(list(targets)).to(device),
        "cu_seqlens": torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device),
        "lengths": tuple(sizes),
    }


def check_sample(name: str, ids: Any, trained: Any) -> tuple[Tensor, Tensor]:
    """The ids of a sample (n,) and the positions that are trained; ValueError with `name`."""
    ids, mask = torch.as_tensor(ids, device="cpu"), torch.as_tensor(trained, device="cpu")
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"{name}: expected token ids, at least one, came {tuple(ids.shape)} {ids.dtype}"
        )
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"{name}: expected a bool for each of {len(ids)} ids, came a mask of shape "
            f"{tuple(mask.shape)}, {mask.dtype}"
        )
    if mask[0]:
        raise ValueError(
            f"{name}: the token at position 0 is trained, but nothing stands before it"
        )
    return ids.long(), mask.nonzero()[:, 0]


def trunks_of(checked: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What the trunk sees of each sample: the rows before its last trained token."""
    return [ids[: trained[-1]] if len(trained) else ids[:0] for ids, trained in checked]


def told_apart(trunks: list[Tensor], apart: Sequence[int | Tensor] | None) -> list[Tensor]:
    """The ids of each trunk (n,), or beside them what tells equal ones apart (n, 2)."""
    if apart is None:
        return trunks
    if len(apart) != len(trunks):
        raise ValueError(
            f"apart: expected a number for each of {len(trunks)} samples, came {len(apart)}"
        )
    numbers = [torch.as_tensor(x, dtype=torch.int64) for x in apart]
    return [
        torch.stack([ids, number[: len(ids)] if number.dim() else number.expand(len(ids))], 1)
        for ids, number in zip(trunks, numbers, strict=True)
    ]


def check_lengths(lengths: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Refuse, naming the group: an empty prompt, a group without completions, an empty one."""
    for group, (prompt, completions) in enumerate(lengths):
        if prompt < 1:
            raise ValueError(
                f"groups[{group}]: expected a prompt of at least one token, came an empty one"
            )
        if not len(completions) or min(completions) < 1:
            raise ValueError(
                f"groups[{group}]: expected at least one completion and none empty, came lengths "
                f"{list(completions)[:8]}"
            )


def _tensor(ids: Ids) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device="cpu")
