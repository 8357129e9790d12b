"""Test the table of losses, the value and slope of each loss function, and the KL estimators.

The losses of the value function and the explained variance are compared with loops over numbers.
"""

import math
import warnings

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.objective.advantages import whitened
from grpo_fast.objective.aggregation import AGGREGATIONS as PACKAGE_AGGREGATIONS
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.objective.ppo import VALUE_LOSSES, explained_variance, gae, value_losses
from tests import oracles
from tests.loss_cases import AGGREGATIONS, options_for


def test_both_sides_have_the_same_losses_kl_estimators_and_normalisers():
    assert set(OBJECTIVES) == set(oracles.ORACLES)
    assert OBJECTIVES["gspo"].function is OBJECTIVES["grpo"].function
    assert set(KL_ESTIMATORS) == set(oracles.KL_ORACLES)
    assert set(PACKAGE_AGGREGATIONS) == set(AGGREGATIONS)


def test_default_bounds_of_the_ratio():
    assert LossConfig().epsilon_high == LossConfig().epsilon_low == 0.2
    assert LossConfig(epsilon_low=0.1, loss_type="grpo").epsilon_high == 0.1
    assert LossConfig(loss_type="cispo").epsilon_high == 5.0


# The oracle gets all tokens as one completion, because the rows of a token-level loss do not depend
# on each other. "gspo" has the function of "grpo", and a ratio of the whole completion.
LEAF_LOSSES = tuple(x for x in oracles.ORACLES if x not in ("gmpo", "gspo", "gspo_token", "vespo"))


@pytest.mark.parametrize("loss_type", LEAF_LOSSES)
@pytest.mark.parametrize("delta", [None, 1.1, 2.0])
def test_leaf_value_and_slope(loss_type, delta):
    """Check that value and slope of each loss function agree with the fp64 oracle.

    A grid of log ratios and advantages reaches every branch. test_loss_parity.py tests the losses
    whose ratio depends on all tokens of a completion. The tolerance is 1e-6, because
    hyperparameters such as 1.05 are not exact in fp32. In fp32, the slope of "sapo" is the most
    difficult one: at a ratio of 12, the weight of the token is nearly 0.
    """
    if delta is not None and "delta" not in OBJECTIVES[loss_type].params:
        pytest.skip("this loss has no delta")
    options = options_for(loss_type, delta=delta)
    lr = torch.linspace(-2.503, 3.497, 121, dtype=torch.float64)
    A = torch.tensor([-1.5, -0.2, 0.0, 0.3, 2.0], dtype=torch.float64)
    lr, A = (x.reshape(-1) for x in torch.meshgrid(lr, A, indexing="ij"))
    lp = -4.0 + 0.3 * torch.sin(torch.arange(len(lr), dtype=torch.float64))
    lp.requires_grad_()
    rows = oracles.Completion(lp, lp.detach() - lr, None, None, A, None)
    expected = oracles.ORACLES[loss_type](rows, oracles.resolve(options))
    (slope,) = torch.autograd.grad(expected.sum(), lp)
    leaf = OBJECTIVES[loss_type].function
    value, own = leaf(lp.detach(), lr, A, *LossConfig(**options).params)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own.expand_as(lr), slope, rtol=1e-6, atol=1e-6)
    inputs = (x.detach().float() for x in (lp, lr, A))
    _, own = leaf(*inputs, *LossConfig(**options).params)
    torch.testing.assert_close(own.double().expand_as(lr), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kl_estimator", oracles.KL_ORACLES)
def test_kl_value_and_slope(kl_estimator):
    far = torch.tensor([-30.0, 19.9, 20.1, 25.0, 89.0, 1e4])  # k3 is its tangent above 20
    d = torch.cat([torch.linspace(-6, 6, 97), far]).double()
    lp = torch.zeros_like(d, requires_grad=True)
    expected = oracles.KL_ORACLES[kl_estimator](d - lp)
    (slope,) = torch.autograd.grad(expected.sum(), lp)
    value, own = KL_ESTIMATORS[kl_estimator](d)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(own.double().expand_as(d), slope, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("magnitude", [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.249, 0.251, 0.5])
def test_k3_is_accurate_where_its_formula_cancels(magnitude, sign):
    """Check that the relative error of k3 in fp32 is at most 1e-6 for |d| from 1e-7 to 1e-2.

    In this range, the terms of e^d - d - 1 cancel in fp32. For larger |d|, the tolerance is 5e-6.
    For small |d|, a series in fp64 gives the exact values.
    """
    d = torch.tensor([sign * magnitude, sign * magnitude * 1.37], dtype=torch.float32)
    value, slope = KL_ESTIMATORS["k3"](d)
    exact = d.double()
    series = sum(exact**n / math.factorial(n) for n in range(2, 8))
    true = torch.where(exact.abs() < 0.05, series, torch.expm1(exact) - exact)
    tolerance = 1e-6 if magnitude <= 1e-2 else 5e-6
    assert ((value.double() - true).abs() <= tolerance * true).all()
    true = -torch.expm1(exact)
    assert ((slope.double() - true).abs() <= tolerance * true.abs()).all()


def test_k3_is_never_negative_and_exactly_zero_on_policy():
    small = torch.logspace(-30, 2, 4000)
    d = torch.cat([torch.linspace(-100, 100, 20001), small, -small, torch.zeros(1)])
    for dtype in (torch.float32, torch.float64):
        value, slope = KL_ESTIMATORS["k3"](d.to(dtype))
        assert torch.isfinite(value).all() and (value >= 0).all()
        assert value[-1] == 0 and slope[-1] == 0


def test_at_a_tie_the_unclipped_branch_keeps_its_gradient():
    """Check that the slope is −r·A if the clipped and the unclipped branch are equal.

    The branches are equal on policy, where r = 1. With ε = 0, r = 1 is also exactly the clip bound.
    """
    leaf = OBJECTIVES["grpo"].function
    lr = torch.tensor([0.0, 0.0], dtype=torch.float64)
    A = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for epsilon in (0.0, 0.2):
        _, slope = leaf(torch.full_like(lr, -1.0), lr, A, epsilon, epsilon, math.inf)
        assert (slope == -A).all()


EPSILON = 0.2


def by_hand(kind, v, old, target):
    """Compute a value loss from its definition, one number at a time.

    Returns:
        The loss, its derivative with respect to v, and whether the clipped term is the larger one.
    """
    error = v - target
    if kind == "huber":
        near = abs(error) <= 1
        value = error * error / 2 if near else abs(error) - 1 / 2
        return value, error if near else math.copysign(1, error), False
    if kind == "clipped":
        bounded = min(max(v, old - EPSILON), old + EPSILON)
        if (bounded - target) ** 2 > error**2:
            return (bounded - target) ** 2 / 2, 0.0, True
    return error * error / 2, error, False


@pytest.mark.parametrize("kind", VALUE_LOSSES)
def test_every_loss_and_its_gradient(kind):
    # The values are inside, above and below the clip range, and on both sides of the target.
    cases = [(v, old, target) for v in (-1.5, -0.1, 0.05, 0.9, 2.0)
             for old in (-0.3, 0.0, 0.5) for target in (-1.0, 0.0, 0.2, 3.0)]  # fmt: skip
    values, old, returns = torch.tensor(cases, dtype=torch.float64).unbind(1)
    values.requires_grad_()
    losses, clipped = value_losses(values, old, returns, kind, epsilon=EPSILON)
    losses.sum().backward()
    expected = [by_hand(kind, *case) for case in cases]
    torch.testing.assert_close(losses.tolist(), [x[0] for x in expected])
    torch.testing.assert_close(values.grad.tolist(), [x[1] for x in expected])
    assert clipped.tolist() == [x[2] for x in expected]
    assert clipped.any() == (kind == "clipped")


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 4.0, 5.0])
    # Explained variance ignores a constant error, so the result is still 1.
    assert explained_variance(returns - 7.0, returns) == 1
    assert explained_variance(torch.full((4,), 3.0), returns) == 0
    assert explained_variance(torch.tensor([1.0, 2.0, 4.0, 3.0]), returns).item() == pytest.approx(
        1 - (3 * 0.25 + 2.25) / 10  # the errors are 0, 0, 0, 2, and Σ(R − 3)² = 10
    )
    assert explained_variance(returns, torch.ones(4)).isnan()
    with warnings.catch_warnings(action="error"):
        assert explained_variance(torch.zeros(0), torch.zeros(0)).isnan()
        assert explained_variance(torch.ones(1), torch.zeros(1)).isnan()


def test_gae_against_its_recursion():
    """Check that `gae` follows the recursion A_t = δ_t + γλ·A_{t+1}.

    Here, δ_t = r_t + γ·V_{t+1} − V_t. The value V after the last token is 0. The recursion skips
    masked tokens, such as padding or the output of a tool between two turns.
    """
    g = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(5, 9, generator=g), torch.randn(5, 9, generator=g)
    gamma, lam = 0.9, [0.7, 0.7, 1.0, 0.0, 0.3]
    mask = torch.arange(9)[None] < torch.tensor([9, 4, 0, 1, 8])[:, None]
    mask[1, 0] = mask[4, 2] = mask[4, 5:7] = False
    given = [torch.where(mask, x, math.nan) for x in (rewards, values)]
    own = torch.stack([gae(*given, gamma, x, mask=mask)[i] for i, x in enumerate(lam)])
    expected = torch.zeros(5, 9, dtype=torch.float64)
    for b in range(5):
        following = trace = 0.0
        for t in reversed(mask[b].nonzero().flatten().tolist()):
            value = values[b, t].item()
            trace = rewards[b, t].item() + gamma * following - value + gamma * lam[b] * trace
            expected[b, t], following = trace, value
    torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=1e-6)


def test_whitened_leaves_out_what_is_unknown():
    a = torch.tensor([[1.0, 3.0, 1e6], [5.0, float("nan"), 7.0]], dtype=torch.float64)
    known = torch.tensor([[True, True, False], [True, False, True]])
    white = whitened(a, known)[known]
    torch.testing.assert_close(white, (a[known] - 4) / math.sqrt(5))
