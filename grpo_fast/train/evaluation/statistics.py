"""Compare two models on the same questions: paired difference, standard error and p-value.

The p-value comes from Fisher's sign-flip test. If both models are equally good, the difference on a
question is as likely to be d as -d. The p-value is the probability that random signs give a mean at
least as far from 0 as the observed mean. The test assumes no distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from grpo_fast.train.config import require
from grpo_fast.train.evaluation.evaluate import mean_and_error

FLIPS = 100_000  # number of random sign choices, if the differences have several sizes
AT_ONCE = 2_000  # sign choices in memory at the same time


class Paired(NamedTuple):
    """Comparison of one metric of two models, over the n questions on which both have a value."""

    a: float
    b: float
    difference: float  # b - a
    se: float  # standard error of the difference
    p: float  # two-sided p-value
    n: int


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare one metric of two models, given one value per question.

    Args:
        a: values of the first model.
        b: values of the second model, in the same order. A question with a NaN in `a` or `b` is
            excluded.
    """
    came = f"{len(a)} and {len(b)}"
    require(len(a) == len(b), "paired", "one value of each model per question", came)
    both = [pair for pair in zip(a, b, strict=True) if not any(map(math.isnan, pair))]
    differences = [second - first for first, second in both]
    mean, error = mean_and_error(differences)
    mean_a, _ = mean_and_error([first for first, _ in both])
    mean_b, _ = mean_and_error([second for _, second in both])
    return Paired(mean_a, mean_b, mean, error, sign_flip_p(differences), len(both))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign-flip test, or NaN if there are no differences.

    The p-value is exact if all nonzero differences have the same size, as for greedy accuracy.
    Otherwise it is estimated from 100,000 random choices of signs, which are the same in every
    call.
    """
    if not differences:
        return math.nan
    values = torch.tensor(differences, dtype=torch.float64)
    values = values[values != 0]
    n = len(values)
    if n == 0:
        return 1.0
    sizes = values.abs()
    # 1. If all differences have the same size, the test is McNemar's exact test, a binomial test of
    # the signs.
    if bool((sizes == sizes[0]).all()):
        positive = int((values > 0).sum())
        tail = sum(math.comb(n, i) for i in range(min(positive, n - positive) + 1))
        return min(1.0, 2 * tail / 2**n)
    # 2. Otherwise count the sign choices whose sum is at least as far from 0 as the observed sum.
    # The tolerance also counts sums that are equal except for rounding errors.
    limit = abs(float(values.sum())) - 1e-9 * float(sizes.max()) * n
    generator = torch.Generator().manual_seed(0)
    far = 0
    for _ in range(FLIPS // AT_ONCE):
        bits = torch.randint(2, (AT_ONCE, n), generator=generator, dtype=torch.int8)
        far += int((((2 * bits - 1).double() @ sizes).abs() >= limit).sum())
    return (1 + far) / (1 + FLIPS)
