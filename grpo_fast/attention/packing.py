"""From groups of completions to packed rows: which groups share a pack, and where every token
stands in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import TreeLayout

# Token ids: a list of ints or a 1-D tensor of integers.
Ids = Sequence[int] | Tensor
# A prompt and its completions.
Group = tuple[Ids, Sequence[Ids]]


@dataclass(frozen=True)
class PackedGroups:
    """B completions in one row: the trunk sees T tokens, the head R predictions, one for each
    completion token.

    The last token of a completion predicts nothing, so the trunk does not see it. R rows are in the
    caller's order of completions; the order within T is the layout's.
    """

    input_ids: Tensor  # (1, T) int64
    layout: TreeLayout
    # (R,) int64: row of T that predicts each completion token (a shared prompt's last row: G times)
    predicting: Tensor
    target_ids: Tensor  # (R,) int64: the completion tokens
    cu_seqlens: Tensor  # (B+1,) int32: completions in R
    lengths: tuple[int, ...]  # of the B completions, on the host
    group_sizes: tuple[int, ...]  # completions of each group, as they were given

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
        """(R, …) values of completion tokens → B views (length of the completion, …), in the
        caller's order.
        """
        if values.shape[0] != sum(self.lengths):
            raise ValueError(
                f"values: expected one row for each of {sum(self.lengths)} tokens, came "
                f"{tuple(values.shape)}"
            )
        return values.split(self.lengths)

    def split_groups(self, values: Tensor) -> list[tuple[Tensor, ...]]:
        """The views of `split`, group by group."""
        views, ends = self.split(values), [0, *accumulate(self.group_sizes)]
        return [views[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def pack_groups(
    groups: Sequence[Group], *, shared: bool = True, device: torch.device | str = "cpu"
) -> PackedGroups:
    """Pack groups into one row, each prompt once (`shared`) or once per completion.

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
    _check_groups(groups)
    units: list[Group] = list(groups) if shared else [(p, [c]) for p, cs in groups for c in cs]
    pieces, layout, starts = _lay_out(units, device)
    rows, targets, lengths = [], [], []
    for unit, (_, completions) in enumerate(units):
        for index, ids in enumerate(completions):
            last_of_prompt, trunk = starts[unit][index]
            rows += [torch.tensor([last_of_prompt]), torch.arange(trunk, trunk + len(ids) - 1)]
            targets.append(_tensor(ids))
            lengths.append(len(ids))
    return PackedGroups(
        input_ids=torch.cat(pieces)[None].to(device),
        layout=layout,
        predicting=torch.cat(rows).to(device),
        target_ids=torch.cat(targets).to(device),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        lengths=tuple(lengths),
        group_sizes=tuple(len(completions) for _, completions in groups),
    )


def _lay_out(
    units: Sequence[Group], device: torch.device | str
) -> tuple[list[Tensor], TreeLayout, list[list[tuple[int, int]]]]:
    """Segments of the row, their layout, and for each completion (row of the prompt's last token,
    first trunk row).
    """
    going_on = [[i for i, c in enumerate(completions) if len(c) > 1] for _, completions in units]
    sharing = [unit for unit, more in enumerate(going_on) if len(more) > 1]
    plain = [unit for unit, more in enumerate(going_on) if len(more) <= 1]
    pieces: list[Tensor] = [_tensor(units[unit][0]) for unit in sharing]
    lengths = [len(piece) for piece in pieces]
    last_rows = dict(zip(sharing, (end - 1 for end in accumulate(lengths)), strict=True))
    trunks: dict[tuple[int, int], int] = {}
    row = sum(lengths)
    for unit in sharing:
        for index in going_on[unit]:
            piece = _tensor(units[unit][1][index])[:-1]
            pieces.append(piece)
            lengths.append(len(piece))
            trunks[unit, index] = row
            row += len(piece)
    for unit in plain:
        prompt, completions = units[unit]
        segment = [_tensor(prompt), *(_tensor(completions[index])[:-1] for index in going_on[unit])]
        pieces += segment
        lengths.append(sum(map(len, segment)))
        last_rows[unit] = row + len(prompt) - 1
        trunks.update({(unit, index): row + len(prompt) for index in going_on[unit]})
        row += lengths[-1]
    parents = [-1] * len(sharing)
    parents += [p for p, unit in enumerate(sharing) for _ in going_on[unit]]
    parents += [-1] * (len(lengths) - len(parents))
    layout = TreeLayout.of(lengths, device, parents=parents)
    starts = [
        [(last_rows[unit], trunks.get((unit, index), 0)) for index in range(len(completions))]
        for unit, (_, completions) in enumerate(units)
    ]
    return pieces, layout, starts


class Share(NamedTuple):
    """Part of a pack: completions of one group."""

    group: int
    completions: tuple[int, ...]

    def of(self, groups: Sequence[Group]) -> Group:
        """This part as a group of its own, for `pack_groups`."""
        prompt, completions = groups[self.group]
        return prompt, [completions[i] for i in self.completions]


def trunk_tokens(prompt: int, completions: Sequence[int], *, shared: bool = True) -> int:
    """Tokens of a group of these lengths in a packed row: P + Σ(C−1) shared, Σ(P + C − 1)
    otherwise.
    """
    return prompt * (1 if shared else len(completions)) + sum(completions) - len(completions)


def plan_packs(
    lengths: Sequence[tuple[int, Sequence[int]]], budget: int, *, shared: bool = True
) -> list[list[Share]]:
    """Distribute groups over packs of at most `budget` trunk tokens: best fit, largest first,
    deterministic.

    A group stays whole unless it alone exceeds the budget; then its completions go to as few packs
    as best fit finds, each with a copy of the prompt. A completion that with its prompt exceeds the
    budget gets a pack of its own. Without sharing a split costs nothing, so every completion is
    placed by itself.

    Args:
        lengths: (tokens of the prompt, [tokens of each completion, …]) of each group.
        budget: trunk tokens (T) of a pack.

    Returns:
        Packs, in order of their first group; each holds one share of a group, in order of groups.

    Raises:
        ValueError: budget < 1, a group without completions, an empty prompt or completion.
    """
    if budget < 1:
        raise ValueError(f"budget: expected at least 1 token, came {budget}")
    for group, (prompt, completions) in enumerate(lengths):
        _check_lengths(group, prompt, completions)
    shares: list[tuple[int, Share]] = []
    for group, (prompt, completions) in enumerate(lengths):
        alone = [[i] for i in range(len(completions))]
        for part in _parts(prompt, completions, budget) if shared else alone:
            cost = trunk_tokens(prompt, [completions[i] for i in part], shared=shared)
            shares.append((cost, Share(group, tuple(part))))
    packs = _best_fit([cost for cost, _ in shares], budget)
    return sorted(_joined(sorted(shares[i][1] for i in pack)) for pack in packs)


def _joined(shares: Sequence[Share]) -> list[Share]:
    """One share for each group of a pack."""
    groups: dict[int, tuple[int, ...]] = {}
    for group, completions in shares:
        groups[group] = groups.get(group, ()) + completions
    return [Share(group, completions) for group, completions in groups.items()]


def _parts(prompt: int, completions: Sequence[int], budget: int) -> list[list[int]]:
    """The completions of one group, cut where the group alone exceeds the budget."""
    if trunk_tokens(prompt, completions) <= budget:
        return [list(range(len(completions)))]
    return [sorted(part) for part in _best_fit([c - 1 for c in completions], budget - prompt)]


def _best_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of items, largest first into the fullest bin that still holds it; what exceeds the
    capacity stands alone.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fitting = [b for b, left in enumerate(room) if left >= costs[item]]
        if fitting:
            best = min(fitting, key=lambda b: (room[b], b))
            bins[best].append(item)
            room[best] -= costs[item]
        else:
            bins.append([item])
            room.append(capacity - costs[item])
    return bins


def _check_groups(groups: Sequence[Group]) -> None:
    """Refuse, naming the group: no groups, a group without completions, an empty prompt or
    completion.
    """
    if not len(groups):
        raise ValueError(
            "groups: expected at least one (prompt_ids, [completion_ids, …]), came none"
        )
    for number, (prompt, completions) in enumerate(groups):
        _check_lengths(number, len(prompt), [len(c) for c in completions])


def _check_lengths(group: int, prompt: int, completions: Sequence[int]) -> None:
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
