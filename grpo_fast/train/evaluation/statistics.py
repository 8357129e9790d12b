"""Comparison of two models on the same questions: paired difference, standard error and p-value.

The p-value comes from Fisher's sign-flip test. If both models are equally good, each difference
could just as well have the opposite sign. The p-value is the probability that differences with
random signs have a mean at least as far from 0 as the observed mean. The test does not assume that
the differences follow a particular distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_fast.train.evaluation.evaluate import mean_and_error

FLIPS = 100_000  # number of random choices of signs in an estimate
AT_ONCE = 2_000  # number of these choices that are in memory at the same time


@dataclass(frozen=True)
class Paired:
    """Comparison of two models in one metric, over the questions for which both have a value."""

    a: float  # mean of the first model
    b: float  # mean of the second model
    difference: float  # b - a
    se: float  # standard error of the difference
    p: float  # two-sided p-value
    n: int  # number of questions


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare two models in one metric. Each model has one value per question.

    Args:
        a: values of the first model.
        b: values of the second model for the same questions in the same order. A question is
            excluded if one of its values is NaN.
    """
    both = [pair for pair in zip(a, b, strict=True) if not any(map(math.isnan, pair))]
    differences = [second - first for first, second in both]
    mean, error = mean_and_error(differences)
    mean_a, _ = mean_and_error([first for first, _ in both])
    mean_b, _ = mean_and_error([second for _, second in both])
    return Paired(mean_a, mean_b, mean, error, sign_flip_p(differences), len(both))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign-flip test, or NaN if there are no differences.

    If all nonzero differences have the same size, as for greedy accuracy, the p-value is exact.
    Otherwise it is estimated from 100,000 random choices of signs. The random seed is fixed, so the
    result is reproducible.

    Args:
        differences: difference between the two models for each question.
    """
    if not differences:
        return math.nan
    values = torch.tensor(differences, dtype=torch.float64)
    values = values[values != 0]
    n = len(values)
    if n == 0:
        return 1.0
    sizes = values.abs()
    # 1. If all differences have the same size, the test is a binomial test of the signs, which is
    # known as McNemar's exact test.
    if bool((sizes == sizes[0]).all()):
        positive = int((values > 0).sum())
        tail = sum(math.comb(n, i) for i in range(min(positive, n - positive) + 1))
        return min(1.0, 2 * tail / 2**n)
    # 2. Otherwise count the sign choices whose sum is at least as far from 0 as the observed sum.
    # Subtract a tolerance, so that sums that differ only by rounding errors count as equal.
    limit = abs(float(values.sum())) - 1e-9 * float(sizes.max()) * n
    generator = torch.Generator().manual_seed(0)
    far = 0
    for _ in range(FLIPS // AT_ONCE):
        bits = torch.randint(2, (AT_ONCE, n), generator=generator, dtype=torch.int8)
        far += int((((2 * bits - 1).double() @ sizes).abs() >= limit).sum())
    return (1 + far) / (1 + FLIPS)
