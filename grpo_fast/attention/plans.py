"""Distribute samples over packed rows with a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from grpo_fast.attention.packing import Group, Sample, check_lengths, trie_of
from grpo_fast.attention.trie import Trie
from grpo_fast.errors import names_nearest


class Share(NamedTuple):
    """Completions of one group that are placed in the same packed row.

    Attributes:
        group: index of the group.
        completions: indices of completions of the group.
    """

    group: int
    completions: tuple[int, ...]

    def of(self, groups: Sequence[Group]) -> Group:
        """Select the prompt and the completions of this share from all groups."""
        prompt, completions = groups[self.group]
        return prompt, [completions[i] for i in self.completions]


def trunk_tokens(prompt: int, completions: Sequence[int], *, shared: bool = True) -> int:
    """Return the number of tokens that a group needs in a packed row.

    With prompt length P and completion lengths C, it is P + Σ(C − 1) if the prompt is shared, and
    Σ(P + C − 1) otherwise.
    """
    return prompt * (1 if shared else len(completions)) + sum(completions) - len(completions)


@names_nearest
def plan_packs(
    lengths: Sequence[tuple[int, Sequence[int]]], budget: int, *, shared: bool = True
) -> list[list[Share]]:
    """Distribute groups over packed rows of at most `budget` tokens each.

    The algorithm is best fit, and the result is deterministic. A group stays in one row unless it
    exceeds the budget on its own. In that case its completions are distributed over as few rows as
    best fit finds, each with a copy of the prompt. A completion that exceeds the budget on its own
    gets a separate row. Without sharing, every completion is placed separately.

    Args:
        lengths: for each group the pair (prompt tokens, [tokens of each completion, …]).
        budget: number of tokens of a row that the model computes.
        shared: whether the completions of a group share the rows of their prompt.

    Returns:
        For each packed row a list of shares. A `Share` selects all or some of the completions of
        one group. Rows are ordered by their first group, and the shares of a row by group.

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

    Samples that begin with the same tokens share a prefix, which a row needs only once. They stay
    in one row if the prefix and the rest of these samples fit into the budget together. Otherwise
    they are distributed over several rows, and each of these rows contains the prefix. A sample
    that exceeds the budget on its own gets a separate row.

    `pack_tree` copies a shared prefix if storing it once would save fewer tokens than its argument
    `merge_cost` demands. `plan_trees` counts such a prefix only once, so the packed row may exceed
    the budget.

    Args:
        samples: pairs (ids, trained), as for `pack_tree`.
        budget: number of distinct tokens of a row.
        apart: one key for each sample. A key is a number, or a tensor with a number for each id
            of the sample. Samples share a prefix only where their ids and their keys are equal.
            None: equal ids are enough.

    Returns:
        For each row the indices of its samples. `pack_tree` packs `[samples[i] for i in row]`.

    Raises:
        ValueError: a budget below 1, or invalid samples.
    """
    return sorted(trie_of(samples, apart)[1].packs(budget))


def tree_tokens(samples: Sequence[Sample]) -> int:
    """Return the number of distinct tokens in a packed row that contains all these samples.

    `plan_trees` compares this number with its budget.
    """
    return trie_of(samples, None)[1].below[0]
