"""Test that a NaN in an active row or in the head reaches the loss and every gradient.

Comparisons, clips, masks and weights of 0 must not hide the NaN. A user can then find it by
checking either the loss or any gradient.
"""

from __future__ import annotations

import math

import torch

import grpo_fast
from grpo_fast.objective.kl import KL_ESTIMATORS
from tests import oracles
from tests.loss_cases import (
    BACKENDS,
    EVERYWHERE,
    FUNCTIONS,
    IS_INTERPRETER,
    LAYOUTS,
    LEAVES_AND_LEVELS,
    Case,
    make_case,
    options_for,
    run,
)
from tests.pairs import pairs

WHERE = ("hidden", "weight")
BAD = (math.nan, math.inf, -math.inf)
HEADS = ("linear", "logits")
ON_POLICY = {"old": False, "on-policy": True}.items()
# Options that give some tokens a weight of 0, by corrections or by the entropy mask. Only the last
# entry, "rules", gives no token a weight of 0.
FILTERS = {
    **{name: {"corrections": x} for name, x in oracles.WORDS.items()},
    "masks": {"corrections": [oracles.off_policy(0.0)], "top_entropy_quantile": 0.3},
    "rules": {"entropy_coef": 0.1, "softcap": 4.0, "temperature": 0.7},
}


def spoiled(case: Case, where: str, value: float) -> Case:
    """Return a copy of the case in which one element of the tensor named `where` is `value`.

    In "hidden", the element is in an active row of the second completion. In "weight", it is in the
    row of an id that is not a target.
    """
    changed = getattr(case, where).clone()
    if where == "hidden":
        changed[1, 1, 3] = value
    else:
        free = next(v for v in range(len(changed)) if v not in case.ids)
        changed[free, 3] = value
    return case.but(**{where: changed})


def assert_seen(case: Case, function: str, backend: str, layout: str = "padded", **more) -> None:
    result = run(function, case, backend=backend, layout=layout, **more)
    assert not math.isfinite(result.loss.item()), "the loss is finite"
    for name, grad in result.grads.items():
        assert not grad.isfinite().all(), f"d{name} is finite"
        if name not in ("weight", "bias"):
            assert (grad[~case.mask] == 0).all(), f"d{name}: a masked row got something"


@pairs(layout=LAYOUTS, is_on_policy=ON_POLICY, backend=EVERYWHERE, function=FUNCTIONS,
       has_sets=[False, True], loss_type__level=LEAVES_AND_LEVELS)  # fmt: skip
def test_for_every_loss(loss_type, level, backend, function, is_on_policy, layout, has_sets):
    """Check also batches with the token sets of a sampler, in which a NaN of W may be in no set."""
    case = make_case(31, support=has_sets, **options_for(loss_type, level))
    case = case.but(old=None) if is_on_policy else case
    for where in WHERE if not has_sets else ("hidden",):
        for value in BAD:
            assert_seen(spoiled(case, where, value), function, backend, layout)


@pairs(kl_estimator=tuple(KL_ESTIMATORS), backend=EVERYWHERE, function=HEADS,
       is_on_policy=ON_POLICY, times_ratio=[False, True],
       loss_type=["grpo", "gspo", "gmpo", "vespo", "cispo"])  # fmt: skip
def test_beside_a_kl(loss_type, backend, function, kl_estimator, is_on_policy, times_ratio):
    kl = {"beta": 0.2, "kl_estimator": kl_estimator, "kl_times_ratio": times_ratio}
    case = spoiled(make_case(32, **options_for(loss_type, **kl)), "hidden", math.nan)
    assert_seen(case.but(old=None) if is_on_policy else case, function, backend)


@pairs(options=FILTERS.items(), backend=EVERYWHERE, function=HEADS, advantage=[-0.8, 0.0],
       loss_type=["grpo", "gspo", "kimi", "reinforce"])  # fmt: skip
def test_where_a_filter_drops_the_row(loss_type, backend, function, options, advantage):
    case = make_case(33, sampling=True, **options_for(loss_type, **options))
    values = case.advantages.index_fill(0, torch.tensor(1), advantage)
    bad = spoiled(case.but(advantages=values), "hidden", math.nan)
    for below in (0, 5):  # sampling logps with ratios of 1 or above the bound
        assert_seen(bad.but(sampling=bad.sampling - below), function, backend)


@pairs(dtype=[torch.float32, torch.bfloat16, torch.float16], backend=EVERYWHERE, where=WHERE,
       value=BAD)  # fmt: skip
def test_with_a_vocabulary_for_the_fused_kernels(where, value, backend, dtype):
    """Check that the fused kernels propagate NaN and infinities, with and without grad_filter.

    The head has several blocks of vocabulary columns and several chunks of rows.
    """
    options = options_for("grpo", beta=0.1)
    mask = torch.ones(5, 8 if IS_INTERPRETER else 30, dtype=torch.bool)
    case = make_case(34, H=16, V=2500, mask=mask, dtype=dtype, **options)
    for more in ({}, {"grad_filter": 0.05}):
        assert_seen(spoiled(case, where, value), "linear", backend, **more)


@pairs(value=BAD, where=WHERE, backend=BACKENDS)
def test_linear_logps(backend, where, value):
    case = spoiled(make_case(36, **options_for("grpo")), where, value)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    ids = torch.where(case.mask, case.ids, -100)
    logps, entropy = grpo_fast.linear_logps(
        hidden, weight, ids, return_entropy=True, backend=backend
    )
    assert not logps.isfinite().all() and not entropy.isfinite().all()
    logps.sum().backward()
    assert not hidden.grad.isfinite().all() and not weight.grad.isfinite().all()
    assert (hidden.grad[~case.mask] == 0).all() and (logps[~case.mask] == 0).all()
    with torch.no_grad():
        assert not grpo_fast.linear_logps(hidden, weight, ids, backend=backend).isfinite().all()
