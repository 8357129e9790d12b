"""Tests of the row kernels against fp64 formulas and the loss oracle.

They run in C++ and in Triton's interpreter. The tests of the loss also run with the torch backend.
test_csrc.py runs the tests named *numerics* again with other instruction sets.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from grpo_fast.kernels import route
from grpo_fast.kernels.types import LogitRows, LogitTransform
from grpo_fast.objective.coefficients import RowTerms, row_coefficients
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES
from tests.kernels import formulas
from tests.kernels.formulas import only_memory_of
from tests.loss_cases import ENGINES, IS_INTERPRETER
from tests.pairs import pairs

# Row lengths to test. 1 and 2 are smaller than a vector. 127, 129 and 2051 leave an incomplete
# vector at the end. A row of 512 columns has one partial sum, and a row of 5000 columns has several
# blocks. 151936 is the size of a real vocabulary.
SIZES = [1, 127, 2051, 5000, *([] if IS_INTERPRETER else [2, 129, 512, 151936])]
ROWS, MANY = (5, 12) if IS_INTERPRETER else (33, 64)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRANSFORMS = {
    "plain": (1.0, None, 1.0), "temperature": (1.0, None, 0.7), "scale": (0.0625, None, 1.0),
    "negative_scale": (-1.0, None, 1.3), "softcap": (1.0, 30.0, 1.0), "all": (0.5, 20.0, 0.9),
}  # fmt: skip
# The kernels compute the loss of each token, but no mean over tokens. Losses that differ only in
# the mean share one kernel function, so test one loss for each function.
LOCAL = [x for x in OBJECTIVES if LossConfig(x, max_completion_length=8).is_token_local]
LEAVES = list({OBJECTIVES[name].function: name for name in LOCAL}.values())
OPTIONS: dict[str, dict] = {
    "grpo": {"epsilon_low": 0.1, "epsilon_high": 0.3, "delta": 1.5},
    "dual_clip": {"dual_clip_c": 1.3},
    "cispo": {"epsilon_high": 1.2},
    "dppo_tv": {"epsilon_low": 0.02, "epsilon_high": 0.01},
    "dppo_kl": {"epsilon_low": 0.02, "epsilon_high": 0.01},
}
CLAMPS = ({}, {"kl_clamp": 0.2}, {"kl_input_clamp": 0.8}, {"kl_clamp": 0.3, "kl_input_clamp": 0.8})


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


# ---- row_loss_


def make_loss(count: int = MANY, columns: int = 131, dtype=torch.float32) -> dict:
    """Return the inputs of `row_loss_`.

    The log ratios are inside, below and above the clip ranges. The advantages are positive,
    negative and 0.
    """
    logits, targets = torch.randn(count, columns) * 3, torch.randint(0, columns, (count,))
    logps = torch.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
    advantages = torch.randn(count)
    advantages[::9] = 0
    return {
        "logits": logits.to(dtype), "target_ids": targets, "advantages": advantages,
        "policy_weights": torch.rand(count) + 0.1, "kl_weights": torch.rand(count) + 0.1,
        "old_logps": logps - 0.4 * torch.randn(count), "ref_logps": logps + torch.randn(count),
        "grad_entropy": torch.randn(count),
    }  # fmt: skip


def terms_of(x: dict) -> RowTerms:
    return RowTerms(**{name: x[name] for name in RowTerms._fields})


def call(
    rows, x: dict, config: LossConfig, transform: LogitTransform | None = None, out=None, **options
):
    """Call `row_loss_`, and return its RowLoss and the gradient of the logits.

    The gradient is written to `out`, or to a copy of the logits if `out` is None.
    """
    logits = x["logits"].clone() if out is None else x["logits"]
    out = logits if out is None else out
    options.setdefault("return_entropy", x["grad_entropy"] is not None)
    p, terms = LogitRows(logits, x["target_ids"], transform or LogitTransform()), terms_of(x)
    with only_memory_of(logits, out, p.target_ids, *terms):
        return rows.row_loss_(p, out, terms, config, **options), out


def config_of(loss_type: str, **more) -> LossConfig:
    options = {"beta": 0.3, "max_completion_length": 8, **OPTIONS.get(loss_type, {}), **more}
    return LossConfig(loss_type, **options)


OF_LOSS = ("old_logps", "ref_logps", "advantages", "policy_weights", "kl_weights")


def check_loss(rows, x: dict, config: LossConfig, transform: LogitTransform | None = None) -> None:
    """Check losses, coefficients and the gradient of the logits against the oracle."""
    z, slope = formulas.final(x["logits"], *(transform or LogitTransform()))
    lp = formulas.statistics(z, x["target_ids"])[1]
    losses, g = formulas.loss_and_slope(lp, *(x[name] for name in OF_LOSS), config)
    exact = formulas.gradient(z, slope, x["target_ids"], g, x["grad_entropy"])
    result, d = call(rows, x, config, transform)
    rtol, least = (1e-5, 3e-6) if IS_INTERPRETER else (3e-6, 1e-6)
    torch.testing.assert_close(result.losses.double(), losses, rtol=rtol, atol=3e-6)
    error, size = (d.double() - exact).norm(dim=1), exact.norm(dim=1)
    bar = 1e-5 if d.dtype == torch.float32 else 2**-8  # one rounding to bf16
    assert (error <= bar * size + least).all(), (config, error.max())


@pytest.mark.parametrize("loss_type", LEAVES)
def test_every_leaf(rows, loss_type: str) -> None:
    """Check every loss function against the oracle with three logit transforms.

    One transform is tested with all inputs, one without old_logps, and one without a reference.
    Some weights are 0.
    """
    x = make_loss(MANY)
    x["policy_weights"][3] = x["kl_weights"][3] = x["policy_weights"][5] = x["kl_weights"][6] = 0.0
    transforms = [LogitTransform(), LogitTransform(0.5, 20.0, 0.9)]
    transforms += [LogitTransform(1.0, None, 1.3)]
    missing = [(), ("old_logps",), ("ref_logps", "kl_weights", "grad_entropy")]
    for transform, names in zip(transforms, missing, strict=True):
        check_loss(rows, {**x, **dict.fromkeys(names)}, config_of(loss_type), transform)


@pairs(estimator=KL_ESTIMATORS, clamps=CLAMPS, times_ratio=[False, True], has_old=[False, True])
def test_every_kl(rows, estimator, clamps, times_ratio, has_old) -> None:
    x = make_loss(MANY)
    options = {"kl_estimator": estimator, "kl_times_ratio": times_ratio, **clamps}
    x = x if has_old else {**x, "old_logps": None}
    check_loss(rows, x, config_of("grpo", **options))


@pairs(columns=[1, 131, 2600], dtype=DTYPES)
def test_joins_the_two_doors_bit_for_bit(rows, dtype: torch.dtype, columns: int) -> None:
    x, config = make_loss(ROWS, columns, dtype), LossConfig(loss_type="grpo", beta=0.3)
    for transform, grad_entropy in (
        (LogitTransform(), x["grad_entropy"]),
        (LogitTransform(0.5, 20.0, 0.9), None),
    ):
        y = {**x, "grad_entropy": grad_entropy}
        result, d = call(rows, y, config, transform)
        p = LogitRows(x["logits"], x["target_ids"], transform)
        stats = rows.row_logps(p, return_entropy=grad_entropy is not None)
        for got, expected in zip(result[:3], stats, strict=True):
            assert got is expected is None or torch.equal(got, expected)
        p = p._replace(logits=x["logits"].clone())
        again = rows.row_grad_(p, stats, result.grad_logps, y["grad_entropy"])
        out = call(rows, y, config, transform, out=torch.full_like(x["logits"], math.nan))[1]
        assert torch.equal(d, again) and torch.equal(out, d)


@pytest.mark.parametrize("transform_name", ["plain", "negative_scale", "all"])
@pytest.mark.parametrize("rows", ENGINES, indirect=True)
def test_a_row_depends_on_itself_only(rows, transform_name: str) -> None:
    """Check that the result of a row depends only on this row, bit for bit.

    The test changes the order of the rows, their neighbours, the number of threads and the order of
    the programs.
    """
    x, config = make_loss(ROWS, 4500), LossConfig(loss_type="dapo", beta=0.1)
    transform = make_transform(transform_name)

    def run(index, threads: int = 1) -> list[torch.Tensor]:
        part = {name: value[index] for name, value in x.items()}
        with formulas.torch_threads(threads):
            result, d = call(rows, part, config, transform)
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
    x = make_loss(8)
    config = config_of(loss_type, kl_times_ratio=OBJECTIVES[loss_type].reference)
    clean, d_clean = call(rows, x, config)
    dead, live = torch.tensor([1, 4, 6]), torch.tensor([0, 2, 3, 5, 7])
    bad_ids = torch.tensor([-100, 131, 2**40])
    # The weights of a row without a target may be zero or nonzero, so test both.
    for weights in ((), ("policy_weights", "kl_weights", "grad_entropy")):
        y = {name: value.clone() for name, value in x.items()}
        y["target_ids"][dead] = bad_ids
        for name in ("logits", "advantages", "old_logps", "ref_logps"):
            y[name][dead] = math.nan
        for name in weights:
            y[name][dead] = 0.0
        result, d = call(rows, y, config)
        for value, expected in ((d, d_clean), (result.losses, clean.losses),
                                (result.grad_logps, clean.grad_logps)):  # fmt: skip
            assert (value[dead] == 0).all() and torch.equal(value[live], expected[live])
    # A weight of 0 must remove a NaN in the term that it multiplies, but not a NaN in another term.
    x["policy_weights"][2], x["advantages"][2] = 0.0, math.nan
    x["kl_weights"][3], x["ref_logps"][3] = 0.0, math.nan
    result, d = call(rows, x, config)
    assert d.isfinite().all() and result.losses.isfinite().all()
    assert result.losses[3] != 0 and (result.losses[2] != 0 or not OBJECTIVES[loss_type].reference)


def test_far_ratios_stay_finite(rows) -> None:
    """Check that losses and gradients are finite for any old_logps.

    The kernels limit the ratio exp(logp - old_logp) to e^20.
    """
    x = {**make_loss(4), "grad_entropy": None}
    x["old_logps"] = torch.tensor([-1e4, -200.0, -1e30, 1e4])
    for loss_type, sign in itertools.product(("unclipped", "grpo"), (-1.0, 1.0)):
        x["advantages"], x["ref_logps"] = torch.full((4,), sign), x["ref_logps"] + 100
        result, d = call(rows, x, LossConfig(loss_type=loss_type, beta=0.1))
        assert result.losses.isfinite().all() and d.isfinite().all() and d.any()
    slope = call(rows, {**x, "kl_weights": None}, LossConfig("unclipped"))[0].grad_logps[0]
    torch.testing.assert_close(slope / x["policy_weights"][0], -torch.tensor(math.exp(20.0)))


def test_a_boundary_is_on_the_side_that_the_torch_reader_says(rows) -> None:
    """Check that kernels and torch agree on which tokens are clipped (ratio beyond 1±ε).

    They may disagree only if the ratio is within two ulps of the bound.
    """
    config, count = LossConfig("grpo", epsilon_low=0.2, epsilon_high=0.2), 20 * ROWS
    x = {**make_loss(count, 3), "kl_weights": None, "grad_entropy": None}
    x["policy_weights"].fill_(1.0)
    p = LogitRows(x["logits"], x["target_ids"], LogitTransform())
    logps = rows.row_logps(p, return_entropy=False)[1]
    bound = torch.where(torch.arange(count) % 2 == 0, math.log(1.2), math.log(0.8))
    x["old_logps"] = logps - bound * (1 + torch.linspace(-1e-5, 1e-5, count))
    x["advantages"] = torch.where(torch.arange(count) % 4 < 2, 1.0, -1.0)
    result, _ = call(rows, x, config)
    _, expected = row_coefficients(logps, terms_of(x), config)
    differ = (result.grad_logps == 0) != (expected == 0)
    ratio = torch.exp((logps - x["old_logps"]).double())
    assert (differ & ((ratio - bound.double().exp()).abs() > 2.4e-7)).sum() == 0
    assert differ.float().mean() < 0.05 and 0.1 < (expected == 0).float().mean() < 0.9
