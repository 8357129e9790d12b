"""Two models on the same questions: the sign-flip test against counting every sign."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from fractions import Fraction

import pytest

from grpo_fast.train.evaluation import statistics as module
from grpo_fast.train.evaluation.statistics import paired, sign_flip_p


def by_counting(differences):
    """Every choice of signs, as far from 0 as the one found: in fractions."""
    exact = [Fraction(d).limit_denominator(10**6) for d in differences]
    found, far = abs(sum(exact)), 0
    for signs in itertools.product((1, -1), repeat=len(exact)):
        far += abs(sum(s * d for s, d in zip(signs, exact, strict=True))) >= found
    return far / 2 ** len(exact)


def mcnemar(better, worse):
    """The exact binomial test of the questions on which two models differ."""
    n, k = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


@pytest.mark.parametrize("samples", [1, 2, 3, 8])
def test_p_is_the_share_of_all_signs(samples):
    rng = random.Random(samples)
    for _ in range(15):
        d = [rng.randint(-samples, samples) / samples for _ in range(rng.randint(1, 11))]
        assert sign_flip_p(d) == pytest.approx(by_counting(d), abs=1e-12), d


def test_p_of_values_that_have_nothing_in_common():
    rng = random.Random(0)
    for n in (1, 5, 11):
        d = [round(rng.gauss(0.5, 1.0), 5) for _ in range(n)]
        assert sign_flip_p(d) == pytest.approx(by_counting(d), abs=1e-12)
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1.0  # 0.1 + 0.2 is 0.3


@pytest.mark.parametrize(("better", "worse"), [(5, 0), (120, 90), (3, 3), (700, 500)])
def test_greedy_answers_are_mcnemars_exact_test(better, worse):
    d = [1.0] * better + [-1.0] * worse + [0.0] * 40
    random.Random(1).shuffle(d)
    assert sign_flip_p(d) == pytest.approx(mcnemar(better, worse), rel=1e-9)
    assert sign_flip_p([-x for x in d]) == sign_flip_p(d)


def test_random_signs_come_close_and_are_never_too_sure(monkeypatch):
    rng = random.Random(2)
    d = [rng.randint(-8, 8) / 8 + 0.1 * (i % 3 - 1) for i in range(60)]
    exact = sign_flip_p(d)
    monkeypatch.setattr(module, "MOST_SUMS", 0)
    drawn = sign_flip_p(d)
    assert 0.001 < exact < 0.999 and drawn != exact and sign_flip_p(d) == drawn
    assert drawn == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / module.FLIPS))
    assert sign_flip_p([1.0] * 60) == 1 / (1 + module.FLIPS)


def test_many_real_values_are_drawn():
    rng = random.Random(3)
    d = [rng.gauss(0.1, 1.0) for _ in range(400)]
    z = abs(math.fsum(d)) / math.sqrt(math.fsum(x * x for x in d))
    assert sign_flip_p(d) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)


def test_a_pair_of_lists():
    a, b = [0.0, 1.0, 0.5, math.nan, 0.25], [1.0, 1.0, 0.75, 1.0, math.nan]
    found = paired(a, b)
    d = [1.0, 0.0, 0.25]
    assert (found.a, found.b, found.n) == (0.5, 2.75 / 3, 3)
    assert found.difference == pytest.approx(statistics.mean(d))
    assert found.se == pytest.approx(statistics.stdev(d) / math.sqrt(3)) and found.p == 0.5
    assert found.p == by_counting(d)


def test_pairs_without_a_difference_or_without_any():
    same = paired([1.0, 0.0], [1.0, 0.0])
    assert (same.difference, same.se, same.p) == (0.0, 0.0, 1.0)
    one = paired([0.0], [1.0])
    assert one.difference == 1.0 and math.isnan(one.se) and one.p == 1.0
    none = paired([math.nan], [1.0])
    assert none.n == 0 and math.isnan(none.p) and math.isnan(none.difference)
    with pytest.raises(ValueError, match="expected one value of each model per question, got 1"):
        paired([1.0], [1.0, 2.0])
