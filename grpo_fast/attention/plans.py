"""Distribution of samples over packed rows with a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from grpo_fast.attention.packing import Group, Sample, check_lengths, trie_of
from grpo_fast.attention.trie import Trie
from grpo_fast.errors import names_nearest


class Share(NamedTuple):
    """Some completions of one group, as part of a packed row.

    Attributes:
        group: index of the group.
        completions: indices of its completions.
    """

    group: int
    completions: tuple[int, ...]

    def of(self, groups: Sequence[Group]) -> Group:
        """Return the group (prompt, completions) of this share from the list of all groups."""
        prompt, completions = groups[self.group]
        return prompt, [completions[i] for i in self.completions]


def trunk_tokens(prompt: int, completions: Sequence[int], *, shared: bool = True) -> int:
    """Return the tokens of a group in a packed row: P + Σ(C − 1) if shared, else Σ(P + C − 1)."""
    return prompt * (1 if shared else len(completions)) + sum(completions) - len(completions)


@names_nearest
def plan_packs(
    lengths: Sequence[tuple[int, Sequence[int]]], budget: int, *, shared: bool = True
) -> list[list[Share]]:
    """Distribute groups over packed rows of at most `budget` tokens each. Best fit, deterministic.

    A group is kept together unless it exceeds the budget alone. Then its completions are
    distributed over as few rows as best fit finds, each with a copy of the prompt. A completion
    that exceeds the budget alone gets its own row. Without sharing, every completion is placed
    separately.

    Args:
        lengths: for each group the pair (prompt tokens, [tokens of each completion, …]).
        budget: tokens of a row that the model computes.
        shared: whether the completions of a group share the rows of their prompt.

    Returns:
        For each row the list of its shares. Rows are ordered by their first group, shares by group.

    Raises:
        ValueError: a budget below 1, a group without completions, or an empty prompt or completion.

    Example:
        >>> from grpo_fast.attention import plan_packs
        >>> plan_packs([(4, [3, 3]), (4, [5])], budget=10)
        [[Share(group=0, completions=(0, 1))], [Share(group=1, completions=(0,))]]
    """
    check_lengths(lengths)
    owner = [(group, i) for group, (_, sizes) in enumerate(lengths) for i in range(len(sizes))]
    packs = Trie.of_groups(lengths, shared=shared).packs(budget)
    placed = [groupby((owner[n] for n in pack), key=lambda place: place[0]) for pack in packs]
    return sorted(
        [Share(group, tuple(i for _, i in places)) for group, places in groups] for groups in placed
    )


@names_nearest
def plan_trees(
    samples: Sequence[Sample], budget: int, *, apart: Sequence[int | Tensor] | None = None
) -> list[list[int]]:
    """Distribute samples over packed rows of at most `budget` distinct tokens each.

    Subtrees are kept together unless they exceed the budget alone, as groups are in `plan_packs`.
    Prefixes that `pack_tree` copies, because they save too little, are counted once.

    Args:
        samples: pairs (ids, trained), as for `pack_tree`.
        budget: distinct tokens of a row.
        apart: numbers that keep prefixes apart, as for `pack_tree`.

    Returns:
        For each row the indices of its samples. `pack_tree` packs `[samples[i] for i in row]`.

    Raises:
        ValueError: a budget below 1, or invalid samples.
    """
    return sorted(trie_of(samples, apart)[1].packs(budget))


def tree_tokens(samples: Sequence[Sample]) -> int:
    """Return the number of distinct tokens of samples in one row, as `plan_trees` counts them."""
    return trie_of(samples, None)[1].below[0]
