"""Test 500 random calls per run against the oracle.

Hypothesis draws shapes, strides, dtypes, options, layouts and backends. A failure prints the seed.
`GRPO_FAST_FUZZ_SEED=<seed> pytest tests/loss/test_fuzz.py` replays it, and GRPO_FAST_FUZZ_CASES
sets the number of cases.
"""

from __future__ import annotations

import math
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from grpo_fast.kernels.head import sources as linear
from grpo_fast.kernels.head import support as head_support
from grpo_fast.objective.losses import OBJECTIVES
from tests import oracle_inputs, oracles
from tests.loss.test_loss_autograd import VIEWS
from tests.loss_cases import (
    AGGREGATIONS,
    BACKENDS,
    LOSS_LEVELS,
    make_case,
    options_for,
    reference_logps,
    relative_l2,
    run,
    spans,
    truth,
)

SEED = int(os.environ.get("GRPO_FAST_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
CASES = int(os.environ.get("GRPO_FAST_FUZZ_CASES", 500))
RUNNABLE = [p.values[0] for p in BACKENDS if not p.marks]
# Relative L2 error that is allowed for fp32 arithmetic. It is larger than in the accuracy tests
# (test_contract_accuracy.py), because the batches here are so small that one number can dominate
# the error. For each rounding to 16 bits, half a unit in the last place is added. A gradient is
# rounded when it is stored, and once more if the upstream gradient is not 1.
ARITHMETIC = 3e-5
CORRECTIONS = [
    *oracles.WORDS.values(),
    [oracles.off_policy(0.07)],
    [{"kind": "mask", "low": 0.7, "high": 1.4}],  # IcePop
    [{"low": 0.7}, {"kind": "reject", "low": 0.9, "high": 1.3, "level": "geometric"}],
    [{"kind": "reject", "low": 0.7, "high": 3.0, "level": "worst_token"}],
    [{"high": 1.5, "ratio": "current/sampling"},
     {"kind": "reject", "high": 2.0, "level": "product", "ratio": "current/sampling"}],
]  # fmt: skip
OFF_POLICY = len(oracles.WORDS)
WORKSPACE_BYTES = linear.workspace_bytes  # keep the original, because each test case patches it
HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@st.composite
def calls(draw):
    loss_type, level = draw(st.sampled_from(LOSS_LEVELS))
    options = options_for(loss_type, level, draw(st.sampled_from((None, *AGGREGATIONS))))
    options.setdefault("max_completion_length", draw(st.integers(1, 9)))
    if loss_type not in ("kimi", "dro") and draw(st.booleans()):
        options.update(beta=draw(st.sampled_from((0.04, 0.5))), kl_times_ratio=draw(st.booleans()))
        options.update(kl_estimator=draw(st.sampled_from(tuple(oracles.KL_ORACLES))))
    if draw(st.booleans()) and "delta" in OBJECTIVES[loss_type].params:
        options["delta"] = draw(st.sampled_from((1.05, 1.7, 4.0)))
    for name, values in (
        ("temperature", (1.0, 0.6, 1.5)),
        ("softcap", (None, 4.0)),
        ("logit_scale", (1.0, 1.6)),
        ("entropy_coef", (0.0, 0.1)),
        ("top_entropy_quantile", (1.0, 0.55)),
        ("corrections", CORRECTIONS),
    ):
        options[name] = draw(st.sampled_from(values))
    has_sampling = draw(st.booleans())
    of_current = loss_type == "vespo" and options["corrections"] is CORRECTIONS[-1]
    of_sampler = not has_sampling and options["corrections"] is not CORRECTIONS[OFF_POLICY]
    if of_current or of_sampler:
        del options["corrections"]
    B, L = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    bits = draw(st.lists(st.integers(0, 3), min_size=B * L, max_size=B * L))
    return {
        "options": options,
        "mask": torch.tensor([b > 0 for b in bits], dtype=torch.bool).reshape(B, L),
        "H": draw(st.sampled_from((1, 3, 8, 17))),
        "V": draw(st.sampled_from((2, 5, 31, 33, 130))),
        "dtype": draw(
            st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        ),
        "bias": draw(st.booleans()),
        "sampling": has_sampling,
        "support": draw(st.booleans()),
        "gathered_cost": draw(st.sampled_from((0, 10**9))),  # forces or forbids gathering rows of W
        "per_token_advantages": draw(st.booleans()),
        "on_policy": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
        "function": draw(st.sampled_from(("linear", "linear", "logits", "logps"))),
        "layout": draw(st.sampled_from(("padded", "packed"))),
        "backend": draw(st.sampled_from(RUNNABLE)),
        "view": draw(st.sampled_from((None, *VIEWS))),
        "upstream": draw(st.sampled_from((1.0, -2.5))),
        "totals": draw(st.booleans()),
        "workspace_rows": draw(st.sampled_from((None, 1, 40))),
    }


def decisions_are_clear(case, expected) -> bool:
    """Return whether all values are so far from clip and mask bounds that rounding cannot matter.

    Near a bound, the oracle could choose a different branch than our code, so the test skips the
    case.
    """
    o = expected.options
    if not case.mask.any():
        return True
    given_logps, given_entropy = (x.double() for x in reference_logps(case))
    lp = getattr(expected, "logps", given_logps)
    entropy = getattr(expected, "entropy", given_entropy)
    rows = oracle_inputs.completions_of(
        lp, case.advantages, case.mask, old=case.old, sampling=case.sampling
    )
    bounds = [1 - o.epsilon_low, 1 + o.epsilon_high, o.dual_clip_c, o.delta or 9e9, o.epsilon_high]
    for c in (c for c in rows if len(c.logp)):
        if case.old is not None:
            r = oracles.ratio(c, o)
            mean = torch.exp((c.logp - c.old).mean())
            for bound in bounds:
                if torch.any((r - bound).abs() < 1e-3) or abs(mean - bound) < 1e-3:
                    return False
            lr = c.logp - c.old
            if o.loss_type == "gmpo" and torch.any(
                (lr - o.epsilon_high).abs().minimum((lr + o.epsilon_low).abs()) < 1e-3
            ):
                return False
            moved = (c.logp.exp() - c.old.exp()).abs()
            divergence = oracles.binary_kl(c.old.exp(), c.logp.exp())
            if o.loss_type.startswith("dppo") and any(
                torch.any((x - e).abs() < 1e-4)
                for x in (moved, divergence)
                for e in (o.epsilon_low, o.epsilon_high)
            ):
                return False
        for x in o.corrections:
            r = oracles.correction_ratio(c, x)
            for bound in (x.get("low"), x.get("high")):
                if r is not None and bound and torch.any((r.log() - math.log(bound)).abs() < 1e-3):
                    return False
    if expected.entropy_floor is not None:  # a token may be at the threshold
        return not torch.any((entropy[case.mask] - expected.entropy_floor).abs() < 1e-4)
    return True


@pytest.mark.fuzz
@seed(SEED)
@settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(call=calls())
def test_any_call_is_the_oracle(call, monkeypatch, poisoned_memory):
    note(f"fuzz: {CASES} cases, GRPO_FAST_FUZZ_SEED={SEED}")
    case = make_case(
        call["seed"], H=call["H"], V=call["V"], mask=call["mask"], dtype=call["dtype"],
        bias=call["bias"], sampling=call["sampling"], support=call["support"],
        per_token_advantages=call["per_token_advantages"], **call["options"],
    )  # fmt: skip
    if call["on_policy"]:
        case = case.but(old=None)
    if call["totals"]:
        case = case.but(num_items=37, num_completions=11)
    if call["per_token_advantages"] and sum(spans(case.mask)) == len(case.mask):
        # Use the padded layout, because this batch has as many tokens as completions. In the packed
        # layout, advantages of shape (T,) would be interpreted as one per completion.
        call["layout"] = "padded"
    view = VIEWS.get(call["view"], lambda x: x)
    if call["view"] and case.mask.numel():
        case = case.but(
            ids=view(case.ids),
            mask=view(case.mask),
            old=None if case.old is None else view(case.old),
            ref=view(case.ref),
        )
    expected = truth(call["function"], case)
    if not decisions_are_clear(case, expected):
        return
    rows = call["workspace_rows"]
    smaller = WORKSPACE_BYTES if rows is None else lambda *_: rows * call["V"] * 4
    monkeypatch.setattr(linear, "workspace_bytes", smaller)
    monkeypatch.setattr(head_support, "GATHERED_COST", call["gathered_cost"])
    result = run(
        call["function"],
        case,
        layout=call["layout"],
        backend=call["backend"],
        upstream=call["upstream"],
    )
    size = sum(w.abs().sum().item() for w in expected.losses) + 1.0
    assert abs(result.loss.item() - expected.loss.item()) <= 1e-5 * size
    roundings = 1 if call["upstream"] == 1 else 2
    half_ulp = 0.0 if call["function"] == "logps" else HALF_ULP[call["dtype"]]
    tolerance = ARITHMETIC + 1.01 * roundings * half_ulp
    for name, grad in result.grads.items():
        true = call["upstream"] * getattr(expected, f"{name}_grad")
        error = (grad.double() - true).norm().item()
        floor = 1e-6 if call["dtype"] != torch.float16 else 1e-5
        assert error <= tolerance * true.norm().item() + floor, (name, relative_l2(grad, true))
        if name not in ("weight", "bias"):
            assert (grad[~case.mask] == 0).all()
        if case.kept is not None and name in ("logits", "weight"):
            outside = grad[~case.kept] if name == "logits" else grad[~case.kept[case.mask].any(0)]
            assert (outside == 0).all(), "a gradient outside of the sets"
