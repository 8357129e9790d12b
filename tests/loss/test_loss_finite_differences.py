"""Value and gradient agree: central differences of the public functions, no oracle involved.

For every loss × level × normaliser × layout, along a random direction u in logps (and in hidden
states):

    (L(x + h·u) − L(x − h·u)) / 2h  =  ⟨∂L/∂x, u⟩

Where a loss stops a gradient the plain difference of its value is not its gradient. There the
stopped factor is frozen with the public arguments alone:

- cispo, dppo_*, vespo: the factor depends on lp only through lp − old (and p − p_old inside an
  indicator, which is locally constant), so moving old_logps together with logps freezes it, and
  what is left of the difference is the slope of lp. dppo's indicator cannot flip: no row is within
  the step of its threshold.
- gspo_token: s = exp(lp − sg(lp) + sg(mean lr)). Along a direction that is constant within each
  completion the stopped mean and the free lp move by the same amount, so the plain difference is
  the gradient along it. That leaves the distribution inside a completion: by the formula all its
  tokens carry the same weight times the same slope, which is asserted.
- no old_logps: old = sg(lp). The difference is taken with old_logps = the starting logps given
    explicitly.
- k3+, k1+: the slope is that of k2, so the difference is taken of the k2 loss; the value is
    compared with k3 and k1.
- the off-policy mask, the entropy quantile and sampling ratios are constants of the step; none is
    near its bound.

The functions return fp32, so a step of 1e-2 leaves about 1e-5 of rounding and 1e-5 of curvature:
the bound is 1e-3.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from tests.loss_cases import (
    AGGREGATIONS,
    LAYOUTS,
    LEVELS,
    LOSS_LEVELS,
    arguments,
    make_case,
    options_for,
    pack,
    reference_logps,
    run,
    spans,
)  # fmt: skip
from tests.pairs import pairs

STEP, TOLERANCE = 4e-3, 1e-3
RATIO_STOPPED = ("cispo", "vespo", "dppo_tv", "dppo_kl")


def loss_of_logps(case, layout, logps, *, old="as given", config=None):
    """The public grpo_loss as a number."""
    keywords = arguments(case if isinstance(old, str) else case.but(old=old), layout)
    advantages = keywords.pop("advantages")
    lay = logps if layout == "padded" else pack(logps, spans(case.mask))
    return grpo_fast.grpo_loss(
        lay, advantages, config or grpo_fast.LossConfig(**case.options), **keywords
    ).loss.item()


def direction(case, seed=0):
    u = torch.randn(case.mask.shape, generator=torch.Generator().manual_seed(seed))
    if case.options["loss_type"] == "gspo_token":
        u = u[:, :1].expand_as(u)
    return torch.where(case.mask, u, 0.0)


def difference(case, layout, logps, u, *, config=None):
    h = STEP
    move_old = case.options["loss_type"] in RATIO_STOPPED
    plus = loss_of_logps(
        case, layout, logps + h * u, old=case.old + h * u if move_old else "as given", config=config
    )
    minus = loss_of_logps(
        case, layout, logps - h * u, old=case.old - h * u if move_old else "as given", config=config
    )
    return (plus - minus) / (2 * h)


def assert_agree(measured, promised, size):
    assert abs(measured - promised) <= TOLERANCE * size, (measured, promised, size)


def slope_size(grad, u):
    """The size against which the error is judged: no cancellation between tokens can hide or
    inflate it.
    """
    return (grad.double() * u.double()).abs().sum().item() + 1e-6


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS)
def test_gradient_of_logps(loss_type, level, aggregation, layout):
    case = make_case(11, **options_for(loss_type, level, aggregation))
    logps, _ = reference_logps(case)
    grad = run("logps", case, layout=layout).grads["logps"]
    for seed in range(2):
        u = direction(case, seed)
        assert_agree(
            difference(case, layout, logps, u),
            (grad.double() * u).sum().item(),
            slope_size(grad, u),
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gspo_token_spreads_evenly_inside_a_completion(aggregation, layout):
    case = make_case(11, **options_for("gspo_token", "token", aggregation))
    grad = run("logps", case, layout=layout).grads["logps"]
    for b in range(len(case.mask)):
        inside = grad[b][case.mask[b]]
        assert (inside == inside[:1]).all()
    assert (grad != 0).any()


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS)
def test_gradient_of_hidden_states(loss_type, level, aggregation, layout):
    """The fused path: ⟨dH, U⟩ + ⟨dW, U'⟩ against the difference of linear_grpo_loss itself."""
    case = make_case(12, **options_for(loss_type, level, aggregation))
    g = torch.Generator().manual_seed(0)
    du, dw = (
        torch.randn(case.hidden.shape, generator=g),
        torch.randn(case.weight.shape, generator=g),
    )
    grads = run("linear", case, layout=layout).grads
    if loss_type in (*RATIO_STOPPED, "gspo_token"):
        # The stopped factor is frozen through logps above; here the chain rule through lp, on the
        # leaf's own slope.
        slope = run("logps", case, layout=layout).grads["logps"]

        def value(s):
            moved = case.but(hidden=case.hidden + s * du, weight=case.weight + s * dw)
            return (reference_logps(moved)[0].double() * slope.double()).sum().item()
    else:

        def value(s):
            moved = case.but(hidden=case.hidden + s * du, weight=case.weight + s * dw)
            return run("linear", moved, layout=layout, upstream=None).loss.item()

    h = 1e-3
    measured = (value(h) - value(-h)) / (2 * h)
    promised = (grads["hidden"].double() * du).sum() + (grads["weight"].double() * dw).sum()
    size = grads["hidden"].norm().item() + grads["weight"].norm().item() + 1e-6
    assert_agree(measured, promised.item(), size)


@pytest.mark.parametrize(("loss_type", "level"), LOSS_LEVELS)
def test_on_policy_gradient_is_that_of_a_frozen_old(loss_type, level):
    case = make_case(13, **options_for(loss_type, level))
    logps, _ = reference_logps(case)
    free = run("logps", case.but(old=None)).grads["logps"]
    frozen = case.but(old=logps)
    u = direction(case)
    measured = difference(frozen, "padded", logps, u)
    assert_agree(measured, (free.double() * u).sum().item(), slope_size(free, u))


@pairs(level=LEVELS, times_ratio=[False, True], kl_estimator=["k1", "abs", "k2", "k3"])
def test_gradient_of_the_kl(kl_estimator, times_ratio, level):
    case = make_case(
        16,  # a completion's summed log ratio stays away from the clip bounds, too
        **options_for(
            "grpo", level, beta=0.5, kl_estimator=kl_estimator, kl_times_ratio=times_ratio
        ),
    )
    logps, _ = reference_logps(case)
    grad = run("logps", case).grads["logps"]
    u = direction(case)
    assert_agree(
        difference(case, "padded", logps, u), (grad.double() * u).sum().item(), slope_size(grad, u)
    )


@pytest.mark.parametrize(("straight_through", "value_of"), [("k3+", "k3"), ("k1+", "k1")])
def test_gradient_of_the_straight_through_kl(straight_through, value_of):
    options = options_for("grpo", beta=0.5)
    case = make_case(14, **options, kl_estimator=straight_through)
    logps, _ = reference_logps(case)
    result = run("logps", case)
    assert result.loss.item() == pytest.approx(
        run("logps", case.with_options(kl_estimator=value_of)).loss.item(), rel=1e-6
    )
    u = direction(case)
    k2 = grpo_fast.LossConfig(**options, kl_estimator="k2")
    measured = difference(case, "padded", logps, u, config=k2)
    grad = result.grads["logps"]
    assert_agree(measured, (grad.double() * u).sum().item(), slope_size(grad, u))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_of_the_entropy_bonus(aggregation):
    """Fused: the bonus reaches hidden and weight through the softmax, checked on linear_grpo_loss
    itself.
    """
    case = make_case(15, **options_for("grpo", aggregation=aggregation, entropy_coef=0.7))
    case = case.but(advantages=torch.zeros_like(case.advantages))
    g = torch.Generator().manual_seed(0)
    du, dw = (
        torch.randn(case.hidden.shape, generator=g),
        torch.randn(case.weight.shape, generator=g),
    )
    grads = run("linear", case).grads
    h = 4e-3
    values = [
        run(
            "linear",
            case.but(hidden=case.hidden + s * du, weight=case.weight + s * dw),
            upstream=None,
        ).loss.item()
        for s in (h, -h)
    ]
    promised = (grads["hidden"].double() * du).sum() + (grads["weight"].double() * dw).sum()
    size = grads["hidden"].norm().item() + grads["weight"].norm().item()
    assert size > 1e-2
    assert_agree((values[0] - values[1]) / (2 * h), promised.item(), size)
