"""Packing of samples into rows in which a shared prefix is stored once.

`Trie` is the prefix tree of several sequences. It decides which tokens become a segment of a row,
and which sequences share a row. `pack_tree` and `pack_groups` build a packed row. For each trained
token, the row also has the index of the hidden state that predicts it. `plan_trees` and
`plan_packs` distribute samples and groups over rows with a token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import TreeLayout, concatenated_ranges
from grpo_fast.errors import require

# ------------------------------------------------------------------------------------- Prefix trees
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
    There is no recursion, because trees may be deep.

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


# -------------------------------------------------------------------------------------- Packed rows
# Token ids, as a list of ints or a 1-D tensor of integers.
Ids = Sequence[int] | Tensor
# The token ids of a prompt, and those of each of its completions.
Group = tuple[Ids, Sequence[Ids]]
# The ids of a sample, and a flag for each id that says whether the token is trained.
Sample = tuple[Ids, Sequence[bool] | Sequence[int] | Tensor]


@dataclass(frozen=True)
class PackedTree:
    """B samples packed into one row.

    The model computes the hidden states of the row's T tokens. From these, the LM head computes R
    predictions: one for each trained token of each sample, in the caller's order. The row omits
    each sample's last trained token and everything after it, because no trained token is predicted
    from them.

    Attributes:
        input_ids: (1, T), int64. Token ids of the row.
        layout: the segments of the row.
        predicting: (R,), int64. For each trained token, the index of the hidden state that predicts
            it, from 0 to T - 1. Indices may repeat. Pass this tensor as `hidden_rows`.
        target_ids: (R,), int64. Ids of the trained tokens.
        cu_seqlens: (B+1,), int32. Offsets of the samples among the R trained tokens.
        lengths: number of trained tokens of each sample, on the host.
    """

    input_ids: Tensor  # (1, T) int64
    layout: TreeLayout
    predicting: Tensor  # (R,) int64
    target_ids: Tensor  # (R,) int64
    cu_seqlens: Tensor  # (B+1,) int32
    lengths: tuple[int, ...]  # B numbers, on the host

    @property
    def model_inputs(self) -> dict[str, object]:
        """Return the keyword arguments for `model(...)`.

        They are input_ids, position_ids, use_cache=False and packed_layout. Call `prepare(model)`
        once before, because some models ignore the layout without an error.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.layout.position_ids,
            "use_cache": False,
            "packed_layout": self.layout,
        }

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split values of the trained tokens by sample.

        Args:
            values: (R, …), one row for each trained token.

        Returns:
            B views of shape (trained tokens of the sample, …).
        """
        total = sum(self.lengths)
        shape = tuple(values.shape)
        require(shape[0] == total, "values", f"one row for each of {total} tokens", shape)
        return values.split(self.lengths)


@dataclass(frozen=True)
class PackedGroups(PackedTree):
    """Groups of completions packed into one row.

    Each completion is one sample, and only its completion tokens are trained. The class also has
    the attributes of `PackedTree`.

    Attributes:
        group_sizes: number of completions of each group.
    """

    group_sizes: tuple[int, ...]  # completions of each group

    def split_groups(self, values: Tensor) -> list[tuple[Tensor, ...]]:
        """Split values of the trained tokens by group and completion.

        Args:
            values: (R, …), one row for each trained token.

        Returns:
            For each group a tuple of views of shape (tokens of the completion, …).
        """
        views = self.split(values)
        ends = [0, *accumulate(self.group_sizes)]
        return [views[a:b] for a, b in pairwise(ends)]


def pack_tree(
    samples: Sequence[Sample],
    *,
    apart: Sequence[int | Tensor] | None = None,
    merge_cost: float = MERGE_COST,
    device: torch.device | str = "cpu",
) -> PackedTree:
    """Pack samples into one row in which every shared prefix is stored once.

    A trained token that k samples share counts k times in the loss. To count it once, mask it in
    all samples but one.

    Args:
        samples: for each sample a pair (ids, trained): its n token ids, and a bool for each id that
            says whether the token is trained. At least one token must be trained.
        apart: one key for each sample. A key is a number, or a tensor with a number for each id of
            the sample. Two samples share a token only if their keys are equal as well. Pass keys if
            the model has inputs other than the ids, for example images, adapters or replayed
            routes. None: equal ids are enough.
        merge_cost: a shared prefix is stored once if this saves at least this fraction of the
            tokens that follow the prefix. Otherwise each branch gets a copy of the prefix. 0 stores
            every shared token once.
        device: the model's device.

    Returns:
        The packed row, with R trained tokens in the order of the samples.

    Raises:
        ValueError: no samples, a sample without ids, a mask of a different length, a trained token
            at position 0 (no token predicts it), or no trained token at all.

    Example:
        >>> from grpo_fast.attention import pack_tree
        >>> first = ([7, 8, 9, 11, 12], [0, 0, 0, 1, 1])
        >>> second = ([7, 8, 9, 13], [0, 0, 0, 1])
        >>> pack = pack_tree([first, second])
        >>> pack.target_ids.tolist(), pack.predicting.tolist()
        ([11, 12, 13], [2, 3, 2])
    """
    checked, trie = trie_of(samples, apart)
    is_any = any(len(trained) for _, trained in checked)
    require(is_any, "samples", "at least one trained token", "none")
    ids, trained = ([pair[n] for pair in checked] for n in (0, 1))
    fields = _pack(
        trie.segments(merge_cost), torch.cat(ids), [len(x) for x in ids],
        torch.cat(trained), [len(x) for x in trained], device,
    )  # fmt: skip
    return PackedTree(**fields)


def pack_groups(
    groups: Sequence[Group], *, shared: bool = True, device: torch.device | str = "cpu"
) -> PackedGroups:
    """Pack groups of completions into one row in which every prompt is stored once.

    Completions are stored separately even if they begin with the same tokens. Equal prompts of
    different groups are stored separately, too.

    Args:
        groups: pairs (prompt_ids, [completion_ids, …]). Each group needs at least one completion,
            and no sequence may be empty.
        shared: if False, repeat the prompt in front of each completion. The model's results for the
            completions are the same.
        device: the model's device.

    Returns:
        The packed row. Its trained tokens are the tokens of all completions, in order.

    Raises:
        ValueError: no groups, a group without completions, or an empty prompt or completion.

    Example:
        >>> from grpo_fast.attention import pack_groups
        >>> pack = pack_groups([([1, 2, 3], [[4, 5], [6, 7, 8]])])
        >>> pack.input_ids.tolist()
        [[1, 2, 3, 4, 6, 7]]
        >>> pack.target_ids.tolist()
        [4, 5, 6, 7, 8]
    """
    require(len(groups), "groups", "at least one (prompt_ids, [completion_ids, …])", "none")
    lengths = [(len(prompt), [len(c) for c in completions]) for prompt, completions in groups]
    check_lengths(lengths)
    pieces: list[Tensor] = []  # prompt, completion, prompt, completion, …
    for prompt_ids, completions in groups:
        prompt = _tensor(prompt_ids)
        for completion_ids in completions:
            pieces += [prompt, _tensor(completion_ids)]
    before = [length for length, of_group in lengths for _ in of_group]
    counts = [length for _, of_group in lengths for length in of_group]
    fields = _pack(
        Trie.of_groups(lengths, shared=shared).segments(0), torch.cat(pieces),
        [a + b for a, b in zip(before, counts, strict=True)],
        concatenated_ranges(before, counts), counts, device,
    )  # fmt: skip
    return PackedGroups(**fields, group_sizes=tuple(len(of_group) for _, of_group in lengths))


def _pack(
    segments: Segments,
    ids: Tensor,
    sample_lengths: Sequence[int],
    trained: Tensor,
    trained_counts: Sequence[int],
    device: torch.device | str,
) -> dict[str, Any]:
    """Build the fields of a `PackedTree`.

    Args:
        segments: the segments of the row.
        ids: (N,), int64, on the CPU. Token ids of the B samples, one sample after another.
        sample_lengths: B numbers of token ids.
        trained: (R,), int64, on the CPU. Position of each trained token in its sample.
        trained_counts: B numbers of trained tokens.
        device: the model's device.
    """
    lengths = [end - start for start, end in zip(segments.starts, segments.ends, strict=True)]
    layout = TreeLayout.of(lengths, device, parents=segments.parents)
    starts = torch.tensor(segments.starts)
    sample_starts = torch.tensor(sample_lengths).cumsum(0) - torch.tensor(sample_lengths)
    # 1. Copy the tokens of each segment from one of the samples that contain the segment.
    sources = sample_starts[torch.tensor(segments.samples)] + starts
    tokens = ids[concatenated_ranges(sources, lengths)]
    # 2. List the segments of all samples: for each sample, the path from the root to its last
    #    segment.
    paths: list[int] = []
    trunks: list[int] = []  # numbers of tokens of the paths
    for last in segments.last:
        path: list[int] = []
        while last >= 0:
            path.append(last)
            last = segments.parents[last]
        paths += path[::-1]
        trunks.append(sum(lengths[segment] for segment in path))
    # 3. Find the row that predicts each trained token. It is the row of the sample's previous
    #    token. Its place is counted in all paths, one after another.
    path_ends = torch.tensor(trunks).cumsum(0)
    shifts = path_ends - torch.tensor(trunks) - 1
    repeats = torch.tensor(trained_counts)
    places = trained + shifts.repeat_interleave(repeats)
    bounds = torch.tensor([0, *accumulate(lengths[segment] for segment in paths)])
    at = torch.searchsorted(bounds, places, right=True) - 1
    predicting = places - bounds[at] + torch.tensor([layout.starts[s] for s in paths])[at]
    targets = ids[trained + sample_starts.repeat_interleave(repeats)]
    ends = [0, *accumulate(trained_counts)]
    return {
        "input_ids": tokens[None].to(device),
        "layout": layout,
        "predicting": predicting.to(device),
        "target_ids": targets.to(device),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device),
        "lengths": tuple(trained_counts),
    }


def check_sample(name: str, ids: Any, trained: object) -> tuple[Tensor, Tensor]:
    """Check a sample, and return its ids (n,) and the positions of its trained tokens, both int64.

    An invalid sample raises a ValueError that calls the sample `name`.
    """
    try:
        ids, mask = (torch.as_tensor(x, device="cpu") for x in (ids, trained))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected token ids and a bool for each, got {error}") from error
    is_integer = not ids.is_floating_point() and ids.dtype != torch.bool
    fits = ids.dim() == 1 and len(ids) and is_integer and ids.min() >= 0
    require(fits, name, "token ids, at least one", f"{tuple(ids.shape)} {ids.dtype}")
    fits = mask.shape == ids.shape and bool(((mask == 0) | (mask == 1)).all())
    came = f"a mask of shape {tuple(mask.shape)}, {mask.dtype}"
    require(fits, name, f"a bool for each of {len(ids)} ids", came)
    expected = "no trained token at position 0, because no token before it predicts it"
    require(not mask[0], name, expected, "one")
    return ids.long(), mask.nonzero()[:, 0]


def trie_of(
    samples: Sequence[Sample], apart: Sequence[int | Tensor] | None
) -> tuple[list[tuple[Tensor, Tensor]], Trie]:
    """Check samples, and build the trie of their ids.

    The trie contains only the ids before the last trained token of each sample, and no ids of a
    sample without trained tokens.

    Returns:
        A pair (all ids, positions of the trained tokens) for each sample, and the trie.
    """
    checked = [check_sample(f"samples[{n}]", *sample) for n, sample in enumerate(samples)]
    # Cut each sample before its last trained token, because no trained token is predicted from the
    # rest.
    words = [ids[: trained[-1]] if len(trained) else ids[:0] for ids, trained in checked]
    if apart is not None:
        expected = f"a number for each of {len(words)} samples"
        require(len(apart) == len(words), "apart", expected, len(apart))
        for n, x in enumerate(apart):
            number = torch.as_tensor(x, dtype=torch.int64).expand(len(checked[n][0]))
            words[n] = torch.stack([words[n], number[: len(words[n])]], 1)
    return checked, Trie.of_ids(words)


def check_lengths(lengths: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Raise a ValueError if a prompt or completion is empty, or a group has no completions."""
    for group, (prompt, completions) in enumerate(lengths):
        name = f"groups[{group}]"
        came = f"lengths {list(completions)[:8]}"
        require(prompt >= 1, name, "a prompt of at least one token", "an empty one")
        fits = len(completions) and min(completions) >= 1
        require(fits, name, "at least one completion and none empty", came)


def _tensor(ids: Ids) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device="cpu")


# ------------------------------------------------------------------------- Rows with a token budget
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
