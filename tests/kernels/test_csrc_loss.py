"""`row_loss_` in C++: every loss and KL against the fp64 oracle, and bit for bit against the two
doors it joins.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import subprocess
from pathlib import Path

import pytest
import torch

from grpo_fast import LossConfig, linear_grpo_loss, linear_logps
from grpo_fast.kernels import reference as rows_torch
from grpo_fast.kernels.cpu import leaves as leaves_cpp
from grpo_fast.kernels.cpu import loader as csrc_loader
from grpo_fast.kernels.cpu import rows as rows_cpu
from grpo_fast.kernels.types import LogitRule
from grpo_fast.objective.coefficients import RowTerms, row_coefficients
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES
from tests.kernels import formulas

REASON = csrc_loader.load("rows")
needs_library = pytest.mark.skipif(
    REASON is not None, reason=f"no C++ kernels here: {(REASON or '').splitlines()[:1]}"
)

LOCAL = [
    name
    for name in OBJECTIVES
    if LossConfig(loss_type=name, max_completion_length=8).is_token_local
]
OPTIONS: dict[str, dict] = {
    "grpo": {"epsilon_low": 0.1, "epsilon_high": 0.3, "delta": 1.5},
    "dual_clip": {"dual_clip_c": 1.3},
    "cispo": {"epsilon_high": 1.2},
    "dppo_tv": {"epsilon_low": 0.02, "epsilon_high": 0.01},
    "dppo_kl": {"epsilon_low": 0.02, "epsilon_high": 0.01},
    "dr_grpo": {"max_completion_length": 8},
}


def make_rows(rows: int = 64, columns: int = 131, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows whose log ratios lie on all sides of the clip ranges, with advantages of both signs and
    0.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    logits, targets = (
        normal(rows, columns) * 3,
        torch.randint(0, columns, (rows,), generator=generator),
    )
    logps = torch.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
    advantages = normal(rows)
    advantages[::9] = 0
    return {
        "logits": logits,
        "target_ids": targets,
        "advantages": advantages,
        "policy_weights": torch.rand(rows, generator=generator) + 0.1,
        "kl_weights": torch.rand(rows, generator=generator) + 0.1,
        "old_logps": logps - 0.4 * normal(rows),
        "ref_logps": logps + normal(rows),
        "grad_entropy": normal(rows),
    }


OF_LOSS = ("old_logps", "ref_logps", "advantages", "policy_weights", "kl_weights")
CLAMPS = ({}, {"kl_clamp": 0.2}, {"kl_input_clamp": 0.8}, {"kl_clamp": 0.3, "kl_input_clamp": 0.8})


def terms_of(x: dict) -> RowTerms:
    return RowTerms(**{name: x[name] for name in RowTerms._fields})


def call(x: dict, config: LossConfig, rule: LogitRule | None = None, out=None, **options) -> tuple:
    """(RowLoss, d-logits), from a copy of the logits unless `out` is given."""
    logits = x["logits"].clone() if out is None else x["logits"]
    target = logits if out is None else out
    options.setdefault("return_entropy", x["grad_entropy"] is not None)
    return rows_cpu.row_loss_(
        logits, target, x["target_ids"], terms_of(x), config, rule or LogitRule(), **options
    ), target


@needs_library
@pytest.mark.parametrize("loss_type", LOCAL)
def test_every_loss_and_kl_against_the_oracle(loss_type: str) -> None:
    """Losses, coefficients and d-logits."""
    x = make_rows()
    settings = {"loss_type": loss_type, "beta": 0.3, **OPTIONS.get(loss_type, {})}
    plain, every = [(LossConfig.kl_estimator, False, {})], (KL_ESTIMATORS, (False, True), CLAMPS)
    for estimator, times_ratio, clamps in (
        itertools.product(*every) if loss_type == "grpo" else plain
    ):
        of_kl = {"kl_estimator": estimator, "kl_times_ratio": times_ratio, **clamps}
        config = LossConfig(**settings, **of_kl)
        z, slope = formulas.final(x["logits"])
        lp = formulas.statistics(z, x["target_ids"])[1]
        losses, g = formulas.loss_and_slope(lp, *(x[name] for name in OF_LOSS), config)
        exact = formulas.gradient(z, slope, x["target_ids"], g, x["grad_entropy"])
        result, d = call(x, config)
        torch.testing.assert_close(result.losses.double(), losses, rtol=3e-6, atol=3e-6)
        error, size = (d.double() - exact).norm(dim=1), exact.norm(dim=1)
        assert (error <= 1e-5 * size + 1e-6).all(), (loss_type, estimator, times_ratio, error.max())


@needs_library
@pytest.mark.parametrize("loss_type", LOCAL)
def test_agrees_with_the_torch_reader(loss_type: str) -> None:
    """The same rows through rows_torch, without old_logps, without a reference, with every rule."""
    config = LossConfig(
        loss_type=loss_type, beta=0.3, kl_estimator="k3", **OPTIONS.get(loss_type, {})
    )
    for rule, missing in itertools.product(
        [
            LogitRule(),
            LogitRule(0.5, 20.0, 0.9),
            LogitRule(1.0, None, torch.linspace(0.5, 2.0, 64)),
        ],
        [(), ("old_logps",), ("ref_logps", "grad_entropy"), ("kl_weights",)],
    ):
        x = {**make_rows(seed=1), **dict.fromkeys(missing)}
        result, d = call(x, config, rule, return_entropy=True)
        expected_d = torch.empty_like(d)
        expected = rows_torch.row_loss_(
            x["logits"], expected_d, x["target_ids"], terms_of(x), config, rule, return_entropy=True
        )
        for name, got, truth in zip(result._fields, result[:5], expected[:5], strict=False):
            torch.testing.assert_close(
                got, truth, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        torch.testing.assert_close(d, expected_d, rtol=2e-5, atol=2e-5)


@needs_library
@pytest.mark.parametrize("columns", [1, 131, 512, 2600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_joins_the_two_doors_bit_for_bit(dtype: torch.dtype, columns: int) -> None:
    x = make_rows(33, columns)
    x["logits"] = x["logits"].to(dtype)
    config = LossConfig(loss_type="grpo", beta=0.3)
    for rule, with_entropy in itertools.product(
        [LogitRule(), LogitRule(0.5, 20.0, 0.9)], [False, True]
    ):
        y = x if with_entropy else {**x, "grad_entropy": None}
        result, d = call(y, config, rule)
        stats = rows_cpu.row_logps(x["logits"], x["target_ids"], rule, return_entropy=with_entropy)
        for got, expected in zip(result[:3], stats, strict=True):
            assert got is expected is None or torch.equal(got, expected)
        g, ge = result.grad_logps, y["grad_entropy"]
        again = rows_cpu.row_grad_(x["logits"].clone(), x["target_ids"], stats, g, ge, rule)
        assert torch.equal(d, again)
        out = torch.full_like(x["logits"], math.nan)
        call(y, config, rule, out=out)
        assert torch.equal(out, d)


@needs_library
def test_a_row_depends_on_itself_only() -> None:
    """Bitwise: neighbours, the thread count, and whether there are others (small chunks are not
    shared).
    """
    x, config = make_rows(96, 1500), LossConfig(loss_type="dapo", beta=0.1)
    result, d = call(x, config)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        crowd, d_crowd = call(x, config)
        torch.set_num_threads(1)
        rows = slice(40, 47)
        part, d_part = call({name: value[rows] for name, value in x.items()}, config)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(d, d_crowd) and torch.equal(d[rows], d_part)
    for whole, other, few in zip(result[:5], crowd[:5], part[:5], strict=True):
        assert torch.equal(whole, other) and torch.equal(whole[rows], few)


@needs_library
@pytest.mark.parametrize("loss_type", LOCAL)
def test_rows_that_do_not_count_are_inert(loss_type: str) -> None:
    """Poison in everything that a row without a target holds: zero row, loss 0, coefficient 0,
    neighbours untouched.
    """
    x = make_rows(8)
    has_kl = OBJECTIVES[loss_type].reference
    config = LossConfig(
        loss_type=loss_type, beta=0.3, kl_times_ratio=has_kl, max_completion_length=8
    )
    clean, d_clean = call(x, config)
    dead = torch.tensor([1, 4, 6])
    for name in ("policy_weights", "kl_weights", "grad_entropy"):
        x[name][dead] = 0.0
    for name in ("logits", "advantages", "old_logps", "ref_logps"):
        x[name][dead] = math.nan
    x["target_ids"][dead] = torch.tensor([-100, 131, 2**40])
    result, d = call(x, config)
    assert (
        (d[dead] == 0).all()
        and (result.losses[dead] == 0).all()
        and (result.grad_logps[dead] == 0).all()
    )
    live = torch.tensor([0, 2, 3, 5, 7])
    assert torch.equal(d[live], d_clean[live]) and torch.equal(
        result.losses[live], clean.losses[live]
    )
    # Without a target no weight has to be 0.
    x = make_rows(8)
    x["target_ids"][dead] = torch.tensor([-100, 131, 2**40])
    assert (x["grad_entropy"][dead] != 0).all() and (call(x, config)[1][dead] == 0).all()
    # Each weight guards its own term only.
    x = make_rows(8)
    x["policy_weights"][2], x["advantages"][2] = 0.0, math.nan
    x["kl_weights"][3], x["ref_logps"][3] = 0.0, math.nan
    result, d = call(x, config)
    assert d.isfinite().all() and result.losses.isfinite().all() and (result.losses[2:4] != 0).all()


@needs_library
def test_on_policy_is_exact() -> None:
    """old_logps from `row_logps`, or none: the ratio is exactly 1 and the slope exactly -A,
    whatever the clip range.
    """
    x = {**make_rows(), "kl_weights": None, "grad_entropy": None}
    config = LossConfig(loss_type="grpo", epsilon_low=0.0, epsilon_high=0.0)
    x["policy_weights"].fill_(1.0)
    _, logps, _ = rows_cpu.row_logps(
        x["logits"], x["target_ids"], LogitRule(), return_entropy=False
    )
    for old in (logps, None):
        result, _ = call({**x, "old_logps": old}, config)
        assert torch.equal(result.grad_logps, -x["advantages"]) and torch.equal(
            result.losses, -x["advantages"]
        )


@needs_library
def test_a_log_ratio_cannot_overflow() -> None:
    x = {**make_rows(4), "kl_weights": None, "grad_entropy": None}
    x["old_logps"] = torch.tensor([-1e4, -200.0, -1e30, 1e4])
    x["advantages"] = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    result, d = call(x, LossConfig(loss_type="unclipped"))
    assert result.losses.isfinite().all() and d.isfinite().all()
    torch.testing.assert_close(
        result.grad_logps[0] / x["policy_weights"][0], torch.tensor(math.exp(20.0))
    )


@needs_library
def test_a_boundary_is_on_the_side_that_the_torch_reader_says() -> None:
    """Log ratios a few ulps around 1±ε: where the two readers disagree, the ratio is within two
    ulps of the bound.
    """
    config = LossConfig(loss_type="grpo", epsilon_low=0.2, epsilon_high=0.2)
    rows = 4000
    x = {**make_rows(rows, 3), "kl_weights": None, "grad_entropy": None}
    x["policy_weights"].fill_(1.0)
    _, logps, _ = rows_cpu.row_logps(
        x["logits"], x["target_ids"], LogitRule(), return_entropy=False
    )
    bound = torch.where(torch.arange(rows) % 2 == 0, math.log(1.2), math.log(0.8))
    x["old_logps"] = logps - bound * (1 + torch.linspace(-1e-5, 1e-5, rows))
    x["advantages"] = torch.where(torch.arange(rows) % 4 < 2, 1.0, -1.0)
    result, _ = call(x, config)
    _, expected = row_coefficients(logps, terms_of(x), config)
    differ = (result.grad_logps == 0) != (expected == 0)
    ratio = torch.exp((logps - x["old_logps"]).double())
    assert (differ & ((ratio - bound.double().exp()).abs() > 2.4e-7)).sum() == 0
    assert differ.float().mean() < 0.05 and 0.1 < (expected == 0).float().mean() < 0.9


@needs_library
@pytest.mark.parametrize("loss_type", ["grpo", "reinforce", "cispo"])
def test_the_loss_returns_the_logps_of_linear_logps(loss_type: str) -> None:
    """Bit for bit on backend cpu, so that a rollout's logps give a ratio of exactly 1."""
    torch.manual_seed(0)
    hidden, weight, ids = (
        torch.randn(3, 20, 32),
        torch.randn(300, 32),
        torch.randint(0, 300, (3, 20)),
    )
    mask = torch.rand(3, 20) < 0.7
    config = LossConfig(loss_type=loss_type, compute_entropy=True)
    logps, entropy = linear_logps(hidden, weight, ids, return_entropy=True, backend="cpu")
    weight.requires_grad_()
    result = linear_grpo_loss(
        hidden,
        weight,
        ids,
        torch.randn(3),
        config,
        completion_mask=mask,
        old_logps=logps,
        backend="cpu",
    )
    assert torch.equal(result.logps[mask], logps[mask])
    assert torch.equal(result.entropy[mask], entropy[mask])


@needs_library
def test_refusals() -> None:
    x, config = make_rows(4), LossConfig(loss_type="grpo", beta=0.1)
    for name in (
        "advantages",
        "policy_weights",
        "kl_weights",
        "old_logps",
        "ref_logps",
        "grad_entropy",
    ):
        with pytest.raises(RuntimeError, match=f"{name}: expected one value for each of 4 rows"):
            call({**x, name: torch.zeros(3)}, config)
    with pytest.raises(RuntimeError, match=r"out: expected \(4, 131\), got \(4, 130\)"):
        call(x, config, out=torch.empty(4, 130))
    empty = {name: value[:0] for name, value in x.items()}
    result, d = call(empty, config)
    assert d.shape == (0, 131) and all(value.shape == (0,) for value in result[:5])


# ---- the printer ----


def a_new_loss(logp, log_ratio, advantage, low, high):
    """Every statement and every word that a leaf may use."""
    new = tl.minimum(tl.exp(log_ratio), high) - tl.maximum(-tl.abs(logp), low)  # noqa: F821
    near = (new > low) & (new <= high) | (advantage == LIMIT)
    new = tl.where(near, new, tl.sigmoid(new) / 2 + tl.log(high))  # noqa: F821
    kl, unused = a_helper(new - logp)
    return -new * advantage + kl, tl.where(near, tl.expm1(advantage), tl.clamp(kl, low, high))  # noqa: F821


def a_helper(d):
    return d * d, 2 * d


def a_bad_loss(logp, log_ratio, advantage):
    return tl.tanh(logp), advantage  # noqa: F821


LIMIT = 0.5
tl = torch


@pytest.mark.skipif(csrc_loader.compiler() is None, reason="no C++ compiler")
def test_a_loss_added_in_python_works_in_cpp(tmp_path: Path) -> None:
    """Printed, compiled and called: the C++ leaves give what the Python leaves give in fp64, the
    new one included.
    """
    leaves = [*leaves_cpp.objective_leaves(), a_new_loss]
    text = leaves_cpp.print_header(leaves, leaves_cpp.kl_leaves())
    (tmp_path / "leaves.h").write_text(text)
    source = tmp_path / "run.cpp"
    source.write_text(
        '#include "leaves.h"\n'
        + 'extern "C" void run(int kl, int64_t index, double a, double b, double c,\n'
        + "                    const double* p, double* to) {\n"
        + "  const auto r = kl ? grpo_fast::kl_estimator(index, a, p)\n"
        + "                    : grpo_fast::objective(index, a, b, c, p);\n"
        + "  to[0] = r.value, to[1] = r.slope;\n}\n"
    )
    command = [
        *(csrc_loader.compiler() or ()),
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-psabi",
        f"-I{csrc_loader.source_folder()}",
        "-fPIC",
        "-shared",
    ]
    subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "leaves.so")], check=True, timeout=120
    )
    run = ctypes.CDLL(str(tmp_path / "leaves.so")).run
    run.argtypes = [
        ctypes.c_int,
        ctypes.c_int64,
        *[ctypes.c_double] * 3,
        *[ctypes.POINTER(ctypes.c_double)] * 2,
    ]
    params = (0.2, 0.3, 2.0, 1.5)
    points = list(
        itertools.product((-9.0, -0.7, -1e-3), (-0.5, -0.1, 0.0, 0.25, 3.0), (-1.5, 0.0, 0.5))
    )
    a, b, c = torch.tensor(points, dtype=torch.float64).unbind(1)
    for is_kl, table in ((0, leaves), (1, leaves_cpp.kl_leaves())):
        for index, leaf in enumerate(table):
            extra = params[: leaf.__code__.co_argcount - (1 if is_kl else 3)]
            given = [torch.tensor(p, dtype=torch.float64) for p in extra]
            expected = leaf(b, *given) if is_kl else leaf(a, b, c, *given)
            for i, (x, y, z) in enumerate(points):
                to = (ctypes.c_double * 2)()
                run(is_kl, index, y if is_kl else x, y, z, (ctypes.c_double * 4)(*params), to)
                for got, truth in zip(to, expected, strict=True):
                    assert math.isclose(
                        got, truth.expand(len(points))[i].item(), rel_tol=1e-12, abs_tol=1e-15
                    ), leaf


def test_the_printer_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"a_bad_loss: expected .* came 'tl.tanh'"):
        leaves_cpp.print_header([a_bad_loss], [])
    with pytest.raises(
        ValueError, match="a_helper: expected the arguments logp, log_ratio, advantage"
    ):
        leaves_cpp.print_header([a_helper], [])
    leaves_cpp.header.cache_clear()
    monkeypatch.setitem(OBJECTIVES, "bad", OBJECTIVES["grpo"]._replace(leaf=a_bad_loss))
    _, reason = csrc_loader.compile_library("rows")
    leaves_cpp.header.cache_clear()
    assert reason is not None and "cannot be printed as C++: a_bad_loss" in reason


def test_the_leaves_are_numbered_and_take_what_the_kernel_hands_over() -> None:
    of_losses = [LossConfig(loss_type=name, max_completion_length=8) for name in LOCAL]
    for config in of_losses + [LossConfig(kl_estimator=name) for name in KL_ESTIMATORS]:
        handed = rows_cpu.leaf_arguments(config.key)
        assert leaves_cpp.objective_leaves()[handed[0]] is OBJECTIVES[config.loss_type].leaf
        assert leaves_cpp.kl_leaves()[handed[1]] is KL_ESTIMATORS[config.kl_estimator]
        assert handed[3 : 3 + len(config.params)] == config.params and len(handed) == 9
