"""Test the losses of the value function and the explained variance against loops over numbers."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from grpo_fast.objective.advantages import whitened
from grpo_fast.objective.ppo import VALUE_LOSSES, explained_variance, gae, value_losses

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
