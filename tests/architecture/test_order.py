"""Tests that the result of a test does not depend on earlier tests, and tests of `tests.pairs`."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tests.pairs import covering


def test_draws_are_those_of_a_fresh_generator() -> None:
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(1), expected) and random.random() == random.Random(0).random()


@pytest.mark.parametrize("sizes", [(3, 2, 2, 6), (5, 4, 3), (2,) * 6, (4, 1, 3), (3, 3), (4,)])
def test_pairs_has_every_pair_and_is_short(sizes):
    rows = covering(sizes)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == {
            *itertools.product(*map(range, (sizes[a], sizes[b])))
        }
    assert len({*rows}) == len(rows) <= 2 * math.prod(sorted(sizes)[-2:])
