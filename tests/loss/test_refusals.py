"""Test that invalid input raises a ValueError, and that the next valid call works.

The message must name the argument, the expected value and the actual value. There is one table per
public entry point. test_divergence.py has the table of `linear_divergence`.
"""

import copy
import dataclasses
import functools
import itertools
import math
import pickle
import re

import pytest
import torch
from torch.autograd import forward_ad

import grpo_fast
from grpo_fast import DivergenceTerm, LossConfig, Support, TeacherHead, linear_logps, logits_logps
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    HAS_GPU,
    LOSSES,
    call,
    cu_seqlens_of,
    make_case,
    options_for,
    reference_logps,
    spans,
)
from tests.pairs import pairs

NAN, INF = math.nan, math.inf


def assert_refused(name: str, function, *arguments, said: str = "", **keywords) -> str:
    """Check that a call raises a ValueError with a complete message, and return the message.

    The message must name the argument, the expected value and the actual value, and contain the
    text `said`.
    """
    with pytest.raises(ValueError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert name in message and said in message, message
    assert ("expect" in message and "got" in message) or " conflicts with " in message, message
    return message


# ---- LossConfig
VESPO = ("k_pos", "k_neg", "lambda_pos", "lambda_neg")
WRONG = {  # values that every loss refuses
    "temperature": (0.0, -1.0, NAN, INF, "1", None, torch.ones(5, 7), torch.Tensor),
    "epsilon_low": (-0.1, NAN, INF, None), "epsilon_high": (-0.1, NAN, INF, "0.2"),
    "beta": (-0.1, NAN, INF), "delta": (0.0, -1.0, NAN), "softcap": (0.0, -5.0, NAN),
    "kl_clamp": (0.0, -1.0, NAN, INF, "1"), "kl_input_clamp": (0.0, -1.0, NAN, INF, "1"),
    "logit_scale": (0.0, NAN, INF, 1e39), "entropy_coef": (NAN, INF),
    "top_entropy_quantile": (0.0, 1.5, -0.2, NAN), "sapo_temperature_pos": (0.0, -1.0, NAN),
    "sapo_temperature_neg": (0.0, NAN), "dual_clip_c": (1.0, 0.5, NAN),
    "max_completion_length": (0, -5, 1.5, 10**400), "kl_times_ratio": ("no", None, 2),
    "compute_entropy": ("no", None, 2), **{f"vespo_{name}": (-1.0,) for name in VESPO},
    "loss_type": ("ppo", None, "grop"), "kl_estimator": ("k4", "kl"), "aggregation": ("mean",),
    "importance_sampling_level": ("turn",), "cispo_bound": ("upper",),
    "corrections": ("token_mask", 3, ["mask"], [{"cap": 2.0}], [{}, {"level": "product"}]),
    "corrections.low": (2.0, 2.1, -0.1, NAN, True), "corrections.kind": ("clip",),
    "corrections.high": (-0.9, 0.0, NAN, INF, "2", True), "corrections.ratio": ("new/old",),
    "corrections.level": ("sequence", "worst_token", []),
    "corrections.advantages": ("positive", "negative"),
}  # fmt: skip
CONFLICTS = [
    *[(k, {k: 1.0, "kl_estimator": "exact"}) for k in ("kl_clamp", "kl_input_clamp")],
    ("kl_times_ratio", dict(beta=0.1, kl_estimator="exact", kl_times_ratio=True)),
    ("corrections.low", dict(corrections={"kind": "reject"})),
    ("corrections.low", dict(corrections={"low": 3.0, "high": 2.0})),
    ("corrections.ratio", dict(loss_type="vespo", corrections={"ratio": "current/sampling"})),
    ("max_completion_length", dict(loss_type="dr_grpo")),
    ("max_completion_length", dict(aggregation="fixed_length")),
    *[
        ("importance_sampling_level", dict(loss_type=x, importance_sampling_level=level))
        for x in ("kimi", "dro", "dppo_tv", "dppo_kl", "gspo_token", "gmpo", "vespo")
        for level in ("sequence", "sequence_sum")
    ],
    # GSPO is defined by the mean of the log ratios, so a different level must raise an error.
    ("importance_sampling_level", dict(loss_type="gspo", importance_sampling_level="sequence_sum")),
]


def config_of(name: str, value) -> dict:
    section, _, field = name.partition(".")
    return {section: {"kind": "mask", "high": 2.0, field: value} if field else value}


CONFIGS = [(name, config_of(name, x)) for name, values in WRONG.items() for x in values]


@pytest.mark.parametrize(("name", "options"), CONFIGS + CONFLICTS, ids=str)
def test_config(name, options):
    message = assert_refused(name, LossConfig, **options)
    if options in ({"loss_type": "grop"}, {"kl_estimator": "kl"}):
        assert all(x in message for x in (("dapo", "gspo") if name == "loss_type" else ("k3",)))


# For each option, the loss types that read it, and a value that is not the default. All other loss
# types must reject this value.
READ_BY = {
    "delta": ({"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo", "gspo_token"}, 4.0),
    "dual_clip_c": ({"dual_clip"}, 2.0),
    "cispo_bound": ({"cispo"}, "offset"),
    "sapo_temperature_pos": ({"sapo"}, 2.0),
    "sapo_temperature_neg": ({"sapo"}, 2.0),
    **{f"vespo_{name}": ({"vespo"}, 1.0) for name in VESPO},
    **{name: (set(LOSSES) - {"kimi", "dro"}, value) for name, value in
       (("kl_estimator", "k2"), ("kl_times_ratio", True), ("kl_clamp", 10.0),
        ("kl_input_clamp", 20.0))},
}  # fmt: skip


@pytest.mark.parametrize("name", READ_BY)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_an_option_that_the_loss_does_not_read(loss_type, name):
    readers, value = READ_BY[name]
    options = {"loss_type": loss_type, "max_completion_length": 9, "beta": 0.1}
    default = LossConfig(**options)
    if loss_type in readers:
        assert getattr(default.replace(**{name: value}), name) == value
    else:
        message = assert_refused(name, LossConfig, **options, **{name: value})
        assert all(word in message for word in (repr(value), repr(loss_type), *readers))
        assert_refused(name, default.replace, **{name: value})
    assert LossConfig(**options, **{name: getattr(default, name)}) == default


def test_configs_are_frozen_and_compared():
    """Check that configs are immutable, comparable and hashable, and can be copied and pickled."""
    one = LossConfig(temperature=0.7)
    assert one == one.replace() and hash(one) == hash(one.replace())
    assert one != LossConfig() and one != "a config"
    assert one != one.replace(beta=0.5)
    for x in (one, DivergenceTerm("t", "jsd", coef=2.0)):
        assert copy.deepcopy(x) == pickle.loads(pickle.dumps(x)) == x
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.beta = 0.1


# ---- The losses
CASE = make_case(101, **options_for("grpo", beta=0.1))
B, L = CASE.mask.shape
T, ROWS = int(CASE.mask.sum()), sum(spans(CASE.mask))
ACTIVE, MASKED = (tuple(m.nonzero()[2].tolist()) for m in (CASE.mask, ~CASE.mask))
HEADS = ("logits", "linear")
GIVEN = {"old_logps": CASE.old, "ref_logps": CASE.ref, "sampling_logps": CASE.old}
ONES = torch.ones(B, L)


def bad(x: torch.Tensor, value: float, at=ACTIVE) -> torch.Tensor:
    return x.index_put(tuple(torch.tensor(i) for i in at), torch.tensor(value, dtype=x.dtype))


def wants_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


IDS = torch.randint(23, (ROWS,), generator=torch.Generator().manual_seed(0))
SETS = torch.stack([(IDS + 1) % 23, IDS, (IDS + 7) % 23], 1)  # three ids for each row
OFFSETS = torch.arange(ROWS + 1) * 3
TEACHER = TeacherHead(torch.ones(B, L, 5), torch.ones(23, 5))
TOTALS = (0, -1, NAN, INF, 1e-40, torch.tensor(1e-40, dtype=torch.float64), torch.tensor(0.0),
          torch.tensor([1.0, 2.0]))  # fmt: skip
# Rows (functions, argument, invalid values). For a pair (value, text), the message must contain the
# text.
LOSS_ROWS: list[tuple[tuple[str, ...], str, list]] = [
    (FUNCTIONS, "advantages", [
        torch.ones(B + 1), torch.ones(B, L + 1), torch.ones(()), torch.ones(B).long(),
        [1.0] * B, CASE.advantages.to_sparse(), wants_gradient(CASE.advantages),
        *(bad(CASE.advantages, x, (0,)) for x in (NAN, INF, -INF)),
        (torch.where(CASE.mask & (ONES.cumsum(1) == 1), NAN, ONES), "got nan ("),
    ]),
    (HEADS, "target_ids", [
        CASE.ids.float(), CASE.ids[:, :-1], CASE.ids.bool(), CASE.ids.to_sparse(),
        *(bad(CASE.ids, x) for x in (-1, 23, 10**9)),
        (bad(CASE.ids, -100), "completion_mask=(target_ids != -100)"),
    ]),
    (FUNCTIONS, "completion_mask", [
        CASE.mask[:, :-1], CASE.mask[:-1], CASE.mask.reshape(-1), CASE.mask.long() * 2,
        torch.where(CASE.mask, NAN, 0.0), CASE.mask.to_sparse(),
        (CASE.mask.float() * 0.5, f"got 0.5 ({T} of {B * L} values)"),
        (wants_gradient(CASE.mask.float()), "pass completion_mask.detach()"),
    ]),
    *[(FUNCTIONS, name, [
        x[:, :-1], x[:-1], x.long(), x.to("meta"),
        (wants_gradient(x), f"pass {name}.detach()"),
    ]) for name, x in GIVEN.items()],
    # A positive value shows that the caller passed losses or probabilities by mistake.
    *[(HEADS, name, [
        bad(x, 0.02), bad(x, INF), (bad(x, 0.07), "16 bits"), (bad(x, 100.0), "got 100 (1 of"),
    ]) for name, x in GIVEN.items()],
    (FUNCTIONS, "old_logps", [(bad(CASE.old, NAN), f"got nan (1 of {T} values)")]),
    (FUNCTIONS, "ref_logps", [None, *(bad(CASE.ref, x) for x in (NAN, INF, -INF))]),
    (("logps",), "logps", [bad(reference_logps(CASE)[0], -INF), CASE.old.long(), CASE.old[0, 0]]),
    (FUNCTIONS, "num_items_in_batch", [*TOTALS, torch.tensor(9.0, requires_grad=True)]),
    (FUNCTIONS, "num_completions_in_batch", [*TOTALS, torch.tensor(9.0, requires_grad=True)]),
    (FUNCTIONS, "cu_seqlens", [cu_seqlens_of([L] * B), [0, L]]),
    (FUNCTIONS, "config", [{"loss_type": "grpo"}]),
    (HEADS, "backend", ["gpu", None, *[("triton", "CPU")] * (not HAS_GPU)]),
    (HEADS, "validate", ["always", None]),
    (("linear",), "lm_head_weight", [
        CASE.weight[:, :-1], CASE.weight[0], CASE.weight.bfloat16(), CASE.weight.to("meta"),
        CASE.weight[:0],
    ]),
    (("linear",), "hidden", [
        CASE.hidden.to_sparse(), torch.nested.nested_tensor(list(CASE.hidden)), CASE.hidden.long(),
        CASE.hidden[0, 0], torch.ones(()), CASE.hidden.to(torch.float8_e4m3fn),
        (CASE.hidden.to("meta"), "expected a tensor with values, got one on the"),
    ]),
    (("linear",), "bias", [CASE.bias[:-1], CASE.bias.long()]),
    (("linear",), "grad_filter", [0.0, 1.0, -0.1, NAN, "a lot"]),
    (("linear",), "divergence", ["kl"]),
    (("logits",), "logits", [CASE.logits.long(), CASE.logits[0, 0], CASE.logits[..., :0]]),
]  # fmt: skip
# Further invalid calls, as rows (functions, argument, changes of the call).
ELSE: list[tuple[tuple[str, ...], str, dict]] = [
    (("linear",), "lm_head_weight",
     dict(hidden=CASE.hidden[..., :0], lm_head_weight=CASE.weight[:, :0])),
    *[(("linear",), name, dict(divergence=DivergenceTerm(**{"teacher": TEACHER, **x})))
      for name, x in (("coef", dict(coef=-1.0)), ("coef", dict(coef=NAN)),
                      ("kind", dict(kind="k3")),
       ("teacher.hidden", dict(teacher=TEACHER._replace(hidden=torch.ones(B, L - 1, 5)))))],
    (("linear",), "divergence", dict(divergence=DivergenceTerm(TEACHER), grad_filter=0.1)),
    *[(("linear",), "support", dict(support=Support(SETS.flatten(), OFFSETS), layout="packed",
                                    target_ids=IDS, **other))
      for other in (dict(grad_filter=0.1), dict(divergence=DivergenceTerm(
          TEACHER._replace(hidden=torch.ones(len(IDS), 5)))))],
    (("linear",), "hidden_rows", dict(hidden_rows=torch.zeros(B, L, dtype=torch.int64))),
    (("logps",), "kl_estimator", dict(config=LossConfig("grpo", beta=0.1, kl_estimator="exact"),
                                      said="got 'exact'; add")),
    *[(FUNCTIONS, name, {"layout": "packed", name: x})
      for name, x in (("old_logps", CASE.old), ("completion_mask", CASE.mask))],
    *[(FUNCTIONS, "cu_seqlens", {"layout": "packed", "cu_seqlens": cu, "advantages": torch.ones(n)})
      for cu, n in (
          *((torch.tensor(x, dtype=torch.int32), len(x) - 1) for x in (
              [0, 7, 10, 10, 15], [1, 7, 10, 10, 15, ROWS], [0, 9, 7, 10, 15, ROWS],
              [0, 7, 10, 10, 15, ROWS + 1], [ROWS])),
          (None, 5), (torch.ones(6), 5), ([0, ROWS], 5))],
    *[(("logits",), "logits", {"inplace": True, "logits": x, "said": "share no memory, got"})
      for x in (CASE.logits[0, 0].expand(B, L, 23).detach().requires_grad_(),
                torch.randn(B * L + 23).as_strided((B, L, 23), (L, 1, 1)).requires_grad_())],
]  # fmt: skip
LOSS_CALLS = [
    pytest.param(f, name, {"layout": "padded", "said": "", **changes}, id=f"{f}-{name}-{i}")
    for i, (functions, name, changes) in enumerate([
        *((f, name, {name: x[0], "said": x[1]} if isinstance(x, tuple) else {name: x})
          for f, name, values in LOSS_ROWS for x in values),
        *ELSE,
    ])
    for f in functions
]  # fmt: skip


good_loss = functools.cache(lambda function: call(function, CASE).loss)


@pytest.mark.parametrize(("function", "name", "changes"), LOSS_CALLS)
def test_losses(function, name, changes):
    before = good_loss(function)
    assert_refused(name, call, function, CASE, **changes)
    assert torch.equal(call(function, CASE).loss, before)  # the failed calls leave no state


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_looks_invalid_but_is_allowed(function):
    """Check values that must not raise an error.

    Such values are at masked tokens, or require grad while gradients are disabled. `grpo_loss` also
    accepts positive values, because they may be log-densities.
    """
    for name, x in GIVEN.items():
        call(function, CASE, **{name: bad(bad(x, 0.009), 5.0, MASKED)})
        with torch.no_grad():  # no gradient could be lost here
            call(function, CASE, **{name: wants_gradient(x)})
    if function == "logps":
        call(function, CASE, old_logps=bad(CASE.old, 100.0))
        call(function, CASE, logps=torch.where(CASE.mask, reference_logps(CASE)[0], -INF))
        return
    call(function, CASE, target_ids=torch.where(CASE.mask, CASE.ids, -100))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_options_that_need_an_argument_or_exclude_it(function):
    for loss_type in ("kimi", "dro"):
        case = make_case(101, **options_for(loss_type))
        assert_refused("ref_logps", call, function, case, ref_logps=case.ref)
        call(function, case)
    for correction in ({"kind": "mask", "high": 2.0}, {"kind": "reject", "high": 2.0}, {}):
        case = make_case(31, **options_for("grpo", corrections=[correction]))
        assert_refused("sampling_logps=None conflicts with corrections", call, function, case)
    for need in ({"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}):
        case = CASE.but(options=options_for("grpo", **need))
        for entropy in (None, torch.ones(5, 6)) if function == "logps" else ():
            assert_refused("entropy", call, function, case, entropy=entropy)


@pairs(function=["linear", "logits"], backend=BACKENDS)
def test_one_target_of_no_probability_among_others_is_refused(backend, function):
    case = make_case(24, mask=torch.ones(2, 3, dtype=torch.bool), **options_for("grpo"))
    case.bias[int(case.ids[0, 1])] = -torch.inf
    assert (case.ids != case.ids[0, 1]).any()
    with pytest.raises(ValueError, match="target_ids: expected targets of finite probability"):
        call(function, case, backend=backend)


# ---- The functions of log-probabilities, with `support` and `hidden_rows`
HIDDEN, WEIGHT = torch.randn(ROWS, 8), torch.randn(23, 8)
LOGPS_BASE = {
    "linear_logps": {"hidden": HIDDEN, "lm_head_weight": WEIGHT, "target_ids": IDS},
    "logits_logps": {"logits": HIDDEN @ WEIGHT.T, "target_ids": IDS},
}


def with_id(row: int, place: int, value: int) -> torch.Tensor:
    """Return the ids of SETS as one vector, with one id replaced by `value`."""
    return bad(SETS, value, (row, place)).flatten()


EVERY = tuple(LOGPS_BASE)
FLAT = SETS.flatten()
NAMED = torch.arange(ROWS) // 2
LOGPS_ROWS: list[tuple[tuple[str, ...], str, list]] = [
    (EVERY, "target_ids", [IDS.float(), IDS[:3], IDS + 23, IDS - 100]),
    (EVERY, "temperature", [0.0, -1.0, NAN, INF]),
    (EVERY, "temperature: expected a finite number > 0, got tensor(0.5000)", [torch.tensor(0.5)]),
    (EVERY, f"temperature: expected a finite number > 0, got shape ({ROWS},); call once for each",
     [torch.ones(ROWS)]),
    (EVERY, "softcap", [0.0, -1.0]),
    (EVERY, "logit_scale", [NAN]),
    (EVERY, "backend", ["cuda", "best"]),
    (("linear_logps",), "lm_head_weight", [WEIGHT[:, :7], WEIGHT.double()]),
    (("linear_logps",), "bias", [torch.ones(10)]),
    (("logits_logps",), "logits", [torch.ones(ROWS, 23).long(), torch.ones(ROWS, 0)]),
    (("linear_logps",), "hidden_rows: expected an int64 or int32 tensor", [NAMED.float()]),
    (("linear_logps",), "hidden_rows: expected shape that of target_ids", [NAMED[:3]]),
    (("linear_logps",), f"hidden_rows: expected rows in [0, {ROWS})", [NAMED + ROWS, NAMED - 2]),
    (EVERY, "support: expected None or a Support", [(FLAT, OFFSETS)]),
    (EVERY, "support: expected", [Support(with_id(5, 1, int(IDS[5] + 3) % 23), OFFSETS)]),
    (EVERY, "no id twice", [Support(with_id(4, 0, int(IDS[4])), OFFSETS)]),
    (EVERY, "support.ids", [Support(x, OFFSETS) for x in (
        with_id(4, 0, 23), with_id(4, 0, -1), FLAT.float(), SETS, FLAT.to("meta"))]),
    (EVERY, "support.offsets", [Support(FLAT, x) for x in (
        OFFSETS.where(OFFSETS != 9, 2), OFFSETS.clamp(min=1), OFFSETS.clamp(max=3 * ROWS - 1),
        OFFSETS[:-1], OFFSETS.int(), OFFSETS.tolist())]),
]  # fmt: skip
ARGUMENT = {"no id twice": "support"}
LOGPS_CALLS = [
    pytest.param(f, said, x, id=f"{f}-{said}-{i}")
    for functions, said, values in LOGPS_ROWS
    for f, (i, x) in itertools.product(functions, enumerate(values))
]


@pytest.mark.parametrize(("function", "said", "value"), LOGPS_CALLS)
def test_logps_functions(function, said, value):
    name = ARGUMENT.get(said, re.split(r"[.:]", said)[0])
    assert_refused(said, getattr(grpo_fast, function), **LOGPS_BASE[function] | {name: value})
    good = {"support": Support(FLAT, OFFSETS)} if name == "support" else {}
    result = getattr(grpo_fast, function)(**LOGPS_BASE[function], **good)
    assert result.isfinite().all()


@pytest.mark.parametrize("function", ["linear", "logits"])
def test_forward_mode_derivatives_of_logps_are_refused(function):
    """Check that logps raise an error instead of a derivative of 0, in both forward modes."""
    hidden, weight, ids = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])
    x = hidden if function == "linear" else hidden @ weight.T

    def logps(x):
        return linear_logps(x, weight, ids) if function == "linear" else logits_logps(x, ids)

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.jvp(logps, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        logps(forward_ad.make_dual(x, torch.ones_like(x)))
