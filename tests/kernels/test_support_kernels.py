"""Tests of the kernels for `support`, the sets of ids of a sampler, against fp64.

They cover sizes around tiles and vectors, the order of sums, factors of 0 with NaN, and
uninitialised memory. All backends are tested. test_triton_interpreter.py runs the tests again in
Triton's interpreter.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from grpo_fast.kernels import route, support
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.types import HeadInputs, HeadTensors, LogitRows, LogitTransform, SupportRows
from tests.kernels import formulas
from tests.kernels.formulas import draw, only_memory_of, reversed_programs
from tests.loss_cases import ENGINES, IS_INTERPRETER
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Sizes of the rows' token sets: one id, less than a tile of 8 ids, exactly a tile, one id more,
# several tiles, and all 70 ids of the vocabulary.
LENGTHS = (1, 3, 8, 9, 32, 33, 70, 2)
V, N, R = 70, 11, len(LENGTHS)
TRANSFORMS = {"plain": LogitTransform(), "all": LogitTransform(0.8, 3.0, 0.7),
              "negative": LogitTransform(-1.3, None, 1.7)}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=ENGINES)
def support_kernels(request):
    if request.param == "cpu":  # without C++ kernels, the test would use torch
        assert loader.unavailable("support") is None
    return route.kernel_module("support", request.param)


@pytest.fixture(params=ENGINES)
def kernels(request):
    return route.rows_route(request.param, torch.empty(0)).kernels


def some_rows() -> SupportRows:
    """Return token sets whose ids are in random order.

    The targets are at the start, at the end and in the middle of their sets.
    """
    g = torch.Generator().manual_seed(1)
    ids = torch.cat([torch.randperm(V, generator=g)[:k] for k in LENGTHS])
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return SupportRows(None, None, ids, offsets, torch.tensor([0, 2, 7, 3, 0, 32, 69, 1]), INDEX)


INDEX = torch.tensor([8, 1, 1, 3, 5, 0, 2, 10])  # row of `hidden` for each set
ROWS = some_rows()
TARGETS = ROWS.ids[ROWS.offsets[:-1] + ROWS.places]


def tensors_of(width: int, dtype: torch.dtype = torch.float32) -> HeadTensors:
    """Return random hidden (N, width), weight (V, width) and bias (V,) of an LM head."""
    weight = (draw(V, width, seed=3) * 2 / width**0.5).to(dtype)
    return HeadTensors(draw(N, width, seed=2).to(dtype), weight, draw(V, seed=4).to(dtype))


def exact(hidden, weight, bias, transform, g, g_entropy=None) -> tuple:
    """Compute the expected results in fp64 from masked logits.

    Returns:
        The raw logits (nnz,), the statistics, the gradient of the raw logits (nnz,), and the
        derivative of each logp with respect to its hidden row (R, width). The first and the third
        have one entry for each id of each token set.
    """
    full = hidden[INDEX].double() @ weight.double().T + bias.double()
    at = ROWS.rows, ROWS.ids
    z, slope = formulas.final(full, *transform)
    kept = torch.zeros_like(z, dtype=torch.bool).index_put_(at, torch.tensor(True))
    z = z.masked_fill(~kept, -torch.inf)
    d = formulas.gradient(z, slope, TARGETS, g, g_entropy)
    one = formulas.gradient(z, slope, TARGETS, torch.ones_like(g))
    return full[at], formulas.statistics(z, TARGETS), d[at], one @ weight.double()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert (actual.double() - expected).abs().max() <= tolerance * max(1, expected.abs().max())


def of_head(support_kernels, tensors: HeadTensors, transform: LogitTransform, **options: bool):
    options = {"return_entropy": True, "return_slopes": True} | options
    with only_memory_of(*tensors, *ROWS):
        p = HeadInputs(*tensors, ROWS.places, transform)
        return support_kernels.head_rows(p, ROWS, **options)


# The widths are around the sizes of vectors and blocks. For width 300, the test lowers the maximum
# width of the Triton kernel to 128, so that the reference implementation is used.
@pairs(name=TRANSFORMS, width=[1, 15, 64, 131, 300], dtype=DTYPES)
def test_a_head(support_kernels, width, dtype, name, monkeypatch):
    """Check that logits, statistics and slopes agree with fp64.

    Sums of 16-bit inputs must be computed in fp32. Requesting slopes or the entropy must not change
    the bits of the other results.
    """
    if IS_INTERPRETER and width == 300:
        monkeypatch.setattr("grpo_fast.kernels.gpu.support.SUPPORT_COLUMNS", 128)
    transform, tensors = TRANSFORMS[name], tensors_of(width, dtype)
    found = of_head(support_kernels, tensors, transform)
    raw, stats, _, slopes = exact(*tensors, transform, torch.ones(R))
    assert_close(found.raw, raw)
    for got, want in zip(found.stats, stats, strict=True):
        assert_close(got, want, 4e-6)
    assert_close(found.slopes, slopes, 4e-6)
    plain = of_head(support_kernels, tensors, transform, return_slopes=False)
    assert plain.slopes is None and all(map(torch.equal, found.stats, plain.stats))
    bare = of_head(support_kernels, tensors, transform, return_entropy=False)
    assert bare.stats[2] is None and torch.equal(bare.slopes, found.slopes)
    assert all(map(torch.equal, (bare.raw, *bare.stats[:2]), (found.raw, *found.stats[:2])))


def test_a_certain_token_keeps_its_digits(support_kernels):
    """Check that logps near 0 are accurate, and that slopes are accurate for probabilities near 1.

    A set with one id must have a logp of 0 and a slope of exactly 0.
    """
    hidden, weight, _ = tensors_of(20)
    tensors = HeadTensors(hidden, weight * 0.01, torch.zeros(V).index_fill(0, TARGETS, 18.0))
    found = of_head(support_kernels, tensors, LogitTransform())
    _, stats, _, slopes = exact(*tensors, LogitTransform(), torch.ones(R))
    certain = stats[1].abs() < 1e-5
    assert certain.sum() >= 2
    assert ((found.stats[1] - stats[1]).abs() <= 1e-5 * stats[1].abs())[certain].all()
    assert (found.slopes - slopes).norm(dim=1).le(1e-4 * slopes.norm(dim=1))[certain].all()
    assert found.stats[1][0] == 0 and not found.slopes[0].any()


@pytest.mark.parametrize("has_entropy", [True, False], ids=["entropy", "logp"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_ragged_rows(kernels, transform, has_entropy):
    """Check that the row kernels accept rows of unequal length, stored one after another."""
    tensors, g = tensors_of(20), draw(R, seed=5)
    g_entropy = draw(R, seed=6) if has_entropy else None
    for x in (g, g_entropy):
        _ = x if x is None else x.index_fill_(0, torch.tensor(2), 0.0)
    exact_raw, stats, d, _ = exact(*tensors, transform, g, g_entropy)
    raw = exact_raw.float()
    with only_memory_of(raw, *ROWS):
        p = LogitRows(raw[None], ROWS.places, transform, ROWS.offsets)
        found = kernels.row_logps(p, return_entropy=has_entropy)
    for got, want in zip(found, stats, strict=True):
        assert got is None or (got - want).abs().max() <= 4e-6
    raw[ROWS.rows == 2] = math.nan  # its coefficient is 0, so its gradient is 0
    with only_memory_of(raw, *ROWS, g, g_entropy, *found):
        kernels.row_grad_(p, found, g, g_entropy)
    assert_close(raw, d)
    assert not raw[ROWS.rows == 2].any()


# ---- sums of selected rows


@pytest.mark.parametrize("width", [20, 1030])
def test_dh_from_d_logits(support_kernels, width):
    """Check that a row of dH is the sum of d·W over its token set, and exactly 0 where d is 0.

    If d is 0, a NaN in W must have no effect. A NaN in d must reach dH.
    """
    weight, d = tensors_of(width).weight, draw(len(ROWS.ids), seed=7)
    d[ROWS.ids == 5] = 0.0
    weight[5] = math.nan
    with only_memory_of(d, weight, *ROWS):
        found = support_kernels.head_hidden(d, weight, ROWS)
    terms = weight.nan_to_num().double()[ROWS.ids] * d.double()[:, None]
    assert_close(found, torch.zeros(R, width).double().index_add_(0, ROWS.rows, terms))
    d[1] = math.nan
    assert support_kernels.head_hidden(d, weight, ROWS)[1].isnan().all()


@pairs(dtype=DTYPES, width=[20, 1030], indexed=[True, False])
def test_dw(support_kernels, width, dtype, indexed):
    """Check that dW is correct for ids that occur often or never.

    If d is 0, NaN and inf in `hidden` must have no effect. With `add`, the result is added to the
    existing values. The result must be bitwise independent of the order of the programs.
    """
    count, hidden = 8 * 19, torch.cat([tensors_of(width, dtype).hidden] * 2)
    ids = torch.randint(V // 2, (count,), generator=torch.Generator().manual_seed(8))
    ids[::3] = 7
    index = INDEX.clone() if indexed else None
    rows = SupportRows(None, None, ids, torch.arange(0, count + 1, 19), None, index)
    d, at = draw(count, seed=9), rows.hidden_rows
    d[at == 5], d[at == 3] = 0.0, 0.0
    hidden[5], hidden[3] = math.nan, math.inf
    hidden = hidden if indexed else hidden[:8].contiguous()
    terms = hidden[at].nan_to_num(posinf=0.0).double() * d.double()[:, None]
    expected = torch.zeros(V, width).double().index_add_(0, ids, terms)
    before = draw(V, width, seed=8).to(dtype)
    call = partial(support_kernels.head_weight, d, hidden, rows)
    new = torch.full((V, width), math.nan, dtype=dtype)
    call(new, add=False)
    again, sums = torch.full_like(new, math.nan), before.clone()
    with reversed_programs():
        call(again, add=False)
    call(sums, add=True)
    assert torch.equal(new, again) and not new[V // 2 :].any()
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2e-6
    for found, want in ((new, expected), (sums, expected + before.double())):
        assert ((found - want).abs() <= 1.01 * rounding * want.abs() + 2e-6).all()


@pytest.mark.skipif(IS_INTERPRETER, reason="Triton adds a block of rows at once")
def test_terms_are_added_in_the_order_of_the_rows(support_kernels, monkeypatch):
    """Check that the terms of dW are added in the order of the rows.

    In fp32, 1 + 1e8 − 1e8 is 0 in this order, but 1 in the opposite order. The test lowers the
    block size of the torch implementation to one row.
    """
    monkeypatch.setattr(support, "BLOCK_ELEMENTS", 2)
    rows = SupportRows(None, None, torch.tensor([3, 3, 3]), torch.arange(4), torch.zeros(3).long())
    out = torch.full((6, 2), torch.nan)
    hidden = torch.tensor([[1.0, 2.0], [1e8, 2e8], [-1e8, -2e8]])
    support_kernels.head_weight(torch.ones(3), hidden, rows, out, add=False)
    assert not out.any()


def test_many_rows_may_have_one_id(support_kernels):
    """Check that dW is exact if all 700 rows have the same id, which takes several partial sums.

    All terms are 1, and fp32 adds small integers exactly.
    """
    ids, count = torch.full((700,), 40), 700
    rows = SupportRows(None, None, ids, torch.arange(count + 1), torch.zeros(count).long())
    out = torch.full((41, 70), torch.nan)
    support_kernels.head_weight(torch.ones(count), torch.ones(count, 70), rows, out, add=False)
    assert (out[40] == count).all() and not out[:40].any()


@pytest.mark.skipif(IS_INTERPRETER, reason="only torch and C++ search the targets")
@pytest.mark.parametrize("engine", ENGINES)
def test_where_targets_stand(engine):
    support_kernels, ids = route.kernel_module("support", engine), torch.tensor([5, 2, 7, 7, 2, 0])
    places = partial(support_kernels.target_places, ids, torch.tensor([0, 3, 6]))
    found, repeated = places(torch.tensor([7, 0]), 8)
    assert found.tolist() == [2, 2] and int(repeated) == -1
    assert places(torch.tensor([5, 5]), 8)[0].tolist() == [0, -1]
    ids[4] = 7
    assert int(places(torch.tensor([7, 0]), 8)[1]) == 7


def test_the_reference_is_taken_without_a_compiler(monkeypatch):
    route.kernel_module.cache_clear()
    monkeypatch.setattr(route.loader, "unavailable", lambda name="rows": "no compiler here")
    try:
        assert route.kernel_module("support", "cpu") is support
    finally:
        route.kernel_module.cache_clear()
