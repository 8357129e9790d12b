"""Rows that exist only in a sampler's support: the kernels against fp64, and the public functions
against the fp64 oracle.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from grpo_fast.kernels.gpu import configs, support
from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.support import SupportRows
from grpo_fast.kernels.types import LogitRule
from tests.kernels import formulas
from tests.kernels.triton_tools.interpreter import only_memory_of, reversed_programs

NAN = float("nan")
# One id alone, fewer than a tile, a tile exactly, one more, several tiles, all of the vocabulary.
LENGTHS = (1, 3, 8, 9, 32, 33, 70, 2)
V, N = 70, 11


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_rows(vocab: int = V) -> SupportRows:
    """Sets in no order, the targets at their begin, end and between."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    ids = torch.cat([torch.randperm(vocab, generator=g)[:k] for k in LENGTHS])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return SupportRows(None, None, ids, offsets, torch.tensor([0, 2, 7, 3, 0, 32, 69, 1]))


ROWS = some_rows()
TEMPERATURES = torch.linspace(0.6, 1.7, len(LENGTHS))
RULES = [LogitRule(), LogitRule(0.8, 3.0, 0.7), LogitRule(-1.3, None, TEMPERATURES)]


def head(width: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple:
    """hidden, which of its rows, weight, bias."""
    weight = (numbers(V, width, seed=3) * 2 / width**0.5).to(dtype)
    b = numbers(V, seed=4).to(dtype) if bias else None
    return numbers(N, width, seed=2).to(dtype), torch.tensor([8, 1, 1, 3, 5, 0, 2, 10]), weight, b


def exact(hidden, index, weight, bias, rows, rule, g, g_entropy=None) -> tuple:
    """(raw, stats, d-logits, slopes) in fp64 from masked logits, the first and third (nnz,)."""
    full = hidden[index].double() @ weight.double().T
    full = full if bias is None else full + bias.double()
    at = rows.rows, rows.ids
    z, slope = formulas.final(full, *rule)
    kept = torch.zeros_like(z, dtype=torch.bool).index_put_(at, torch.tensor(True))
    z = z.masked_fill(~kept, -torch.inf)
    target = rows.ids[rows.offsets[:-1] + rows.places]
    d = formulas.gradient(z, slope, target, g, g_entropy)
    one = formulas.gradient(z, slope, target, torch.ones_like(g))
    return full[at], formulas.statistics(z, target), d[at], one @ weight.double()


def swept(tensors: tuple, rule: LogitRule, *, slopes: bool = True):
    return support.head_rows(*tensors, ROWS, rule, return_entropy=True, return_slopes=slopes)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (actual.double() - expected).abs().max() <= tolerance * max(1, expected.abs().max())


# Widths: below a block, a block, one beyond it; 4 columns at a time where a program holds 128.
@pytest.mark.parametrize("rule", RULES, ids=["plain", "all", "temperatures"])
@pytest.mark.parametrize(("width", "most"), [(20, 8192), (128, 8192), (129, 8192), (300, 128)])
def test_from_hidden(width, most, rule, monkeypatch):
    monkeypatch.setattr(configs, "SUPPORT_COLUMNS", most)
    tensors, g = head(width, bias=rule.softcap is None), numbers(len(LENGTHS), seed=5)
    with only_memory_of(*tensors, *ROWS, TEMPERATURES):
        found = swept(tensors, rule)
    raw, stats, _, slopes = exact(*tensors, ROWS, rule, g)
    assert_close(found.raw, raw, 2e-6)
    for got, want in zip(found.stats, stats, strict=True):
        assert_close(got, want, 4e-6)
    assert (found.slopes is None) == (width > most)
    if found.slopes is not None:
        assert_close(found.slopes, slopes, 4e-6)
    again = swept(tensors, rule, slopes=False)
    assert all(torch.equal(x, y) for x, y in zip(found.stats, again.stats, strict=True))
    assert again.slopes is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_summed_in_fp32(dtype):
    tensors = head(150, dtype)
    found = swept(tensors, RULES[1])
    raw, stats, _, slopes = exact(*tensors, ROWS, RULES[1], torch.ones(len(LENGTHS)))
    assert_close(found.raw, raw, 2e-6)
    assert_close(found.stats[1], stats[1], 4e-6)
    assert_close(found.slopes, slopes, 4e-6)


def test_any_strides():
    """A transposed weight, as a tied embedding may be, and columns of a wider hidden."""
    hidden, index, weight, bias = head(20)
    wide = torch.full((N, 40), NAN)
    wide[:, ::2] = hidden
    found = swept((wide[:, ::2], index, weight.t().contiguous().t(), bias), RULES[0])
    expected = swept((hidden, index, weight, bias), RULES[0])
    assert_close(found.slopes, expected.slopes, 1e-6)
    assert_close(found.raw, expected.raw, 1e-6)


def test_a_certain_token_keeps_its_digits():
    """log p near 0 and 1 - p near 0 are no differences; one id alone has a slope of exactly 0."""
    hidden, index, weight, _ = head(20)
    weight, bias = weight * 0.01, torch.zeros(V)
    bias[ROWS.ids[ROWS.offsets[:-1] + ROWS.places]] = 18.0
    tensors = hidden, index, weight, bias
    found = swept(tensors, RULES[0])
    _, stats, _, slopes = exact(*tensors, ROWS, RULES[0], torch.ones(len(LENGTHS)))
    certain = stats[1].abs() < 1e-5
    assert certain.sum() >= 2
    assert ((found.stats[1] - stats[1]).abs() <= 1e-5 * stats[1].abs())[certain].all()
    assert (found.slopes - slopes).norm(dim=1).le(1e-4 * slopes.norm(dim=1))[certain].all()
    assert found.stats[1][0] == 0 and not found.slopes[0].any()


def test_nan_stays_in_its_row():
    hidden, index, weight, bias = head(20)
    clean = swept((hidden, index, weight, bias), RULES[0])
    hidden[index[3], 5] = NAN
    found = swept((hidden, index, weight, bias), RULES[0])
    assert found.stats[1][3].isnan() and found.slopes[3].isnan().any()
    others = torch.arange(len(LENGTHS)) != 3
    assert torch.equal(found.slopes[others], clean.slopes[others])


# ---- rows of given logits


@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "logp"])
@pytest.mark.parametrize("rule", RULES, ids=["plain", "all", "temperatures"])
def test_ragged_rows(rule, with_entropy):
    tensors, g = head(20), numbers(len(LENGTHS), seed=5)
    g_entropy = numbers(len(LENGTHS), seed=6) if with_entropy else None
    g[2] = 0
    if g_entropy is not None:
        g_entropy[2] = 0
    exact_raw, stats, d, _ = exact(*tensors, ROWS, rule, g, g_entropy)
    raw = exact_raw.float()
    with only_memory_of(raw, *ROWS, TEMPERATURES):
        options = {"return_entropy": with_entropy, "offsets": ROWS.offsets}
        found = rows_triton.row_logps(raw[None], ROWS.places, rule, **options)
    for got, want in zip(found, stats, strict=True):
        assert got is None or (got - want).abs().max() <= 4e-6
    raw[ROWS.rows == 2] = NAN  # no coefficient: exact zeros, whatever it holds
    with only_memory_of(raw, *ROWS, g, g_entropy, TEMPERATURES, *found):
        own = ROWS.places, found, g, g_entropy, rule
        rows_triton.row_grad_(raw[None], *own, offsets=ROWS.offsets)
    assert_close(raw, d, 2e-6)
    assert not raw[ROWS.rows == 2].any()


# ---- sums of named rows


@pytest.mark.parametrize("width", [20, 1030])
def test_dh_from_d_logits(width):
    _, _, weight, _ = head(width)
    d = numbers(len(ROWS.ids), seed=7)
    d[ROWS.ids == 5] = 0.0
    weight[5] = NAN
    with only_memory_of(d, weight, *ROWS):
        found = support.head_hidden(d, weight, ROWS)
    terms = weight.nan_to_num().double()[ROWS.ids] * d.double()[:, None]
    expected = torch.zeros(len(LENGTHS), width).double().index_add_(0, ROWS.rows, terms)
    assert_close(found, expected, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [20, 1030])
def test_dw(width, dtype, monkeypatch):
    """Some ids by many rows, some by none; NaN where the coefficient is 0; the order of the
    programs changes nothing.
    """
    hidden, index, _, _ = head(width, dtype)
    count = 8 * 19
    ids = torch.randint(V // 2, (count,), generator=torch.Generator().manual_seed(8))
    ids[::3] = 7
    rows = SupportRows(None, None, ids, torch.arange(0, count + 1, 19), None)
    d, hidden = (
        numbers(count, seed=9),
        torch.cat([hidden, torch.full((1, width), NAN, dtype=dtype)]),
    )
    index[5] = N
    d[rows.rows == 5] = 0.0
    terms = hidden[index[rows.rows]].nan_to_num().double() * d.double()[:, None]
    expected = torch.zeros(V, width).double().index_add_(0, ids, terms)
    sums, results = support._sums, []

    def watched(factors, places, offsets, *rest, add):
        with only_memory_of(factors, places, offsets, *rest):
            sums(factors, places, offsets, *rest, add=add)

    monkeypatch.setattr(support, "_sums", watched)
    for order in (contextlib.nullcontext, reversed_programs):
        results.append(torch.full((V, width), NAN, dtype=dtype))
        with order():
            support.head_weight(d, hidden, index, rows, results[-1], add=False)
    assert torch.equal(*results)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2e-6
    assert ((results[0] - expected).abs() <= 1.01 * rounding * expected.abs() + 2e-6).all()
    assert not results[0][V // 2 :].any()


def test_dw_is_added_to_what_is_there():
    hidden, index, weight, _ = head(20)
    d, before = numbers(len(ROWS.ids), seed=7), numbers(V, 20, seed=8)
    total = before.clone()
    support.head_weight(d, hidden, index, ROWS, total, add=True)
    terms = hidden[index[ROWS.rows]].double() * d.double()[:, None]
    assert_close(total, before.double().index_add(0, ROWS.ids, terms), 2e-6)
    in_order = torch.empty(V, 20)
    support.head_weight(d, hidden, None, ROWS, in_order, add=False)
    terms = hidden[ROWS.rows].double() * d.double()[:, None]
    assert_close(in_order, torch.zeros(V, 20).double().index_add(0, ROWS.ids, terms), 2e-6)
