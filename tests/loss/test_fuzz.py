"""Test 500 random calls per run against the oracle, and against a second call that must agree.

Hypothesis draws shapes, strides, dtypes, options, layouts, backends and the relation between the
two calls (`RELATIONS`). A failure prints the seed.
`GRPO_FAST_FUZZ_SEED=<seed> pytest tests/loss/test_fuzz.py` replays it, and GRPO_FAST_FUZZ_CASES
sets the number of cases.
"""

import math
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from grpo_fast.kernels.head import sources as linear
from grpo_fast.objective.losses import OBJECTIVES
from tests import oracles
from tests.loss_cases import (
    AGGREGATIONS,
    EVERYWHERE,
    LOSS_LEVELS,
    Case,
    Result,
    arguments,
    call,
    leaves_of,
    make_case,
    options_for,
    pack,
    reference_logps,
    relative_l2,
    run,
    spans,
    truth,
)

SEED = int(os.environ.get("GRPO_FAST_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
CASES = int(os.environ.get("GRPO_FAST_FUZZ_CASES", 500))
RUNNABLE = [p.values[0] for p in EVERYWHERE if all(m.name != "skip" for m in p.marks)]
# Relative L2 error that is allowed for fp32 arithmetic. It is larger than in the accuracy tests
# (test_contract.py), because the batches here are so small that one number can dominate
# the error. For each rounding to 16 bits, half a unit in the last place is added. A gradient is
# rounded when it is stored, and once more if the upstream gradient is not 1.
ARITHMETIC = 3e-5
CORRECTIONS = {
    **oracles.WORDS,
    "IcePop": [{"kind": "mask", "low": 0.7, "high": 1.4}],
    "truncated below": [{"low": 0.8, "high": 1.4}],
    "no lower bound": [{"kind": "reject", "low": 0.0, "high": 2.0}],
    "always below 1": [{"low": 0.3, "high": 0.8}],
    "always above 1": [{"kind": "mask", "low": 1.1, "high": 5.0}],
    "rejected unless above 1": [{}, {"kind": "reject", "low": 1.1}],
    "a bound without a number of fp32": [{"low": 1e-50, "high": 3e38}],
    "unbounded": [{}],
    "geometric": [{"high": 1.3, "level": "geometric"}],
    "token rejection": [{"kind": "reject", "low": 0.7, "high": 1.4}],
    "product rejection": [{"kind": "reject", "low": 0.5, "high": 2.0, "level": "product"}],
    "worst token": [{"kind": "reject", "low": 0.7, "high": 3.0, "level": "worst_token"}],
    "seq-mask-tis": [{}, {"kind": "reject", "low": 0.9, "high": 1.3, "level": "geometric"}],
    "off policy": [oracles.off_policy(0.05)],
    "off policy for all": [oracles.off_policy(10.0)],
    "current": [{"high": 1.5, "ratio": "current/sampling"}],
    "current rejected": [
        {"high": 1.5},
        {"kind": "reject", "low": 0.5, "level": "product", "ratio": "current/sampling"},
        {"kind": "reject", "high": 2.0, "advantages": "negative"},
    ],
}
WORKSPACE_BYTES = linear.workspace_bytes  # keep the original, because each test case patches it
HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
POISON = (math.nan, math.inf, -math.inf, 3e38)
BAD_IDS = (-100, -1, 10**6, 2**40)
OF_ROWS = ("hidden", "ids", "mask", "advantages", "old", "ref", "sampling", "kept")


def strided_last(x):
    """Return a copy of x with stride 2: a view of every second element of a larger buffer."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7)
    wide[..., ::2] = x
    return wide[..., ::2]


def offset(x):
    flat = x.new_full((x.numel() + 3,), 5)
    flat[3:] = x.reshape(-1)
    return flat[3:].view(x.shape)


def row_padded(x):
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5), 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


VIEWS = {f.__name__: f for f in (strided_last, offset, row_padded, transposed)}


# ---- Relations between two calls. Each function returns nothing, and fails if they disagree.
def changed(case: Case, change) -> Case:
    """Return a copy of the case in which `change` is applied to all tensors with one row per token.

    `change` gets the name and the tensor. Advantages may have one value per completion instead.
    """
    given = {name: getattr(case, name) for name in OF_ROWS}
    return case.but(**{name: change(name, x) for name, x in given.items() if x is not None})


def poisoned(case: Case) -> Case:
    """Return a copy of the case with NaN, ±inf, huge numbers or invalid ids at masked tokens."""
    g = torch.Generator().manual_seed(0)

    def spoil(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1 or name in ("mask", "kept"):
            return x
        values = torch.tensor(BAD_IDS if name == "ids" else POISON, dtype=x.dtype)
        bad = values[torch.randint(len(values), x.shape, generator=g)]
        return torch.where(case.mask if x.dim() == 2 else case.mask[..., None], x, bad)

    return changed(case, spoil)


def is_ambiguous(case: Case) -> bool:
    """Return whether the packed layout would read an advantage per token as one per completion.

    This happens to a batch that has as many tokens as completions.
    """
    return case.advantages.dim() == 2 and sum(spans(case.mask)) == len(case.mask)


def assert_same(found: Result, expected: Result, tolerance: float | None = None) -> None:
    """Check that two results are bitwise equal, or that they agree within a tolerance.

    The tolerance is relative to the norm of a gradient. Losses and logps agree within 1e-5 of their
    size, because they are always fp32.
    """
    ours, theirs = found.named(), expected.named()
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        y = theirs[name]
        if tolerance is None:
            assert torch.equal(x, y) and x.isfinite().all(), name
        elif name.startswith("d"):
            error = (x.double() - y.double()).norm().item()
            assert error <= tolerance * y.double().norm().item() + 1e-5, name
        elif not name.startswith("metrics/"):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5, msg=name)


def poison_changes_no_bit(function, case, result, tolerance, how):
    """Check that no value at a masked token can change a bit, with and without gradients."""
    assert_same(run(function, poisoned(case), **how), result)
    how = {name: how[name] for name in ("layout", "backend")}
    with torch.no_grad():
        quiet = [call(function, x, **how) for x in (case, poisoned(case))]
    assert torch.equal(quiet[0].loss, quiet[1].loss)
    assert torch.equal(quiet[0].logps, quiet[1].logps)
    # Without gradients, the terms of the loss may be added in a different order.
    torch.testing.assert_close(quiet[0].loss, result.loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(quiet[0].logps, result.raw.logps)
    for name, metric in quiet[0].metrics.items():
        if name != "skipped_rows":
            torch.testing.assert_close(metric, result.metrics[name], rtol=1e-5, atol=1e-5, msg=name)


def a_layout_changes_nothing(function, case, result, tolerance, how):
    other = "packed" if how["layout"] == "padded" else "padded"
    if is_ambiguous(case):
        return
    again = run(function, case, **{**how, "layout": other})
    again.logps = torch.where(case.mask, again.logps, result.logps)
    if again.entropy is not None:
        again.entropy = torch.where(case.mask, again.entropy, result.entropy)
    assert_same(again, result, tolerance)


def padding_changes_nothing(function, case, result, tolerance, how):
    """Check that three more masked columns change nothing."""
    L = case.mask.shape[1]

    def pad(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            return x
        return torch.cat([x, x.new_zeros((len(x), 3, *x.shape[2:]))], 1)

    found = run(function, poisoned(changed(case, pad)), **how)
    for name in found.grads.keys() - {"weight", "bias"}:
        assert not found.grads[name][:, L:].any()
        found.grads[name] = found.grads[name][:, :L]
    found.logps = found.logps[:, :L]
    found.entropy = None if found.entropy is None else found.entropy[:, :L]
    assert_same(found, result, tolerance)


def an_order_changes_nothing(function, case, result, tolerance, how):
    """Check that the order of the completions changes nothing."""
    order = torch.randperm(len(case.mask), generator=torch.Generator().manual_seed(1))
    found = run(function, changed(case, lambda _, x: x[order]), **how)
    back = order.argsort()
    for name in found.grads.keys() - {"weight", "bias"}:
        found.grads[name] = found.grads[name][back]
    found.logps = found.logps[back]
    found.entropy = None if found.entropy is None else found.entropy[back]
    assert_same(found, result, tolerance)


def parts_sum_to_the_step(function, case, result, tolerance, how):
    """Check that two micro-batches with the totals of the step have its loss and gradients.

    "token_mean_local" divides by the tokens of one micro-batch, and the entropy filter compares the
    tokens of one micro-batch.
    """
    o = oracles.resolve(case.options)
    is_local = o.aggregation == "token_mean_local" or o.top_entropy_quantile < 1
    if is_local or not case.mask.any():
        return
    totals = {"num_items": case.mask.sum().item(), "num_completions": len(case.mask)}
    whole = case.but(**totals)
    result, middle = run(function, whole, **how), len(case.mask) // 2
    halves = [changed(whole, lambda _, x, rows=rows: x[rows])
              for rows in (slice(0, middle), slice(middle, None))]  # fmt: skip
    if how["layout"] == "packed" and any(is_ambiguous(half) for half in halves):
        return
    parts = [run(function, half, **how) for half in halves]
    summed = Result(sum(p.loss for p in parts), {}, torch.cat([p.logps for p in parts]), None, {},
                    None)  # fmt: skip
    for name in result.grads:
        of_parts = [part.grads[name] for part in parts]
        summed.grads[name] = sum(of_parts) if name in ("weight", "bias") else torch.cat(of_parts)
    result.metrics, result.entropy = {}, None
    # A sum of two stored gradients has the rounding of each of them.
    assert_same(summed, result, 3 * tolerance)


def rows_may_be_named(function, case, result, tolerance, how):
    """Check `hidden_rows` with hidden states that are stored twice, in reverse order.

    Masked tokens may name any row.
    """
    lengths, layout = spans(case.mask), how["layout"]
    hidden, mask = case.hidden, case.mask
    if layout == "packed":
        hidden, mask = pack(hidden, lengths), pack(mask, lengths)
    flat = hidden.flatten(0, mask.dim() - 1)
    count = len(flat)
    rows = torch.arange(count).flip(0)
    rows = rows + count * (rows % 2)
    rows = torch.where(mask.flatten(), rows, 10**9).view(mask.shape)
    stored = torch.cat([flat.flip(0)] * 2).detach().requires_grad_()
    out = call(
        "linear", case, layout, hidden=stored, hidden_rows=rows, backend=how["backend"]
    )  # fmt: skip
    out.loss.backward()
    assert torch.equal(out.logps, result.raw.logps)
    grad = how["upstream"] * (stored.grad[:count] + stored.grad[count:]).flip(0).double()
    expected = result.grads["hidden"]
    expected = pack(expected, lengths) if layout == "packed" else expected
    error = (grad - expected.flatten(0, mask.dim() - 1).double()).norm().item()
    assert error <= tolerance * expected.double().norm().item() + 1e-5


def repeated_passes_agree(function, case, result, tolerance, how):
    """Check that a second call has the same bits, and does not modify its inputs.

    Its backward pass runs twice. An upstream gradient of −2 must scale the gradients exactly.
    """
    assert_same(run(function, case, **how), result)
    layout, backend = how["layout"], how["backend"]
    leaves = {n: x.requires_grad_() for n, x in leaves_of(function, case, layout).items()}
    given = arguments(function, case, layout) | leaves
    watched = [(x, x.detach().clone(), x._version) for x in given.values() if torch.is_tensor(x)]
    loss = call(function, case, layout, **given | {"backend": backend}).loss
    once, again, scaled = (
        torch.autograd.grad(factor * loss, [*leaves.values()], retain_graph=True, allow_unused=True)
        for factor in (1.0, 1.0, -2.0)
    )
    for x, y, z in zip(once, again, scaled, strict=True):
        assert x is None or torch.equal(x, y)
        assert x is None or x.dtype != torch.float32 or torch.equal(-2.0 * x, z)
    for x, before, version in watched:
        assert x._version == version and torch.equal(x.nan_to_num(), before.nan_to_num())


def a_frozen_input_changes_nothing(function, case, result, tolerance, how):
    """Check that each gradient has the same bits if no other gradient is computed."""
    for name in result.grads:
        frozen = result.grads.keys() - {name}
        alone = run(function, case, frozen=frozen, **how)
        assert torch.equal(alone.grads[name], result.grads[name]), name
        assert alone.grads.keys() == {name}


def logits_may_be_overwritten(function, case, result, tolerance, how):
    assert_same(run(function, case, inplace=True, **how), result)


RELATIONS = {
    "poison": poison_changes_no_bit,
    "layout": a_layout_changes_nothing,
    "pad": padding_changes_nothing,
    "permute": an_order_changes_nothing,
    "split": parts_sum_to_the_step,
    "repeat rows": rows_may_be_named,
    "again": repeated_passes_agree,
    "frozen": a_frozen_input_changes_nothing,
    "inplace": logits_may_be_overwritten,
}


OF_VALUES = ("layout", "pad", "permute", "split")
ONLY = {"repeat rows": "linear", "inplace": "logits"}  # relations of a single function


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
        ("logit_scale", (1.0, 1.6, -1.3)),
        ("entropy_coef", (0.0, 0.1)),
        ("compute_entropy", (False, True)),
        ("top_entropy_quantile", (1.0, 0.55, 0.2)),
        ("corrections", tuple(CORRECTIONS.values())),
    ):
        options[name] = draw(st.sampled_from(values))
    has_sampling = draw(st.booleans())
    read = {x.get("ratio", "old/sampling") for x in options["corrections"]}
    of_current = loss_type == "vespo" and "current/sampling" in read
    if of_current or not (has_sampling or read <= {"current/behaviour"}):
        del options["corrections"]
    B, L = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    bits = draw(st.lists(st.integers(0, 3), min_size=B * L, max_size=B * L))
    function = draw(st.sampled_from(("linear", "linear", "logits", "logps")))
    relations = [name for name in RELATIONS if ONLY.get(name, function) == function]
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
        "per_token_advantages": draw(st.booleans()),
        "on_policy": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
        "function": function,
        "layout": draw(st.sampled_from(("padded", "packed"))),
        "backend": draw(st.sampled_from(RUNNABLE)),
        "view": draw(st.sampled_from((None, *VIEWS))),
        "upstream": draw(st.sampled_from((1.0, -2.5))),
        "totals": draw(st.sampled_from((None, float, torch.tensor))),
        "workspace_rows": draw(st.sampled_from((None, 1, 40))),
        "relation": draw(st.sampled_from(relations)),
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
    rows = oracles.completions_of(
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
@(pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.fuzz)
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
@given(drawn=calls())
def test_any_call(drawn, monkeypatch, poisoned_memory):
    note(f"fuzz: {CASES} cases, GRPO_FAST_FUZZ_SEED={SEED}")
    case = make_case(
        drawn["seed"], H=drawn["H"], V=drawn["V"], mask=drawn["mask"], dtype=drawn["dtype"],
        bias=drawn["bias"], sampling=drawn["sampling"], support=drawn["support"],
        per_token_advantages=drawn["per_token_advantages"], **drawn["options"],
    )  # fmt: skip
    if drawn["on_policy"]:
        case = case.but(old=None)
    if drawn["totals"]:
        case = case.but(num_items=drawn["totals"](37), num_completions=drawn["totals"](11))
    if is_ambiguous(case):
        drawn["layout"] = "padded"
    view = VIEWS.get(drawn["view"], lambda x: x)
    if drawn["view"] and case.mask.numel():
        case = case.but(
            ids=view(case.ids),
            mask=view(case.mask),
            old=None if case.old is None else view(case.old),
            ref=view(case.ref),
        )
    expected = truth(drawn["function"], case)
    if not decisions_are_clear(case, expected):
        return
    rows = drawn["workspace_rows"]
    smaller = WORKSPACE_BYTES if rows is None else lambda *_: rows * drawn["V"] * 4
    monkeypatch.setattr(linear, "workspace_bytes", smaller)
    how = {name: drawn[name] for name in ("layout", "backend", "upstream")}
    if case.mask.numel() and drawn["relation"] in OF_VALUES:
        how["view"] = view  # the other relations compare bits, which may depend on strides
    result = run(drawn["function"], case, **how)
    size = sum(w.abs().sum().item() for w in expected.losses) + 1.0
    assert abs(result.loss.item() - expected.loss.item()) <= 1e-5 * size
    if result.entropy is not None and drawn["function"] != "logps" and case.mask.any():
        assert (result.entropy - expected.entropy)[case.mask].abs().max() <= 2e-5
    roundings = 1 if drawn["upstream"] == 1 else 2
    half_ulp = 0.0 if drawn["function"] == "logps" else HALF_ULP[drawn["dtype"]]
    tolerance = ARITHMETIC + 1.01 * roundings * half_ulp
    for name, grad in result.grads.items():
        true = drawn["upstream"] * getattr(expected, f"{name}_grad")
        error = (grad.double() - true).norm().item()
        floor = 1e-6 if drawn["dtype"] != torch.float16 else 1e-5
        assert error <= tolerance * true.norm().item() + floor, (name, relative_l2(grad, true))
        if name not in ("weight", "bias"):
            assert (grad[~case.mask] == 0).all()
        if case.kept is not None and name in ("logits", "weight"):
            outside = grad[~case.kept] if name == "logits" else grad[~case.kept[case.mask].any(0)]
            assert (outside == 0).all(), "a gradient outside of the sets"
    assert not any(metric.isnan() for metric in result.metrics.values())
    RELATIONS[drawn["relation"]](drawn["function"], case, result, tolerance, how)
