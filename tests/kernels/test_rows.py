"""Tests of the row kernels against fp64 formulas.

They run in C++ and in Triton's interpreter. Some also run with the torch backend.
test_csrc.py runs the tests named *numerics* again with other instruction sets.
"""

import math
from functools import partial

import pytest
import torch

from grpo_fast.kernels import route
from grpo_fast.kernels.types import LogitRows, LogitTransform
from grpo_fast.objective.coefficients import RowInputs, row_coefficients
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from tests.kernels import formulas
from tests.kernels.formulas import only_memory_of
from tests.loss_cases import ENGINES, IS_INTERPRETER
from tests.pairs import pairs

# Row lengths to test. 1 and 2 are smaller than a vector. 127, 129 and 2051 leave an incomplete
# vector at the end. A row of 512 columns has one partial sum, and a row of 5000 columns has several
# blocks. 151936 is the size of a real vocabulary.
SIZES = [1, 127, 2051, 5000, *([] if IS_INTERPRETER else [2, 129, 512, 151936])]
ROWS = 5 if IS_INTERPRETER else 33
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRANSFORMS = {
    "plain": (1.0, None, 1.0), "temperature": (1.0, None, 0.7), "scale": (0.0625, None, 1.0),
    "negative_scale": (-1.0, None, 1.3), "softcap": (1.0, 30.0, 1.0), "all": (0.5, 20.0, 0.9),
}  # fmt: skip
# The kernels compute the loss of each token, but no mean over tokens. Losses that differ only in
# the mean share one kernel function, so test one loss for each function.
LOCAL = [x for x in OBJECTIVES if LossConfig(x, max_completion_length=8).is_token_local]
LEAVES = list({OBJECTIVES[name].function: name for name in LOCAL}.values())
TRANSFORM = LogitTransform()


@pytest.fixture(params=[engine for engine in ENGINES if engine.id != "torch"])
def rows(request):
    return route.rows_route(request.param, torch.empty(0)).kernels


def make_transform(name: str) -> LogitTransform:
    return LogitTransform(*TRANSFORMS[name])


def make_rows(count: int, columns: int, dtype=torch.float32):
    """Return random logits and target ids.

    The logits are a view of a larger buffer of NaN, with an odd row stride and an odd offset. The
    targets include the first, the last and the middle column.
    """
    logits = torch.full((count, columns + 3), math.nan, dtype=dtype)[:, 1 : columns + 1]
    logits.copy_(torch.randn(count, columns) * 4)
    targets = torch.randint(0, columns, (count,))
    targets[:3] = torch.tensor([0, columns - 1, columns // 2])[:count]
    return logits, targets


def check_statistics(stats, logits, targets, transform) -> None:
    bar = 3e-7 if IS_INTERPRETER else 2e-7
    for value, truth in zip(
        stats, formulas.statistics(formulas.final(logits, *transform)[0], targets), strict=True
    ):
        assert value.dtype == torch.float32 and value.shape == targets.shape
        assert (value - truth).abs().max() <= 2e-6 + bar * truth.abs().max()


def check_gradient(gradient, logits, targets, transform, g, ge) -> None:
    """Check the gradient of each row against fp64, in the L2 norm.

    The gradient is the sum of a logp term and an entropy term, which may cancel. The error is
    therefore compared with the sum of the norms of both terms. The limit also allows for the
    spacing between fp32 numbers that are as large as the logits.
    """
    ge = torch.zeros_like(g) if ge is None else ge
    z, slope = formulas.final(logits, *transform)
    terms = [formulas.gradient(z, slope, targets, *pair) for pair in ((g, 0 * ge), (0 * g, ge))]
    size = terms[0].norm(dim=1) + terms[1].norm(dim=1)
    error = (gradient.double() - terms[0] - terms[1]).norm(dim=1)
    bound = 1e-6 + 2e-7 * (z.abs().amax(1) + z.amax(1) - z.amin(1))
    # Triton computes log p + H as a difference of fp32 numbers that are as large as z, so the error
    # of the entropy term grows with z.
    least = 6e-8 * z.abs().amax(1) * ge.abs() if IS_INTERPRETER else 1e-15
    assert (error <= bound * size + least).all(), (error / size).max()


@pairs(columns=SIZES, transform_name=TRANSFORMS, dtype=DTYPES)
def test_numerics(rows, columns, transform_name, dtype) -> None:
    """Check that statistics and gradients of rows of logits agree with fp64.

    A 16-bit gradient must be the fp32 gradient, rounded once. No bit may change if the entropy is
    requested, or if its coefficients are 0. Memory outside the views must not be written.
    """
    count = 4 if columns > 10_000 else ROWS
    logits, targets = make_rows(count, columns, dtype)
    transform = make_transform(transform_name)
    of = partial(LogitRows, target_ids=targets, transform=transform)
    with only_memory_of(logits, targets):
        stats = rows.row_logps(of(logits), return_entropy=True)
    check_statistics(stats, logits, targets, transform)
    again = rows.row_logps(of(logits), return_entropy=False)
    assert again[2] is None and all(map(torch.equal, again[:2], stats))
    g, ge, wide = torch.randn(count), torch.randn(count), logits.float()
    for grad_entropy in (None, ge):
        given = stats, g, grad_entropy
        exact = rows.row_grad_(of(wide.clone()), *given)
        check_gradient(exact, logits, targets, transform, g, grad_entropy)
        out = torch.full((count, columns + 5), math.nan, dtype=dtype)
        with only_memory_of(logits, targets, *stats, g, grad_entropy, out):
            found = rows.row_grad_(of(logits), *given, out=out[:, 2:-3])
        assert torch.equal(found, exact.to(dtype)) and out[:, [0, 1, -3, -2, -1]].isnan().all()
    over = logits.clone()
    assert rows.row_grad_(of(over), *given) is over and torch.equal(over, found)
    zero = rows.row_grad_(of(wide.clone()), stats, g, torch.zeros(count))
    assert torch.equal(rows.row_grad_(of(wide.clone()), (*stats[:2], None), g, None), zero)


def test_numerics_store_rounds_like_torch(rows) -> None:
    """Check that gradients are rounded to 16 bits exactly as torch rounds them.

    The gradients cover 40 orders of magnitude, with subnormals and overflow. The rows end with an
    incomplete vector.
    """
    for dtype in DTYPES[1:]:
        logits = torch.linspace(-100.0, 0.0, 4099).repeat(6, 1).to(dtype)
        targets = torch.zeros(6, dtype=torch.int64)
        g = torch.tensor([1.0, -3.3, 1e5, 1e-4, 1e38, math.inf])
        stats = rows.row_logps(LogitRows(logits, targets, LogitTransform()), return_entropy=False)
        p = LogitRows(logits, targets, LogitTransform())
        exact = rows.row_grad_(p._replace(logits=logits.float()), stats, g, None)
        out = rows.row_grad_(p, stats, g, None, out=torch.empty(6, 4099, dtype=dtype))
        assert torch.equal(out.nan_to_num(7.0), exact.to(dtype).nan_to_num(7.0))


@pytest.mark.parametrize("transform_name", ["plain", "temperature", "negative_scale"])
def test_numerics_infinite_columns_are_absent(rows, transform_name: str) -> None:
    """Check that vocabulary columns at −inf have gradient 0 and do not affect the other columns.

    The other columns must have the same bits if the −inf is replaced by very small logits.
    """
    logits, targets = make_rows(6, 4096)
    transform = make_transform(transform_name)
    hole = -math.inf * math.copysign(1.0, transform.logit_scale)
    logits[:, ::3] = hole
    logits[0, :2048] = hole  # the first block has only -inf
    targets[:] = 4093
    stats = rows.row_logps(LogitRows(logits, targets, transform), return_entropy=True)
    check_statistics(stats, logits, targets, transform)
    given = stats, torch.randn(6), torch.randn(6)
    absent = torch.isinf(logits)
    gradient = rows.row_grad_(LogitRows(logits.clone(), targets, transform), *given)
    assert (gradient[absent] == 0).all() and gradient.isfinite().all()
    far = logits.masked_fill(absent, -3e4 * math.copysign(1.0, transform.logit_scale))
    assert torch.equal(gradient, rows.row_grad_(LogitRows(far, targets, transform), *given))


@pytest.mark.parametrize("gap", [0.1, 5.0, 14.0, 16.0, 25.0])
@pytest.mark.parametrize("rows", ENGINES, indirect=True)
def test_numerics_confident_tokens(rows, gap: float) -> None:
    """Check the gradient of the target's logit, 1 − p, for target probabilities p close to 1.

    It must be accurate, and the logp must never exceed 0.
    """
    logits, every = torch.full((3, 1000), 3.0), torch.arange(3)
    targets = torch.tensor([0, 700, 999])
    logits[every, targets] += gap + math.log(999)
    stats = rows.row_logps(LogitRows(logits, targets, LogitTransform()), return_entropy=False)
    truth = formulas.statistics(logits.double(), targets)[1]
    assert (stats[1] <= 0).all()
    torch.testing.assert_close(stats[1].double(), truth, rtol=1e-6, atol=0)
    rest = -torch.expm1(truth)
    p = LogitRows(logits.clone(), targets, LogitTransform())
    gradient = rows.row_grad_(p, stats, torch.ones(3), None)
    torch.testing.assert_close(gradient[every, targets].double(), rest, rtol=1e-6, atol=0)
    assert gradient.double().sum(1).abs().max() <= 4e-6 * rest.max()


def test_numerics_large_offsets_and_ranges(rows) -> None:
    """Check that adding 4096 to all logits changes no logp, and that a 1e4 logit is exact."""
    logits, targets = make_rows(4, 3000)
    logits = (logits * 1024).round() / 1024  # makes adding 4096 exact
    plain = rows.row_logps(LogitRows(logits, targets, LogitTransform()), return_entropy=True)
    moved = rows.row_logps(
        LogitRows(logits + 4096.0, targets, LogitTransform()), return_entropy=True
    )
    torch.testing.assert_close(moved[1:], plain[1:], rtol=0, atol=2e-6)
    logits[:, 5] = 1e4
    targets[:] = 5
    lse, logps, entropy = rows.row_logps(
        LogitRows(logits, targets, LogitTransform()), return_entropy=True
    )
    assert torch.equal(lse, torch.full((4,), 1e4)) and (logps == 0).all() and (entropy == 0).all()


def test_numerics_of_negligible_probabilities(rows) -> None:
    """Check that probabilities below 2^-98 give 0 in C++, and that larger ones stay accurate.

    Products with smaller numbers are denormal, which made a benchmark eight times as slow.
    """
    logits = torch.linspace(-120.0, 0.0, 4099).repeat(2, 1)
    targets = torch.tensor([4098, 7])
    stats = rows.row_logps(LogitRows(logits, targets, LogitTransform()), return_entropy=False)
    p = LogitRows(logits.clone(), targets, LogitTransform())
    others = torch.ones(2, 4099, dtype=torch.bool).scatter(1, targets[:, None], False)
    found = rows.row_grad_(p, stats, torch.tensor([1.0, -3.0]), None).abs()[others].double()
    p = logits.double().softmax(1)
    truth = (p * torch.tensor([[1.0], [3.0]]))[others]
    is_kept = p[others] > 1.001 * 2.0**-98
    torch.testing.assert_close(found[is_kept], truth[is_kept], rtol=2e-5, atol=0)
    # Allow for the rounding of denormal numbers, which only Triton returns.
    assert (found[~is_kept] <= 1.001 * truth[~is_kept] + 2.0**-147).all()
    if not IS_INTERPRETER:
        assert (found[p[others] < 0.999 * 2.0**-98] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_zero_rows_are_exact_zeros(rows, dtype: torch.dtype, with_entropy: bool) -> None:
    """Check that rows with coefficients of 0 have gradients of exactly 0.

    The logits of such rows may be NaN, and their targets may be invalid.
    """
    logits, targets = make_rows(9, 1000)
    logits[[1, 8]] = math.nan  # row 8 has a valid target
    logits[3] = math.inf
    logits[5] = -math.inf
    targets[[1, 3, 5]] = torch.tensor([-100, 10**12, -1])
    logits = logits.to(dtype)
    stats = rows.row_logps(LogitRows(logits, targets, LogitTransform()), return_entropy=True)
    assert stats[1][8].isnan() and stats[1][[0, 2, 4, 6, 7]].isfinite().all()
    g = torch.tensor([1.0, 0.0, 1.0, -0.0, 1.0, 0.0, 0.0, 1.0, -0.0])
    ge = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]) if with_entropy else None
    out = torch.full_like(logits, math.nan)
    rows.row_grad_(LogitRows(logits, targets, LogitTransform()), stats, g, ge, out=out)
    assert out.isfinite().all() and (out[[1, 3, 5, 8]] == 0).all()
    assert (out[6] == 0).all() != with_entropy
    assert logits[1].isnan().all()  # with `out`, the input is unchanged


# ---- row_loss_. tests/loss/test_loss_parity.py checks its values with every loss and option


def make_loss(count: int, columns: int) -> tuple:
    """Return random logits, target ids and `RowInputs` for `row_loss_`."""
    logits, targets = torch.randn(count, columns) * 3, torch.randint(0, columns, (count,))
    logps = torch.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
    terms = RowInputs(
        advantages=torch.randn(count), policy_weights=torch.rand(count) + 0.1,
        kl_weights=torch.rand(count) + 0.1, old_logps=logps - 0.4 * torch.randn(count),
        ref_logps=logps + torch.randn(count), grad_entropy=torch.randn(count),
    )  # fmt: skip
    return logits, targets, terms


def call(rows, logits, targets, terms, config, transform=TRANSFORM) -> tuple:
    """Call `row_loss_`, and return its RowLoss and the gradient of the logits."""
    out = torch.full_like(logits, math.nan)
    p = LogitRows(logits, targets, transform)
    return_entropy = terms.grad_entropy is not None
    with only_memory_of(logits, out, targets, *terms):
        return rows.row_loss_(p, out, terms, config, return_entropy=return_entropy), out


@pytest.mark.parametrize("transform_name", ["plain", "negative_scale", "all"])
@pytest.mark.parametrize("rows", ENGINES, indirect=True)
def test_a_row_depends_on_itself_only(rows, transform_name: str) -> None:
    """Check that the result of a row depends only on this row, bit for bit.

    The test changes the order of the rows, their neighbours, the number of threads and the order of
    the programs.
    """
    logits, targets, terms = make_loss(ROWS, 4500)
    config, transform = LossConfig("dapo", beta=0.1), make_transform(transform_name)

    def run(index, threads: int = 1) -> list[torch.Tensor]:
        part = logits[index], targets[index], terms.map(lambda x: x[index])
        with formulas.torch_threads(threads):
            result, d = call(rows, *part, config, transform)
        return [*result[:5], d]

    whole, order = run(slice(None)), torch.randperm(ROWS)
    with formulas.reversed_programs():
        assert all(map(torch.equal, run(slice(None), 5), whole))
    for index in (order, slice(2, 4), slice(ROWS - 1, ROWS)):
        assert all(torch.equal(part, every[index]) for part, every in zip(run(index), whole))  # noqa: B905


@pytest.mark.parametrize("loss_type", LEAVES)
def test_rows_that_do_not_count_are_inert(rows, loss_type: str) -> None:
    """Check that a row without a target has outputs of 0, even if its inputs are NaN.

    The results of all other rows must not change by a bit.
    """
    has_reference = OBJECTIVES[loss_type].reference
    config = LossConfig(loss_type, beta=0.3, max_completion_length=8, kl_times_ratio=has_reference)
    logits, targets, terms = make_loss(8, 131)
    clean, d_clean = call(rows, logits, targets, terms, config)
    dead, live = torch.tensor([1, 4, 6]), torch.tensor([0, 2, 3, 5, 7])
    bad_ids = targets.index_copy(0, dead, torch.tensor([-100, 131, 2**40]))
    bad = terms._replace(
        **{name: getattr(terms, name).index_fill(0, dead, math.nan)
           for name in ("advantages", "old_logps", "ref_logps")}
    )  # fmt: skip
    # The weights of a row without a target may be zero or nonzero, so test both.
    for names in ((), ("policy_weights", "kl_weights", "grad_entropy")):
        bad = bad._replace(**{name: getattr(terms, name).index_fill(0, dead, 0) for name in names})
        result, d = call(rows, logits.index_fill(0, dead, math.nan), bad_ids, bad, config)
        for value, expected in ((d, d_clean), (result.losses, clean.losses),
                                (result.grad_logps, clean.grad_logps)):  # fmt: skip
            assert (value[dead] == 0).all() and torch.equal(value[live], expected[live])
    # A weight of 0 must remove a NaN in the term that it multiplies, but not a NaN in another term.
    terms.policy_weights[2], terms.advantages[2] = 0.0, math.nan
    terms.kl_weights[3], terms.ref_logps[3] = 0.0, math.nan
    result, d = call(rows, logits, targets, terms, config)
    assert d.isfinite().all() and result.losses.isfinite().all()
    assert result.losses[3] != 0 and (result.losses[2] != 0 or not has_reference)


def test_a_boundary_is_on_the_side_that_the_torch_reader_says(rows) -> None:
    """Check that kernels and torch agree on which tokens are clipped (ratio beyond 1±ε).

    They may disagree only if the ratio is within two ulps of the bound.
    """
    config, count = LossConfig("grpo", epsilon_low=0.2, epsilon_high=0.2), 20 * ROWS
    logits, targets, _ = make_loss(count, 3)
    p = LogitRows(logits, targets, TRANSFORM)
    logps = rows.row_logps(p, return_entropy=False)[1]
    bound = torch.where(torch.arange(count) % 2 == 0, math.log(1.2), math.log(0.8))
    old = logps - bound * (1 + torch.linspace(-1e-5, 1e-5, count))
    advantages = torch.where(torch.arange(count) % 4 < 2, 1.0, -1.0)
    terms = RowInputs(advantages, torch.ones(count), old_logps=old)
    result, _ = call(rows, logits, targets, terms, config)
    _, expected = row_coefficients(logps, terms, config)
    differ = (result.grad_logps == 0) != (expected == 0)
    ratio = torch.exp((logps - old).double())
    assert (differ & ((ratio - bound.double().exp()).abs() > 2.4e-7)).sum() == 0
    assert differ.float().mean() < 0.05 and 0.1 < (expected == 0).float().mean() < 0.9
