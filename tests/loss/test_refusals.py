"""Test that invalid input raises a ValueError, and that the next valid call works.

The message must name the argument, the expected value and the actual value.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig, attention
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    IS_INTERPRETER,
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


def assert_refused(name: str, function, *arguments, **keywords) -> str:
    """Check that a call raises a ValueError with a complete message, and return the message.

    The message must name the argument, the expected value and the actual value.
    """
    with pytest.raises(ValueError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert name in message, message
    assert ("expected" in message and "got" in message) or " conflicts with " in message, message
    return message


VESPO = ("k_pos", "k_neg", "lambda_pos", "lambda_neg")
CONFIG = [
    *[("temperature", dict(temperature=x)) for x in (0.0, -1.0, NAN, INF, "1", None)],
    ("temperature", dict(temperature=torch.ones(5, 7).long())),
    *[("epsilon_low", dict(epsilon_low=x)) for x in (-0.1, NAN, INF, None)],
    *[("epsilon_high", dict(epsilon_high=x)) for x in (-0.1, NAN, INF, "0.2")],
    *[("beta", dict(beta=x)) for x in (-0.1, NAN, INF)],
    *[("delta", dict(delta=x)) for x in (0.0, -1.0, NAN)],
    *[(k, {k: x}) for k in ("kl_clamp", "kl_input_clamp") for x in (0.0, -1.0, NAN, INF, "1")],
    *[(k, {k: 1.0, "kl_estimator": "exact"}) for k in ("kl_clamp", "kl_input_clamp")],
    *[("softcap", dict(softcap=x)) for x in (0.0, -5.0, NAN)],
    *[("logit_scale", dict(logit_scale=x)) for x in (0.0, NAN, INF, 1e39)],
    *[("entropy_coef", dict(entropy_coef=x)) for x in (NAN, INF)],
    *[("top_entropy_quantile", dict(top_entropy_quantile=x)) for x in (0.0, 1.5, -0.2, NAN)],
    *[("sapo_temperature_pos", dict(sapo_temperature_pos=x)) for x in (0.0, -1.0, NAN)],
    *[("sapo_temperature_neg", dict(sapo_temperature_neg=x)) for x in (0.0, NAN)],
    *[("dual_clip_c", dict(dual_clip_c=x)) for x in (1.0, 0.5, NAN)],
    *[("max_completion_length", dict(max_completion_length=x)) for x in (0, -5, 1.5, 10**400)],
    *[(name, {name: x}) for name in ("kl_times_ratio", "compute_entropy") for x in ("no", None, 2)],
    *[(f"vespo_{name}", {f"vespo_{name}": -1.0}) for name in VESPO],
    ("loss_type", dict(loss_type="ppo")),
    ("loss_type", dict(loss_type=None)),
    ("kl_estimator", dict(kl_estimator="k4")),
    ("aggregation", dict(aggregation="mean")),
    ("importance_sampling_level", dict(importance_sampling_level="turn")),
    ("cispo_bound", dict(cispo_bound="upper")),
    *[
        (f"corrections.{name}", dict(corrections={"kind": "mask", "high": 2.0, name: x}))
        for name, wrong in {
            "kind": ["clip"],
            "level": ["sequence", "worst_token", []],
            "ratio": ["new/old"],
            "high": [-0.9, 0.0, NAN, INF, "2", True],
            "low": [2.0, 2.1, -0.1, NAN, True],
            "advantages": ["positive", "negative"],
        }.items()
        for x in wrong
    ],
    ("corrections.low", dict(corrections={"kind": "reject"})),
    ("corrections.low", dict(corrections={"low": 3.0, "high": 2.0})),
    ("corrections.ratio", dict(loss_type="vespo", corrections={"ratio": "current/sampling"})),
    *[
        ("corrections", dict(corrections=x))
        for x in ("token_mask", 3, ["mask"], [{"cap": 2.0}], [{}, {"level": "product"}])
    ],
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


@pytest.mark.parametrize(("name", "options"), CONFIG, ids=str)
def test_config(name, options):
    assert_refused(name, LossConfig, **options)


def test_unknown_names_list_the_choices():
    message = assert_refused("loss_type", LossConfig, loss_type="grop")
    assert "grop" in message and "dapo" in message and "gspo" in message
    assert "k3" in assert_refused("kl_estimator", LossConfig, kl_estimator="kl")


def test_configs_are_frozen_and_compared():
    """Check that configs are immutable, comparable and hashable, even with a temperature tensor."""
    one, other = (LossConfig(temperature=torch.ones(2, 3)) for _ in range(2))
    assert one == one.replace() and hash(one) == hash(one.replace())
    assert one != other and one != LossConfig() and one != "a config"
    assert one != one.replace(beta=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.beta = 0.1


CASE = make_case(101, **options_for("grpo", beta=0.1))


def bad_values(x, value, where=(0, 0)):
    x = x.clone()
    x[where] = value
    return x


def refusals():
    """Yield (argument name, functions that must reject it, invalid keyword arguments)."""
    c, every, heads, linear = CASE, FUNCTIONS, ("logits", "linear"), ("linear",)
    B, L = c.mask.shape
    active = tuple(c.mask.nonzero()[2].tolist())
    tiny = torch.tensor(1e-40, dtype=torch.float64)
    totals = [0, -1, NAN, INF, 1e-40, tiny, torch.tensor(0.0), torch.tensor([1.0, 2.0])]
    given = {"old_logps": c.old, "ref_logps": c.ref, "sampling_logps": c.old}
    table = [
        (every, "advantages", [
            torch.ones(B + 1), torch.ones(B, L + 1), torch.ones(()), torch.ones(B).long(),
            [1.0] * B, c.advantages.to_sparse(),
            *(bad_values(c.advantages, x, 0) for x in (NAN, INF, -INF)),
        ]),
        (heads, "target_ids", [
            c.ids.float(), c.ids[:, :-1], c.ids.bool(), c.ids.to_sparse(),
            *(bad_values(c.ids, x, active) for x in (-1, -100, 23, 10**9)),
        ]),
        (every, "completion_mask", [
            c.mask[:, :-1], c.mask[:-1], c.mask.reshape(-1), c.mask.long() * 2,
            c.mask.float() * 0.5, torch.where(c.mask, NAN, 0.0), c.mask.to_sparse(),
        ]),
        *[(every, name, [x[:, :-1], x[:-1], x.long(), x.to("meta")]) for name, x in given.items()],
        (every, "old_logps", [bad_values(c.old, NAN, active)]),
        (every, "ref_logps", [None, *(bad_values(c.ref, x, active) for x in (NAN, INF, -INF))]),
        (every, "num_items_in_batch", totals),
        (every, "num_completions_in_batch", totals),
        (every, "cu_seqlens", [cu_seqlens_of([L] * B), [0, L]]),
        (every, "config", [{"loss_type": "grpo"}]),
        (heads, "backend", ["gpu", "CPU", None, "triton"]),
        (heads, "validate", ["always", None]),
        (linear, "lm_head_weight", [
            c.weight[:, :-1], c.weight[0], c.weight.bfloat16(), c.weight.to("meta"), c.weight[:0],
        ]),
        (linear, "hidden", [
            c.hidden.to_sparse(), torch.nested.nested_tensor(list(c.hidden)), c.hidden.long(),
            c.hidden[0, 0], torch.ones(()), c.hidden.to(torch.float8_e4m3fn),
        ]),
        (linear, "bias", [c.bias[:-1], c.bias.long()]),
        (("logits",), "logits", [c.logits.long(), c.logits[0, 0], c.logits[..., :0]]),
        (("logps",), "logps", [c.old.long(), c.old[0, 0]]),
    ]  # fmt: skip
    for functions, name, values in table:
        for value in values:
            yield name, functions, {name: value}
    no_columns = dict(hidden=c.hidden[..., :0], lm_head_weight=c.weight[:, :0])
    yield "lm_head_weight", linear, no_columns


PADDED = [
    pytest.param(name, f, changes, id=f"{f}-{name}-{i}")
    for i, (name, functions, changes) in enumerate(refusals())
    for f in functions
]


@pytest.mark.parametrize(("name", "function", "changes"), PADDED)
def test_padded_arguments(name, function, changes):
    before = call(function, CASE).loss
    assert_refused(name, call, function, CASE, **changes)
    assert torch.equal(call(function, CASE).loss, before)  # the failed calls leave no state


def test_tensors_on_the_meta_device():
    c = CASE
    tensors = [x.to("meta") for x in (c.hidden, c.weight, c.ids, c.advantages)]
    with pytest.raises(ValueError, match="hidden: expected a tensor with values, got one on the"):
        grpo_fast.linear_grpo_loss(*tensors, LossConfig())


T = sum(spans(CASE.mask))
CU = [
    [0, 7, 10, 10, 15], [1, 7, 10, 10, 15, T], [0, 9, 7, 10, 15, T], [0, 7, 10, 10, 15, T + 1], [T],
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "cu", [*[torch.tensor(x, dtype=torch.int32) for x in CU], None, torch.ones(6), [0, T]], ids=str
)
def test_packed_offsets(cu, function):
    A = torch.ones(5 if cu is None or isinstance(cu, list) else len(cu) - 1)
    assert_refused("cu_seqlens", call, function, CASE, "packed", cu_seqlens=cu, advantages=A)
    call(function, CASE, "packed")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_per_token_tensors_of_the_other_layout(function):
    for name, value in (("old_logps", CASE.old), ("completion_mask", CASE.mask)):
        assert_refused(name, call, function, CASE, "packed", **{name: value})


def test_a_logp_of_minus_infinity():
    """Check that a logp of -inf raises an error at an active token, but not at a masked token."""
    logps = torch.where(CASE.mask, reference_logps(CASE)[0], -INF)
    call("logps", CASE, logps=logps)
    logps[tuple(CASE.mask.nonzero()[1].tolist())] = -INF
    assert_refused("logps", call, "logps", CASE, logps=logps)


def with_temperature(t: torch.Tensor) -> LossConfig:
    return LossConfig(loss_type="grpo", temperature=t)


@pytest.mark.parametrize("function", ["logits", "linear"])
def test_per_token_temperature(function):
    ones = torch.ones(5, 7)
    bad = [torch.ones(4), *(bad_values(ones, x, (0, 1)) for x in (0.0, -1, NAN, INF))]
    for t in bad:
        assert_refused("temperature", call, function, CASE, config=with_temperature(t))
    # A masked token may have any temperature.
    call(function, CASE, config=with_temperature(torch.where(CASE.mask, ones, NAN)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_first_bad_value_is_quoted_and_the_others_are_counted(function):
    tokens, odd = int(CASE.mask.sum()), CASE.mask.nonzero()[:3].T
    number = CASE.mask.float().index_put(tuple(odd), torch.tensor([0.5, 2.0, NAN]))
    is_odd = torch.zeros_like(CASE.mask).index_put(tuple(odd[:, 1:]), torch.tensor(True))
    said = {"completion_mask": (number, f"got 0.5 (3 of {number.numel()} values)")}
    for name, given in (("advantages", CASE.advantages[:, None]), ("old_logps", CASE.old)):
        said[name] = torch.where(is_odd, NAN, given), f"got nan (2 of {tokens} values)"
    for name, (value, came) in said.items():
        assert came in assert_refused(name, call, function, CASE, **{name: value})
    if function != "logps":
        config = with_temperature(torch.where(number == 0.5, -3.0, 1.0))
        message = assert_refused("temperature", call, function, CASE, config=config)
        assert f"got -3 (1 of {tokens} values)" in message


CONSTANTS = (
    "advantages", "old_logps", "ref_logps", "sampling_logps", "completion_mask",
    "num_items_in_batch", "num_completions_in_batch",
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", CONSTANTS)
def test_an_argument_that_requires_grad_but_would_get_none(name, function):
    """Check the error for a tensor that requires grad, but for which the loss computes no gradient.

    For example, plain torch would compute a gradient for `old_logps=logps`. Our loss computes none,
    so without the error this gradient would be lost silently. The error suggests .detach().
    """
    given = {"advantages": CASE.advantages, "completion_mask": CASE.mask.float()}
    value = given.get(name, CASE.old if name.endswith("logps") else torch.tensor(9.0))
    value = value.clone().requires_grad_()
    message = assert_refused(name, call, function, CASE, **{name: value})
    assert f"pass {name}.detach()" in message
    call(function, CASE, **{name: value.detach()})
    with torch.no_grad():  # no gradient could be lost here
        call(function, CASE, **{name: value})


def test_a_temperature_that_requires_grad_but_would_get_none():
    t = torch.ones(5, 7, requires_grad=True)
    for function in ("logits", "linear"):
        assert_refused("temperature", call, function, CASE, config=with_temperature(t))
    h, w, ids = torch.randn(4, 8), torch.randn(11, 8), torch.randint(11, (4,))
    t = torch.ones(4, requires_grad=True)
    assert_refused("temperature", grpo_fast.linear_logps, h, w, ids, temperature=t)
    assert_refused("temperature", grpo_fast.logits_logps, h @ w.T, ids, temperature=t)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["old_logps", "ref_logps", "sampling_logps"])
def test_a_positive_log_probability_of_a_head(name, function):
    """Check that a positive old, reference or sampling logp raises an error, except in `grpo_loss`.

    A positive value shows that the caller passed losses or probabilities by mistake. `grpo_loss`
    accepts positive values, because they may be log-densities.
    """
    given = CASE.ref if name == "ref_logps" else CASE.old
    active, masked = (tuple(m.nonzero()[1].tolist()) for m in (CASE.mask, ~CASE.mask))
    for value in (0.02, 0.5, 3.0, 100.0, INF):
        bad = {name: bad_values(given, value, active)}
        if function != "logps":
            assert_refused(name, call, function, CASE, **bad)
        elif value != INF:
            call(function, CASE, **bad)
    call(function, CASE, **{name: bad_values(bad_values(given, 0.009, active), 5.0, masked)})
    assert "got 100 (1 of" in assert_refused(
        name, call, "linear", CASE, **{name: bad_values(given, 100.0, active)}
    )


@pytest.mark.parametrize("need", [{"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}])
def test_grpo_loss_cannot_make_an_entropy_of_its_own(need):
    case = CASE.but(options=options_for("grpo", **need))
    for entropy in (None, torch.ones(5, 6)):
        assert_refused("entropy", call, "logps", case, entropy=entropy)


@pytest.mark.parametrize("loss_type", ["kimi", "dro"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_kimi_has_no_reference(loss_type, function):
    case = make_case(101, **options_for(loss_type))
    assert_refused("ref_logps", call, function, case, ref_logps=case.ref)
    call(function, case)


def test_ignored_index_is_allowed_where_masked_only():
    ids = torch.where(CASE.mask, CASE.ids, -100)
    for function in ("linear", "logits"):
        call(function, CASE, target_ids=ids)
    for mask in (torch.ones_like(CASE.mask), None):
        with pytest.raises(
            ValueError, match=r"^target_ids: .*completion_mask=\(target_ids != -100\)"
        ):
            call("linear", CASE, target_ids=ids, completion_mask=mask)


def logps_refusals():
    """Yield (name of the invalid argument, whether the function takes logits, all arguments)."""
    h, w, ids = torch.randn(4, 8), torch.randn(11, 8), torch.randint(11, (4,))
    heads = {False: dict(hidden=h, lm_head_weight=w), True: dict(logits=h @ w.T)}
    bad = torch.ones(4).index_put((torch.tensor([1, 3]),), torch.tensor([-0.5, INF]))
    for name, heads_of, values in (
        ("target_ids", heads, (ids.float(), ids[:3], ids + 11, ids - 100)),
        ("temperature", heads, (0.0, -1.0, NAN, INF, torch.ones(3), bad)),
        ("softcap", heads, (0.0, -1.0)),
        ("logit_scale", heads, (NAN,)),
        ("entropy_over", heads, ("all", None, True)),
        ("backend", heads, ("cuda", "best")),
        ("lm_head_weight", (False,), (w[:, :7], w.double())),
        ("bias", (False,), (torch.ones(10),)),
        ("logits", (True,), ((h @ w.T).long(), h @ w[:0].T)),
    ):
        for from_logits in heads_of:
            for value in values:
                yield name, from_logits, heads[from_logits] | {"target_ids": ids, name: value}


@pytest.mark.parametrize(("name", "from_logits", "given"), [
    pytest.param(*x, id=f"{x[0]}-{i}") for i, x in enumerate(logps_refusals())
])  # fmt: skip
def test_logps_functions(name, from_logits, given):
    function = grpo_fast.logits_logps if from_logits else grpo_fast.linear_logps
    message = assert_refused(name, function, **given)
    if isinstance(given.get("temperature"), torch.Tensor) and len(given["temperature"]) == 4:
        assert "got -0.5 (2 of 4 values)" in message


@pytest.mark.skipif(torch.cuda.is_available() or IS_INTERPRETER, reason="triton runs here")
def test_an_explicit_backend_says_why_it_cannot_run_here():
    assert "cpu" in assert_refused("backend", call, "linear", CASE, backend="triton").lower()


@pairs(function=["linear", "logits"], backend=BACKENDS)
def test_one_target_of_no_probability_among_others_is_refused(backend, function):
    case = make_case(24, mask=torch.ones(2, 3, dtype=torch.bool), **options_for("grpo"))
    case.bias[int(case.ids[0, 1])] = -torch.inf
    assert (case.ids != case.ids[0, 1]).any()
    with pytest.raises(ValueError, match="target_ids: expected targets of finite probability"):
        call(function, case, backend=backend)


NEAR = {
    "eps_low": "epsilon_low", "epsilon_hgih": "epsilon_high", "losstype": "loss_type",
    "Temperature": "temperature", "kl_beta": "beta", "kl_estimater": "kl_estimator",
    "importance_sampling": "importance_sampling_level", "entropy_coeff": "entropy_coef",
    "correction": "corrections", "max_completion_len": "max_completion_length",
}  # fmt: skip


@pytest.mark.parametrize("word", NEAR)
def test_an_unknown_keyword_names_the_nearest_one(word):
    expected = rf"LossConfig\(\) got an unexpected keyword .* '{word}'; nearest: {NEAR[word]}$"
    for make in (LossConfig, LossConfig().replace):
        with pytest.raises(TypeError, match=expected):
            make(**{word: 0.1})


@pytest.mark.parametrize(
    ("kind", "word", "near"),
    [
        (LossConfig, "zzz", ""),
        (LossConfig, "x" * 5000, ""),
        (grpo_fast.Correction, "hihg", "; nearest: high"),
        (grpo_fast.DivergenceTerm, "coeff", "; nearest: coef"),
        (grpo_fast.TeacherHead, "biass", "; nearest: bias"),
        (grpo_fast.TeacherTopK, "logprobs", "; nearest: logps"),
        (grpo_fast.linear_logps, "softcaps", "; nearest: softcap"),
        (grpo_fast.logits_logps, "temperatur", "; nearest: temperature"),
        (grpo_fast.linear_logps, "epsilon_low", ""),
        (grpo_fast.grpo_loss, "old_logprobs", "; nearest: old_logps"),
        (grpo_fast.linear_grpo_loss, "epsilon_low", r"; .*: pass LossConfig\(epsilon_low=...\)"),
        (grpo_fast.logits_grpo_loss, "beta", r"; .*: pass LossConfig\(beta=...\)"),
        (grpo_fast.linear_divergence, "weight", "; nearest: weights"),
        (attention.pack_groups, "share", "; nearest: shared"),
    ],
)
def test_unknown_keywords_of_the_other_options(kind, word, near):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) got an .* '{word}'{near}$"):
        kind(**{word: 1.0})


def test_known_keywords_are_built_as_before():
    term = grpo_fast.DivergenceTerm("t", "jsd", coef=2.0)
    assert term == ("t", "jsd", 2.0, 0.5) and term._replace(beta=0.1).beta == 0.1
    assert copy.deepcopy(term) == pickle.loads(pickle.dumps(term)) == term
    config = LossConfig("grpo", 0.1, beta=0.2)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert list(inspect.signature(LossConfig).parameters)[:2] == ["loss_type", "epsilon_low"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'teacher'"):
        grpo_fast.DivergenceTerm()
    with pytest.raises(TypeError, match="multiple values for argument 'loss_type'"):
        LossConfig("grpo", loss_type="dapo")


def test_positive_logps_come_with_their_number_and_the_usual_cause():
    given = torch.full((9,), -0.5)
    given[2:4] = 0.07
    call = dict(cu_seqlens=torch.tensor([0, 9]), old_logps=given)
    args = torch.ones(9, 2), torch.ones(5, 2), torch.zeros(9, dtype=torch.int64), torch.ones(1)
    with pytest.raises(ValueError, match=r"^old_logps: .*got 0.07 \(2 of 9 values\).* 16 bits"):
        grpo_fast.linear_grpo_loss(*args, LossConfig(), **call)
