"""Tests of the C++ kernel library: builds, loading, generated functions and instruction sets.

The kernels must refuse indices and sizes with which they would leave their memory.
"""

import ctypes
import functools
import itertools
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import decode, gemm, loader, loss_codegen, rows
from grpo_fast.kernels.types import AddedRows, HeadInputs, LogitRows, LogitTransform, SupportRows
from grpo_fast.objective.losses import OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]
DISABLED = "GRPO_FAST_DISABLE_CSRC is set"
REASON = loader.unavailable("rows")
needs_library = pytest.mark.skipif(
    REASON is not None, reason=f"no C++ kernels here: {(REASON or '').splitlines()[:1]}"
)


# ---- generated loss functions ----


def a_new_loss(logp, log_ratio, advantage, low, high):
    """Compute a made-up loss that uses every statement and operation that a loss may contain."""
    new = tl.exp(log_ratio) - tl.abs(logp)  # noqa: F821
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


@pytest.mark.skipif(loader.compiler() is None, reason="no C++ compiler")
def test_a_loss_added_in_python_works_in_cpp(tmp_path: Path) -> None:
    """Check that loss functions translated to C++ give the fp64 results of the Python functions.

    The test covers all losses and one new loss, which uses every operation.
    """
    leaves = [*loss_codegen.objective_functions(), a_new_loss]
    text = loss_codegen.print_header(leaves, loss_codegen.kl_functions())
    (tmp_path / "loss_functions.h").write_text(text)
    source = tmp_path / "run.cpp"
    source.write_text(
        '#include "loss_functions.h"\n'
        + 'extern "C" void run(int kl, int64_t index, double a, double b, double c,\n'
        + "                    const double* p, double* to) {\n"
        + "  const auto r = kl ? grpo_fast::kl_estimator(index, a, p)\n"
        + "                    : grpo_fast::objective(index, a, b, c, p);\n"
        + "  to[0] = r.value, to[1] = r.slope;\n}\n"
    )
    flags = "-std=c++17 -O1 -Wall -Werror -Wno-psabi -fPIC -shared".split()
    files = [f"-I{loader.source_folder()}", str(source), "-o", str(tmp_path / "leaves.so")]
    subprocess.run([*(loader.compiler() or ()), *flags, *files], check=True, timeout=120)
    run = ctypes.CDLL(str(tmp_path / "leaves.so")).run
    numbers = ctypes.POINTER(ctypes.c_double)
    run.argtypes = [ctypes.c_int, ctypes.c_int64, *[ctypes.c_double] * 3, numbers, numbers]
    params = (0.2, 0.3, 2.0, 1.5)
    places = (-9.0, -0.7, -1e-3), (-0.5, -0.1, 0.0, 0.25, 3.0), (-1.5, 0.0, 0.5)
    for is_kl, table in enumerate((leaves, loss_codegen.kl_functions())):
        for (index, leaf), point in itertools.product(enumerate(table), itertools.product(*places)):
            given = point[1:2] if is_kl else point
            extra = params[: leaf.__code__.co_argcount - len(given)]
            expected = leaf(*(torch.tensor(x, dtype=torch.float64) for x in (*given, *extra)))
            to = (ctypes.c_double * 2)()
            run(is_kl, index, *(3 * given)[:3], (ctypes.c_double * 4)(*params), to)
            for got, truth in zip(to, expected, strict=True):
                assert math.isclose(got, float(truth), rel_tol=1e-12, abs_tol=1e-15), leaf


def test_the_printer_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"a_bad_loss: expected .* got 'tl.tanh'"):
        loss_codegen.print_header([a_bad_loss], [])
    with pytest.raises(
        ValueError, match="a_helper: expected the arguments logp, log_ratio, advantage"
    ):
        loss_codegen.print_header([a_helper], [])
    loss_codegen.header.cache_clear()
    monkeypatch.setitem(OBJECTIVES, "bad", OBJECTIVES["grpo"]._replace(function=a_bad_loss))
    _, reason = loader.compile_library("rows")
    loss_codegen.header.cache_clear()
    assert reason is not None and "cannot be printed as C++: a_bad_loss" in reason


# ---- the loader ----


def test_explicit_use_raises_the_reason(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("GRPO_FAST_DISABLE_CSRC", "1")
    caplog.set_level(logging.INFO, "grpo_fast")
    fresh = functools.cache(loader._unavailable_once.__wrapped__)
    monkeypatch.setattr(loader, "_unavailable_once", fresh)
    assert loader.unavailable("rows") == loader.unavailable("rows") == DISABLED
    reason = f"kernels 'rows' are not available: {DISABLED}"
    with pytest.raises(loader.CsrcUnavailable, match=reason):
        loader.operator.__wrapped__("rows", "row_logps")
    (record,) = caplog.records  # logged once, and not as a warning
    assert DISABLED in record.message and record.levelno == logging.INFO


def test_loader_key_covers_what_changes_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_nothing(command: list[str], flags: list[str], source: Path, output: Path) -> None:
        output.write_text("x")

    monkeypatch.setattr(loader, "_run_compiler", compile_nothing)
    monkeypatch.setenv("CXX", "g++")

    def name(instruction_set: str = "native") -> str:
        path, reason = loader.compile_library("rows", instruction_set, folder=tmp_path)
        assert reason is None and path is not None
        return path.name

    first = name()
    assert name() == first
    names = {first, name("avx2"), name("avx512")}
    monkeypatch.setenv("CXX", "clang++")
    names.add(name())
    monkeypatch.setattr(loader, "cpu_flags", lambda: ("other",))
    names.add(name())
    monkeypatch.setattr(loader.platform, "libc_ver", lambda: ("glibc", "2.17"))
    names.add(name())
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(name())
    monkeypatch.setattr(loss_codegen, "header", lambda: "another loss")
    names.add(name())
    assert len(names) == 8


FILES = ("rows", "gemm_cpu", "head", "support_kernels", "decode_cpu")
DECODER = "tests/rollout/test_decoder.py"


@needs_library
@pytest.mark.skipif("avx2" not in loader.cpu_flags(), reason="the CPU has no AVX2")
def test_other_instruction_sets(tmp_path: Path) -> None:
    """Check that the tests of rows and products also pass in a generic build and with AVX2.

    The generic build has vectors of 4 lanes. The AVX2 build has 8 lanes on a CPU with AVX-512. On
    other CPUs, the native build already has 8 lanes, so the AVX2 build has 16, and the compiler
    splits each vector into two.
    """
    command = loader.compiler()
    assert command is not None
    variants = [("generic", 4), ("avx2", 8 if "avx512f" in loader.cpu_flags() else 16)]
    processes = []
    for instruction_set, lanes in variants:
        ours = ("GRPO_FAST_", "PYTEST_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {
            "GRPO_FAST_CPU": instruction_set, "GRPO_FAST_CACHE": str(tmp_path / instruction_set),
            "CXX": " ".join([*command, f"-DGRPO_FAST_LANES={lanes}"]),
        }  # fmt: skip
        names = "numerics and cpu and not 151936 and not 5000 or every_layout or "
        names += "beside_a_bf16 or values_against or a_head and cpu or no_other_row"
        files = [f"tests/kernels/test_{x}.py" for x in FILES]
        files += [DECODER] * (instruction_set == "avx2")  # the generic build lacks FMA
        options = ["-q", "-x", "-p", "no:cacheprovider", "-k", names]
        line = [sys.executable, "-m", "pytest", *options, *files]
        processes.append(
            subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    for process in processes:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert " passed" in output and "skipped" not in output, output
    libraries = ("rows", "gemm", "linear", "support", "decode")
    for (instruction_set, _), library in itertools.product(variants, libraries):
        assert list((tmp_path / instruction_set).glob(f"{library}-*.so"))
    assert list((tmp_path / "avx2").glob("decoder-*.so"))


TRANSFORM, IDS, BAD = LogitTransform(), torch.arange(4), torch.arange(4) + 1
X, HIDDEN, WEIGHT = torch.zeros(4, 10), torch.zeros(4, 3), torch.zeros(10, 3)
SETS = SupportRows(
    None, None, torch.arange(8), torch.arange(5) * 2, torch.zeros(4, dtype=torch.int64)
)
KEYS, TILES = torch.zeros(2, 3, 8), decode.tiles_of(*torch.zeros(2, 1, 2, 17, 8))


def logps(target_ids=IDS, offsets=None):
    logits = X if offsets is None else X.view(1, 40)
    p = LogitRows(logits, target_ids, TRANSFORM, offsets)
    return rows.row_logps(p, return_entropy=False)


def grad(out=X, logps=X[:, 0]):
    p = LogitRows(X, IDS, TRANSFORM)
    return rows.row_grad_(p, (X[:, 0], logps, None), X[:, 0], None, out=out)


def product(values=X, **places):
    added = AddedRows(torch.ones(4), values, **places)
    return gemm.mm_(torch.zeros(4, 3), torch.zeros(3, 10), torch.zeros(4, 10), added=added)


def head(target_ids=IDS, bias=None, out=X):
    given = HeadInputs(HIDDEN, WEIGHT, bias, target_ids, TRANSFORM)
    return rows.head_logps(given, return_entropy=False, logits_out=out)


def sets(index=None, **changes):
    own = SETS._replace(hidden_index=index, **changes)
    p = HeadInputs(HIDDEN, WEIGHT, None, own.places, TRANSFORM)
    return rows.head_rows(p, own, return_entropy=False, return_slopes=False)


def sums(**changes):
    kernels = route.kernel_module("support", "cpu")
    return kernels.head_hidden(torch.ones(8), WEIGHT, SETS._replace(**changes))


def step(lengths=17, counts=3, time=0):
    own = decode.grow_tiles((), TILES, 3, 1)
    numbers = torch.tensor([lengths]), torch.tensor([counts])
    return decode.decode_(KEYS, KEYS, KEYS, TILES, own, *numbers, time, 1.0, None)


@needs_library
@pytest.mark.parametrize(
    ("call", "name", "bad"),
    [
        (logps, "target_ids", IDS[:3]),
        (logps, "offsets", torch.tensor([0, 10, 20, 30, 41])),
        (logps, "offsets", torch.tensor([0, 20, 10, 30, 40])),
        (grad, "out", torch.zeros(4, 9)),
        (grad, "logps", torch.zeros(3)),
        (product, "ids", BAD),
        (product, "rows", BAD),
        (head, "target_ids", IDS[:3]),
        (head, "bias", torch.zeros(9)),
        (head, "out", torch.zeros(4, 9)),
        (sets, "index", BAD),
        (sets, "ids", torch.arange(8) + 3),
        (sets, "ids", torch.arange(8) - 1),
        (sets, "offsets", torch.tensor([0, 2, 4, 6, 9])),
        (sums, "ids", torch.arange(8) + 3),
        (sums, "offsets", torch.arange(5).flip(0) * 2),
        (step, "lengths", 33),
        (step, "counts", 4),
        (step, "time", 16),
        (step, "time", -1),
    ],
)
def test_an_index_or_a_size_out_of_range_is_refused(call, name, bad):
    call()
    with pytest.raises(RuntimeError, match=rf"\b(added_)?{name}.*: expected"):
        call(**{name: bad})
