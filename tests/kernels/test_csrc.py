"""The C++ row kernels against formulas in fp64, and the loader's ways to say no.

The tests named *numerics* run again in subprocesses under other instruction sets and vector widths
(see the last part).
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_fast.kernels.cpu import leaves as leaves_cpp
from grpo_fast.kernels.cpu import loader as csrc_loader
from grpo_fast.kernels.cpu import rows as rows_cpu
from grpo_fast.kernels.types import LogitRule
from tests.kernels import formulas
from tests.pairs import pairs

ROOT = Path(__file__).resolve().parents[2]
REASON = csrc_loader.load("rows")
needs_library = pytest.mark.skipif(
    REASON is not None, reason=f"no C++ kernels here: {(REASON or '').splitlines()[:1]}"
)

# 1, 2: smaller than a vector; 127, 129: a tail beside a power of two; 512, 2048 + 3: a whole run, a
# block and a tail; 5000: several blocks; 151936: a real vocabulary.
SIZES = [1, 2, 127, 129, 512, 2051, 5000, 151936]
RULES = {
    "plain": (1.0, None, 1.0), "temperature": (1.0, None, 0.7), "scale": (0.0625, None, 1.0),
    "negative_scale": (-1.0, None, 1.3), "softcap": (1.0, 30.0, 1.0), "all": (0.5, 20.0, 0.9),
    "per_row": (1.0, None, "rows"), "per_row_softcap": (1.5, 25.0, "rows"),
}  # fmt: skip


def make_rule(name: str, rows: int) -> LogitRule:
    scale, softcap, temperature = RULES[name]
    if temperature == "rows":
        temperature = 0.5 + torch.rand(rows)
    return LogitRule(scale, softcap, temperature)


def make_rows(
    rows: int, columns: int, seed: int = 0, spread: float = 4.0
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, columns) * spread, torch.randint(0, columns, (rows,))


def expected_statistics(logits, targets, rule):
    return formulas.statistics(formulas.final(logits, *rule)[0], targets)


def check_gradient(gradient, logits, targets, rule, g, ge) -> None:
    """Each row's error in the L2 norm, against its two terms (they may cancel) and fp32's spacing
    of z and log p.
    """
    z, slope = formulas.final(logits, *rule)
    terms = [formulas.gradient(z, slope, targets, *pair) for pair in ((g, 0 * ge), (0 * g, ge))]
    size = terms[0].norm(dim=1) + terms[1].norm(dim=1)
    error = (gradient.double() - terms[0] - terms[1]).norm(dim=1)
    bound = 1e-6 + 2e-7 * (z.abs().amax(1) + z.amax(1) - z.amin(1))
    assert (error <= bound * size + 1e-15).all(), (error / size).max()


@needs_library
@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("columns", SIZES)
def test_numerics_fp32(columns: int, rule_name: str) -> None:
    rows = 4 if columns > 10_000 else 33
    logits, targets = make_rows(rows, columns)
    # In the first run, the tail, the middle.
    targets[:3] = torch.tensor([0, columns - 1, columns // 2])[:3]
    rule = make_rule(rule_name, rows)
    lse, logps, entropy = rows_cpu.row_logps(logits, targets, rule, return_entropy=True)
    true_lse, true_logps, true_entropy = expected_statistics(logits, targets, rule)
    for value, truth in [(lse, true_lse), (logps, true_logps), (entropy, true_entropy)]:
        assert value.dtype == torch.float32 and value.shape == (rows,)
        assert (value - truth).abs().max() <= 2e-6 + 2e-7 * truth.abs().max()
    g, ge = torch.randn(rows), torch.randn(rows)
    gradient = rows_cpu.row_grad_(logits.clone(), targets, (lse, logps, entropy), g, ge, rule)
    check_gradient(gradient, logits, targets, rule, g, ge)
    gradient = rows_cpu.row_grad_(logits.clone(), targets, (lse, logps, None), g, None, rule)
    check_gradient(gradient, logits, targets, rule, g, torch.zeros(rows))


@needs_library
@pairs(rule_name=["plain", "all", "per_row"], dtype=[torch.bfloat16, torch.float16],
       columns=[1, 2, 127, 129, 2051])  # fmt: skip
def test_numerics_16_bits(columns: int, dtype: torch.dtype, rule_name: str) -> None:
    """Exact on the given 16-bit logits; only the stored gradient is rounded."""
    logits, targets = make_rows(17, columns)
    logits = logits.to(dtype)
    rule = make_rule(rule_name, 17)
    lse, logps, entropy = rows_cpu.row_logps(logits, targets, rule, return_entropy=True)
    for value, truth in zip(
        (lse, logps, entropy), expected_statistics(logits, targets, rule), strict=True
    ):
        assert (value - truth).abs().max() <= 1e-5
    g, ge = torch.randn(17), torch.randn(17)
    kept = logits.clone()
    exact = rows_cpu.row_grad_(logits.float(), targets, (lse, logps, entropy), g, ge, rule)
    gradient = rows_cpu.row_grad_(logits, targets, (lse, logps, entropy), g, ge, rule)
    assert gradient is logits and gradient.dtype == dtype
    assert torch.equal(gradient, exact.to(dtype))  # rounded to nearest even, as torch does
    check_gradient(exact, kept, targets, rule, g, ge)


@needs_library
def test_numerics_store_rounds_like_torch() -> None:
    """Gradients over 40 orders of magnitude, subnormals and overflow included, in every tail
    position.
    """
    for dtype in (torch.bfloat16, torch.float16):
        logits = torch.linspace(-100.0, 0.0, 4099).repeat(6, 1)
        targets = torch.zeros(6, dtype=torch.int64)
        g = torch.tensor([1.0, -3.3, 1e5, 1e-4, 1e38, math.inf])
        lse, logps, _ = rows_cpu.row_logps(logits, targets, LogitRule(), return_entropy=False)
        logits = logits.to(dtype)
        exact = rows_cpu.row_grad_(
            logits.clone().float(), targets, (lse, logps, None), g, None, LogitRule()
        )
        out = torch.empty(6, 4099, dtype=dtype)
        rows_cpu.row_grad_(logits, targets, (lse, logps, None), g, None, LogitRule(), out=out)
        assert torch.equal(out.nan_to_num(7.0), exact.to(dtype).nan_to_num(7.0))


@needs_library
@pytest.mark.parametrize("rule_name", ["plain", "temperature", "negative_scale"])
def test_numerics_infinite_columns_are_absent(rule_name: str) -> None:
    """-inf columns (in z) contribute exactly 0; the gradient equals, bit for bit, that of columns
    far below.
    """
    logits, targets = make_rows(6, 4096)
    rule = make_rule(rule_name, 6)
    hole = -math.inf * math.copysign(1.0, rule.logit_scale)
    logits[:, ::3] = hole
    logits[0, :2048] = hole  # a first block with nothing in it
    targets[:] = 4093
    lse, logps, entropy = rows_cpu.row_logps(logits, targets, rule, return_entropy=True)
    for value, truth in zip(
        (lse, logps, entropy), expected_statistics(logits, targets, rule), strict=True
    ):
        assert (value - truth).abs().max() <= 3e-6
    g, ge = torch.randn(6), torch.randn(6)
    absent = torch.isinf(logits)
    gradient = rows_cpu.row_grad_(logits.clone(), targets, (lse, logps, entropy), g, ge, rule)
    assert (gradient[absent] == 0).all() and gradient.isfinite().all()
    far = logits.masked_fill(absent, -3e4 * math.copysign(1.0, rule.logit_scale))
    finite = rows_cpu.row_grad_(far, targets, (lse, logps, entropy), g, ge, rule)
    assert torch.equal(gradient, finite)


@needs_library
@pytest.mark.parametrize("gap", [0.1, 5.0, 14.0, 16.0, 25.0])
def test_numerics_confident_tokens(gap: float) -> None:
    """p -> 1: the target's gradient g(1 - p) keeps its digits, and logp never exceeds 0."""
    logits = torch.full((3, 1000), 3.0)
    targets = torch.tensor([0, 700, 999])
    logits[torch.arange(3), targets] += gap + math.log(999)
    rule = LogitRule()
    lse, logps, _ = rows_cpu.row_logps(logits, targets, rule, return_entropy=False)
    _, truth, _ = expected_statistics(logits, targets, rule)
    assert (logps <= 0).all()
    torch.testing.assert_close(logps.double(), truth, rtol=1e-6, atol=0)
    g = torch.ones(3)
    gradient = rows_cpu.row_grad_(logits.clone(), targets, (lse, logps, None), g, None, rule)
    rest = -torch.expm1(truth)
    picked = gradient[torch.arange(3), targets].double()
    torch.testing.assert_close(picked, rest, rtol=1e-6, atol=0)
    assert gradient.double().sum(1).abs().max() <= 4e-6 * rest.max()


@needs_library
def test_numerics_large_offsets_and_ranges() -> None:
    """Logits of 1e4 and differences beyond exp's range neither overflow nor lose the
    distribution.
    """
    logits, targets = make_rows(4, 3000)
    logits = (logits * 1024).round() / 1024  # so that adding 4096 is exact
    shifted = logits + 4096.0
    plain = rows_cpu.row_logps(logits, targets, LogitRule(), return_entropy=True)
    moved = rows_cpu.row_logps(shifted, targets, LogitRule(), return_entropy=True)
    torch.testing.assert_close(moved[1], plain[1], rtol=0, atol=2e-6)
    torch.testing.assert_close(moved[2], plain[2], rtol=0, atol=2e-6)
    logits[:, 5] = 1e4
    targets[:] = 5
    lse, logps, entropy = rows_cpu.row_logps(logits, targets, LogitRule(), return_entropy=True)
    assert torch.equal(lse, torch.full((4,), 1e4)) and (logps == 0).all() and (entropy == 0).all()


@needs_library
def test_numerics_not_a_number_shows() -> None:
    """A NaN anywhere makes its row NaN, in every output, and no other row."""
    for column, value in itertools.product([0, 700, 2500, 2999], [math.nan, math.inf]):
        logits, targets = make_rows(3, 3000)
        logits[1, column] = value
        results = rows_cpu.row_logps(logits, targets, LogitRule(), return_entropy=True)
        for result in results[1:]:
            assert result[1].isnan() and result[[0, 2]].isfinite().all()
        g = torch.ones(3)
        gradient = rows_cpu.row_grad_(logits.clone(), targets, results, g, g, LogitRule())
        assert gradient[1].isnan().any() and gradient[[0, 2]].isfinite().all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_zero_rows_are_exact_zeros(dtype: torch.dtype, with_entropy: bool) -> None:
    """Rows without coefficients may hold anything, invalid targets included."""
    logits, targets = make_rows(9, 1000)
    logits[[1, 8]] = math.nan  # row 8 has a target
    logits[3] = math.inf
    logits[5] = -math.inf
    targets[[1, 3, 5]] = torch.tensor([-100, 10**12, -1])
    logits = logits.to(dtype)
    lse, logps, entropy = rows_cpu.row_logps(logits, targets, LogitRule(), return_entropy=True)
    assert logps[[1, 3, 5, 8]].isnan().all() and logps[[0, 2, 4, 6, 7]].isfinite().all()
    g = torch.tensor([1.0, 0.0, 1.0, -0.0, 1.0, 0.0, 0.0, 1.0, -0.0])
    ge = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]) if with_entropy else None
    out = torch.full_like(logits, math.nan)
    result = rows_cpu.row_grad_(logits, targets, (lse, logps, entropy), g, ge, LogitRule(), out=out)
    assert result is out and out.isfinite().all()
    assert (out[[1, 3, 5, 8]] == 0).all()
    assert (out[6] == 0).all() != with_entropy
    assert logits[1].isnan().all()  # the input stays as it was when `out` is given


def bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.contiguous().view(torch.uint8) for x in tensors]


def run_both(logits, targets, g, ge, rule):
    lse, logps, entropy = rows_cpu.row_logps(logits, targets, rule, return_entropy=True)
    return bits(
        lse,
        logps,
        entropy,
        rows_cpu.row_grad_(logits.clone(), targets, (lse, logps, entropy), g, ge, rule),
    )


@needs_library
@pytest.mark.parametrize("rule_name", ["plain", "per_row", "all"])
def test_a_row_depends_on_itself_only(rule_name: str) -> None:
    """Bitwise: order, neighbours, chunk size, thread count and run do not matter."""
    logits, targets = make_rows(37, 4500)
    rule = make_rule(rule_name, 37)
    g, ge = torch.randn(37), torch.randn(37)
    whole = run_both(logits, targets, g, ge, rule)
    order = torch.randperm(37)
    permuted = run_both(logits[order], targets[order], g[order], ge[order], rule.rows(order))
    parts = [slice(i, i + 1) for i in range(37)]
    single = [run_both(logits[i], targets[i], g[i], ge[i], rule.rows(i)) for i in parts]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run_both(logits, targets, g, ge, rule)
        torch.set_num_threads(5)
        crowd = run_both(logits, targets, g, ge, rule)
    finally:
        torch.set_num_threads(threads)
    for k, value in enumerate(whole):
        assert torch.equal(value, alone[k]) and torch.equal(value, crowd[k])
        rows = value.view(37, -1)
        assert torch.equal(rows[order], permuted[k].view(37, -1))
        assert torch.equal(rows, torch.cat([one[k].view(1, -1) for one in single]))


@needs_library
def test_options_do_not_move_the_logps() -> None:
    """Bitwise: asking for the entropy, or a zero entropy coefficient, changes nothing else."""
    for dtype, rule_name in itertools.product(
        [torch.float32, torch.bfloat16], ["plain", "temperature", "softcap"]
    ):
        logits, targets = make_rows(9, 3001)
        logits = logits.to(dtype)
        rule = make_rule(rule_name, 9)
        lse, logps, entropy = rows_cpu.row_logps(logits, targets, rule, return_entropy=True)
        again = rows_cpu.row_logps(logits, targets, rule, return_entropy=False)
        assert again[2] is None
        assert torch.equal(lse, again[0]) and torch.equal(logps, again[1])
        g = torch.randn(9)
        without = rows_cpu.row_grad_(logits.clone(), targets, (lse, logps, None), g, None, rule)
        zero = rows_cpu.row_grad_(
            logits.clone(), targets, (lse, logps, entropy), g, torch.zeros(9), rule
        )
        assert torch.equal(without, zero)


@needs_library
def test_strides_offsets_and_outputs() -> None:
    """Row strides above V, unaligned starts, expanded rows, a separate `out`."""
    logits, targets = make_rows(6, 777)
    g, rule = torch.randn(6), LogitRule(1.0, None, 0.8)
    lse, logps, _ = rows_cpu.row_logps(logits, targets, rule, return_entropy=False)
    expected = rows_cpu.row_grad_(logits.clone(), targets, (lse, logps, None), g, None, rule)
    wide = torch.full((6, 1003), math.nan)
    view = wide[:, 3:780]
    view.copy_(logits)
    got = rows_cpu.row_logps(view, targets, rule, return_entropy=False)
    assert torch.equal(got[0], lse) and torch.equal(got[1], logps)
    assert torch.equal(
        rows_cpu.row_grad_(view, targets, (lse, logps, None), g, None, rule), expected
    )
    # Nothing beside the view is written.
    assert wide[:, :3].isnan().all() and wide[:, 780:].isnan().all()
    row = logits[2].expand(6, 777)
    got = rows_cpu.row_logps(row, targets[2].expand(6), rule, return_entropy=False)
    assert torch.equal(got[1], logps[2].expand(6))
    out = torch.full((6, 1000), math.nan)[:, 100:877]
    kept = logits.clone()
    assert rows_cpu.row_grad_(logits, targets, (lse, logps, None), g, None, rule, out=out) is out
    assert torch.equal(out, expected) and torch.equal(logits, kept)


@needs_library
def test_empty_and_single() -> None:
    empty = rows_cpu.row_logps(
        torch.empty(0, 7), torch.empty(0, dtype=torch.int64), LogitRule(), return_entropy=True
    )
    assert [x.shape for x in empty] == [(0,)] * 3
    none = torch.empty(0)
    assert rows_cpu.row_grad_(
        torch.empty(0, 7), none.long(), (none, none, None), none, None, LogitRule()
    ).shape == (0, 7)


@needs_library
def test_refusals() -> None:
    logits, targets = make_rows(4, 10)
    rule, vector = LogitRule(), torch.zeros(4)
    for bad_logits, bad_targets, bad_rule, message in [
        (logits.double(), targets, rule, "logits: expected float32, bfloat16 or float16"),
        (
            logits.t(),
            torch.zeros(10, dtype=torch.int64),
            rule,
            "logits: expected a contiguous last dimension",
        ),
        (logits[0], targets, rule, r"logits: expected \(C, V\)"),
        (logits, targets.int(), rule, "target_ids: expected int64"),
        (logits, targets[:3], rule, "target_ids: expected one value for each of 4 rows"),
        (logits, targets, LogitRule(1.0, -1.0, 1.0), "softcap: expected a positive number"),
        (
            logits,
            targets,
            LogitRule(1.0, None, torch.ones(3)),
            "temperature: expected one value for each of 4 rows",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            rows_cpu.row_logps(bad_logits, bad_targets, bad_rule, return_entropy=False)
    for out, message in [
        (torch.empty(4, 9), r"out: expected \(4, 10\), got \(4, 9\)"),
        (torch.empty(4, 10, dtype=torch.float16), "out: expected the dtype of the logits"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            rows_cpu.row_grad_(logits, targets, (vector, vector, None), vector, None, rule, out=out)
    with pytest.raises(RuntimeError, match="entropy: expected the rows' entropies"):
        rows_cpu.row_grad_(logits, targets, (vector, vector, None), vector, vector, rule)


# ---- the loader ----


def test_loader_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(csrc_loader, "_PACKAGE", tmp_path / "grpo_fast")
    for name in ("GRPO_FAST_DISABLE_CSRC", "GRPO_FAST_CPU"):
        monkeypatch.delenv(name, raising=False)
    assert "the C++ sources are neither in" in (csrc_loader._load("rows") or "")


DISABLED = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from grpo_fast.kernels.cpu import loader as csrc_loader
from grpo_fast.kernels.cpu import rows as rows_cpu
from grpo_fast.kernels import reference as rows_torch
csrc_loader.load(), csrc_loader.load("rows")
try:
    zeros, ids = torch.zeros(1, 2), torch.zeros(1).long()
    rows_cpu.row_logps(zeros, ids, rows_torch.LogitRule(), return_entropy=False)
except csrc_loader.CsrcUnavailable as error:
    print(error)
"""


def test_explicit_use_raises_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISABLED],
        cwd=ROOT,
        env=os.environ | {"GRPO_FAST_DISABLE_CSRC": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    reason = "GRPO_FAST_DISABLE_CSRC is set"
    assert done.stdout.strip() == f"the C++ kernels 'rows' are not available: {reason}", done.stderr
    assert done.stderr.count(reason) == 1  # logged once


def write_something(command: list[str], flags: list[str], source: Path, output: Path) -> None:
    """Stands in for the compiler."""
    output.write_text("x")


@needs_library
def test_loader_builds_again_what_does_not_load(tmp_path: Path, monkeypatch) -> None:
    """`_open` stands in for dlopen: a library cannot be loaded twice in a process."""
    opened = []
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path))
    monkeypatch.delenv("GRPO_FAST_CPU", raising=False)
    monkeypatch.setattr(csrc_loader, "_run_compiler", write_something)

    def open_second(path: Path) -> str | None:
        opened.append(path)
        return "undefined symbol" if len(opened) == 1 else None

    monkeypatch.setattr(csrc_loader, "_open", open_second)
    assert csrc_loader._load("rows") is None
    assert len(opened) == 2 and opened[0] == opened[1]


def test_loader_key_covers_what_changes_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csrc_loader, "_run_compiler", write_something)
    monkeypatch.setenv("CXX", "g++")

    def name(instruction_set: str = "native", **options) -> str:
        path, reason = csrc_loader.compile_library(
            "rows", instruction_set, folder=tmp_path, **options
        )
        assert reason is None and path is not None
        return path.name

    first = name()
    assert name() == first
    names = {first, name("avx2"), name("avx512")}
    monkeypatch.setenv("CXX", "clang++")
    names.add(name())
    monkeypatch.setattr(csrc_loader, "cpu_flags", lambda: ("other",))
    names.add(name())
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(name())
    monkeypatch.setattr(leaves_cpp, "header", lambda: "another loss")
    names.add(name())
    assert len(names) == 7


@needs_library
@pytest.mark.skipif("avx2" not in csrc_loader.cpu_flags(), reason="the CPU has no AVX2")
def test_other_instruction_sets(tmp_path: Path) -> None:
    """Rows and products again, for the baseline with 4 lanes and for AVX2: 8 lanes where the native
    build has AVX-512, else 16 (the AVX-512 source, split)."""
    command = csrc_loader.compiler()
    assert command is not None
    variants = [("generic", 4), ("avx2", 8 if "avx512f" in csrc_loader.cpu_flags() else 16)]
    processes = []
    for instruction_set, lanes in variants:
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("GRPO_FAST_", "PYTEST_"))
        }
        environment |= {
            "GRPO_FAST_CPU": instruction_set,
            "GRPO_FAST_CACHE": str(tmp_path / instruction_set),
            "CXX": " ".join([*command, f"-DGRPO_FAST_LANES={lanes}"]),
        }
        line = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            "numerics and not 151936 and not per_row and not 5000 or every_layout or "
            "beside_a_bf16 or values_against or a_head and cpu",
            __file__,
            str(ROOT / "tests/kernels/test_gemm_cpu.py"),
            str(ROOT / "tests/kernels/test_linear_cpu.py"),
            str(ROOT / "tests/kernels/test_support_doors.py"),
            str(ROOT / "tests/kernels/test_decode_cpu.py"),
            str(ROOT / "tests/attention/test_attention_csrc.py"),
        ]
        processes.append(
            subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        assert " passed" in output and "skipped" not in output, output
    libraries = ("rows", "gemm", "linear", "support", "decode", "attention")
    for (instruction_set, _), library in itertools.product(variants, libraries):
        assert list((tmp_path / instruction_set).glob(f"{library}-*.so"))
