"""Tests of the loader on machines where the C++ kernels cannot be built or loaded.

Each case runs in a separate process (loader_cases.py).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_fast.kernels import route as backends
from grpo_fast.kernels.cpu import loader as csrc_loader

ROOT = Path(__file__).resolve().parents[2]
REASON = csrc_loader.unavailable("rows")
pytestmark = pytest.mark.skipif(REASON is not None, reason="there is no library to copy")
OURS = ("GRPO_FAST_", "CXX", "PYTEST_")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}

# Maps each case to the reason that its only log line must contain.
FALLBACKS = {
    "no_compiler": "no C++ compiler",
    "failing_compiler": "the compiler failed with status 3: rows.cpp:1: error: ?[2Jplanted",
    "idle_compiler": "the compiler failed with status 0: it names no error",
    "garbage_cpu": "GRPO_FAST_CPU: expected one of",
    "open_quote": 'CXX: expected a command line, got "g++ -DNAME=\'x"',
    "shell_words": "the compiler did not run",
    "nobody": "GRPO_FAST_CACHE: expected a folder",
    "another_users_folder": "which belongs to uid",
    "not_a_folder": "cannot write to the cache folder",
}

DAMAGED = ("truncated", "one_bit_changed", "another_users_library")


class Case:
    """Output, log lines and exit statuses of one case of `loader_cases`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder.joinpath("out").read_text().splitlines()
        self.err = folder.joinpath("err").read_text().splitlines()
        self.statuses = folder.joinpath("statuses").read_text().split()
        self.told = [line for line in self.err if line.startswith("grpo_fast: ")]
        builds = folder / "builds"
        self.builds = len(builds.read_text().split()) if builds.is_file() else 0

    def names(self, pattern: str) -> set[str]:
        return {path.name for path in (self.folder / "cache").glob(pattern)}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("loader")
    library, reason = csrc_loader.compile_library("rows")
    assert library is not None, reason
    line = [sys.executable, "-m", "tests.kernels.loader_cases", str(folder), str(library)]
    subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, check=True, timeout=240)
    return lambda name: Case(folder / name)


@pytest.mark.parametrize("name", FALLBACKS)
def test_torch_runs_where_the_kernels_cannot_and_one_line_says_so(case, name: str) -> None:
    found = case(name)
    assert found.out == ["torch"] and found.statuses == ["0"], found.err
    assert len(found.told) == 1 and FALLBACKS[name] in found.told[0], found.err
    assert not any("Traceback" in line for line in found.err)
    assert len(found.told[0]) < 600 and found.told[0].isprintable()
    assert not (found.folder / "planted").exists()  # no shell runs the text of CXX


@pytest.mark.parametrize("name", DAMAGED)
def test_a_library_that_is_not_what_was_built_never_reaches_dlopen(case, name: str) -> None:
    """Check that a library is compiled again if it is damaged or belongs to a different user.

    If a truncated file were loaded, the process would die with SIGBUS.
    """
    if name == "another_users_library" and os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    found = case(name)
    assert found.out == ["cpu"] and found.statuses == ["0"], found.err
    assert len(found.told) == 1 and "is damaged or another user's, compiling again" in found.told[0]
    assert found.builds == 2 and len(found.names("rows-*.so")) == 1


@pytest.mark.parametrize(
    ("name", "out", "builds"),
    [
        ("switched_off", ["torch"], 0),
        ("shipped", ["cpu"], 0),
        ("three_builds", ["cpu"] * 3, 3),
        ("threads", ["cpu"], 1),
    ],
)
def test_no_warning_where_nothing_is_wrong(case, name: str, out: list[str], builds: int) -> None:
    """Check that no warning is logged in four cases that are not faults.

    The cases are disabled kernels, the wheel's library on a machine without a compiler, three
    processes that compile at the same time, and threads that share one build.
    """
    found = case(name)
    assert (found.out, found.told, found.builds) == (out, [], builds)
    assert found.statuses == ["0"] * len(out) and len(found.names("*")) == min(builds, 1)


def test_a_run_says_which_kernels_it_has(case) -> None:
    slow, fast = case("a_slow_run"), case("a_fast_run")
    lines = [[x for x in found.out if x.startswith("kernels: ")] for found in (slow, fast)]
    assert len(lines[0]) == 1 and lines[1] == ["kernels: cpu"]
    assert lines[0][0].startswith("kernels: torch (slower; cpu: GRPO_FAST_CPU: expected one of")
    assert len(slow.told) == 1 and fast.told == [] and slow.statuses == fast.statuses == ["0"]
    summaries = [json.loads((x.folder / "run" / "summary.json").read_text()) for x in (slow, fast)]
    assert [x["backend"] for x in summaries] == ["torch", "cpu"]
    assert summaries[1]["backend_fallback"] is None
    assert summaries[0]["backend_fallback"] in lines[0][0]


@pytest.mark.parametrize(
    ("has", "wanted", "expected"),
    [
        (csrc_loader._AVX2 | csrc_loader._AVX512, "native", "avx512"),
        (csrc_loader._AVX2 | {"avx512f"}, "native", "avx2"),
        (csrc_loader._AVX512, "native", "generic"),
        (csrc_loader._AVX2, "generic", "generic"),
        (set(), "avx2", None),
    ],
)
def test_a_wheels_library_fits_the_cpu(monkeypatch, tmp_path, has, wanted, expected) -> None:
    for name in csrc_loader.SHIPPED:
        path = tmp_path / "csrc" / "built" / name / "rows.so"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    monkeypatch.setattr(csrc_loader, "_PACKAGE", tmp_path)
    monkeypatch.setattr(csrc_loader, "cpu_flags", lambda: tuple(has))
    path = csrc_loader.shipped_library("rows", wanted)
    assert (path.parent.name if path else None) == expected
    assert csrc_loader.shipped_library("absent", wanted) is None


@pytest.mark.parametrize(("device", "level"), [("cuda", logging.WARNING), ("cpu", logging.INFO)])
def test_a_gpu_without_triton_is_told_as_loudly(monkeypatch, caplog, device, level) -> None:
    """Check that missing Triton is logged as a warning on a GPU, but as INFO on a CPU.

    On a CPU, the loader has already logged why the C++ kernels are missing.
    """
    monkeypatch.setattr(backends, "fallback_reason", lambda device: "it is not installed")
    with caplog.at_level(logging.INFO, "grpo_fast"):
        assert backends._auto.__wrapped__(device) == "torch"
    (record,) = caplog.records
    assert record.levelno == level and "(it is not installed)" in record.message
