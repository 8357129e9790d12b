"""Prefix tree of N sequences, from which the segments of a packed row are built.

The code uses no recursion, because trees may be deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

# A node becomes a segment only if storing its tokens once saves at least this fraction of the
# tokens below the node. Otherwise, its tokens are copied into its children. The value reflects the
# cost of a segment: the attention results of all tokens below it are merged once more, which takes
# about 1% of the time that these tokens need.
MERGE_COST = 1 / 128


class Segments(NamedTuple):
    """Nodes of a prefix tree that become the segments of a packed row.

    The segments are in level order: first the roots with children, then the nodes below them, level
    by level. Roots without children are last.

    Attributes:
        parents: index of the parent of each segment; −1 for a root.
        starts: position of the first token of each segment.
        ends: position after the last token of each segment.
        samples: for each segment, the index of a sequence that contains its tokens.
        last: for each sequence, the index of the segment with its last token; −1 for an empty
            sequence.
    """

    parents: list[int]
    starts: list[int]
    ends: list[int]
    samples: list[int]
    last: list[int]


class Trie:
    """Prefix tree of N sequences.

    A node contains consecutive tokens that are shared by the same set of sequences. The end of a
    node is the length of the prefix up to its last token. Node 0 is the empty prefix.

    Args:
        lengths: lengths of the N sequences.
        order: indices of the sequences, sorted so that common prefixes are adjacent and shorter
            sequences come first.
        common: for each sequence in this order, the length of the prefix that it shares with the
            previous sequence; 0 for the first.
    """

    def __init__(self, lengths: Sequence[int], order: Sequence[int], common: Sequence[int]) -> None:
        self.ends, self.parents, self.sequences = [0], [-1], [list[int]()]
        path = [0]  # nodes from the root to the previous sequence
        # 1. Insert the sequences. A sequence shares its first `depth` tokens with the previous
        # sequence, and its path branches off after these tokens.
        for number, depth in zip(order, common, strict=True):
            below = -1
            while self.ends[path[-1]] > depth:
                below = path.pop()
            # Split the node `below` if the sequence branches off in the middle of it.
            if self.ends[path[-1]] < depth:
                path.append(self._add(depth, path[-1]))
                self.parents[below] = path[-1]
            if lengths[number] > depth:
                path.append(self._add(lengths[number], path[-1]))
            self.sequences[path[-1]].append(number)
        # 2. Compute, bottom-up and for each node: its first sequence, its children, and the number
        #    of tokens below it.
        self.first = [min(numbers, default=len(order)) for numbers in self.sequences]
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
        """Build the trie of the given id sequences.

        Args:
            ids: int64 tensors of shape (n,) or (n, k). With shape (n, k), two positions are equal
                if all k numbers are equal.
        """
        # Sort by bytes. Byte order differs from numeric order, but it also makes equal prefixes
        # adjacent.
        words = [x.contiguous().numpy().tobytes() for x in ids]
        order = sorted(range(len(ids)), key=lambda i: (words[i], i))
        shared = [_common(ids[a], ids[b]) for a, b in pairwise(order)]
        return cls([len(x) for x in ids], order, [0, *shared][: len(ids)])

    @classmethod
    def of_groups(cls, lengths: Sequence[tuple[int, Sequence[int]]], *, shared: bool) -> Trie:
        """Build the trie of prompts with their completions.

        The trie lacks the last token of each completion, because it predicts no other token.

        Args:
            lengths: (prompt tokens, [tokens of each completion, …]) of each group.
            shared: whether the completions of a prompt share the node of the prompt.
        """
        trunks, order, common = list[int](), list[int](), list[int]()
        for prompt, completions in lengths:
            first = len(trunks)
            trunks += [prompt + tokens - 1 for tokens in completions]
            order += sorted(range(first, len(trunks)), key=lambda i: trunks[i] > prompt)
            common += [0] + [prompt if shared else 0] * (len(completions) - 1)
        return cls(trunks, order, common)

    def segments(self, merge_cost: float) -> Segments:
        """Return the segments of a packed row that contains all sequences.

        A node with a single child is merged with that child. If storing the tokens of a node once
        saves less than the fraction `merge_cost` of the tokens below the node, its tokens are
        copied into the segments of its children.
        """
        # 1. List the chosen nodes level by level, with the roots without children at the end.
        roots = self._worthwhile(0, merge_cost)
        nodes = [node for node in roots if self.children[node]]
        parents = [-1] * len(nodes)
        for at, node in enumerate(nodes):  # the loop appends to the list that it reads
            children = self._worthwhile(node, merge_cost)
            nodes += children
            parents += [at] * len(children)
        plain = [node for node in roots if not self.children[node]]
        nodes += plain
        parents += [-1] * len(plain)
        # 2. Find the segment with the last token of each sequence. The tokens of a copied node are
        #    in the segments of all its children. Use the segment of the first child.
        segment_of = {node: segment for segment, node in enumerate(nodes)}
        last = [-1] * sum(map(len, self.sequences))
        for node in self.upwards:
            if node not in segment_of:
                first_child = (self.children[node] or [node])[0]
                segment_of[node] = segment_of.get(first_child, -1)
            for number in self.sequences[node]:
                last[number] = segment_of[node]
        starts = [self.ends[nodes[parent]] if parent >= 0 else 0 for parent in parents]
        firsts = [self.first[node] for node in nodes]
        return Segments(parents, starts, [self.ends[node] for node in nodes], firsts, last)

    def _worthwhile(self, above: int, merge_cost: float) -> list[int]:
        """Return the nearest descendants of node `above` that save enough tokens to be segments."""
        nodes = list[int]()
        stack = self.children[above][::-1]
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
        """Distribute the sequences over rows of at most `budget` distinct tokens.

        The sequences of a subtree stay in one row, unless the subtree and the path from the root to
        it exceed the budget together. In that case, the sequences are distributed over as few rows
        as best fit finds, and each of these rows contains a copy of the path.

        Args:
            budget: number of distinct tokens of a row.

        Returns:
            For each row, the indices of its sequences.
        """
        if budget < 1:
            raise ValueError(f"budget: expected at least 1 token, got {budget}")
        # Divide the sequences that end in a node or below it into parts. All sequences of one part
        # stay in the same row. A part is a pair: its number of distinct tokens, excluding those
        # above the node, and the list of the indices of its sequences.
        parts: dict[int, list[tuple[int, list[int]]]] = {}
        for node in [*self.upwards, 0]:
            of_child = [(self.first[child], parts.pop(child)) for child in self.children[node]]
            of_child += [(number, [(0, [number])]) for number in self.sequences[node]]
            items = [part for _, of_one in sorted(of_child) for part in of_one]
            room = budget - self.ends[node]
            if node and self.below[node] <= room:
                bins = [list(range(len(items)))]
            else:
                bins = best_fit([cost for cost, _ in items], room)
            length = self.ends[node] - self.ends[self.parents[node]] if node else 0
            parts[node] = [
                (length + sum(items[i][0] for i in bin_), [n for i in bin_ for n in items[i][1]])
                for bin_ in bins
            ]
        return [sorted(numbers) for _, numbers in parts[0]]


def _common(a: Tensor, b: Tensor) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    differ = (a[:length] != b[:length])[..., None].flatten(1).any(1)
    return int(differ.int().argmax()) if bool(differ.any()) else length


def best_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute items over bins: the largest item first, into the fullest bin with enough room.

    An item that is larger than the capacity gets a separate bin.

    Args:
        costs: size of each item.
        capacity: size of a bin.

    Returns:
        For each bin, the indices of its items.
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
