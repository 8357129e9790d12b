"""Compiler, cache and loader of the C++ kernels.

Each `csrc/api/<name>.cpp` compiles in seconds into one library in a cache folder. The libraries use
torch's stable ABI, so one build works with every torch >= 2.11. A wheel for Linux also contains
libraries for three instruction sets, which are used if nothing can be compiled. CPUs other than
x86-64 use torch.

Environment:
    GRPO_FAST_DISABLE_CSRC=1: behave as if no compiler existed
    GRPO_FAST_CACHE=<folder>: folder of the compiled libraries (default ~/.cache/grpo_fast)
    GRPO_FAST_CPU=native|avx512|avx2|generic: target instruction set (default native)
    CXX=<command>: the compiler
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_fast.kernels import NAMESPACE
from grpo_fast.kernels.cpu import loss_codegen

logger = logging.getLogger("grpo_fast")

_PACKAGE = Path(__file__).resolve().parents[2]
_FLAGS = [
    "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-fPIC",
    "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-shared",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]  # fmt: skip
_AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
# Maps each value of GRPO_FAST_CPU to compiler flags, and to the CPU features that /proc/cpuinfo
# must list so that the compiled code can run.
_INSTRUCTION_SETS: dict[str, tuple[list[str], set[str]]] = {
    "native": (["-march=native"], set()),
    "avx512": (["-march=skylake-avx512"], _AVX2 | _AVX512),
    "avx2": (["-march=haswell"], _AVX2),
    "generic": ([], set()),
}
# Instruction sets of the compiled libraries in a wheel, fastest first. They correspond to
# x86-64-v4, x86-64-v3 and the x86-64 baseline.
SHIPPED = ("avx512", "avx2", "generic")
_COMPILE_TIMEOUT_S = 300
_DISABLED = "GRPO_FAST_DISABLE_CSRC is set"
_LONGEST_LINE = 400  # maximum length of a reason in a log line, table or summary
_lock = threading.Lock()
_warned: list[str] = []  # libraries already reported as missing; only the first is a warning

Operator = Callable[..., Any]  # a torch operator; its schema checks the arguments


class CsrcUnavailable(RuntimeError):
    """Raised if the C++ kernels cannot run here. The message gives the reason."""


def unavailable(library: str = "rows") -> str | None:
    """Return why a C++ library cannot be used, or None if it can.

    The first call in a process builds and loads the library. Afterwards, its operators are in
    `torch.ops.<NAMESPACE>_<library>`. The first missing library is logged at WARNING level, because
    the torch implementation that replaces it is slower.
    """
    # Hold a lock. If two threads registered the operators of one library, torch would raise an
    # error.
    with _lock:
        return _unavailable_once(library)


@functools.cache
def _unavailable_once(library: str) -> str | None:
    reason = _load(library)
    if reason:
        # Warn only about the first missing library, because all are usually missing for the same
        # reason.
        level = logging.INFO if _warned or reason == _DISABLED else logging.WARNING
        if level == logging.WARNING:
            _warned.append(library)
        text = "grpo_fast: C++ kernels '%s' are not available, torch does their work, "
        text += "1.5 to 5 times slower: %s"
        logger.log(level, text, library, one_line(reason))
    return reason


def one_line(reason: str) -> str:
    """Return the first line of a message, shortened and without control characters."""
    line = "".join(c if c.isprintable() else "?" for c in reason.strip().partition("\n")[0])
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


@functools.cache
def operator(library: str, name: str) -> Operator:
    """Return an operator of a C++ library. If necessary, build and load the library first.

    The operator raises RuntimeError if it is called with unsupported tensors.

    Raises:
        CsrcUnavailable: the library cannot be used; the message contains the compiler's output.
    """
    reason = unavailable(library)
    if reason:
        raise CsrcUnavailable(f"the C++ kernels '{library}' are not available: {reason}")
    operator: Operator = getattr(getattr(torch.ops, f"{NAMESPACE}_{library}"), name).default
    return operator


def _load(library: str) -> str | None:
    """Build and load a library. Return None on success, and otherwise the reason why it failed."""
    if os.environ.get("GRPO_FAST_DISABLE_CSRC", "0") not in ("", "0"):
        return _DISABLED
    wanted = os.environ.get("GRPO_FAST_CPU") or "native"
    if wanted not in _INSTRUCTION_SETS:
        return f"GRPO_FAST_CPU: expected one of {list(_INSTRUCTION_SETS)}, got {wanted!r}"
    # Check the features of the CPU, because an unsupported instruction would kill the process.
    missing = _INSTRUCTION_SETS[wanted][1] - set(cpu_flags())
    if missing:
        return f"GRPO_FAST_CPU={wanted}: this CPU lacks {', '.join(sorted(missing))}"
    path, reason = compile_library(library, wanted)
    if path is None:
        path = shipped_library(library, wanted)
        if path is None:
            return reason
        text = "grpo_fast: C++ kernels '%s' come from the wheel, for %s: %s"
        logger.info(text, library, path.parent.name, one_line(reason or ""))
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"{path} does not load: {error}"
    return None


def shipped_library(library: str, instruction_set: str = "native") -> Path | None:
    """Return the wheel's fastest library that this CPU can run, or None if the wheel has none."""
    for name in SHIPPED if instruction_set == "native" else (instruction_set,):
        path = _PACKAGE / "csrc" / "built" / name / f"{library}.so"
        if path.is_file() and _INSTRUCTION_SETS[name][1] <= set(cpu_flags()):
            return path
    return None


def source_folder() -> Path | None:
    """Return the folder of the C++ sources, or None if it does not exist.

    In a checkout, the folder is csrc/. In an installed wheel, it is grpo_fast/csrc.
    """
    folders = (_PACKAGE / "csrc", _PACKAGE.parent / "csrc")
    return next((x for x in folders if (x / "api" / "rows.cpp").is_file()), None)


def compiler() -> list[str] | None:
    """Return the compiler command: $CXX, or the first of g++, clang++ and c++ on the PATH.

    Raises:
        ValueError: $CXX is not a valid command line.
    """
    chosen = os.environ.get("CXX", "")
    if chosen.strip():
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise ValueError(f"CXX: expected a command line, got {chosen!r}: {error}") from error
    paths = map(shutil.which, ("g++", "clang++", "c++"))
    return next(([path] for path in paths if path), None)


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first CPU in /proc/cpuinfo. On other systems, there are none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def cpu_flags() -> tuple[str, ...]:
    """Return the CPU features as Linux names them, sorted. They are empty on other systems."""
    return tuple(sorted(_cpuinfo().get("flags", "").split()))


def cpu_vendor() -> str:
    """Return the CPU's vendor_id from /proc/cpuinfo, or "" if it is unknown."""
    return _cpuinfo().get("vendor_id", "")


def compile_library(
    library: str, instruction_set: str = "native", *, folder: Path | None = None
) -> tuple[Path | None, str | None]:
    """Compile csrc/api/<library>.cpp, unless the cache already contains the result.

    The file name contains a hash of everything that the compiled library depends on: the sources,
    flags, compiler, CPU, C library and torch version. Machines that differ in one of them can
    therefore share a home folder.

    Returns:
        (path, None), or (None, reason) if the library cannot be compiled.
    """
    try:
        # 1. Find the cache folder, the sources and the compiler.
        folder = cache_folder() if folder is None else folder
        if platform.machine() not in ("x86_64", "AMD64"):
            raise CsrcUnavailable(f"the machine is {platform.machine()}, expected x86_64")
        sources = source_folder()
        if sources is None:
            places = f"neither in {_PACKAGE / 'csrc'} nor in {_PACKAGE.parent / 'csrc'}"
            raise CsrcUnavailable(f"the C++ sources are {places}")
        command = compiler()
        if command is None:
            tried = "install g++ or clang++, or set CXX; neither they nor c++ are on the PATH"
            raise CsrcUnavailable(f"no C++ compiler: {tried}")
        # 2. Compute the file name of the library from everything on which the library depends.
        source = sources / "api" / f"{library}.cpp"
        try:
            printed = loss_codegen.header()
        except OSError as error:  # Python has no source files
            what = "the losses of objective/losses.py and kl.py"
            raise CsrcUnavailable(f"{what} cannot be printed as C++: {error}") from error
        texts = [path.read_bytes() for path in [source, *sorted(sources.rglob("*.h"))]]
        flags = [*_FLAGS, *_INSTRUCTION_SETS[instruction_set][0]]
        flags.append(f"-DGRPO_FAST_LIBRARY={NAMESPACE}_{library}")
        # Hash the repr of the tuple. Joining the strings could give the same text for different
        # inputs.
        machine = cpu_flags(), platform.libc_ver(), torch.__version__
        parts = repr(([printed.encode(), *texts], flags, command, machine))
        stem = f"{library}-{hashlib.sha256(parts.encode()).hexdigest()[:20]}"

        # 3. Define the build, which runs only if the cache does not contain the library.
        def build(output: Path) -> None:
            (output.parent / "loss_functions.h").write_text(printed, encoding="utf-8")
            includes = f"-I{sources}", f"-I{output.parent}"
            # A warning, because the default level hides an INFO line, and the user has to wait.
            logger.warning("grpo_fast: compiling %s once (up to a minute) …", source.name)
            _run_compiler(command, [*flags, *includes], source, output)
            by = shlex.join(command)
            logger.info("grpo_fast: compiled %s for %s with %s", library, instruction_set, by)

        # 4. Take the library from the cache, or build it.
        return find_or_build(folder, stem, build), None
    except (CsrcUnavailable, ValueError) as error:
        return None, str(error)
    except OSError as error:
        hint = "GRPO_FAST_CACHE chooses another"
        failed = f"cannot read the C++ sources, or cannot write to the cache folder {folder}"
        return None, f"{failed} ({hint}): {error}"


def _run_compiler(command: list[str], flags: list[str], source: Path, output: Path) -> None:
    """Compile a library.

    Raises:
        CsrcUnavailable: the library was not compiled. The message gives the reason, with the
            compiler's output if it ran.
    """
    torch_folder = Path(torch.__file__).resolve().parent
    line = [*command, *flags, f"-I{torch_folder / 'include'}", str(source), "-o", str(output)]
    line += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
    try:
        # Run the command without a shell, so that CXX cannot inject commands.
        done = subprocess.run(
            line, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CsrcUnavailable(f"the compiler did not run: {error}") from error
    if done.returncode == 0 and output.is_file():
        return
    said = done.stderr.strip()
    # Begin with the first line that contains "error", because logs show only the first line of a
    # reason.
    errors = [text for text in said.splitlines() if "error" in text.lower()]
    outcome = f"status {done.returncode}: {errors[0] if errors else 'it names no error'}"
    text = f"the compiler failed with {outcome}\n{shlex.join(line)}\n{said[-4000:]}"
    raise CsrcUnavailable(text)


# ---- Cache folder of the compiled libraries. The file name of a library ends with the sha256 of
# ---- its content. The hash is checked before the library is loaded, because loading a truncated
# ---- file (after a crash or on a full disk) would kill the process with SIGBUS.


def cache_folder() -> Path:
    """Return the cache folder: $GRPO_FAST_CACHE if it is set, otherwise ~/.cache/grpo_fast.

    Raises:
        ValueError: the user has no home folder.
    """
    wanted = os.environ.get("GRPO_FAST_CACHE") or "~/.cache/grpo_fast"
    try:
        return Path(wanted).expanduser()
    except RuntimeError as error:  # neither HOME nor a passwd entry exists
        expected = "expected a folder for compiled libraries"
        raise ValueError(f"GRPO_FAST_CACHE: {expected}, got {wanted}: {error}") from error


def find_or_build(folder: Path, stem: str, build: Callable[[Path], None]) -> Path:
    """Return the library whose name begins with `stem`, building it if necessary.

    A finished build is moved into the folder by an atomic rename, so several processes may build at
    the same time.

    Args:
        folder: the cache folder.
        stem: beginning of the file name, which identifies the sources, flags, compiler and CPU.
        build: function that compiles the library and writes it to the path that it receives.

    Raises:
        OSError: the folder cannot be created, read or written.
        ValueError: the folder belongs to another user, whose code would then run in this process.
    """
    # Give only this user access to the folder (mode 0700), because code in the folder is executed.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_trusted(folder):
        came = f"{folder}, which belongs to uid {folder.stat().st_uid}"
        raise ValueError(f"GRPO_FAST_CACHE: expected a folder of this user, got {came}")
    libraries = list(folder.glob(f"{stem}-*.so"))
    for path in libraries:
        if _is_intact(path, stem):
            return path
        logger.warning("grpo_fast: %s is damaged or another user's, compiling again", path)
    with tempfile.TemporaryDirectory(dir=folder, prefix="grpo-fast-build-") as scratch:
        output = Path(scratch) / f"{stem}.so"
        build(output)
        target = folder / _name(output, stem)
        # os.replace is atomic, so other processes see either no file or the complete file.
        os.replace(output, target)
    # Remove damaged libraries after the build, so that a build that fails removes nothing.
    for path in libraries:
        if path != target and not _is_intact(path, stem):
            with contextlib.suppress(OSError):
                path.unlink()
    return target


def _is_intact(path: Path, stem: str) -> bool:
    """Return whether a library has a trusted owner and its content matches the hash in its name."""
    try:
        return path.name == _name(path, stem) and _is_trusted(path)
    except OSError:  # removed by another process, or not readable
        return False


def _name(path: Path, stem: str) -> str:
    return f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()}.so"


def _is_trusted(path: Path) -> bool:
    # Trust files that belong to root or to this user.
    return path.stat().st_uid in (0, os.geteuid())
