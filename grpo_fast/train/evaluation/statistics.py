"""Two models on the same questions: the paired difference, its standard error and its p-value.

Fisher's sign-flip test: if both models are alike, a question's difference is as likely to be d as
−d; p is the probability that signs drawn at random give a mean at least as far from 0. It assumes
no distribution. Where differences are 1, 0 or −1, it is McNemar's exact test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.train.config import require
from grpo_fast.train.evaluation.evaluate import mean_and_error

GRID = 1e-9  # of the largest difference: sums that are closer are one
MOST_SUMS = 4_000_000  # of an exact distribution in the making
FLIPS = 100_000  # signs drawn at random where the exact distribution has more sums
AT_ONCE = 2_000


class Paired(NamedTuple):
    """One metric of two models on the n questions where both have it."""

    a: float
    b: float
    difference: float  # b − a
    se: float  # of the difference
    p: float  # two-sided
    n: int


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare one value per question of each model; questions with a NaN are left out."""
    came = f"{len(a)} and {len(b)}"
    require(len(a) == len(b), "paired", "one value of each model per question", came)
    both = [pair for pair in zip(a, b, strict=True) if not any(map(math.isnan, pair))]
    differences = [second - first for first, second in both]
    mean, error = mean_and_error(differences)
    first, second = (mean_and_error([pair[i] for pair in both])[0] for i in range(2))
    return Paired(first, second, mean, error, sign_flip_p(differences), len(both))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of "each difference is as likely to have the other sign"; NaN of none.

    Exact as long as the sums have few different values, as those of accuracies do; else from
    100,000 random draws, the same ones in every call: (1 + draws as far from 0) / (1 + draws).
    """
    if not differences:
        return math.nan
    values = torch.tensor(differences, dtype=torch.float64)
    largest = float(values.abs().max())
    if largest == 0:
        return 1.0
    values = (values / largest / GRID).round() * GRID
    sizes, counts = values.abs().unique(return_counts=True)
    # Slack of a grid step for each rounding of a sum: else the one that came may miss its own tail.
    limit = abs(float(values.sum())) - GRID * (1 + len(sizes))
    exact = _exact_tail(sizes, counts, limit)
    return _drawn_tail(values.abs(), limit) if exact is None else exact


def _exact_tail(sizes: Tensor, counts: Tensor, limit: float) -> float | None:
    """P(|Σ ± size| ≥ limit), each size `counts` times; None where it has too many values."""
    sums, weights = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        if size == 0:
            continue
        if len(sums) * (count + 1) > MOST_SUMS:
            return None
        up = torch.arange(count + 1, dtype=torch.float64)  # how many of them have the plus sign
        n = torch.tensor(float(count), dtype=torch.float64)
        chance = (n + 1).lgamma() - (up + 1).lgamma() - (n - up + 1).lgamma() - n * math.log(2)
        reached = (sums[:, None] + size * (2 * up - n)).flatten() / GRID
        sums, place = reached.round().unique(return_inverse=True)
        sums = sums * GRID
        shares = (weights[:, None] * chance.exp()).flatten()
        weights = torch.zeros_like(sums).index_add_(0, place, shares)
    return min(1.0, float(weights[sums.abs() >= limit].sum()))


def _drawn_tail(sizes: Tensor, limit: float) -> float:
    """The same from random signs, each of `sizes` once."""
    generator, far = torch.Generator().manual_seed(0), 0
    for _ in range(FLIPS // AT_ONCE):
        signs = torch.randint(2, (AT_ONCE, len(sizes)), generator=generator, dtype=torch.int8)
        far += int((((2 * signs - 1).double() @ sizes).abs() >= limit).sum())
    return (1 + far) / (1 + FLIPS)
