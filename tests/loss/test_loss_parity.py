"""Test the value and gradient of every loss against the fp64 oracle.

The tests cover every level, aggregation, layout, function and backend. The oracle computes in fp64
from the same fp32 numbers. No ratio is near a clip bound, so differences come only from fp32
arithmetic. The tolerance for gradients is a relative L2 error of 1e-5 instead of the 2e-6 of the
contract. At V = 23 the log ratio has an absolute error of about 1e-7, which a slope such as 1 − e^d
amplifies. The contract applies only to dH and dW of the policy term, and test_contract_accuracy.py
tests it.
"""

from __future__ import annotations

import pytest
import torch

from tests.loss_cases import (
    AGGREGATIONS,
    BACKENDS,
    FUNCTIONS,
    LAYOUTS,
    LEVELS,
    LOSS_LEVELS,
    check,
    make_case,
    options_for,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS)
def test_logps(loss_type, level, aggregation, layout):
    check("logps", make_case(1, **options_for(loss_type, level, aggregation)), layout=layout)


@pairs(layout=LAYOUTS, aggregation=AGGREGATIONS, loss_type__level=LOSS_LEVELS, backend=BACKENDS,
       function=["linear", "logits"])  # fmt: skip
def test_sweeps(function, loss_type, level, aggregation, layout, backend):
    case = make_case(2, **options_for(loss_type, level, aggregation))
    check(function, case, layout=layout, backend=backend)


# To save time, the tests below use only one aggregation for each loss.
KL_LOSSES = tuple(x for x in LOSS_LEVELS if x[0] not in ("kimi", "dro"))


@pairs(function=FUNCTIONS, times_ratio=[False, True],
       kl_estimator=["k1", "abs", "k2", "k3", "k3+", "k1+"], level=LEVELS)  # fmt: skip
def test_kl_estimators(function, level, kl_estimator, times_ratio):
    options = {"beta": 0.4, "kl_estimator": kl_estimator, "kl_times_ratio": times_ratio}
    for clamps in ({}, {"kl_clamp": 0.12}, {"kl_input_clamp": 0.45, "kl_clamp": 0.12}):
        check(function, make_case(4, **options_for("grpo", level, **options, **clamps)))


@pairs(times_ratio=[False, True], loss_type__level=KL_LOSSES, backend=BACKENDS)
def test_every_loss_with_kl(loss_type, level, times_ratio, backend):
    case = make_case(5, **options_for(loss_type, level, beta=0.4, kl_times_ratio=times_ratio))
    check("linear", case, layout="packed", backend=backend)


@pairs(layout=LAYOUTS, loss_type__level=LOSS_LEVELS, backend=BACKENDS)
def test_per_token_advantages(loss_type, level, layout, backend):
    case = make_case(6, per_token_advantages=True, **options_for(loss_type, level))
    check("linear", case, layout=layout, backend=backend)


@pairs(function=FUNCTIONS, loss_type__level=LOSS_LEVELS)
def test_on_policy_without_old_logps(loss_type, level, function):
    check(function, make_case(7, **options_for(loss_type, level)).but(old=None))


@pairs(aggregation=AGGREGATIONS, layout=LAYOUTS)
def test_totals_of_the_whole_step(aggregation, layout):
    case = make_case(8, **options_for("grpo", aggregation=aggregation))
    check("linear", case.but(num_items=131, num_completions=17), layout=layout)


@pairs(loss_type=["grpo", "cispo", "sapo", "gmpo", "gspo", "vespo"],
       dtype=[torch.int64, torch.float32, torch.uint16, torch.float8_e5m2])  # fmt: skip
def test_masks_of_any_dtype(loss_type, dtype):
    case = make_case(9, **options_for(loss_type))
    check("linear", case, completion_mask=case.mask.to(dtype))
