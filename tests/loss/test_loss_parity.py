"""Value and gradient of every loss × level × normaliser × layout × function × backend, against the
fp64 oracle.

Inputs are fp32 numbers; the oracle gets the same numbers in fp64, and no clip decision is near its
bound, so the whole difference is fp32 arithmetic. The gradients are held to 1e-5 in relative L2
rather than the contract's 2e-6 because a log ratio at V = 23 inherits an absolute error of some
1e-7 from lp, which a slope of 1 − e^d or a softened gate amplifies; `test_contract_accuracy.py`
holds 2e-6 where the contract speaks (dH, dW of the policy term).
"""

from __future__ import annotations

import pytest

from tests.loss_cases import (
    AGGREGATIONS,
    BACKENDS,
    LAYOUTS,
    LEVELS,
    LOSS_LEVELS,
    assert_same,
    make_case,
    options_for,
    run,
)  # fmt: skip
from tests.pairs import pairs

LOSS_TOL, GRAD_TOL = 2e-6, 1e-5

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS)
def test_logps(loss_type, level, aggregation, layout):
    case = make_case(1, **options_for(loss_type, level, aggregation))
    assert_same(
        "logps", case, run("logps", case, layout=layout), loss_tol=LOSS_TOL, grad_tol=GRAD_TOL
    )


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS, backend=BACKENDS)
def test_linear(loss_type, level, aggregation, layout, backend):
    case = make_case(2, **options_for(loss_type, level, aggregation))
    result = run("linear", case, layout=layout, backend=backend)
    assert_same("linear", case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS, backend=BACKENDS)
def test_logits(loss_type, level, aggregation, layout, backend):
    case = make_case(3, **options_for(loss_type, level, aggregation))
    result = run("logits", case, layout=layout, backend=backend)
    assert_same("logits", case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


# KL, per-token advantages, no old_logps, explicit totals: the same grid, one aggregation each.
KL_LOSSES = tuple(x for x in LOSS_LEVELS if x[0] not in ("kimi", "dro"))


@pairs(function=["logps", "logits", "linear"], times_ratio=[False, True],
       kl_estimator=["k1", "abs", "k2", "k3", "k3+", "k1+"], level=LEVELS)  # fmt: skip
def test_kl_estimators(function, level, kl_estimator, times_ratio):
    options = options_for(
        "grpo", level, beta=0.4, kl_estimator=kl_estimator, kl_times_ratio=times_ratio
    )
    for clamps in ({}, {"kl_clamp": 0.12}, {"kl_input_clamp": 0.45, "kl_clamp": 0.12}):
        case = make_case(4, **options, **clamps)
        assert_same(function, case, run(function, case), loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


@pairs(times_ratio=[False, True], loss_type__level=KL_LOSSES, backend=BACKENDS)
def test_every_loss_with_kl(loss_type, level, times_ratio, backend):
    case = make_case(5, **options_for(loss_type, level, beta=0.4, kl_times_ratio=times_ratio))
    result = run("linear", case, layout="packed", backend=backend)
    assert_same("linear", case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


@pairs(layout=LAYOUTS, loss_type__level=LOSS_LEVELS, backend=BACKENDS)
def test_per_token_advantages(loss_type, level, layout, backend):
    case = make_case(6, per_token_advantages=True, **options_for(loss_type, level))
    result = run("linear", case, layout=layout, backend=backend)
    assert_same("linear", case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


@pytest.mark.parametrize("function", ["logps", "logits", "linear"])
@pytest.mark.parametrize(("loss_type", "level"), LOSS_LEVELS)
def test_on_policy_without_old_logps(loss_type, level, function):
    case = make_case(7, **options_for(loss_type, level)).but(old=None)
    assert_same(function, case, run(function, case), loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_totals_of_the_whole_step(aggregation, layout):
    case = make_case(8, **options_for("grpo", aggregation=aggregation)).but(
        num_items=131, num_completions=17
    )
    assert_same(
        "linear", case, run("linear", case, layout=layout), loss_tol=LOSS_TOL, grad_tol=GRAD_TOL
    )


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo", "gmpo", "gspo", "vespo"])
@pytest.mark.parametrize("dtype_of_mask", ["bool", "int64", "float32"])
def test_masks_of_any_dtype(loss_type, dtype_of_mask):
    import torch

    case = make_case(9, **options_for(loss_type))
    result = run("linear", case, completion_mask=case.mask.to(getattr(torch, dtype_of_mask)))
    assert_same("linear", case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


@pytest.mark.parametrize("function", ["logps", "logits", "linear"])
def test_cispo_with_the_offset_bound(function):
    case = make_case(21, **options_for("cispo", cispo_bound="offset", epsilon_high=0.28))
    assert_same(function, case, run(function, case), loss_tol=2e-6, grad_tol=1e-5)
