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
    ENGINES,
    FUNCTIONS,
    LAYOUTS,
    LEVELS,
    LOSS_LEVELS,
    check,
    make_case,
    options_for,
    pack,
    spans,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


KLS = {"none": {}, "kl": {"beta": 0.4}, "kl times ratio": {"beta": 0.4, "kl_times_ratio": True}}
MASKS = [torch.bool, torch.int64, torch.float32, torch.uint16, torch.float8_e5m2]
# One axis, because "logps" has no backend. With two axes, a loss could miss a backend.
WAYS = [
    pytest.param("logps", None, id="logps"),
    *(
        pytest.param(function, *p.values, id=f"{function}-{p.id}", marks=p.marks)
        for function, backends in (("logits", ENGINES), ("linear", BACKENDS))
        for p in backends
    ),
]


@pairs(function__backend=WAYS, layout=LAYOUTS, aggregation=AGGREGATIONS,
       loss_type__level=LOSS_LEVELS, kl=KLS, per_token=[False, True],
       totals=[(None, None), (131, 17)], mask_dtype=MASKS)  # fmt: skip
def test_sweeps(
    function, loss_type, level, aggregation, layout, backend, kl, per_token, totals, mask_dtype
):
    """Check also totals of the whole step, advantages per token, and masks of other dtypes."""
    options = options_for(loss_type, level, aggregation)
    options |= KLS[kl] if loss_type not in ("kimi", "dro") else {}
    case = make_case(2, per_token_advantages=per_token, **options)
    case = case.but(num_items=totals[0], num_completions=totals[1])
    mask = case.mask.to(mask_dtype)
    if layout == "packed":
        mask = pack(mask, spans(case.mask))
    check(function, case, layout=layout, backend=backend, completion_mask=mask)


@pairs(function=FUNCTIONS, times_ratio=[False, True],
       kl_estimator=["k1", "abs", "k2", "k3", "k3+", "k1+"], level=LEVELS)  # fmt: skip
def test_kl_estimators(function, level, kl_estimator, times_ratio):
    options = {"beta": 0.4, "kl_estimator": kl_estimator, "kl_times_ratio": times_ratio}
    for clamps in ({}, {"kl_clamp": 0.12}, {"kl_input_clamp": 0.45, "kl_clamp": 0.12}):
        check(function, make_case(4, **options_for("grpo", level, **options, **clamps)))


@pairs(function=FUNCTIONS, loss_type__level=LOSS_LEVELS)
def test_on_policy_without_old_logps(loss_type, level, function):
    check(function, make_case(7, **options_for(loss_type, level)).but(old=None))
