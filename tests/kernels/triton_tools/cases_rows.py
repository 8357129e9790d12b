"""Row kernels in the interpreter against fp64. Run by test_triton_interpreter.py in a process of
its own.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.types import LogitRule, RowLoss
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES
from tests.kernels import formulas
from tests.kernels.triton_tools.interpreter import only_memory_of, reversed_programs

# One column, two, one off a power of two on both sides, just over the small block of 1024, three
# blocks of 2048.
VOCABULARIES = (1, 2, 127, 129, 257, 1025, 4099)
RULES = {
    "plain": lambda rows: LogitRule(1.0, None, 1.0),
    "scaled": lambda rows: LogitRule(0.5, None, 0.7),
    "softcap": lambda rows: LogitRule(2.0, 30.0, 1.3),
    "temperatures": lambda rows: LogitRule(1.0, 5.0, torch.linspace(0.5, 2.0, rows)),
}
LP_BAR = 1e-5


def make(rows: int, vocab: int, dtype=torch.float32, seed: int = 0, spread: float = 4.0):
    """Logits inside a larger buffer of NaN (an odd row stride, an odd offset), targets, per-row
    numbers.
    """
    generator = torch.Generator().manual_seed(seed + vocab)
    buffer = torch.full((rows, vocab + 3), float("nan"), dtype=dtype)
    logits = buffer[:, 1 : 1 + vocab]
    logits.copy_(torch.randn(rows, vocab, generator=generator) * spread)
    return (
        logits,
        torch.randint(vocab, (rows,), generator=generator),
        torch.randn(6, rows, generator=generator),
    )


def assert_gradient(actual, expected, dtype):
    """Relative error over all, and per element within the rounding of the stored dtype."""
    difference = (actual.double() - expected).abs()
    unit = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    scale = expected.abs().amax(-1, keepdim=True)
    assert (difference <= unit * expected.abs() + 3e-6 * scale + 1e-7).all(), difference.max()
    assert difference.norm() <= max(2 * unit, 3e-6) * expected.norm() + 1e-12


# Every rule in fp32; the 16-bit types differ in the load and the store only.
@pytest.mark.parametrize(
    ("rule_name", "dtype"),
    [
        *((name, torch.float32) for name in RULES),
        ("temperatures", torch.bfloat16),
        ("softcap", torch.float16),
    ],
)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logps_and_gradient(vocab, rule_name, dtype):
    rows = 4
    rule = RULES[rule_name](rows)
    logits, target, numbers = make(rows, vocab, dtype)
    z, slope = formulas.final(logits, *rule)
    lse, logps, entropy = rows_triton.row_logps(logits, target, rule, return_entropy=True)
    for actual, expected in zip((lse, logps, entropy), formulas.statistics(z, target), strict=True):
        assert actual.dtype == torch.float32
        assert (actual - expected).abs().max() <= LP_BAR
    g, g_entropy = numbers[0], numbers[1]
    for grad_entropy in (None, g_entropy):
        expected = formulas.gradient(z, slope, target, g, grad_entropy)
        out = torch.full_like(logits, float("nan"))
        arguments = target, (lse, logps, entropy), g, grad_entropy, rule
        assert rows_triton.row_grad_(logits, *arguments, out=out) is out
        assert_gradient(out, expected, dtype)
    over = logits.clone()
    assert rows_triton.row_grad_(over, *arguments) is over
    assert torch.equal(over, out)


def test_lower_precision_out():
    logits, target, numbers = make(3, 300)
    rule = LogitRule(1.0, None, 1.0)
    lse, logps, _ = rows_triton.row_logps(logits, target, rule, return_entropy=False)
    exact = rows_triton.row_grad_(
        logits, target, (lse, logps, None), numbers[0], None, rule, out=torch.empty(3, 300)
    )
    out = torch.empty(3, 300, dtype=torch.bfloat16)
    rows_triton.row_grad_(logits, target, (lse, logps, None), numbers[0], None, rule, out=out)
    assert torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minus_inf_columns_count_nothing(dtype):
    logits, target, numbers = make(3, 9000, dtype)
    rule = LogitRule(1.0, None, 0.8)
    logits[0, :4200] = -torch.inf  # more than the whole first block
    logits[1, 5000:] = -torch.inf  # a whole last block
    logits[2, ::2] = -torch.inf
    target = torch.tensor([4500, 17, 3])
    z, slope = formulas.final(logits, *rule)
    lse, logps, entropy = rows_triton.row_logps(logits, target, rule, return_entropy=True)
    for actual, expected in zip((lse, logps, entropy), formulas.statistics(z, target), strict=True):
        assert (actual - expected).abs().max() <= LP_BAR
    expected = formulas.gradient(z, slope, target, numbers[0], numbers[1])
    masked = logits == -torch.inf
    rows_triton.row_grad_(logits, target, (lse, logps, entropy), numbers[0], numbers[1], rule)
    assert_gradient(logits, expected, dtype)
    assert (logits[masked] == 0).all()


def test_confident_token_keeps_its_gradient():
    logits = torch.zeros(5, 64)
    margin = torch.tensor([5.0, 12.0, 14.0, 16.0, 17.9])
    logits[:, 7] = margin
    target, rule, one = torch.full((5,), 7), LogitRule(1.0, None, 1.0), torch.ones(5)
    lse, logps, _ = rows_triton.row_logps(logits, target, rule, return_entropy=False)
    # The kernel's share of the error: 1 - e^lp from the lp that it was given.
    exact = -torch.expm1(logps.double())
    rows_triton.row_grad_(logits, target, (lse, logps, None), one, None, rule)
    assert ((logits[:, 7] - exact).abs() <= 2e-7 * exact).all()


def weighted(rows: int, numbers, seed: int = 0):
    """Advantages, weights and old/ref logps offsets that reach every branch: both sides of the
    clip, zeros, far ref.
    """
    advantages = numbers[2].clone()
    policy, kl = numbers[3].abs() + 0.1, numbers[4].abs() + 0.1
    old_offset = torch.linspace(-1.5, 1.5, rows)
    ref_offset = torch.linspace(-3.0, 4.0, rows)
    return advantages, policy, kl, old_offset, ref_offset


TOKEN_LOSSES = [
    name for name, o in OBJECTIVES.items() if o.window == "ratio" and "token" in o.levels
]
# The names that share a leaf differ in how tokens are averaged, which is not the kernel's matter.
LEAVES = list({OBJECTIVES[name].leaf: name for name in TOKEN_LOSSES}.values())


def config_for(loss_type: str, **options) -> LossConfig:
    if loss_type in ("dppo_tv", "dppo_kl"):
        options |= {"epsilon_low": 0.05, "epsilon_high": 0.08}
    return LossConfig(loss_type=loss_type, beta=0.1, max_completion_length=64, **options)


def check_loss(
    config, *, rows=16, vocab=33, with_old=True, with_kl=True, g_entropy=False, dtype=torch.float32
):
    logits, target, numbers = make(rows, vocab, dtype, spread=1.0)
    rule = LogitRule(1.0, None, 0.9)
    advantages, policy, kl, old_offset, ref_offset = weighted(rows, numbers)
    policy[3] = kl[3] = policy[5] = kl[6] = 0.0
    kl = kl if with_kl else None
    z, slope = formulas.final(logits, *rule)
    plain = rows_triton.row_logps(logits, target, rule, return_entropy=True)
    old = plain[1] + old_offset if with_old else None
    ref = plain[1] + ref_offset if with_kl else None
    grad_entropy = numbers[5] if g_entropy else None
    if g_entropy:
        grad_entropy[3] = 0.0
    lp = formulas.statistics(z, target)[1]
    losses, g = formulas.loss_and_slope(lp, old, ref, advantages, policy, kl, config)
    expected = formulas.gradient(z, slope, target, g, grad_entropy)
    out = logits.clone()
    results = rows_triton.row_loss_(
        out,
        out,
        target,
        RowTerms(advantages, policy, kl, old, ref, grad_entropy),
        config,
        rule,
        return_entropy=True,
    )
    assert isinstance(results, RowLoss)
    for actual, want in zip(results[:3], plain, strict=True):
        assert torch.equal(actual, want), "row_loss_ and row_logps must agree bit for bit"
    for actual, want in ((results.losses, losses), (results.grad_logps, g)):
        assert actual.dtype == torch.float32 and actual[3] == 0
        assert ((actual - want).abs() <= 1e-5 * want.abs() + 1e-6).all()
    assert (out[3] == 0).all()
    error = (out.double() - expected).norm() / expected.norm()
    assert error <= {torch.float32: 5e-6, torch.bfloat16: 3e-3}[dtype]


@pytest.mark.parametrize("loss_type", LEAVES)
def test_every_leaf(loss_type):
    check_loss(config_for(loss_type))
    check_loss(config_for(loss_type), with_old=False, with_kl=False, g_entropy=True)


@pytest.mark.parametrize("times_ratio", [False, True])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_every_kl(estimator, times_ratio):
    check_loss(config_for("dapo", kl_estimator=estimator, kl_times_ratio=times_ratio))
    clamps = {"kl_clamp": 0.05, "kl_input_clamp": 0.6}
    check_loss(config_for("dapo", kl_estimator=estimator, kl_times_ratio=times_ratio, **clamps))
    if times_ratio:
        check_loss(config_for("dapo", kl_estimator=estimator, kl_times_ratio=True), with_old=False)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo", "delta": 1.1},
        {"loss_type": "cispo", "cispo_bound": "offset", "epsilon_high": 0.3},
    ],
)
def test_options(options):
    check_loss(config_for(**options), g_entropy=True)
    check_loss(config_for(**options), dtype=torch.bfloat16)


def test_far_ratios_stay_finite():
    """old_logp far below lp: the ratio is e^20, not inf, and the clipped row's gradient exactly 0,
    not 0·inf.
    """
    logits, target, _ = make(2, 50)
    rule, one = LogitRule(1.0, None, 1.0), torch.ones(2)
    logps = rows_triton.row_logps(logits, target, rule, return_entropy=False)[1]
    advantages, old = torch.tensor([1.0, -1.0]), logps - 200.0
    result = rows_triton.row_loss_(
        logits, logits, target, RowTerms(advantages, one, one, old, logps + 100.0),
        LossConfig(loss_type="grpo"), rule, return_entropy=False,
    )  # fmt: skip
    assert torch.isfinite(logits).all() and (logits != 0).any()
    assert torch.isfinite(result.losses).all() and torch.isfinite(result.grad_logps).all()


def test_unweighted_rows_are_inert():
    """NaN, inf and bad ids in rows without weight: exact zeros there, and no bit changes in the
    other rows.
    """
    rule, config = LogitRule(1.0, None, 1.0), config_for("dapo", kl_times_ratio=True)
    logits, target, numbers = make(6, 200)
    advantages, policy, kl, old, ref = weighted(6, numbers)
    bad, good = [1, 4], [0, 2, 3, 5]
    policy[bad] = kl[bad] = 0.0

    def run(logits, target, old, ref, advantages):
        out = torch.full_like(logits, float("nan"))
        terms = RowTerms(advantages, policy, kl, old, ref)
        with only_memory_of(logits, out, target, *terms[:5]):
            stats = rows_triton.row_loss_(
                logits, out, target, terms, config, rule, return_entropy=True
            )
        return out, torch.stack(stats[:5])

    clean, clean_stats = run(logits, target, old - 5, ref - 5, advantages)
    poisoned, bad_target = logits.clone(), target.clone()
    poisoned[1], poisoned[4] = float("nan"), float("inf")
    bad_target[1], bad_target[4] = -100, 10**12
    holes = [x.clone() for x in (old - 5, ref - 5, advantages)]
    for values in holes:
        values[1], values[4] = float("nan"), float("-inf")
    dirty, dirty_stats = run(poisoned, bad_target, *holes)
    assert (dirty[bad] == 0).all() and (dirty_stats[3:, bad] == 0).all()
    assert torch.equal(dirty[good], clean[good]) and torch.equal(
        dirty_stats[:, good], clean_stats[:, good]
    )


def test_no_rows():
    logits, empty, rule = torch.empty(0, 7), torch.empty(0), LogitRule(1.0, None, 1.0)
    ids = torch.empty(0, dtype=torch.long)
    lse, logps, entropy = rows_triton.row_logps(logits, ids, rule, return_entropy=True)
    assert lse.shape == logps.shape == entropy.shape == (0,)
    assert rows_triton.row_grad_(logits, ids, (lse, logps, None), empty, None, rule) is logits
    results = rows_triton.row_loss_(
        logits, logits, ids, RowTerms(empty, empty), LossConfig(), rule, return_entropy=False
    )
    assert results.lse.shape == results.losses.shape == results.grad_logps.shape == (0,)
    assert results.entropy is None


@pytest.mark.parametrize("vocab", [1, 129, 1025])
def test_memory_and_program_order(vocab):
    """Nothing outside the tensors is touched, and the order of the rows changes no bit."""
    logits, target, numbers = make(5, vocab, torch.bfloat16)
    rule, config = LogitRule(1.0, 9.0, torch.full((5,), 0.8)), config_for("grpo")
    advantages, policy, kl, old, ref = weighted(5, numbers)

    def run():
        work, out = logits.clone(), torch.full_like(logits, float("nan"))
        terms = RowTerms(advantages, policy, kl, old, ref, numbers[5].clone())
        with only_memory_of(work, out, target, *terms, rule.temperature):
            stats = rows_triton.row_logps(work, target, rule, return_entropy=True)
            fused = rows_triton.row_loss_(
                work, out, target, terms, config, rule, return_entropy=True
            )
            rows_triton.row_grad_(work, target, stats, policy, terms.grad_entropy, rule)
        return [*stats, *fused[:5], out, work]

    forward = run()
    with reversed_programs():
        backward = run()
    for a, b in zip(forward, backward, strict=True):
        assert torch.equal(a, b)


def test_memory_check_sees_a_planted_error():
    logits, target, _ = make(4, 40)
    with pytest.raises(Exception, match="out of bounds"), only_memory_of(logits[:3], target):
        rows_triton.row_logps(logits, target, LogitRule(1.0, None, 1.0), return_entropy=False)
