"""Test that a NaN in an active row or in the head reaches the loss and every gradient.

Comparisons, clips, masks and weights of 0 must not hide the NaN. A user can then find it by
checking either the loss or any gradient. test_sweeps of test_loss_parity.py checks every loss.
"""

from __future__ import annotations

import math

import torch

import grpo_fast
from tests import oracles
from tests.loss_cases import (
    BACKENDS,
    EVERYWHERE,
    IS_INTERPRETER,
    Case,
    assert_seen,
    make_case,
    options_for,
)
from tests.pairs import pairs

WHERE = ("hidden", "weight")
BAD = (math.nan, math.inf, -math.inf)
HEADS = ("linear", "logits")
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
