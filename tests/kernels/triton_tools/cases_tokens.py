"""Interpreter cases that compare the kernels around a call with torch.

They expand tokens, find the extremes of vectors for value checks, and sort targets.
"""

import pytest
import torch

from grpo_fast import LossConfig, linear_grpo_loss
from grpo_fast.kernels.gpu import target_rows, tokens
from grpo_fast.loss import checks
from tests.kernels.triton_tools.interpreter import only_memory_of

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def values(count, dtype, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Lengths of completions: one, empty ones at each place, more completions than a block has tokens,
# and more tokens than a block has.
@pytest.mark.parametrize(
    "lengths", [[3], [0, 2, 0, 0, 5, 0], [1] * 700, [600, 0, 700], [4, 1, 1, 9, 2]]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_completions_and_copies(lengths, dtype, masked):
    cu = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    rows = sum(lengths)
    index = torch.arange(rows)[torch.arange(rows) % 3 != 1] if masked else None
    given = [values(len(lengths), torch.float32, 0)]
    given += [values(rows, x, seed) for seed, x in enumerate(DTYPES[1:], 1)]
    every = given if index is None else [*given, index]
    with only_memory_of(cu, *every):
        segments, copies = tokens.expanded(
            index, cu, rows, len(lengths), given[0], given[1:], per_token=False
        )
    expected = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    chosen = torch.arange(rows) if index is None else index
    assert torch.equal(segments, expected[chosen])
    assert torch.equal(copies[0], given[0][expected[chosen]])
    assert copies.stride(0) % 4 == 0  # so that all rows have the same alignment
    for copy, x in zip(copies[1:], given[1:], strict=True):
        assert torch.equal(copy, x[chosen].float())


@pytest.mark.parametrize("masked", [False, True])
def test_the_padded_layout(masked):
    advantages = values(12, torch.float64, 1)
    index = torch.tensor([0, 5, 7, 11]) if masked else None
    segments, copies = tokens.expanded(index, None, 12, 3, advantages, [], per_token=True)
    chosen = torch.arange(12) if index is None else index
    assert torch.equal(segments, chosen // 4)
    assert torch.equal(copies, advantages[chosen].float()[None])


def test_a_transform_of_a_loss_is_refused():
    weight, ids = torch.randn(5, 4), torch.tensor([0, 4, 2])
    config, cu = LossConfig(), torch.tensor([0, 3])

    def loss(hidden):
        advantages = torch.ones(1)
        return linear_grpo_loss(
            hidden, weight, ids, advantages, config, cu_seqlens=cu, backend="triton"
        ).loss

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(torch.randn(3, 4))


@pytest.mark.parametrize("offsets", [[0, 4, 12, 9], [0, -5, 20, 9], [5, 2, 1, 0], [9, 9, 0, 0]])
def test_invalid_offsets_give_ascending_completions_in_range(offsets):
    given = torch.zeros(3)
    found, _ = tokens.expanded(None, torch.tensor(offsets), 9, 3, given, [], per_token=False)
    assert (found.diff() >= 0).all() and (found >= 0).all() and (found < 3).all()


VECTORS = [
    torch.tensor([0, 3, 3, 9], dtype=torch.int32),
    torch.tensor([-100, 2**40, 7]),
    torch.tensor([True]),
    torch.tensor([2.0], dtype=torch.float64),
    torch.tensor([1.0, NAN, -1.0]),
    torch.tensor([0.0, -INF]),
    values(5000, torch.float32, 3),
    values(10, torch.float32, 4)[::2],
    torch.tensor([5.0, 5.0]),
    torch.tensor([9, 8, 7]),
]


@pytest.mark.parametrize("count", [1, 8, 9, 10])
def test_extremes(count):
    given = VECTORS[:count]
    found = tokens.extremes(given)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[:, :2], checks.extremes(given, "torch")[:, :2], equal_nan=True)
    for row, x in zip(found.tolist(), given, strict=True):
        steps = x.double().diff().tolist()
        if all(step == step for step in steps):
            assert row[2] == min(steps, default=INF)


@pytest.mark.parametrize(("rows", "ids"), [(1, 3), (37, 4), (300, 40), (1000, 30000)])
def test_sorted_targets(rows, ids, monkeypatch):
    given = torch.randint(ids, (rows,), generator=torch.Generator().manual_seed(rows))
    with only_memory_of(given):
        found = target_rows.sorted_targets(given)
    monkeypatch.setattr(target_rows, "COUNTED_ROWS", 0)
    for x, expected in zip(found, target_rows.sorted_targets(given), strict=True):
        assert torch.equal(x, expected) and x.dtype == expected.dtype
