"""Value and gradient agree: central differences of the public `grpo_loss`, no oracle involved.

For every loss × level × normaliser × layout, along a random direction u in logps:

    (L(x + h·u) − L(x − h·u)) / 2h  =  ⟨∂L/∂x, u⟩

Where a loss stops a gradient the plain difference of its value is not its gradient. There the
stopped factor is frozen with the public arguments alone:

- cispo, dppo_*, vespo: the factor depends on lp only through lp − old (and p − p_old inside an
  indicator, which is locally constant), so moving old_logps together with logps freezes it, and
  what is left of the difference is the slope of lp.
- gspo_token: s = exp(lp − sg(lp) + sg(mean lr)). Along a direction that is constant within each
  completion the plain difference is the gradient along it. Inside a completion all tokens carry
  the same weight times the same slope, which is asserted.

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


def assert_agree(case, layout, seed=0):
    """The difference of the value along a direction is the gradient's product with it. The error is
    judged against a size that no cancellation between tokens can hide.
    """
    logps, _ = reference_logps(case)
    grad = run("logps", case, layout=layout).grads["logps"].double()
    u = torch.randn(case.mask.shape, generator=torch.Generator().manual_seed(seed))
    u = u[:, :1].expand_as(u) if case.options["loss_type"] == "gspo_token" else u
    u = torch.where(case.mask, u, 0.0)
    moves_old = case.options["loss_type"] in RATIO_STOPPED

    def value(step):
        moved = case.but(old=case.old + step * u) if moves_old else case
        keywords = arguments(moved, layout)
        advantages, x = keywords.pop("advantages"), logps + step * u
        x = x if layout == "padded" else pack(x, spans(case.mask))
        config = grpo_fast.LossConfig(**case.options)
        return grpo_fast.grpo_loss(x, advantages, config, **keywords).loss.item()

    measured = (value(STEP) - value(-STEP)) / (2 * STEP)
    promised, size = (grad * u).sum().item(), (grad * u).abs().sum().item() + 1e-6
    assert abs(measured - promised) <= TOLERANCE * size, (measured, promised, size)


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS)
def test_gradient_of_logps(loss_type, level, aggregation, layout):
    case = make_case(11, **options_for(loss_type, level, aggregation))
    for seed in range(2):
        assert_agree(case, layout, seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gspo_token_spreads_evenly_inside_a_completion(aggregation, layout):
    case = make_case(11, **options_for("gspo_token", "token", aggregation))
    grad = run("logps", case, layout=layout).grads["logps"]
    for b in range(len(case.mask)):
        inside = grad[b][case.mask[b]]
        assert (inside == inside[:1]).all()
    assert (grad != 0).any()


@pairs(level=LEVELS, times_ratio=[False, True], kl_estimator=["k1", "abs", "k2", "k3"])
def test_gradient_of_the_kl(kl_estimator, times_ratio, level):
    # A completion's summed log ratio stays away from the clip bounds, too.
    options = {"beta": 0.5, "kl_estimator": kl_estimator, "kl_times_ratio": times_ratio}
    assert_agree(make_case(16, **options_for("grpo", level, **options)), "padded")
