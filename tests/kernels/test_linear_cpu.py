"""hidden → logps and weights on the CPU: values against fp64, bits that depend on the row alone,
odd rows.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import linear as linear_cpu
from grpo_fast.kernels.cpu import loader as csrc_loader
from grpo_fast.kernels.types import POSITIVE16, LogitRule, widened
from tests.kernels import formulas
from tests.pairs import pairs

REASON = csrc_loader.load("linear") or csrc_loader.load("gemm")
pytestmark = pytest.mark.skipif(
    REASON is not None, reason=f"no C++ kernels here: {(REASON or '').splitlines()[:1]}"
)

T, H = 37, 48
RULES = {
    "plain": LogitRule(),
    "temperature": LogitRule(1.3, None, 0.7),
    "softcap": LogitRule(0.9, 4.0, 1.1),
    "by row": LogitRule(1.0, None, torch.linspace(0.5, 2.0, T)),
}


def problem(
    V: int, dtype: torch.dtype, *, has_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    g = torch.Generator().manual_seed(V)
    hidden, weight = (
        torch.randn(T, H, generator=g).to(dtype),
        (torch.randn(V, H, generator=g) / 3).to(dtype),
    )
    return (
        hidden,
        weight,
        torch.randn(V, generator=g) if has_bias else None,
        torch.randint(V, (T,), generator=g),
    )


def in_fp64(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, rule: LogitRule, g: Tensor
) -> tuple:
    """(logps, entropy, d raw-logits of Σ g·logp)."""
    raw = hidden.double() @ weight.double().t()
    z, slope = formulas.final(raw if bias is None else raw + bias.double(), *rule)
    _, logps, entropy = formulas.statistics(z, ids)
    return logps, entropy, formulas.gradient(z, slope, ids, g)


def d_logits(out: Tensor, unit: Tensor, target_unit: Tensor, ids: Tensor, g: Tensor) -> Tensor:
    d = torch.where((g == 0)[:, None], 0.0, (g * unit)[:, None] * out)
    return d.scatter_add(1, ids[:, None], torch.where(g == 0, 0.0, g * target_unit)[:, None])


@pairs(dtype=[torch.float32, torch.bfloat16], name=RULES, V=[1, 2, 255, 257, 1031])
def test_values_against_fp64(V: int, name: str, dtype: torch.dtype) -> None:
    rule = RULES[name]
    hidden, weight, bias, ids = problem(V, dtype, has_bias=V % 2 == 1)
    g = torch.randn(T, generator=torch.Generator().manual_seed(0))
    logps, entropy, gradient = in_fp64(hidden, weight, bias, ids, rule, g)
    out = torch.full((T, V + 3), math.nan)[:, :V]
    stats, *units, _ = linear_cpu.head_exponentials(
        hidden, weight, bias, ids, rule, out, return_entropy=True
    )
    assert (stats[1].double() - logps).abs().max() <= 1e-5 and (
        stats[2].double() - entropy
    ).abs().max() <= 1e-5
    assert (out.gather(1, ids[:, None]) == 0).all()
    error = d_logits(out, *units, ids, g).double() - gradient
    assert error.norm() <= 3e-6 * gradient.norm() + 1e-9
    again = linear_cpu.head_logps(hidden, weight, bias, ids, rule, return_entropy=True)
    raw = torch.empty(T, V)
    stored = linear_cpu.head_logps(
        hidden, weight, bias, ids, rule, return_entropy=False, logits_out=raw
    )
    for own, other, third in zip(stats, again, stored, strict=True):
        assert torch.equal(own, other) and (third is None or torch.equal(own, third))
    exact = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(raw.double(), exact, rtol=1e-5, atol=1e-5)
    known = torch.full_like(out, math.nan)
    same, *same_units, _ = linear_cpu.head_exponentials(
        hidden, weight, bias, ids, rule, known, known=stats
    )
    assert torch.equal(known, out) and same is stats
    assert all(torch.equal(x, y) for x, y in zip(same_units, units, strict=True))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("V", [2, 257, 1031])
def test_weights_in_16_bits_are_those_in_fp32_rounded_to_ten_digits(V: int, name: str) -> None:
    hidden, weight, bias, ids = problem(V, torch.bfloat16)
    wide, narrow = torch.empty(T, V), torch.full((T, V + 3), -1, dtype=POSITIVE16)
    stats, *units, _ = linear_cpu.head_exponentials(hidden, weight, bias, ids, RULES[name], wide)
    same, *same_units, _ = linear_cpu.head_exponentials(
        hidden, weight, bias, ids, RULES[name], narrow[:, :V]
    )
    assert all(
        torch.equal(x, y)
        for x, y in zip((*stats[:2], *units), (*same[:2], *same_units), strict=True)
    )
    bits = (wide.view(torch.int32) - (29 << 23) + 0x2000).clamp(min=0) >> 14
    assert torch.equal(narrow[:, :V].to(torch.int32) & 0xFFFF, bits)
    assert (narrow[:, V:] == -1).all()
    assert ((widened(narrow[:, :V]) - wide).abs() <= 2**-10 * wide).all()


@pairs(name=RULES, is_known=[False, True], spread=[1, 8])
def test_weights_that_dominate_their_row_come_in_fp32(
    spread: float, is_known: bool, name: str
) -> None:
    """Those of more than a 16th of the row's sum, and only those; also in rows whose target is far
    below the rest.
    """
    V = 1031
    hidden, weight, _, ids = problem(V, torch.bfloat16)
    rule = RULES[name]
    hidden, ids[::5] = hidden * spread, (hidden[::5].float() @ weight.float().t()).argmin(1)
    wide, narrow = torch.empty(T, V), torch.empty(T, V, dtype=POSITIVE16)
    stats = linear_cpu.head_logps(hidden, weight, None, ids, rule, return_entropy=False)
    known = stats if is_known else None
    *_, nothing = linear_cpu.head_exponentials(hidden, weight, None, ids, rule, wide, known=known)
    *_, dominant = linear_cpu.head_exponentials(
        hidden, weight, None, ids, rule, narrow, known=known
    )
    assert nothing is None
    z, slope = formulas.final(hidden.double() @ weight.double().t(), *rule)
    p = z.softmax(1).scatter(1, ids[:, None], 0.0)
    share = p / p.sum(1, keepdim=True)
    is_dominant = torch.zeros(T, V, dtype=torch.bool).index_put_(
        (dominant.rows, dominant.columns), torch.tensor(True)
    )
    assert is_dominant[share > 1.001 / 16].all() and not is_dominant[share < 0.999 / 16].any()
    assert is_dominant.any(1).sum() > (5 if spread == 1 else 30) or name == "softcap"
    assert torch.equal(dominant.values, wide[dominant.rows, dominant.columns])
    order = dominant.rows * V + dominant.columns
    assert (order.diff() > 0).all()


@pytest.mark.parametrize("level", [-300.0, 0.0, 300.0])
def test_a_row_without_a_target_has_an_lse(level: float) -> None:
    """Its logp is NaN, and it is summed relative to its maximum, for want of a target's logit."""
    hidden, weight, bias, ids = problem(700, torch.float32)
    ids[3], ids[5] = -100, 700
    bias = bias + level
    lse, logps, _ = linear_cpu.head_logps(
        hidden, weight, bias, ids, LogitRule(), return_entropy=False
    )
    z = hidden.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(lse.double(), z.logsumexp(1), rtol=1e-6, atol=1e-6)
    assert logps.isnan().nonzero()[:, 0].tolist() == [3, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_itself_only(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise: neighbours, how many there are, threads."""
    hidden, weight, bias, ids = problem(2000, dtype)
    rule = RULES["by row"]

    def run(rows: slice | Tensor, threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = torch.empty(ids[rows].shape[0], 2000)
            stats, *units, _ = linear_cpu.head_exponentials(
                hidden[rows], weight, bias, ids[rows], rule.rows(rows), out, return_entropy=True
            )
        finally:
            torch.set_num_threads(before)
        return [out, *stats, *units]

    whole, order = (
        run(slice(None), 1),
        torch.randperm(T, generator=torch.Generator().manual_seed(1)),
    )
    for rows, threads in [(slice(None), 3), (slice(5, 6), 1), (slice(30, 37), 2), (order, 2)]:
        for part, all_rows in zip(run(rows, threads), whole, strict=True):
            assert torch.equal(part, all_rows[rows])


def test_more_rows_than_a_group() -> None:
    """Rows are taken a thousand at a time; nothing is lost at the seam."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, ids = (
        torch.randn(1030, 8, generator=g),
        torch.randn(300, 8, generator=g),
        torch.arange(1030) % 300,
    )
    lse, logps, _ = linear_cpu.head_logps(
        hidden, weight, None, ids, LogitRule(), return_entropy=False
    )
    z = hidden.double() @ weight.double().t()
    torch.testing.assert_close(lse.double(), z.logsumexp(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        logps.double(), z.log_softmax(1)[torch.arange(1030), ids], rtol=1e-6, atol=2e-6
    )


@pytest.mark.parametrize("nats", [15.0, 19.9, 20.1, 40.0, 200.0])
@pytest.mark.parametrize("softcap", [None, 500.0])
def test_targets_far_below_the_rest(nats: float, softcap: float | None) -> None:
    """Beyond 20 nats a row is weighed against its lse; d-logits and statistics stay those of fp64,
    weights finite.
    """
    V, ids = 300, torch.arange(T) % 300
    weight, hidden = torch.zeros(V, H), torch.zeros(T, H)
    weight[:, 0] = torch.linspace(-1, 1, V)
    hidden[:, 0], hidden[:, 1] = 1.0, 1.0
    weight[ids[3::2], 1] = -nats  # every other row: what is weighed again goes back to its place
    rule = LogitRule(1.0, softcap, 1.0)
    g = torch.ones(T)
    logps, _, gradient = in_fp64(hidden, weight, None, ids, rule, g)
    out = torch.empty(T, V)
    stats, *units, _ = linear_cpu.head_exponentials(hidden, weight, None, ids, rule, out)
    assert logps.min() < -0.8 * nats
    torch.testing.assert_close(stats[1].double(), logps, rtol=1e-6, atol=1e-5)
    assert out.isfinite().all()
    torch.testing.assert_close(
        d_logits(out, *units, ids, g).double(), gradient, rtol=2e-5, atol=1e-7
    )


@pytest.mark.parametrize("nats", [90.0, 150.0, 300.0])
@pytest.mark.parametrize("softcap", [None, 500.0])
def test_columns_far_below_the_target_weigh_nothing(nats: float, softcap: float | None) -> None:
    V, ids = 300, torch.arange(T)
    hidden, weight, out = torch.ones(T, 1), torch.zeros(V, 1), torch.full((T, V), math.nan)
    weight[ids, 0] = nats
    linear_cpu.head_exponentials(hidden, weight, None, ids, LogitRule(1.0, softcap, 1.0), out)
    bent = 0 if softcap is None else math.tanh(nats / softcap)
    torch.testing.assert_close(out[:, :T], (1 - bent**2) * (1 - torch.eye(T)), rtol=1e-4, atol=0)
    below = nats if softcap is None else softcap * bent
    torch.testing.assert_close(
        out[:, T:], torch.full((T, V - T), math.exp(-below)), rtol=1e-3, atol=1e-38
    )


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(1.0, 30.0, 1.0)], ids=["plain", "softcap"])
def test_a_bad_row_shows_and_stays_inert_without_a_coefficient(rule: LogitRule) -> None:
    hidden, weight, bias, ids = problem(600, torch.float32)
    for column, value in itertools.product([0, H - 1], [math.nan, math.inf]):
        bad = hidden.clone()
        bad[3, column] = value
        out = torch.full((T, 600), math.nan)
        stats, *units, _ = linear_cpu.head_exponentials(
            bad, weight, bias, ids, rule, out, return_entropy=True
        )
        others = torch.arange(T) != 3
        # A soft cap makes inf finite.
        expected = in_fp64(bad, weight, bias, ids, rule, torch.ones(T))[0]
        assert torch.equal(stats[1].isnan(), expected.isnan()) and expected[others].isfinite().all()
        assert expected[3].isnan() or value == math.inf and rule.softcap is not None
        assert all(x[others].isfinite().all() for x in (*stats, *units))
        assert out.isfinite().all()
        g = others.float()
        assert d_logits(out, *units, ids, g).isfinite().all()


def test_columns_at_minus_infinity_count_nothing() -> None:
    hidden, weight, _, ids = problem(700, torch.float32)
    ids = torch.where((ids >= 256) & (ids < 512), ids - 256, ids)
    bias = torch.zeros(700)
    closed = torch.arange(700) % 3 == 0
    closed[ids] = False
    bias[closed] = -math.inf
    bias[256:512] = -math.inf  # a whole slice
    ids[3] = -100  # each of its slices is summed relative to the slice's own maximum
    out = torch.empty(T, 700)
    stats, *_ = linear_cpu.head_exponentials(hidden, weight, bias, ids, LogitRule(), out)
    z = hidden.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(stats[0].double(), z.logsumexp(1), rtol=1e-6, atol=1e-5)
    some = ids >= 0
    logps = z.log_softmax(1)[torch.arange(T), ids][some]
    torch.testing.assert_close(stats[1][some].double(), logps, rtol=1e-6, atol=1e-5)
    assert (out[:, bias == -math.inf] == 0).all()


def test_what_it_does_not_take() -> None:
    hidden, weight, _, ids = problem(300, torch.float32)
    for arguments, message in [
        ((hidden.bfloat16(), weight, None, ids), "hidden: expected the dtype of weight"),
        (
            (hidden[:, 1:].contiguous(), weight, None, ids),
            "hidden: expected 48 columns as in weight, got 47",
        ),
        ((hidden, weight, torch.zeros(5), ids), "bias: expected one value for each of 300 rows"),
        ((hidden, weight, None, ids[1:]), "target_ids: expected one value for each of 37 rows"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            linear_cpu.head_logps(*arguments, LogitRule(), return_entropy=False)
    for out in (torch.empty(37, 299), torch.empty(37, 300).double()):
        with pytest.raises(
            RuntimeError, match=r"out: expected float32 \(37, 300\), or int16 for weights"
        ):
            linear_cpu.head_exponentials(hidden, weight, None, ids, LogitRule(), out)
    logits = torch.empty(37, 300, dtype=torch.int16)
    with pytest.raises(RuntimeError, match=r"out: expected float32 \(37, 300\)"):
        linear_cpu.head_logps(
            hidden, weight, None, ids, LogitRule(), return_entropy=False, logits_out=logits
        )


def test_which_heads_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies from 2048 on, where the product is ours."""
    monkeypatch.setattr(route, "own_product", lambda x: x.dtype == torch.float32)

    def starts_from_hidden(columns: int, dtype: torch.dtype = torch.float32) -> bool:
        return (
            route.head_route("cpu", torch.empty(columns, 1, dtype=dtype)).kernels.head_logps
            is not None
        )

    assert starts_from_hidden(2048) and not starts_from_hidden(2047)
    assert not starts_from_hidden(2048, torch.bfloat16)
