"""Tests of the head kernels, which compute logps and exponentials from hidden states.

They check fp64 values, bit invariance and unusual rows. This file runs the C++ kernels, and
test_triton_interpreter.py runs the Triton kernels.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import loader as csrc_loader
from grpo_fast.kernels.cpu import rows as linear_cpu
from grpo_fast.kernels.types import POSITIVE16, Exponentials, HeadInputs, LogitTransform, widened
from tests.kernels import formulas
from tests.kernels.formulas import only_memory_of, reversed_programs, torch_threads
from tests.loss_cases import IS_INTERPRETER
from tests.pairs import pairs

REASON = csrc_loader.unavailable("linear") or csrc_loader.unavailable("gemm")
NO_CPP = pytest.mark.skipif(REASON is not None, reason=f"no C++ kernels here: {REASON}")
if IS_INTERPRETER:
    from grpo_fast.kernels.gpu import gradients, linear

    def units_of(found: Exponentials, transform: LogitTransform) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(found.stats[0]))
        return gradients.times(ones, found, transform, len(ones))

    head_kernels = SimpleNamespace(
        logps=linear.head_logps, weights=linear.head_exponentials, units=units_of
    )
    HEAD_KERNELS = [pytest.param(head_kernels, id="triton")]
else:
    head_kernels = SimpleNamespace(
        logps=linear_cpu.head_logps, weights=linear_cpu.head_exponentials,
        units=lambda found, transform: found[1:3],
    )  # fmt: skip
    HEAD_KERNELS = [pytest.param(head_kernels, id="cpu", marks=[NO_CPP])]
# Dtype in which the exponentials are stored, and the relative error of rounding to this dtype.
STORED, ROUNDING = (torch.bfloat16, 2.0**-8) if IS_INTERPRETER else (torch.float32, 0.0)
DTYPES = [torch.bfloat16] if IS_INTERPRETER else [torch.float32, torch.bfloat16]
T = 37
# Each shape is (rows, hidden size, vocabulary size). A tile has 64 rows, so the cases have fewer
# rows than a tile, exactly one tile of rows, and more. 1030 rows are more than the 1024 rows of a
# group of tiles. Most of the other sizes leave an incomplete last tile, vector or slice.
SHAPES = [(1, 1, 1), (5, 33, 127), (65, 40, 257), (T, 48, 1031)]
SHAPES += [] if IS_INTERPRETER else [(3, 17, 2), (64, 64, 129), (1030, 8, 300)]
TRANSFORMS = {
    "plain": LogitTransform(), "temperature": LogitTransform(1.3, None, 0.7),
    "softcap": LogitTransform(-0.9, 4.0, 1.1),
}  # fmt: skip


@pytest.fixture(params=HEAD_KERNELS)
def head(request):
    return request.param


def problem(rows: int, width: int, vocab: int, dtype=torch.bfloat16) -> tuple[Tensor, ...]:
    """Return hidden, weight, bias and target ids, scaled for raw logits of about 2."""
    g = torch.Generator().manual_seed(rows + width + vocab)
    hidden, weight = torch.randn(rows, width, generator=g), torch.randn(vocab, width, generator=g)
    bias, weight = torch.randn(vocab, generator=g), weight * 2 / width**0.5
    ids = torch.randint(vocab, (rows,), generator=g)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), ids


def raw_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())


def weigh(head, hidden, weight, bias, ids, transform, **options) -> tuple:
    """Call `head.weights`, and check that it writes only to its output.

    The output is a view of a larger buffer of NaN. The rest of the buffer must stay NaN.

    Returns:
        The statistics, the factors of the gradient (2, T), and the exponentials (T, V).
    """
    rows, vocab = len(hidden), len(weight)
    buffer = torch.full((rows, -(-vocab // 8) * 8 + 8), math.nan, dtype=STORED)
    known = options.get("known") or ()
    with only_memory_of(hidden, weight, bias, ids, buffer, *known):
        found = head.weights(
            HeadInputs(hidden, weight, bias, ids, transform), buffer[:, :vocab], **options
        )
    assert buffer[:, vocab:].isnan().all()
    return found.stats, torch.stack(head.units(found, transform)), buffer[:, :vocab]


def d_logits(out: Tensor, units: Tensor, ids: Tensor, g: Tensor) -> Tensor:
    by_row, by_target = (torch.where(g == 0, 0.0, g * x) for x in units)
    d = torch.where((g == 0)[:, None], 0.0, by_row[:, None] * widened(out))
    return d.scatter_add(1, ids[:, None], by_target[:, None])


def check_gradient(out, units, hidden, weight, bias, ids, transform) -> None:
    """Check the gradient of the logits against fp64, for each element and in the L2 norm.

    The limit allows one rounding of each stored exponential, and the fp32 error of the logit. No
    rounding is allowed in the column of the target, where no exponential is stored.
    """
    g = torch.linspace(-1, 1, len(ids) + 1)[1:]
    z, slope = formulas.final(raw_of(hidden, weight, bias), *transform)
    expected = formulas.gradient(z, slope, ids, g)
    assert out.isfinite().all() and (out.gather(1, ids[:, None]) == 0).all()
    rounding = torch.full_like(expected, ROUNDING).scatter(1, ids[:, None], 0.0)
    error = d_logits(out, units, ids, g).double() - expected
    assert (error.abs() <= (rounding + 2e-5) * expected.abs() + 1e-30).all()
    assert error.norm() <= (ROUNDING + 3e-6) * expected.norm() + 1e-9


@pairs(shape=SHAPES, name=TRANSFORMS, dtype=[torch.float32, torch.bfloat16])
def test_values_against_fp64(head, shape, name, dtype) -> None:
    """Check that lse, logps and entropy agree with fp64.

    Their bits must not change if the entropy is requested, or if logits or exponentials are stored.
    """
    transform = TRANSFORMS[name]
    hidden, weight, bias, ids = problem(*shape, dtype)
    bias = None if name == "plain" else bias
    given, rows, vocab = (hidden, weight, bias, ids, transform), shape[0], shape[2]
    raw = raw_of(hidden, weight, bias)
    stats = head.logps(HeadInputs(*given), return_entropy=True)
    for found, wanted in zip(
        stats, formulas.statistics(formulas.final(raw, *transform)[0], ids), strict=True
    ):
        assert found.dtype == torch.float32 and (found - wanted).abs().max() <= 1e-5
    bare = head.logps(HeadInputs(*given), return_entropy=False)
    assert bare[2] is None and all(map(torch.equal, bare[:2], stats))
    for store in {torch.float32, dtype} if IS_INTERPRETER else {torch.float32}:
        wide = torch.full((rows, vocab + 3), math.nan, dtype=store)
        out = wide[:, 1 : vocab + 1] if IS_INTERPRETER else torch.empty(rows, vocab)
        stored = head.logps(HeadInputs(*given), return_entropy=True, logits_out=out)
        assert all(map(torch.equal, stored, stats))
        bar = 2e-6 if store == torch.float32 else 2.0**-8
        least = 3e-6 if IS_INTERPRETER else 1e-5
        assert ((out - raw).abs() <= bar * raw.abs() + least).all()
    if dtype not in DTYPES:
        return
    same, units, out = weigh(head, *given, return_entropy=True)
    assert all(map(torch.equal, same, stats))
    check_gradient(out, units, *given)
    bare, _, again = weigh(head, *given)
    assert bare[2] is None and torch.equal(again, out)
    # Half of the rows, in reverse order and with known statistics, must get the same bits.
    index = torch.arange(rows).flip(0)[: max(rows // 2, 1)]
    part = hidden[index], weight, bias, ids[index], transform
    _, part_units, again = weigh(head, *part, known=tuple(x[index] for x in stats))
    assert torch.equal(again, out[index]) and torch.equal(part_units, units[:, index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_itself_only(head, dtype) -> None:
    """Check that the result of a row depends only on this row, bit for bit.

    The test changes strides, the number of threads, the order of the programs and the other rows.
    One of the other rows becomes NaN.
    """
    hidden, weight, bias, ids = problem(70, 33, 300, dtype)
    transform, order = LogitTransform(1.0, 15.0, 0.7), torch.randperm(70)

    def run(rows: slice | Tensor, threads: int = 1, strided: bool = False) -> list[Tensor]:
        h = hidden[rows].T.contiguous().T if strided else hidden[rows]
        given = h, weight, bias, ids[rows], transform
        with torch_threads(threads):
            stats, units, out = weigh(head, *given, return_entropy=True)
        return [out, *stats, *units]

    whole = run(slice(None))
    with reversed_programs():
        assert all(map(torch.equal, run(slice(None), 3, strided=True), whole))
    for rows, threads in [(slice(5, 6), 1), (slice(60, 70), 2), (order, 2)]:
        assert all(torch.equal(x, y[rows]) for x, y in zip(run(rows, threads), whole, strict=True))
    hidden[3, 2], others = math.nan, torch.arange(70) != 3
    spoiled = run(slice(None))
    assert spoiled[2][3].isnan()
    assert all(torch.equal(x[others], y[others]) for x, y in zip(spoiled, whole, strict=True))


@pytest.mark.parametrize("softcap", [None, 500.0])
@pytest.mark.parametrize("nats", [19.9, 20.1, 90.0, 200.0, 1000.0])
def test_targets_far_below_the_rest(head, nats: float, softcap: float | None) -> None:
    """Check that exponentials are finite and accurate if the target of a row is very unlikely.

    Exponentials are usually relative to the logit of the target. In these rows, they must be
    relative to the lse. Gradients and statistics must agree with fp64, and the other rows must keep
    their bits.
    """
    vocab, ids = 300, torch.arange(T) % 300
    weight, hidden = torch.zeros(vocab, 8), torch.zeros(T, 8)
    weight[:, 0] = torch.linspace(-1, 1, vocab)
    hidden[:, :2] = 1.0
    weight[ids[3::2], 1] = -nats  # in every second row
    tensors = hidden.bfloat16(), weight.bfloat16(), None, ids
    transform = LogitTransform(1.0, softcap, 1.0)
    stats, units, out = weigh(head, *tensors, transform)
    z, _ = formulas.final(raw_of(*tensors[:3]), *transform)
    logps = formulas.statistics(z, ids)[1]
    assert logps.min() < -0.4 * nats and (out.abs() < 2.0**70).all()
    torch.testing.assert_close(stats[1].double(), logps, rtol=1e-6, atol=1e-5)
    check_gradient(out, units, *tensors, transform)
    few = torch.tensor([2, 5])
    part = tensors[0][few], tensors[1], None, ids[few], transform
    assert torch.equal(weigh(head, *part)[2], out[few])
    known = stats[0], stats[1], None
    assert torch.equal(weigh(head, *tensors, transform, known=known)[2], out)


def test_confident_tokens(head) -> None:
    """Check that 1 − p is accurate for target probabilities p of up to 1 − 1e-7.

    If logp were computed as z[target] − lse, 1 − p would have no correct digit.
    """
    margins = torch.linspace(5, 16, 12)
    hidden = torch.stack([margins, torch.full_like(margins, 2.0)], 1).bfloat16()
    weight, ids = torch.zeros(64, 2), torch.full((12,), 9)
    weight[:, 1] = torch.linspace(0.5, 1.5, 64)
    weight[9] = torch.tensor([1.0, 1.0])
    weight = weight.bfloat16()
    stats, units, _ = weigh(head, hidden, weight, None, ids, LogitTransform())
    logps = formulas.statistics(raw_of(hidden, weight, None), ids)[1]
    bar = 4e-6 if IS_INTERPRETER else 1e-5
    assert ((stats[1] - logps).abs() <= bar * logps.abs()).all()
    assert ((units[1] + torch.expm1(logps)).abs() <= bar * torch.expm1(logps).abs()).all()


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(1.0, 30.0, 1.0)], ids=["plain", "softcap"]
)
def test_a_bad_row_shows_and_stays_inert_without_a_coefficient(
    head, transform: LogitTransform
) -> None:
    hidden, weight, bias, ids = problem(T, 48, 200)
    _, clean_units, clean = weigh(head, hidden, weight, bias, ids, transform, return_entropy=True)
    others = torch.arange(T) != 3
    for column, value in itertools.product([0, 47], [math.nan, math.inf]):
        bad = hidden.clone()
        bad[3, column] = value
        stats, units, out = weigh(head, bad, weight, bias, ids, transform, return_entropy=True)
        # A soft cap makes all logits finite, even if a hidden state of the row is infinite.
        z, _ = formulas.final(raw_of(bad, weight, bias), *transform)
        expected = formulas.statistics(z, ids)[1]
        assert torch.equal(stats[1].isnan(), expected.isnan()) and expected[others].isfinite().all()
        assert expected[3].isnan() or value == math.inf and transform.softcap is not None
        assert units[:, 3].isfinite().all() != expected[3].isnan()
        assert all(x[others].isfinite().all() for x in stats)
        assert torch.equal(units[:, others], clean_units[:, others])
        assert out.isfinite().all() and torch.equal(out[others], clean[others])
        assert d_logits(out, units, ids, others.float()).isfinite().all()


@pytest.mark.parametrize("level", [-300.0, 0.0, 300.0])
def test_a_row_without_a_target(head, level: float) -> None:
    """Check that the lse is correct for a row without a target.

    The kernels usually compute exponentials relative to the logit of the target, which is missing
    here.
    """
    hidden, weight, bias, ids = problem(T, 48, 700, torch.float32)
    ids[3], ids[5] = -100, 700
    bias = bias + level
    lse, logps, _ = head.logps(
        HeadInputs(hidden, weight, bias, ids, LogitTransform()), return_entropy=False
    )
    z = raw_of(hidden, weight, bias)
    torch.testing.assert_close(lse.double(), z.logsumexp(1), rtol=1e-6, atol=2e-6)
    some = (ids >= 0) & (ids < 700)
    exact = formulas.statistics(z[some], ids[some])[1]
    torch.testing.assert_close(logps[some].double(), exact, rtol=0, atol=1e-6 * abs(level) + 1e-5)
    assert IS_INTERPRETER or logps[~some].isnan().all()


def test_columns_at_minus_infinity_count_nothing(head) -> None:
    hidden, weight, _, ids = problem(T, 48, 700)
    ids = torch.where((ids >= 256) & (ids < 512), ids - 256, ids)
    bias = torch.zeros(700)
    closed = torch.arange(700) % 3 == 0
    closed[ids] = False
    bias[closed] = bias[256:512] = -math.inf  # columns 256 to 511 are one slice
    bias, transform = bias.bfloat16(), LogitTransform()
    stats, units, out = weigh(head, hidden, weight, bias, ids, transform)
    z = raw_of(hidden, weight, bias)
    torch.testing.assert_close(stats[0].double(), z.logsumexp(1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        stats[1].double(), formulas.statistics(z, ids)[1], rtol=1e-6, atol=1e-5
    )
    check_gradient(out, units, hidden, weight, bias, ids, transform)
    assert (out[:, bias == -math.inf] == 0).all()
    ids[3] = -100  # without a target, each slice subtracts its maximum instead
    lse = head.logps(HeadInputs(hidden, weight, bias, ids, transform), return_entropy=False)[0]
    torch.testing.assert_close(lse.double(), z.logsumexp(1), rtol=1e-6, atol=1e-5)


# ---- CPU kernels only


@NO_CPP
@pairs(name=TRANSFORMS, V=[2, 257, 1031], is_known=[False, True], spread=[1, 8])
def test_exponentials_in_16_bits(spread: float, is_known: bool, V: int, name: str) -> None:
    """Check that exponentials in 16 bits have ten significant bits.

    Only exponentials above 1/16 of their row's sum are also returned in fp32. Some rows have an
    unlikely target, because the kernels compute such rows twice.
    """
    transform = TRANSFORMS[name]
    hidden, weight, _, ids = problem(T, 48, V)
    hidden, ids[::5] = hidden * spread, (hidden[::5].float() @ weight.float().t()).argmin(1)
    wide, narrow = torch.empty(T, V), torch.full((T, V + 3), -1, dtype=POSITIVE16)
    given = HeadInputs(hidden, weight, None, ids, transform)
    known = linear_cpu.head_logps(given, return_entropy=False) if is_known else None
    stats, *units, nothing, _, _ = linear_cpu.head_exponentials(given, wide, known=known)
    same, *same_units, dominant, _, _ = linear_cpu.head_exponentials(
        given, narrow[:, :V], known=known
    )
    assert nothing is None and (narrow[:, V:] == -1).all()
    assert all(map(torch.equal, (*stats[:2], *units), (*same[:2], *same_units)))
    assert (wide[wide > 0] >= 2.0**-98).all() and (spread == 1 or V == 2 or (wide == 0).sum() > T)
    bits = (wide.view(torch.int32) - (29 << 23) + 0x2000).clamp(min=0) >> 14
    assert torch.equal(narrow[:, :V].to(torch.int32) & 0xFFFF, bits)
    back = widened(narrow[:, :V])
    assert ((back - wide).abs() <= 2**-10 * wide + 2.0**-98).all() and not back[bits == 0].any()
    p = formulas.final(raw_of(hidden, weight, None), *transform)[0].softmax(1)
    p = p.scatter(1, ids[:, None], 0.0)
    share, places = p / p.sum(1, keepdim=True), (dominant.rows, dominant.columns)
    is_dominant = torch.zeros(T, V, dtype=torch.bool).index_put_(places, torch.tensor(True))
    assert is_dominant[share > 1.001 / 16].all() and not is_dominant[share < 0.999 / 16].any()
    assert is_dominant.any(1).sum() > (5 if spread == 1 else 30) or name == "softcap"
    assert torch.equal(dominant.values, wide[places])
    assert ((dominant.rows * V + dominant.columns).diff() > 0).all()


@NO_CPP
@pytest.mark.parametrize("nats", [90.0, 150.0, 300.0])
@pytest.mark.parametrize("softcap", [None, 500.0])
def test_columns_far_below_the_target_weigh_nothing(nats: float, softcap: float | None) -> None:
    V, ids = 300, torch.arange(T)
    hidden, weight, out = torch.ones(T, 1), torch.zeros(V, 1), torch.full((T, V), math.nan)
    weight[ids, 0] = nats
    transform = LogitTransform(1.0, softcap, 1.0)
    linear_cpu.head_exponentials(HeadInputs(hidden, weight, None, ids, transform), out)
    bent = 0 if softcap is None else math.tanh(nats / softcap)
    torch.testing.assert_close(out[:, :T], (1 - bent**2) * (1 - torch.eye(T)), rtol=1e-4, atol=0)
    below = math.exp(-nats if softcap is None else -softcap * bent)
    torch.testing.assert_close(out[:, T:], torch.full((T, V - T), below), rtol=1e-3, atol=1e-38)


@NO_CPP
def test_which_heads_take_it(monkeypatch):
    """Check that these kernels need at least 2048 ids and the csrc product."""
    monkeypatch.setattr(route, "uses_csrc_gemm", lambda x: x.dtype == torch.float32)
    for columns, dtype in ((2048, torch.float32), (2047, torch.float32), (2048, torch.bfloat16)):
        found = route.head_route("cpu", torch.empty(columns, 1, dtype=dtype)).kernels.head_logps
        assert (found is not None) == (columns == 2048 and dtype == torch.float32)
