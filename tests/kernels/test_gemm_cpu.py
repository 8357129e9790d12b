"""Tests of the csrc matrix product: values in every layout, bit invariance, and when it is used."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm as gemm_cpu
from grpo_fast.kernels.cpu import loader as csrc_loader
from grpo_fast.kernels.head import products
from grpo_fast.kernels.types import AddedRows, add_rows_, scaled_rows, widened
from tests.kernels.formulas import torch_threads
from tests.pairs import pairs

REASON = csrc_loader.unavailable("gemm")
pytestmark = pytest.mark.skipif(
    REASON is not None, reason=f"no C++ kernels here: {(REASON or '').splitlines()[:1]}"
)
# Whether the bf16 product can also run with AMX tiles on this CPU.
HAS_TILES = bool({"avx512_bf16", "amx_bf16"} & set(csrc_loader.cpu_flags()))
KINDS = [(torch.float32, False), (torch.bfloat16, False)] + [(torch.bfloat16, True)] * HAS_TILES
# Sizes (M, N, K) that leave an incomplete last block in every dimension. The micro-kernel computes
# 6 rows (32 with AMX), panels have 16 or 64 columns, and slices of K have 256 words.
SHAPES = [
    (1, 1, 1), (5, 7, 3), (6, 64, 16), (13, 65, 17), (14, 70, 9), (100, 130, 700), (257, 33, 1025),
    (700, 20, 5), (33, 600, 511),
]  # fmt: skip


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear the cached choice of the matrix product before and after the test."""

    def clear() -> None:
        for cache in (gemm_cpu.unavailable, gemm_cpu.has_tiles, route.gemm_choice):
            cache.cache_clear()

    clear()
    yield
    clear()


def test_fp64_is_left_alone_whatever_the_name_of_fp32_means(fresh, monkeypatch):
    monkeypatch.setattr(torch, "float32", torch.float64)
    assert gemm_cpu.unavailable(torch.float64).endswith("not torch.float64")


def matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Return a random (rows, columns) matrix as a view of a larger matrix of NaN.

    A product that reads outside the view gets NaN. With `transposed`, the larger matrix stores the
    transpose.
    """
    stored = (columns, rows) if transposed else (rows, columns)
    x = torch.full((stored[0] + 2, stored[1] + 3), torch.nan, dtype=dtype)[1:-1, 1:-2]
    x.copy_(torch.randn(stored))
    return x.t() if transposed else x


def positive16(x: Tensor) -> Tensor:
    """Round x ≥ 0 to Positive16, an unsigned 16-bit float format with ten significant bits.

    The result has the layout of x (rows or columns contiguous), and is a view of a larger matrix.
    """
    stored = x if x.stride(1) == 1 else x.t()
    out = torch.full((stored.shape[0] + 2, stored.shape[1] + 3), -1, dtype=torch.int16)[1:-1, 1:-2]
    out.copy_(
        ((stored.contiguous().view(torch.int32) - (29 << 23) + 0x2000).clamp(min=0) >> 14).to(
            torch.int16
        )
    )
    return out if x.stride(1) == 1 else out.t()


def multiply(a: Tensor, b: Tensor, out: Tensor, *, tiles: bool = False, **options) -> Tensor:
    """Call `mm_` with or without AMX. By default, `mm_` uses AMX on every CPU that has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_cpu, "uses_tiles", lambda x: tiles)
        return gemm_cpu.mm_(a, b, out, **options)


@pairs(dtype__tiles=KINDS, out_dtype=[torch.float32, torch.bfloat16], shape=SHAPES)
def test_every_layout_gives_the_fp64_product(
    shape, out_dtype: torch.dtype, dtype: torch.dtype, tiles: bool
) -> None:
    torch.manual_seed(0)
    m, n, k = shape
    for a_transposed, b_transposed, add in itertools.product((False, True), repeat=3):
        a, b = matrix(m, k, dtype, a_transposed), matrix(k, n, dtype, b_transposed)
        start = torch.randn(m, n + 2).to(out_dtype)
        out = start.clone()
        multiply(a, b, out[:, 1:-1], add=add, tiles=tiles)
        before = start[:, 1:-1].double() * add
        truth = a.double() @ b.double() + before
        bound = 1e-6 * (a.double().abs() @ b.double().abs() + before.abs())
        # Rounding the result to bf16 adds a relative error of at most 2^-8.
        bound += 2**-8 * truth.abs() if out_dtype == torch.bfloat16 else 0
        assert ((out[:, 1:-1].double() - truth).abs() <= bound).all()
        assert torch.equal(out[:, [0, -1]], start[:, [0, -1]])  # other columns are untouched


@pytest.mark.parametrize(("dtype", "tiles"), KINDS)
def test_bits_depend_on_the_row_the_column_and_nothing_else(
    dtype: torch.dtype, tiles: bool
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(301, 777).to(dtype), torch.randn(777, 1111).to(dtype)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b, torch.empty(a.shape[0], b.shape[1]), tiles=tiles)

    results = []
    for count in (1, 2, 5):
        with torch_threads(count):
            results.append(product(a, b))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    some = (slice(1), slice(None)), (slice(7, 8), slice(1100, 1101)), (slice(3, 40), slice(65, 900))
    for rows, columns in some:
        assert torch.equal(product(a[rows], b[:, columns]), results[0][rows, columns])
    # Check that the layout of the operands in memory does not change the bits of the result.
    assert torch.equal(product(a.t().contiguous().t(), b.t().contiguous().t()), results[0])


@pytest.mark.parametrize(("dtype", "tiles"), KINDS)
def test_an_fp32_operand_beside_a_bf16_one_and_scaled(dtype: torch.dtype, tiles: bool) -> None:
    """Check that the product of an fp32 matrix a with a bf16 or fp32 matrix b is accurate.

    If a is transposed, also check the product in which each column of a is multiplied by a scale.
    """
    torch.manual_seed(0)
    bound = 1e-6 if dtype == torch.float32 else 2**-15
    for (m, n, k), is_transposed in itertools.product(SHAPES, (False, True)):
        a, plain = matrix(m, k, torch.float32, is_transposed), matrix(k, n, dtype, False)
        scales = torch.randn(k).index_fill(0, torch.tensor(0), 0.0)
        # Scales are only supported if b is not transposed.
        for by, b in ((None, plain), (scales, plain), (None, matrix(k, n, dtype, True))):
            if by is None or (is_transposed and not tiles):
                out = multiply(a, b, torch.empty(m, n), tiles=tiles, scales=by)
                wide = a.double() if by is None else a.double() * by.double()
                error = (out.double() - wide @ b.double()).abs()
                assert (error <= bound * (wide.abs() @ b.double().abs()) + 1e-12).all()


@pytest.mark.parametrize("tiles", [False] + [True] * HAS_TILES)
def test_ten_digits_beside_a_bf16_operand(tiles: bool) -> None:
    """Check that a Positive16 matrix gives the same bits as the same matrix rounded to bf16.

    Rows with dominant elements are excluded. The product compensates for the rounding of these
    elements, so its bits differ there.
    """
    torch.manual_seed(0)
    for m, n, k in SHAPES:
        a, b = matrix(m, k, torch.float32, False).abs(), matrix(k, n, torch.bfloat16, False)
        transposed, scales = positive16(a.t().contiguous().t()), torch.randn(k)
        a = widened(positive16(a))
        rounded = multiply(a.bfloat16(), b, torch.empty(m, n), tiles=tiles)
        for b_stored in (b, b.t().contiguous().t()):
            assert torch.equal(
                multiply(positive16(a), b_stored, torch.empty(m, n), tiles=tiles), rounded
            )
        for by in (None, scales):
            d = a if by is None else a * by
            out = multiply(transposed, b, torch.empty(m, n), tiles=tiles, scales=by)
            size = d.double().abs() @ b.double().abs()
            assert ((out.double() - d.double() @ b.double()).abs() <= 2**-8 * size).all()
            is_light = (d.square() < 0.06 * d.square().sum(1, keepdim=True)).all(1)
            expected = multiply(d.bfloat16(), b, torch.empty(m, n), tiles=tiles)
            assert torch.equal(out[is_light], expected[is_light])
            assert k < 500 or 4 * is_light.sum() > m


@pytest.mark.parametrize("tiles", [False] + [True] * HAS_TILES)
@pytest.mark.parametrize("count", [1, 10])
def test_elements_that_dominate_a_row_keep_their_digits(count: int, tiles: bool) -> None:
    """Check that the product corrects the bf16 rounding of elements that dominate their row.

    bf16 would round these elements from 1.006 to 1.0078. If 10 of them are equal, each has only a
    tenth of the row's sum of squares, and its rounding must still be corrected.
    """
    torch.manual_seed(0)
    m, n, k = 300, 150, 700
    a, b = 1e-4 * torch.rand(m, k), torch.randn(k, n).bfloat16()
    a.scatter_(1, torch.rand(m, k).argsort(1)[:, :count], 1.005859375)  # 1 + 3/512 has ten bits
    a *= torch.logspace(0, -3, m)[:, None]
    truth = widened(positive16(a)).double() @ b.double()
    error = []
    for stored in (a, a.t().contiguous().t()):  # only a transposed a is corrected
        out = multiply(positive16(stored), b, torch.empty(m, n), tiles=tiles)
        error.append(((out.double() - truth).norm(dim=1) / truth.norm(dim=1)).max())
    assert error[0] > 1e-3 and error[1] < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_on_top_are_added_before_the_result_is_rounded(dtype: torch.dtype) -> None:
    """Check that the additional rows are added before the result of a product is rounded.

    Rows with the same id are added in order, whatever the block sizes and the number of threads. A
    row with coefficient 0 is not added, even if it is NaN.
    """
    torch.manual_seed(0)
    m, n, k = 700, 1100, 40
    a, b, start = torch.randn(k, m).t(), torch.randn(k, n), torch.randn(m, n).to(dtype)
    ids = torch.cat([torch.tensor([0, 699, 5, 5, 5]), torch.randint(m, (35,))])
    values, coefficients = torch.randn(40, n), 2.0 ** torch.arange(-20, 20)
    coefficients[7], values[7] = 0, torch.nan
    expected = multiply(a, b, torch.empty(m, n))
    added = AddedRows(coefficients, values, ids=ids)
    add_rows_(expected, ids, scaled_rows(values, coefficients))
    assert expected.isfinite().all()
    if dtype == torch.float32:
        shuffled = torch.randperm(40)
        again = AddedRows(coefficients, values[shuffled], ids=ids, rows=shuffled.argsort())
        for rows in (added, again):
            assert torch.equal(gemm_cpu.mm_(a, b, start.clone(), added=rows), expected)
    out = gemm_cpu.mm_(a, b, start.clone(), add=True, added=added)
    rtol = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out, (start.float() + expected).to(dtype), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_result_are_scaled_before_rows_are_added(dtype: torch.dtype) -> None:
    """Check that the product for dH first scales each row of its result, and then adds a row of W.

    A scale of 0 must give zeros, even if the row is NaN.
    """
    torch.manual_seed(0)
    m, n, k = 700, 130, 40  # several blocks of rows
    a, b, scales = torch.randn(m, k), torch.randn(k, n), torch.randn(m)
    a[3], scales[3] = torch.nan, 0
    values, coefficients = torch.randn(9, n).to(dtype), torch.randn(m)
    rows = torch.randint(9, (m,))
    options = {"out_scales": scales, "added": AddedRows(coefficients, values, rows=rows)}
    out = gemm_cpu.mm_(a, b, torch.empty(m, n), **options)
    by = scales[:, None].double()
    true = torch.where(by == 0, 0, (a.double() @ b.double()) * by)
    true += coefficients[:, None].double() * values[rows].double()
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=1e-5)
    narrow = gemm_cpu.mm_(a, b, torch.empty(m, n, dtype=torch.bfloat16), **options)
    assert torch.equal(narrow, out.bfloat16())


@pytest.mark.parametrize("tiles", [False] + [True] * HAS_TILES)
def test_a_nan_stays_in_its_row_and_its_product(tiles: bool) -> None:
    """Check that a NaN stays in its row of a product, and does not leak into later products.

    All calls share the same scratch memory. It still contains the NaN after the first call.
    """
    a, b = torch.ones(40, 30), torch.ones(30, 70)
    a[17, 3] = torch.nan
    out = multiply(a, b, torch.empty(40, 70))
    assert out[17].isnan().all() and (out[torch.arange(40) != 17] == 30).all()
    layouts = (torch.float32, torch.bfloat16), (False, True), (False, True)
    for dtype, a_transposed, b_transposed in itertools.product(*layouts):
        for k, value in ((64, torch.nan), (33, 1.0)):
            a, b = matrix(40, k, dtype, a_transposed), matrix(k, 70, torch.bfloat16, b_transposed)
            out = multiply(a.fill_(value), b.fill_(value), torch.empty(40, 70), tiles=tiles)
        assert (out == 33).all()


def test_whose_product_is_used(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Check that the CPU's vendor, the dtype and GRPO_FAST_GEMM select the matrix product.

    By default, the head uses the csrc product, and so do a model's layers except on Intel CPUs.
    """
    has_fma, _, _ = torch.ops.grpo_fast_gemm.features()
    for choice, vendor, head, layer in [
        ("auto", "AuthenticAMD", has_fma, has_fma),
        ("auto", "GenuineIntel", has_fma, False),
        ("own", "GenuineIntel", has_fma, has_fma),
        ("vendor", "AuthenticAMD", False, False),
    ]:
        monkeypatch.setenv("GRPO_FAST_GEMM", choice)
        monkeypatch.setattr(csrc_loader, "cpu_vendor", lambda vendor=vendor: vendor)
        route.gemm_choice.cache_clear()
        x = torch.zeros(1)
        assert route.uses_csrc_gemm(x) is head, (choice, vendor)
        assert route.layers_use_csrc_gemm(x) is layer, (choice, vendor)
        assert not route.uses_csrc_gemm(x.double()) and not route.uses_csrc_gemm(x.half())
    monkeypatch.setenv("GRPO_FAST_GEMM", "mine")
    route.gemm_choice.cache_clear()
    with pytest.raises(ValueError, match="GRPO_FAST_GEMM: expected one of .*, got 'mine'"):
        route.uses_csrc_gemm(torch.zeros(1))


def test_a_wrong_bf16_product_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fresh: None, caplog
) -> None:
    """Check that the bf16 product is disabled, with one log line, if its self-check fails."""
    if gemm_cpu.unavailable(torch.bfloat16) is not None:
        pytest.skip(f"bf16 is widened here: {gemm_cpu.unavailable(torch.bfloat16)}")
    gemm_cpu.unavailable.cache_clear()
    operator = csrc_loader.operator

    def disturbed(*arguments: object) -> None:
        operator("gemm", "mm_")(*arguments)
        arguments[2].add_(0.01)  # type: ignore[attr-defined]

    monkeypatch.setattr(
        csrc_loader, "operator", lambda *x: disturbed if x[1] == "mm_" else operator(*x)
    )
    for _ in range(2):
        assert "its bf16 product is wrong" in str(gemm_cpu.unavailable(torch.bfloat16))
    assert len(caplog.records) == 1 and "it differs by" in caplog.text


def test_the_self_check_does_not_see_the_modes_of_the_first_call(fresh: None) -> None:
    """Check that autocast and other modes of the caller do not affect the product's self-check.

    The result of the self-check is cached, so it must also hold for later calls without these
    modes.
    """
    expected = gemm_cpu.unavailable(torch.bfloat16)
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.device("meta"), FakeTensorMode()):
        gemm_cpu.unavailable.cache_clear()
        with mode:
            assert gemm_cpu.unavailable(torch.bfloat16) == expected


def test_16_bit_products_are_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the products of a CPU without 16-bit products, which convert one or several blocks.

    The dW of a single chunk has 16 bits, because a whole fp32 dW would need twice the memory.
    """
    torch.manual_seed(0)
    h, weight, d = torch.randn(8, 20).half(), torch.randn(50, 20).half(), torch.randn(8, 50)
    exact = h.double() @ weight.double().t(), d.double() @ weight.double()
    for rows in (16, 1000):
        monkeypatch.setattr(products, "WIDEN_ROWS", rows)
        logits = torch.empty(8, 50)
        products.matmul_logits(h, weight, out=logits)
        found = logits.double(), products.matmul_d_hidden(d, weight).double()
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        d_weight = products.accumulate_outer(None, d, h, final=weight.dtype)
        torch.testing.assert_close(d_weight, (d.double().t() @ h.double()).half())
