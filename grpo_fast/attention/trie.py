"""The distinct prefixes of N sequences: the segments of a packed row. Nothing recurses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

# A node becomes a segment of its own if it saves at least this part of the rows below it: every
# level costs those rows another merge, some 1% of a row. Otherwise its children copy it.
MERGE_COST = 1 / 128


class Segments(NamedTuple):
    """The nodes that become segments of a row, in level order, childless roots last."""

    parents: list[int]  # −1 for none
    starts: list[int]  # positions of their tokens
    ends: list[int]
    samples: list[int]  # a sequence that has these tokens
    last: list[int]  # of each sequence the segment with its last token; −1 if it is empty


class Trie:
    """A tree of prefixes; node 0 is the empty one, and a child's end is behind its parent's.

    Args:
        lengths: of the N sequences.
        order: their numbers, those with a common prefix side by side, shorter ones first.
        shared: the common prefix of each in this order with the one before it; 0 for the first.
    """

    def __init__(self, lengths: Sequence[int], order: Sequence[int], shared: Sequence[int]) -> None:
        self.ends, self.parents, self.sequences = [0], [-1], [list[int]()]
        path = [0]  # to the last sequence
        for number, common in zip(order, shared, strict=True):
            below = -1
            while self.ends[path[-1]] > common:
                below = path.pop()
            if self.ends[path[-1]] < common:  # this sequence branches off inside a node
                path.append(self._add(common, path[-1]))
                self.parents[below] = path[-1]
            if lengths[number] > common:
                path.append(self._add(lengths[number], path[-1]))
            self.sequences[path[-1]].append(number)
        self.first = [min(held, default=len(order)) for held in self.sequences]
        self.below, self.children = [0] * len(self.ends), [list[int]() for _ in self.ends]
        self.upwards = sorted(range(1, len(self.ends)), key=lambda node: -self.ends[node])
        for node in self.upwards:
            parent = self.parents[node]
            self.children[parent].append(node)
            self.first[parent] = min(self.first[parent], self.first[node])
            self.below[parent] += self.below[node] + self.ends[node] - self.ends[parent]
        for children in self.children:
            children.sort(key=self.first.__getitem__)

    def _add(self, end: int, parent: int) -> int:
        self.ends.append(end)
        self.parents.append(parent)
        self.sequences.append([])
        return len(self.ends) - 1

    @classmethod
    def of_ids(cls, ids: Sequence[Tensor]) -> Trie:
        """The trie of int64 ids, (n,) each; of (n, k) two positions are equal in all k numbers."""
        # The order of bytes is not that of numbers, but it puts equal prefixes side by side.
        words = [x.contiguous().numpy().tobytes() for x in ids]
        order = sorted(range(len(ids)), key=lambda i: (words[i], i))
        shared = [_common(ids[a], ids[b]) for a, b in pairwise(order)]
        return cls([len(x) for x in ids], order, [0, *shared][: len(ids)])

    @classmethod
    def of_groups(cls, lengths: Sequence[tuple[int, Sequence[int]]], *, shared: bool) -> Trie:
        """The trie of prompts and their completions without the last token, which predicts nothing;
        `shared`: the completions of a prompt have it in common.
        """
        trunks, order, common = list[int](), list[int](), list[int]()
        for prompt, completions in lengths:
            first = len(trunks)
            trunks += [prompt + tokens - 1 for tokens in completions]
            order += sorted(range(first, len(trunks)), key=lambda i: trunks[i] > prompt)
            common += [0] + [prompt if shared else 0] * (len(completions) - 1)
        return cls(trunks, order, common)

    def segments(self, merge_cost: float) -> Segments:
        """A segment for each node; a chain of nodes is one segment, and the tokens of a node that
        saves too little are copied into its children's.
        """
        roots = self._worthwhile(0, merge_cost)
        nodes = [node for node in roots if self.children[node]]
        parents = [-1] * len(nodes)
        for at, node in enumerate(nodes):  # the list grows while it is read
            children = self._worthwhile(node, merge_cost)
            nodes += children
            parents += [at] * len(children)
        nodes += (plain := [node for node in roots if not self.children[node]])
        parents += [-1] * len(plain)
        home = dict(zip(nodes, range(len(nodes)), strict=True))
        last = [-1] * sum(map(len, self.sequences))
        for node in self.upwards:
            segment = home.setdefault(node, home.get((self.children[node] or [node])[0], -1))
            for number in self.sequences[node]:
                last[number] = segment
        starts = [self.ends[nodes[parent]] if parent >= 0 else 0 for parent in parents]
        firsts = [self.first[node] for node in nodes]
        return Segments(parents, starts, [self.ends[node] for node in nodes], firsts, last)

    def _worthwhile(self, above: int, merge_cost: float) -> list[int]:
        nodes, stack = list[int](), self.children[above][::-1]
        while stack:
            node = stack.pop()
            below = self.children[node]
            saved = (self.ends[node] - self.ends[above]) * (len(below) - 1)
            if below and (len(below) == 1 or saved < merge_cost * self.below[node]):
                stack += below[::-1]
            else:
                nodes.append(node)
        return nodes

    def packs(self, budget: int) -> list[list[int]]:
        """Distribute the sequences over rows of at most `budget` distinct tokens, largest first.

        A subtree stays whole unless it alone exceeds the budget with its path; then its parts go to
        as few rows as best fit finds, each with a copy of the path.
        """
        if budget < 1:
            raise ValueError(f"budget: expected at least 1 token, got {budget}")
        parts: dict[int, list[tuple[int, list[int]]]] = {}
        for node in [*self.upwards, 0]:
            of_child = [(self.first[child], parts.pop(child)) for child in self.children[node]]
            of_child += [(number, [(0, [number])]) for number in self.sequences[node]]
            items = [part for _, those in sorted(of_child) for part in those]
            room = budget - self.ends[node]
            if node and self.below[node] <= room:
                bins = [list(range(len(items)))]
            else:
                bins = best_fit([cost for cost, _ in items], room)
            own = self.ends[node] - self.ends[self.parents[node]] if node else 0
            parts[node] = [
                (own + sum(items[i][0] for i in bin_), [n for i in bin_ for n in items[i][1]])
                for bin_ in bins
            ]
        return [sorted(numbers) for _, numbers in parts[0]]


def _common(a: Tensor, b: Tensor) -> int:
    length = min(len(a), len(b))
    differ = (a[:length] != b[:length])[..., None].flatten(1).any(1)
    return int(differ.int().argmax()) if bool(differ.any()) else length


def best_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of items, largest first into the fullest that still holds it; too large ones alone."""
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
