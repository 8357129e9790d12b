"""Bad input: a ValueError that names the argument, what was expected and what came; then the next
valid call works.
"""

from __future__ import annotations

import math

import pytest
import torch

import grpo_fast
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LOSSES,
    cu_seqlens_of,
    make_case,
    options_for,
    pack,
    reference_logps,
    run,
    spans,
)
from tests.loss_cases import arguments as arguments_of

NAN, INF = math.nan, math.inf


def assert_refused(call, name: str) -> str:
    """The message names the argument and says both sides."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert name in message, message
    assert "expected" in message, message
    assert "came" in message, message
    return message


# ----------------------------------------------------------
# config
CONFIG = [
    *[("temperature", dict(temperature=x)) for x in (0.0, -1.0, NAN, INF, "1", None)],
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
    *[(f"vespo_{k}", {f"vespo_{k}": -1.0}) for k in ("k_pos", "k_neg", "lambda_pos", "lambda_neg")],
    ("loss_type", dict(loss_type="ppo")),
    ("loss_type", dict(loss_type=None)),
    ("kl_estimator", dict(kl_estimator="k4")),
    ("aggregation", dict(aggregation="mean")),
    ("importance_sampling_level", dict(importance_sampling_level="turn")),
    ("cispo_bound", dict(cispo_bound="upper")),
    *[
        (f"corrections.{name}", dict(corrections={"kind": "mask", "high": 2.0, name: x}))
        for name, x in (
            ("kind", "clip"),
            ("level", "sequence"),
            ("ratio", "new/old"),
            ("high", 0.9),
            ("high", 0.0),
            ("high", NAN),
            ("high", INF),
            ("high", "2"),
            ("high", True),
            ("low", 1.1),
            ("low", -0.1),
            ("low", NAN),
            ("advantages", "positive"),
            ("level", "worst_token"),
            ("advantages", "negative"),
            ("level", []),
        )
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
    # GSPO is the mean by its definition
    ("importance_sampling_level", dict(loss_type="gspo", importance_sampling_level="sequence_sum")),
]


# An option that the loss does not read would be ignored: (loss types that read it, a value that is
# not the default).
READ_BY = {
    "delta": ({"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo", "gspo_token"}, 4.0),
    "dual_clip_c": ({"dual_clip"}, 2.0),
    "cispo_bound": ({"cispo"}, "offset"),
    "sapo_temperature_pos": ({"sapo"}, 2.0),
    "sapo_temperature_neg": ({"sapo"}, 2.0),
    "vespo_k_pos": ({"vespo"}, 1.0),
    "vespo_lambda_pos": ({"vespo"}, 1.0),
    "vespo_k_neg": ({"vespo"}, 1.0),
    "vespo_lambda_neg": ({"vespo"}, 1.0),
    "kl_estimator": (set(LOSSES) - {"kimi", "dro"}, "k2"),
    "kl_times_ratio": (set(LOSSES) - {"kimi", "dro"}, True),
    "kl_clamp": (set(LOSSES) - {"kimi", "dro"}, 10.0),
    "kl_input_clamp": (set(LOSSES) - {"kimi", "dro"}, 20.0),
}


@pytest.mark.parametrize("name", READ_BY)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_an_option_that_the_loss_does_not_read(loss_type, name):
    readers, value = READ_BY[name]
    options = {"loss_type": loss_type, "max_completion_length": 9, "beta": 0.1}
    default = grpo_fast.LossConfig(**options)
    if loss_type in readers:
        assert getattr(default.replace(**{name: value}), name) == value
    else:
        message = assert_refused(lambda: grpo_fast.LossConfig(**options, **{name: value}), name)
        assert (
            repr(value) in message
            and repr(loss_type) in message
            and all(reader in message for reader in readers)
        )
        assert_refused(lambda: default.replace(**{name: value}), name)
    assert grpo_fast.LossConfig(**options, **{name: getattr(default, name)}) == default
    assert grpo_fast.LossConfig.from_key(default.key) == default


@pytest.mark.parametrize(
    ("name", "options"), CONFIG, ids=lambda x: x if isinstance(x, str) else str(x)
)
def test_config(name, options):
    assert_refused(lambda: grpo_fast.LossConfig(**options), name)
    grpo_fast.LossConfig()


def test_unknown_names_list_the_choices():
    message = assert_refused(lambda: grpo_fast.LossConfig(loss_type="grop"), "loss_type")
    assert "grop" in message and "dapo" in message and "gspo" in message
    message = assert_refused(lambda: grpo_fast.LossConfig(kl_estimator="kl"), "kl_estimator")
    assert "k3" in message


def test_configs_with_a_temperature_per_token_are_compared():
    one, other = (grpo_fast.LossConfig(temperature=torch.ones(2, 3)) for _ in range(2))
    assert one == one.replace() and hash(one) == hash(one.replace())
    assert one != other and one != grpo_fast.LossConfig() and one != "a config"
    assert one != one.replace(beta=0.5)


def test_the_config_is_frozen():
    import dataclasses

    with pytest.raises(dataclasses.FrozenInstanceError):
        grpo_fast.LossConfig().beta = 0.1


# ----------------------------------------------------------
# the calls
def call_with(
    function, case, *, layout="padded", config=None, lay_out=True, backend="torch", **changes
):
    """Call a loss function with some arguments replaced; the names are the public ones."""
    lengths = spans(case.mask)
    lay = (lambda x: x) if layout == "padded" else (lambda x: pack(x, lengths))
    keywords = arguments_of(case, layout)
    positional = {
        "advantages": keywords.pop("advantages"),
        "config": config or grpo_fast.LossConfig(**case.options),
    }
    if function == "linear":
        positional = {
            "hidden": lay(case.hidden),
            "lm_head_weight": case.weight,
            "target_ids": lay(case.ids),
            **positional,
        }
        keywords["bias"], keywords["backend"] = case.bias, backend
    elif function == "logits":
        positional = {"logits": lay(case.logits), "target_ids": lay(case.ids), **positional}
        keywords["backend"] = backend
    else:
        positional = {"logps": lay(reference_logps(case)[0]), **positional}
    for name, value in changes.items():
        (positional if name in positional else keywords)[name] = value
    f = {
        "linear": grpo_fast.linear_grpo_loss, "logits": grpo_fast.logits_grpo_loss,
        "logps": grpo_fast.grpo_loss,
    }[function]  # fmt: skip
    return f(*positional.values(), **keywords)


CASE = make_case(101, **options_for("grpo", beta=0.1))


def bad_values(x, value, where=(0, 0)):
    x = x.clone()
    x[where] = value
    return x


def refusals():
    """(argument, functions, changes)"""
    c, every, heads = CASE, FUNCTIONS, ("logits", "linear")
    B, L = c.mask.shape
    active = tuple(c.mask.nonzero()[2].tolist())
    yield "advantages", every, dict(advantages=torch.ones(B + 1))
    yield "advantages", every, dict(advantages=torch.ones(B, L + 1))
    yield "advantages", every, dict(advantages=torch.ones(()))
    yield "advantages", every, dict(advantages=torch.ones(B, dtype=torch.int64))
    yield "advantages", every, dict(advantages=[1.0] * B)
    for value in (NAN, INF, -INF):
        yield "advantages", every, dict(advantages=bad_values(c.advantages, value, 0))
    for value in (-1, -100, 23, 10**9):
        yield "target_ids", heads, dict(target_ids=bad_values(c.ids, value, active))
    yield "target_ids", heads, dict(target_ids=c.ids.float())
    yield "target_ids", heads, dict(target_ids=c.ids[:, :-1])
    yield "target_ids", heads, dict(target_ids=c.ids.bool())
    yield "completion_mask", every, dict(completion_mask=c.mask[:, :-1])
    yield "completion_mask", every, dict(completion_mask=c.mask[:-1])
    yield "completion_mask", every, dict(completion_mask=c.mask.reshape(-1))
    yield "completion_mask", every, dict(completion_mask=c.mask.long() * 2)
    yield "completion_mask", every, dict(completion_mask=c.mask.float() * 0.5)
    yield "completion_mask", every, dict(completion_mask=torch.where(c.mask, NAN, 0.0))
    yield "ref_logps", every, dict(ref_logps=None)
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        given = getattr(c, name.split("_")[0]) if name != "sampling_logps" else c.old
        yield name, every, {name: given[:, :-1]}
        yield name, every, {name: given[:-1]}
        yield name, every, {name: given.long()}
        yield name, every, {name: given.to("meta")}
    for name in ("old_logps", "ref_logps"):
        yield name, every, {name: bad_values(getattr(c, name[:3]), NAN, active)}
    for value in (INF, -INF):
        yield "ref_logps", every, dict(ref_logps=bad_values(c.ref, value, active))
    for name in ("num_items_in_batch", "num_completions_in_batch"):
        for value in (0, -1, NAN, INF, torch.tensor(0.0), torch.tensor([1.0, 2.0])):
            yield name, every, {name: value}
    yield "cu_seqlens", every, dict(cu_seqlens=cu_seqlens_of([L] * B))
    yield "cu_seqlens", every, dict(cu_seqlens=[0, L])
    yield "config", every, dict(config={"loss_type": "grpo"})
    for value in ("gpu", "CPU", None, "triton"):
        yield "backend", heads, dict(backend=value)
    for value in ("always", None):
        yield "validate", heads, dict(validate=value)
    yield "lm_head_weight", ("linear",), dict(lm_head_weight=c.weight[:, :-1])
    yield "lm_head_weight", ("linear",), dict(lm_head_weight=c.weight[0])
    yield "lm_head_weight", ("linear",), dict(lm_head_weight=c.weight.bfloat16())
    yield "lm_head_weight", ("linear",), dict(lm_head_weight=c.weight.to("meta"))
    yield "lm_head_weight", ("linear",), dict(lm_head_weight=c.weight[:0])
    no_columns = dict(hidden=c.hidden[..., :0], lm_head_weight=c.weight[:, :0])
    yield "lm_head_weight", ("linear",), no_columns
    yield "hidden", ("linear",), dict(hidden=c.hidden.to_sparse())
    yield "hidden", ("linear",), dict(hidden=torch.nested.nested_tensor(list(c.hidden)))
    yield "target_ids", heads, dict(target_ids=c.ids.to_sparse())
    yield "completion_mask", every, dict(completion_mask=c.mask.to_sparse())
    yield "advantages", every, dict(advantages=c.advantages.to_sparse())
    yield "hidden", ("linear",), dict(hidden=c.hidden.long())
    yield "hidden", ("linear",), dict(hidden=c.hidden[0, 0])
    yield "hidden", ("linear",), dict(hidden=torch.ones(()))
    yield "hidden", ("linear",), dict(hidden=c.hidden.to(torch.float8_e4m3fn))
    yield "bias", ("linear",), dict(bias=c.bias[:-1])
    yield "bias", ("linear",), dict(bias=c.bias.long())
    yield "logits", ("logits",), dict(logits=c.logits.long())
    yield "logits", ("logits",), dict(logits=c.logits[0, 0])
    yield "logits", ("logits",), dict(logits=c.logits[..., :0])
    yield "logps", ("logps",), dict(logps=c.old.long())
    yield "logps", ("logps",), dict(logps=c.old[0, 0])


PADDED = [
    pytest.param(name, f, changes, id=f"{f}-{name}-{i}")
    for i, (name, functions, changes) in enumerate(refusals())
    for f in functions
    if not (name == "backend" and changes["backend"] == "triton" and f == "logps")
]


@pytest.mark.parametrize(("name", "function", "changes"), PADDED)
def test_padded_arguments(name, function, changes):
    before = call_with(function, CASE).loss
    assert_refused(lambda: call_with(function, CASE, **changes), name)
    assert torch.equal(call_with(function, CASE).loss, before)  # nothing is left behind


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
    assert_refused(
        lambda: call_with(function, CASE, layout="packed", cu_seqlens=cu, advantages=A),
        "cu_seqlens",
    )
    call_with(function, CASE, layout="packed")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_per_token_tensors_of_the_other_layout(function):
    for name, value in (("old_logps", CASE.old), ("completion_mask", CASE.mask)):
        assert_refused(
            lambda n=name, v=value: call_with(function, CASE, layout="packed", **{n: v}), name
        )


def test_a_logp_of_minus_infinity():
    logps = reference_logps(CASE)[0]
    b, t = CASE.mask.nonzero()[1].tolist()
    logps[b, t] = -INF
    assert_refused(lambda: call_with("logps", CASE, logps=logps), "logps")
    # A masked one is inert.
    call_with("logps", CASE, logps=torch.where(CASE.mask, reference_logps(CASE)[0], -INF))


@pytest.mark.parametrize("function", ["logits", "linear"])
def test_per_token_temperature(function):
    for bad in (torch.ones(4), torch.ones(5, 7, dtype=torch.int64)):
        assert_refused(
            lambda b=bad: call_with(
                function, CASE, config=grpo_fast.LossConfig(loss_type="grpo", temperature=b)
            ),
            "temperature",
        )
    for value in (0.0, -1.0, NAN, INF):
        t = torch.ones(5, 7)
        t[0, 1] = value
        config = grpo_fast.LossConfig(loss_type="grpo", temperature=t)
        assert_refused(lambda c=config: call_with(function, CASE, config=c), "temperature")
    t = torch.ones(5, 7)
    t[~CASE.mask] = NAN  # a masked slot may hold anything
    call_with(function, CASE, config=grpo_fast.LossConfig(loss_type="grpo", temperature=t))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_first_bad_value_is_quoted_and_the_others_are_counted(function):
    tokens, odd = int(CASE.mask.sum()), CASE.mask.nonzero()[:3].tolist()
    number = CASE.mask.float()
    for (b, t), value in zip(odd, (0.5, 2.0, NAN), strict=True):
        number[b, t] = value
    wrong = [("completion_mask", number, f"came 0.5 (3 of {number.numel()} values)")]
    for name, given in (
        ("advantages", CASE.advantages[:, None].expand(5, 7)),
        ("old_logps", CASE.old),
    ):
        given = given.clone()
        for b, t in odd[1:]:
            given[b, t] = NAN
        wrong.append((name, given, f"came nan (2 of {tokens} values)"))
    for name, value, came in wrong:
        assert came in assert_refused(
            lambda n=name, v=value: call_with(function, CASE, **{n: v}), name
        )
    if function != "logps":
        t = torch.where(number == 0.5, -3.0, 1.0)
        config = grpo_fast.LossConfig(loss_type="grpo", temperature=t)
        message = assert_refused(lambda: call_with(function, CASE, config=config), "temperature")
        assert f"came -3 (1 of {tokens} values)" in message


def test_a_bad_temperature_of_a_target_is_quoted():
    h, w, ids, t = (
        torch.randn(4, 8),
        torch.randn(11, 8),
        torch.tensor([1, 2, -100, 3]),
        torch.ones(4),
    )
    t[1], t[2], t[3] = -0.5, NAN, INF
    for call in (
        grpo_fast.linear_logps,
        lambda h, w, *a, **k: grpo_fast.logits_logps(h @ w.T, *a, **k),
    ):
        assert "came -0.5 (2 of 3 values)" in assert_refused(
            lambda c=call: c(h, w, ids, temperature=t), "temperature"
        )


@pytest.mark.parametrize("need", [{"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}])
def test_grpo_loss_cannot_make_an_entropy_of_its_own(need):
    case = CASE.but(options=options_for("grpo", **need))
    assert_refused(lambda: call_with("logps", case), "entropy")
    assert_refused(lambda: call_with("logps", case, entropy=torch.ones(5, 6)), "entropy")


@pytest.mark.parametrize("loss_type", ["kimi", "dro"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_kimi_has_no_reference(loss_type, function):
    case = make_case(101, **options_for(loss_type))
    assert_refused(lambda: call_with(function, case, ref_logps=case.ref), "ref_logps")
    call_with(function, case)


def test_ignored_index_is_allowed_where_masked_only():
    ids = torch.where(CASE.mask, CASE.ids, -100)
    call_with("linear", CASE, target_ids=ids)
    call_with("logits", CASE, target_ids=ids)
    full = torch.ones_like(CASE.mask)
    assert_refused(
        lambda: call_with("linear", CASE, target_ids=ids, completion_mask=full), "target_ids"
    )
    assert_refused(
        lambda: call_with("linear", CASE, target_ids=ids, completion_mask=None), "target_ids"
    )


# ----------------------------------------------------------
# logps functions
def logps_refusals():
    h, w, ids = torch.randn(4, 8), torch.randn(11, 8), torch.randint(11, (4,))
    yield "target_ids", lambda: grpo_fast.linear_logps(h, w, ids.float())
    yield "target_ids", lambda: grpo_fast.linear_logps(h, w, ids[:3])
    yield "target_ids", lambda: grpo_fast.linear_logps(h, w, ids + 11)
    yield "target_ids", lambda: grpo_fast.linear_logps(h, w, ids - 100)
    yield "lm_head_weight", lambda: grpo_fast.linear_logps(h, w[:, :7], ids)
    yield "lm_head_weight", lambda: grpo_fast.linear_logps(h, w.double(), ids)
    yield "bias", lambda: grpo_fast.linear_logps(h, w, ids, bias=torch.ones(10))
    for t in (0.0, -1.0, NAN, INF):
        yield "temperature", lambda t=t: grpo_fast.linear_logps(h, w, ids, temperature=t)
        yield "temperature", lambda t=t: grpo_fast.logits_logps(h @ w.T, ids, temperature=t)
    yield "temperature", lambda: grpo_fast.linear_logps(h, w, ids, temperature=torch.ones(3))
    yield "softcap", lambda: grpo_fast.linear_logps(h, w, ids, softcap=0.0)
    yield "softcap", lambda: grpo_fast.logits_logps(h @ w.T, ids, softcap=-1.0)
    yield "logit_scale", lambda: grpo_fast.linear_logps(h, w, ids, logit_scale=NAN)
    yield "backend", lambda: grpo_fast.linear_logps(h, w, ids, backend="cuda")
    yield "backend", lambda: grpo_fast.logits_logps(h @ w.T, ids, backend="best")
    yield "target_ids", lambda: grpo_fast.logits_logps(h @ w.T, ids + 11)
    yield "target_ids", lambda: grpo_fast.logits_logps(h @ w.T, ids[:2])
    yield "logits", lambda: grpo_fast.logits_logps((h @ w.T).long(), ids)
    yield "logits", lambda: grpo_fast.logits_logps(h @ w[:0].T, ids)


@pytest.mark.parametrize(
    ("name", "call"),
    [pytest.param(n, c, id=f"{n}-{i}") for i, (n, c) in enumerate(logps_refusals())],
)
def test_logps_functions(name, call):
    assert_refused(call, name)
    h, w, ids = torch.randn(4, 8), torch.randn(11, 8), torch.randint(11, (4,))
    assert torch.isfinite(grpo_fast.linear_logps(h, w, ids)).all()


def test_an_explicit_backend_says_why_it_cannot_run_here():
    import os

    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("triton runs here")
    message = assert_refused(lambda: call_with("linear", CASE, backend="triton"), "backend")
    assert "CPU" in message or "cpu" in message


@pytest.mark.parametrize("function", ["linear", "logits"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_target_of_no_probability_among_others_is_refused(backend, function):
    case = make_case(24, mask=torch.ones(2, 3, dtype=torch.bool), **options_for("grpo"))
    case.bias[int(case.ids[0, 1])] = -torch.inf
    assert (case.ids != case.ids[0, 1]).any()
    with pytest.raises(ValueError, match="target_ids: expected targets of finite probability"):
        run(function, case, backend=backend)
