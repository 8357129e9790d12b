"""Tests of the loader on machines where the C++ kernels cannot be built or loaded."""

import functools
import json
import logging
import os
import pwd
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import grpo_fast
from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm
from grpo_fast.kernels.cpu import loader as csrc_loader
from tests.command_line import invoke, write_recipe

LIBRARY, REASON = csrc_loader.compile_library("rows")
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no library to copy")
CACHES = (
    route.fallback_reason, route.unavailable, route.gemm_choice, route._auto, route._route,
    gemm.unavailable, gemm.has_tiles,
)  # fmt: skip
Prepare = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Simulate a machine on which nothing has been loaded, with an empty cache of libraries.

    Yield a folder. The cache is its subfolder `cache`.
    """
    for name in os.environ:
        if name.startswith(("GRPO_FAST_", "CXX")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(csrc_loader, "_warned", [])
    fresh = functools.cache(csrc_loader._unavailable_once.__wrapped__)
    monkeypatch.setattr(csrc_loader, "_unavailable_once", fresh)
    for cached in CACHES:
        cached.cache_clear()
    yield tmp_path
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture
def copying(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine whose compiler copies LIBRARY and adds a line to the file `builds`."""
    find_output = 'while [ "$1" != -o ]; do shift; done'
    write = f'sleep 0.5; echo built >> {machine}/builds; cp {LIBRARY} "$2"'
    monkeypatch.setenv("CXX", script(machine, f"{find_output}; {write}"))
    return machine


def script(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Change the owner of `path` to a different user.

    Only root can change the owner of a file. Without root, replace `os.geteuid`, so that all files
    appear to belong to a different user.
    """
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        patch.setattr(os, "geteuid", lambda: 12345)


def variables(**values: str) -> Prepare:
    """Return a function that sets environment variables. It replaces {} with the folder."""

    def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
        for name, value in values.items():
            patch.setenv(name, value.replace("{}", str(folder)))

    return prepare


def failing_compiler(folder: Path, patch: pytest.MonkeyPatch) -> None:
    line = r"In file\nrows.cpp:1: error: \033[2Jplanted"
    shout = rf"(printf '{line}'; head -c 200000 /dev/zero | tr '\0' x) >&2"
    patch.setenv("CXX", script(folder, f"{shout}; exit 3"))


def nobody(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def missing(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("GRPO_FAST_CACHE", "HOME"):
        patch.delenv(name)
    patch.setattr(pwd, "getpwuid", missing)


def another_users_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "cache").mkdir()
    give_away(folder / "cache", patch)


def not_a_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    patch.setenv("GRPO_FAST_CACHE", str(folder / "file" / "below"))


def no_sources(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(csrc_loader, "_PACKAGE", folder / "grpo_fast")


def no_python_sources(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def header() -> str:
        raise OSError("could not get source code")

    patch.setattr(csrc_loader.loss_codegen, "header", header)


# Each case prepares a machine, and has the reason that the only log line must contain.
FALLBACKS: dict[str, tuple[Prepare, str]] = {
    "no_compiler": (variables(PATH="{}"), "no C++ compiler"),
    "failing_compiler": (
        failing_compiler, "the compiler failed with status 3: rows.cpp:1: error: ?[2Jplanted",
    ),
    "idle_compiler": (
        variables(CXX="true"), "the compiler failed with status 0: it names no error",
    ),
    "garbage_cpu": (
        variables(GRPO_FAST_CPU="sse9\x1b[2J\n" * 1000), "GRPO_FAST_CPU: expected one of",
    ),
    "open_quote": (
        variables(CXX="g++ -DNAME='x"), 'CXX: expected a command line, got "g++ -DNAME=\'x"',
    ),
    "shell_words": (
        variables(CXX="g++; touch {}/planted; $(touch {}/planted) #"), "the compiler did not run",
    ),
    "no_sources": (no_sources, "the C++ sources are neither in"),
    "no_python_sources": (no_python_sources, "the losses of objective/losses.py and kl.py"),
    "nobody": (nobody, "GRPO_FAST_CACHE: expected a folder"),
    "another_users_folder": (another_users_folder, "which belongs to uid"),
    "not_a_folder": (not_a_folder, "cannot write to the cache folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLBACKS)
def test_torch_runs_where_the_kernels_cannot_and_one_line_says_so(
    machine: Path, name: str, monkeypatch, caplog
) -> None:
    prepare, reason = FALLBACKS[name]
    prepare(machine, monkeypatch)
    hidden, ids = torch.ones(3, 4, requires_grad=True), torch.tensor([1, 2, 3])
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    for _ in range(2):
        output = grpo_fast.linear_grpo_loss(
            hidden, torch.ones(7, 4), ids, torch.ones(1), grpo_fast.LossConfig(), cu_seqlens=lengths
        )
        output.loss.backward()
    assert route.rows_route("auto", torch.empty(0)).backend == "torch"
    warnings = [x for x in caplog.records if x.levelno >= logging.WARNING]
    (record,) = [x for x in warnings if "compiling" not in x.message]
    assert reason in record.message and record.exc_info is None
    assert len(record.message) < 600 and record.message.isprintable()
    assert not (machine / "planted").exists()  # no shell runs the text of CXX


@pytest.mark.parametrize("damage", ["truncated", "one_bit_changed", "another_users"])
def test_a_library_that_is_not_what_was_built_never_reaches_dlopen(
    copying: Path, damage: str, monkeypatch, caplog
) -> None:
    """Check that a library is compiled again if it is damaged or belongs to a different user.

    If a truncated file were loaded, the process would die with SIGBUS.
    """
    path, _ = csrc_loader.compile_library("rows")
    assert csrc_loader.compile_library("rows") == (path, None)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        os.truncate(path, len(content) // 2)
    elif damage == "one_bit_changed":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    else:
        give_away(path, monkeypatch)
    again, _ = csrc_loader.compile_library("rows")
    assert again.read_bytes() == LIBRARY.read_bytes() and again.stat().st_uid == os.geteuid()
    assert caplog.text.count("is damaged or another user's, compiling again") == 1
    assert caplog.text.count("compiling rows.cpp once") == 2  # said before the user waits
    assert (copying / "builds").read_text().split() == ["built"] * 2
    assert list((copying / "cache").iterdir()) == [again]


def test_several_builds_at_once_give_one_library(copying: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(csrc_loader.compile_library, ["rows"] * 3))
    assert (copying / "builds").read_text().split() == ["built"] * 3
    ((path, reason),) = found
    assert reason is None and list((copying / "cache").iterdir()) == [path]


def test_threads_share_one_build(machine: Path, monkeypatch) -> None:
    loads = []

    def load(library: str) -> None:
        loads.append(library)
        time.sleep(0.2)

    monkeypatch.setattr(csrc_loader, "_load", load)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(csrc_loader.unavailable, ["rows"] * 4)) == [None] * 4
    assert loads == ["rows"]


def test_a_library_of_the_wheel_is_used_without_a_warning(
    machine: Path, monkeypatch, caplog
) -> None:
    built = machine / "csrc" / "built" / "generic" / "rows.so"
    built.parent.mkdir(parents=True)
    shutil.copy(LIBRARY, built)
    monkeypatch.setattr(csrc_loader, "_PACKAGE", machine)
    monkeypatch.setenv("PATH", str(machine))
    opened = []
    monkeypatch.setattr(torch.ops, "load_library", opened.append)
    assert csrc_loader.unavailable("rows") is None and opened == [str(built)]
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]


def test_a_run_says_which_kernels_it_has(machine: Path, monkeypatch, no_pictures) -> None:
    monkeypatch.setenv("GRPO_FAST_CPU", "sse9")
    done = invoke("train", write_recipe(machine), "log.save_model=false")
    (kernels,) = [x for x in done.stdout.splitlines() if x.startswith("kernels: ")]
    assert kernels.startswith("kernels: torch (slower; cpu: GRPO_FAST_CPU: expected one of")
    summary = json.loads((machine / "run" / "summary.json").read_text())
    assert summary["backend"] == "torch" and summary["backend_fallback"] in kernels


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
    monkeypatch.setattr(route, "fallback_reason", lambda device: "it is not installed")
    with caplog.at_level(logging.INFO, "grpo_fast"):
        assert route._auto.__wrapped__(device) == "torch"
    (record,) = caplog.records
    assert record.levelno == level and "(it is not installed)" in record.message
