"""Which samples share a packed row of a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from grpo_fast.attention.packing import Group, Sample, check_lengths, trie_of
from grpo_fast.attention.trie import Trie


class Share(NamedTuple):
    """Part of a pack: completions of one group."""

    group: int
    completions: tuple[int, ...]

    def of(self, groups: Sequence[Group]) -> Group:
        prompt, completions = groups[self.group]
        return prompt, [completions[i] for i in self.completions]


def trunk_tokens(prompt: int, completions: Sequence[int], *, shared: bool = True) -> int:
    """Tokens of a group in a packed row: P + Σ(C−1) shared, else Σ(P + C − 1)."""
    return prompt * (1 if shared else len(completions)) + sum(completions) - len(completions)


def plan_packs(
    lengths: Sequence[tuple[int, Sequence[int]]], budget: int, *, shared: bool = True
) -> list[list[Share]]:
    """Distribute groups over packs of at most `budget` trunk tokens: best fit, deterministic.

    A group stays whole unless it alone exceeds the budget; then its completions go to as few packs
    as best fit finds, each with a copy of the prompt; one that exceeds the budget stands alone.
    Without sharing a split costs nothing, so every completion is placed by itself.

    Args:
        lengths: (tokens of the prompt, [tokens of each completion, …]) of each group.
        budget: trunk tokens (T) of a pack.

    Returns:
        Packs, in order of their first group; each holds one share of a group, in order of groups.

    Raises:
        ValueError: budget < 1, a group without completions, an empty prompt or completion.
    """
    check_lengths(lengths)
    owner = [(group, i) for group, (_, sizes) in enumerate(lengths) for i in range(len(sizes))]
    packs = Trie.of_groups(lengths, shared=shared).packs(budget)
    placed = [groupby((owner[n] for n in pack), key=lambda place: place[0]) for pack in packs]
    return sorted(
        [Share(group, tuple(i for _, i in places)) for group, places in groups] for groups in placed
    )


def plan_trees(
    samples: Sequence[Sample], budget: int, *, apart: Sequence[int | Tensor] | None = None
) -> list[list[int]]:
    """Rows of at most `budget` distinct tokens, each a list of its samples' numbers.

    As `plan_packs` does with groups: subtrees stay whole unless they alone exceed the budget.
    Arguments and errors as of `pack_tree`, which packs `[samples[i] for i in row]`; prefixes that
    it copies, because they save too little, are not counted twice.
    """
    return sorted(trie_of(samples, apart)[1].packs(budget))


def tree_tokens(samples: Sequence[Sample]) -> int:
    """Distinct tokens of samples in one row, as `plan_trees` counts them."""
    return trie_of(samples, None)[1].below[0]
