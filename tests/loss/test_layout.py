"""Test the packing of prompts and completions into rows of limited length.

The tests check which tokens a row contains, how long it is, and which tokens each token may attend
to.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.attention import Share, TreeLayout, pack_groups, plan_packs, trunk_tokens
from grpo_fast.attention.kernels.reference import visible

sizes = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(1, 6), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


def numbered(groups):
    """Return groups with the given prompt and completion lengths, and a unique id for each token.

    Because the ids are unique, a misplaced token changes the result.
    """
    numbers = iter(range(10_000))
    return [
        ([next(numbers) for _ in range(p)], [[next(numbers) for _ in range(c)] for c in cs])
        for p, cs in groups
    ]


@settings(max_examples=80, deadline=None)
@given(sizes, st.booleans())
def test_every_completion_token_is_found_back_once(groups, shared):
    groups = numbered(groups)
    pack = pack_groups(groups, shared=shared)
    completions = [list(c) for _, cs in groups for c in cs]
    assert [view.tolist() for view in pack.split(pack.target_ids)] == completions
    assert [[v.tolist() for v in views] for views in pack.split_groups(pack.target_ids)] == [
        cs for _, cs in groups
    ]
    assert (
        pack.cu_seqlens.tolist() == [0, *accumulate(map(len, completions))]
        and pack.cu_seqlens.dtype == torch.int32
    )
    # For each completion token, collect the tokens that are visible to the position that predicts
    # it. They must be the prompt and the earlier completion tokens.
    seen, position = visible(pack.layout), pack.layout.position_ids[0]
    ids = pack.input_ids[0]
    expected = [p + c[:i] for p, cs in groups for c in cs for i in range(len(c))]
    for row, context in zip(pack.predicting.tolist(), expected, strict=True):
        rows = seen[row].nonzero()[:, 0]
        rows = rows[position[rows].argsort()]
        assert position[rows].tolist() == list(range(len(context)))
        assert ids[rows].tolist() == context


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans())
def test_the_trunk_sees_no_token_too_many(groups, shared):
    pack = pack_groups(numbered(groups), shared=shared)
    assert (
        pack.layout.total
        == pack.input_ids.numel()
        == sum(trunk_tokens(p, cs, shared=shared) for p, cs in groups)
    )
    assert pack.layout.cu_seqlens.tolist() == list(pack.layout.starts)
    # A layout without shared prompt rows must have has_tree=False, even if sharing was requested.
    assert pack.layout.has_tree == (shared and any(sum(c > 1 for c in cs) > 1 for _, cs in groups))
    if shared:
        every = pack.input_ids[0].tolist()
        assert len(set(every)) == len(every)


@settings(max_examples=120, deadline=None)
@given(sizes, st.integers(1, 40), st.booleans())
def test_packs_hold_everything_once_within_the_budget(groups, budget, shared):
    plan = plan_packs(groups, budget, shared=shared)
    placed = [(share.group, i) for shares in plan for share in shares for i in share.completions]
    assert sorted(placed) == [(g, i) for g, (_, cs) in enumerate(groups) for i in range(len(cs))]
    assert plan == sorted(plan) and all(shares == sorted(shares) for shares in plan)
    assert plan == plan_packs(groups, budget, shared=shared)
    assert all(len({share.group for share in shares}) == len(shares) for shares in plan)

    def cost(share):
        prompt, completions = groups[share.group]
        return trunk_tokens(prompt, [completions[i] for i in share.completions], shared=shared)

    for shares in plan:
        alone = len(shares) == 1 and len(shares[0].completions) == 1
        assert sum(map(cost, shares)) <= budget or alone
    if shared:  # only a group that is longer than the budget may be split
        for group, (prompt, completions) in enumerate(groups):
            parts = sum(share.group == group for shares in plan for share in shares)
            assert parts == 1 or trunk_tokens(prompt, completions) > budget


def test_best_fit_by_hand():
    # The groups cost 10, 9, 5, 4 and 2 tokens, and the budget of a row is 14. Best fit places the
    # largest group first. It then places each other group into the fullest row that has room.
    groups = [(1, [10]), (1, [5]), (1, [9]), (1, [4]), (1, [2])]
    plan = plan_packs(groups, 14)
    assert [[share.group for share in shares] for shares in plan] == [[0, 3], [1, 2], [4]]
    # The groups cost 12, 10, 9 and 1 tokens, and the budget is 20. Best fit places the last group
    # into the second row, which is fuller. First fit would place it into the first row.
    plan = plan_packs([(1, [12]), (1, [10]), (1, [9]), (1, [1])], 20)
    assert [[share.group for share in shares] for shares in plan] == [[0], [1, 2, 3]]
    # The group needs 5 + 3·4 = 17 tokens, because the last token of a completion is not an input.
    # This exceeds the budget of 14, so two completions share one copy of the prompt, and the third
    # completion gets a second copy.
    assert plan_packs([(5, [5, 5, 5])], 14) == [[Share(0, (0, 1))], [Share(0, (2,))]]
    # The third completion of the split group shares its row with a different group.
    assert plan_packs([(5, [5, 5, 5]), (2, [2, 2])], 14) == [
        [Share(0, (0, 1))],
        [Share(0, (2,)), Share(1, (0, 1))],
    ]
    # The completion of 9 tokens exceeds the budget, so it gets a separate row. The completion of
    # one token adds nothing to its prompt, because the last token of a completion is not an input.
    assert plan_packs([(9, [2, 9, 1])], 10) == [[Share(0, (0, 2))], [Share(0, (1,))]]
    # Without sharing, every completion has a copy of the prompt and is placed separately.
    assert plan_packs([(5, [5, 5, 5])], 18, shared=False) == [[Share(0, (0, 1))], [Share(0, (2,))]]


def test_ids_may_be_lists_or_tensors_and_tensors_stay_where_they_are_asked_for():
    lists = numbered([(3, [2, 4]), (2, [1])])
    tensors = [
        (torch.tensor(p), [torch.tensor(c, dtype=torch.int32) for c in cs]) for p, cs in lists
    ]
    one, other = pack_groups(lists), pack_groups(tensors, device="meta")
    assert torch.equal(one.input_ids, pack_groups(tensors).input_ids)
    for name in ("input_ids", "predicting", "target_ids", "cu_seqlens"):
        here, there = getattr(one, name), getattr(other, name)
        assert (
            there.device.type == "meta" and here.dtype == there.dtype and here.shape == there.shape
        )
    assert one.model_inputs.keys() == {"input_ids", "position_ids", "use_cache", "packed_layout"}
    assert (
        one.model_inputs["packed_layout"] is one.layout and one.model_inputs["use_cache"] is False
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "groups: expected at least one"),
        ([([1], [[2]]), ([], [[1]])], r"groups\[1\]: expected a prompt"),
        ([([1], [])], r"groups\[0\]: expected at least one completion"),
        ([([1], [[1], []])], r"groups\[0\]: .* got lengths \[1, 0\]"),
    ],
)
def test_bad_groups_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        pack_groups(groups)
    lengths = [(len(p), [len(c) for c in cs]) for p, cs in groups]
    if lengths:
        with pytest.raises(ValueError, match=message):
            plan_packs(lengths, 10)


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="budget: expected at least 1"):
        plan_packs([(1, [1])], 0)
    with pytest.raises(ValueError, match="lengths: expected at least one segment and none empty"):
        TreeLayout.of([3, 0])
    for parents in ([0, -1], [-1, 1], [-1, 5], [-1, -2], [-1, 0, 1, 0], [-1, -1, 1, -1, 1]):
        with pytest.raises(ValueError, match="parents: expected an earlier segment than"):
            TreeLayout.of([2] * len(parents), parents=parents)
    with pytest.raises(ValueError, match="parents: expected one for each of 3 segments, got 2"):
        TreeLayout.of([3, 2, 2], parents=[-1, 0])
    pack = pack_groups([([1, 2], [[3, 4]])])
    with pytest.raises(ValueError, match="values: expected one row for each of 2 tokens"):
        pack.split(torch.zeros(3))


def test_no_groups_no_packs():
    assert plan_packs([], 10) == []


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 9))
def test_gradients_of_copied_keys_find_their_rows(groups, window):
    """Check that `Copies.sum_copies` adds the gradients of all copies of a key to the key's row.

    The reference is `index_add_` with the rows from which the keys were copied.
    """
    layout = pack_groups(numbered(groups)).layout
    (call,) = layout.window_calls(window)
    rows, spans = call.keys.rows, call.spans
    grad = torch.arange(1.0, len(rows) + 1, dtype=torch.float64)
    expected = torch.zeros(layout.total, dtype=torch.float64).index_add_(0, rows, grad)
    assert torch.equal(call.keys.sum_copies(grad), expected)
    assert sum(spans.queries) == layout.total and sum(spans.keys) == len(rows)
