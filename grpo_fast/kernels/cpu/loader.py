"""Finds or builds the C++ kernels: prebuilt library → compile into a cache folder → a reason why there is none.

A library is one `csrc/<name>.cpp`. It is written against torch's stable ABI, so g++ or clang++ takes seconds, and one
file serves every torch from 2.11 on and every Python. Nothing is compiled at install time.

Environment:
    GRPO_FAST_DISABLE_CSRC=1   behave as if there were no compiler
    GRPO_FAST_CACHE=<folder>   where compiled libraries are kept (default ~/.cache/grpo_fast)
    GRPO_FAST_CPU=native|avx512|avx2|generic   instruction set to compile for (default native)
    CXX=<command>              the compiler to use
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_fast.kernels.cpu import leaves as leaves_cpp

logger = logging.getLogger("grpo_fast")

_PACKAGE = Path(__file__).resolve().parents[2]
_FLAGS = [
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-shared",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]
_NATIVE = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else ["-mcpu=native"]
# name → (compiler flags, what /proc/cpuinfo must list for the code to run)
_INSTRUCTION_SETS: dict[str, tuple[list[str], set[str]]] = {
    "native": (_NATIVE, set()),
    "avx512": (["-march=skylake-avx512"], {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}),
    "avx2": (["-march=haswell"], {"avx2", "fma", "f16c", "bmi2"}),
    "generic": ([], set()),
}
_COMPILE_TIMEOUT_S = 300


class CsrcUnavailable(RuntimeError):
    """The C++ kernels cannot run here; the message says why."""


def load(library: str = "rows") -> str | None:
    """Make `torch.ops.grpo_fast_<library>` exist. Returns None, or the reason why it cannot. Answered once per process.

    Args:
        library: name of a source file in csrc/, without .cpp.
    """
    return _load_once(library)


@functools.cache
def _load_once(library: str) -> str | None:
    reason = _load(library)
    if reason:
        logger.info("grpo_fast: C++ kernels '%s' are not available: %s", library, reason)
    return reason


def require(library: str = "rows") -> None:
    """Like `load`, for callers that have no other way.

    Raises:
        CsrcUnavailable: with the reason, the compiler's own message included.
    """
    reason = load(library)
    if reason:
        raise CsrcUnavailable(f"the C++ kernels '{library}' are not available: {reason}")


def _load(library: str) -> str | None:
    if os.environ.get("GRPO_FAST_DISABLE_CSRC", "0") not in ("", "0"):
        return "GRPO_FAST_DISABLE_CSRC is set"
    wanted = os.environ.get("GRPO_FAST_CPU", "native")
    if wanted not in _INSTRUCTION_SETS:
        return f"GRPO_FAST_CPU: expected one of {list(_INSTRUCTION_SETS)}, got {wanted!r}"
    missing = _INSTRUCTION_SETS[wanted][1] - set(cpu_flags())
    if missing:
        return f"GRPO_FAST_CPU={wanted}: this CPU lacks {', '.join(sorted(missing))}"
    prebuilt = _prebuilt(library, wanted)
    if prebuilt is not None:
        reason = _open(prebuilt)
        if reason is None:
            logger.info("grpo_fast: C++ kernels '%s': prebuilt %s", library, prebuilt.name)
            return None
        logger.warning("grpo_fast: the prebuilt %s does not load, compiling instead: %s", prebuilt, reason)
    return _load_compiled(library, wanted)


def _load_compiled(library: str, wanted: str) -> str | None:
    path, reason = compile_library(library, wanted)
    if path is None:
        return reason
    reason = _open(path)
    if reason is not None:  # a cache entry damaged by a full disk or a crash: build it once more
        logger.warning("grpo_fast: %s does not load, compiling again: %s", path, reason)
        path.unlink(missing_ok=True)
        path, reason = compile_library(library, wanted)
        if path is not None:
            reason = _open(path)
    return reason


def _open(path: Path) -> str | None:
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"{path} does not load: {error}"
    return None


def _prebuilt(library: str, wanted: str) -> Path | None:
    """grpo_fast/_csrc/<library>-<machine>-<instruction set>.so: the best one this CPU runs."""
    present = set(cpu_flags())
    names = ["avx512", "avx2"] if wanted == "native" else [wanted]
    for name in names:
        path = _PACKAGE / "_csrc" / f"{library}-{platform.machine()}-{name}.so"
        if not path.is_file() or not _INSTRUCTION_SETS[name][1] <= present:
            continue
        if library != "rows" or _has_our_leaves(path):
            return path
        logger.warning("grpo_fast: the prebuilt %s was made for other losses than objectives.py and kl.py have", path)
    return None


def _has_our_leaves(path: Path) -> bool:
    """Whether a library was built with the losses of this objectives.py and kl.py."""
    try:
        return leaves_cpp.marker().encode() in path.read_bytes()
    except (ValueError, OSError):
        return False


def source_folder() -> Path | None:
    """csrc/ of a checkout, or grpo_fast/csrc of an installed wheel."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (folder / "rows.cpp").is_file():
            return folder
    return None


def compiler() -> list[str] | None:
    """The compiler's command line: $CXX, else the first of g++, clang++ and c++ on the PATH."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return [found]
    return None


@functools.cache
def _cpuinfo() -> str:
    """What Linux says of the CPU; empty elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """What this CPU can do, as Linux names it; elsewhere the name of the processor."""
    text = _cpuinfo()
    if not text:
        return (platform.machine(), platform.processor())
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return tuple(sorted(line.partition(":")[2].split()))
    return (platform.machine(),)


@functools.cache
def cpu_vendor() -> str:
    """As Linux names it ("GenuineIntel", "AuthenticAMD"); elsewhere and on other machines an empty string."""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", _cpuinfo(), re.MULTILINE)
    return found[1] if found else ""


def cache_folder() -> Path:
    return Path(os.environ.get("GRPO_FAST_CACHE") or Path.home() / ".cache" / "grpo_fast")


def compile_library(
    library: str,
    instruction_set: str = "native",
    *,
    extra_flags: Sequence[str] = (),
    folder: Path | None = None,
) -> tuple[Path | None, str | None]:
    """Compile csrc/<library>.cpp unless the cache has it. Returns (path, None) or (None, reason).

    The file's name holds a hash of everything that goes into it: sources, flags, compiler, CPU, torch. It appears by
    an atomic rename, so any number of processes may compile at the same time.
    """
    sources = source_folder()
    if sources is None:
        return None, f"the C++ sources are neither in {_PACKAGE / 'csrc'} nor in {_PACKAGE.parent / 'csrc'}"
    command = compiler()
    if command is None:
        return None, "no C++ compiler: none of g++, clang++ and c++ is on the PATH, and CXX is not set"
    try:
        leaves = leaves_cpp.header()
    except (ValueError, OSError) as error:
        return None, f"the losses of objectives.py and kl.py cannot be printed as C++: {error}"
    flags = [*_FLAGS, *_INSTRUCTION_SETS[instruction_set][0], *extra_flags]
    texts = [leaves.encode()] + [
        path.read_bytes() for path in [sources / f"{library}.cpp", *sorted(sources.glob("*.h"))]
    ]
    key = hashlib.sha256(repr((texts, flags, command, cpu_flags(), torch.__version__)).encode()).hexdigest()[:20]
    folder = cache_folder() if folder is None else folder
    target = folder / f"{library}-{key}.so"
    if target.is_file():
        return target, None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            built = Path(scratch) / target.name
            (Path(scratch) / "leaves.h").write_text(leaves)
            reason = _run_compiler(command, [*flags, f"-I{scratch}"], sources / f"{library}.cpp", built)
            if reason:
                return None, reason
            os.replace(built, target)
    except OSError as error:
        return None, f"cannot write to the cache folder {folder} (GRPO_FAST_CACHE chooses another): {error}"
    logger.info("grpo_fast: compiled %s for %s with %s", library, instruction_set, shlex.join(command))
    return target, None


def _run_compiler(command: list[str], flags: list[str], source: Path, output: Path) -> str | None:
    torch_folder = Path(torch.__file__).resolve().parent
    line = [*command, *flags, f"-I{torch_folder / 'include'}", str(source), "-o", str(output)]
    line += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler did not run: {error}"
    if done.returncode == 0:
        return None
    return f"the compiler failed with status {done.returncode}: {shlex.join(line)}\n{done.stderr.strip()[-4000:]}"
