"""Unit tests as a reward: the fraction of a row's tests that hold for the completion's code.

Each answer runs in a separate process (`answer.py`), which never holds the tests. A second process
(`judge.py`) runs the tests and calls the answer's functions. This process compares the output of
programs. Whatever an answer does, it costs its own reward only: a test that was not reached does
not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # a reward's worker runs this file outside its package
import sandbox  # noqa: E402
import sources  # noqa: E402

sys.path.pop(0)

START_S = 30.0  # for starting the interpreter, on a busy machine
MIB = 1 << 20
_OUTPUT = 1 << 16  # bytes that a process may print, at least
# An import uses the stored bytecode. A script would be compiled at each start. The answer must not
# find the folder in sys.path.
LAUNCH = """
import sys
sys.path.insert(0, sys.argv[1])
main = __import__(sys.argv[2]).main
del sys.path[0]
main(*sys.argv[3:])
"""


def code_tests(
    *, completions: Sequence[str], tests: Sequence[Any], seconds: float = 5.0, memory: int = 512
) -> list[float]:
    """Return the fraction of each row's tests that hold for the completion's code.

    Args:
        completions: N completions. The code is the last fenced block of each.
        tests: the tests of each completion's row. Either Python source (or a list of sources) with
            asserts, calls of functions that the tests define, such as `check(f)`, and setup
            statements. Or a list of `{"input": …, "output": …}` for a program that reads stdin and
            writes stdout; `{"inputs": […], "outputs": […]}` means the same.
        seconds: limit for each answer with its tests, of processor time and of elapsed time.
        memory: limit in MiB for each process, including the interpreter.

    Raises:
        ValueError: a limit is out of range, or the tests have a different form.
    """
    if not (0 < seconds <= 3600 and 64 <= memory <= 1 << 20):
        expected = "0 < seconds <= 3600 and 64 <= memory (MiB) <= 1048576"
        raise ValueError(f"code_tests: expected {expected}, got {seconds}, {memory}")
    read = [read_tests(entry) for entry in tests]

    def one(text: str, entry: str | list[tuple[str, str]]) -> float:
        code = code_of(text)
        if isinstance(entry, str):
            return share_of_tests(code, entry, seconds, memory)
        return share_of_programs(code, entry, seconds, memory)

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, completions, read))


code_tests.per_sample = True  # type: ignore[attr-defined]


def read_tests(entry: Any) -> str | list[tuple[str, str]]:
    """Return a row's tests as one source, or as pairs of a program's input and output.

    Raises:
        ValueError: the row has no test, or the tests have a different form.
    """
    # 1. Inputs and outputs of programs, which data sets may store as JSON text.
    with contextlib.suppress(TypeError, ValueError):
        entry = json.loads(entry)
    listed = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    programs = [pair for part in listed for pair in _pairs(part)]
    if programs and all(isinstance(part, dict) for part in listed):
        return programs
    # 2. Python source, which must contain a test.
    for part in listed:
        if not isinstance(part, str):
            expected = 'Python source, a list of sources, or {"input": text, "output": text}'
            got = f"{part!r:.60} ({type(part).__name__})"
            raise ValueError(f"tests: expected {expected}, got {got}")
    source = "\n".join(listed)
    try:
        count = sources.count_tests(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests: expected Python, got {source[:60]!r}: {error}") from None
    if not count:
        expected = "at least one assert, or call of a function that the tests define"
        raise ValueError(f"tests: expected {expected}, got {source[:60]!r}")
    return source


def _pairs(part: Any) -> list[tuple[str, str]]:
    """Return the pairs of {input, output} or {inputs, outputs}, or [] for anything else."""
    if not isinstance(part, dict):
        return []
    inputs = part.get("inputs", [part.get("input")])
    outputs = part.get("outputs", [part.get("output")])
    is_listed = isinstance(inputs, list) and isinstance(outputs, list)
    if not is_listed or len(inputs) != len(outputs):
        return []
    if not all(isinstance(text, str) for text in inputs + outputs):
        return []
    return list(zip(inputs, outputs, strict=True))


def code_of(text: str) -> str:
    """Return the last fenced block of a text, or the text if it has no fence.

    The end of the text closes an open block.
    """
    parts = text.split("```")
    if len(parts) == 1:
        return text
    is_closed = len(parts) % 2 and len(parts) > 2
    code = parts[-2] if is_closed else parts[-1]
    first, line_end, rest = code.partition("\n")
    is_language = first.strip().lower() in ("python", "python3", "py", "")
    return rest if is_language and line_end else code


def share_of_tests(code: str, tests: str, seconds: float, memory: int) -> float:
    """Run the code in one sandbox and its tests in another, and return the share that holds."""
    count = sources.count_tests(tests)
    limits = {"memory": memory * MIB, "seconds": seconds, "output": _OUTPUT * count}
    left, right = socket.socketpair()
    with left, right, _file() as results:
        request = {"code": code, "program": False, **limits}
        with _process("answer", request, left, subprocess.DEVNULL):
            with _process("judge", {"tests": tests, **limits}, right, results) as judge:
                # An open copy of an end would hide from a process that the other one has ended.
                left.close()
                right.close()
                _wait(judge, seconds)
        results.seek(0)
        return results.read().count(sandbox.HELD) / count


def share_of_programs(
    code: str, pairs: list[tuple[str, str]], seconds: float, memory: int
) -> float:
    """Run the code as a program on each input, and return the share of outputs that are right."""
    right = 0
    end = time.monotonic() + seconds
    for given, expected in pairs:
        left = end - time.monotonic()
        if left <= 0:
            break
        request = {"code": code, "program": True, "memory": memory * MIB, "seconds": left,
                   "output": 4 * len(expected) + _OUTPUT}  # fmt: skip
        with _file(given.encode()) as stdin, _file() as stdout:
            with _process("answer", request, stdin, stdout) as child:
                _wait(child, left)
            stdout.seek(0)
            printed = stdout.read().decode(errors="replace")
        right += child.returncode == 0 and _lines(printed) == _lines(expected)
    return right / len(pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _file(content: bytes = b"") -> Any:
    """Return an open file in memory, at its beginning."""
    stream = os.fdopen(os.memfd_create("file"), "wb+")
    stream.write(content)
    stream.seek(0)
    return stream


@contextlib.contextmanager
def _process(
    script: str, request: dict[str, Any], stdin: Any, stdout: Any
) -> Iterator[subprocess.Popen]:
    """Run a script with an empty environment, and kill it at the end.

    No other process has to be killed: the sandbox keeps the script from starting one.

    Raises:
        OSError: the sandbox does not work on this machine.
    """
    with _file(json.dumps(request).encode()) as stream, _file() as errors:
        passed = stream.fileno()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCH, str(HERE), script, str(passed)],
            stdin=stdin, stdout=stdout, stderr=errors, pass_fds=[passed], env={},
        )  # fmt: skip
        with child:
            try:
                yield child
            finally:
                child.kill()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
        if said:
            raise OSError(f"code_tests: the sandbox did not start: {said}")


def _wait(child: subprocess.Popen, seconds: float) -> None:
    """Wait for a process. Its sandbox ends it after its time; this limit includes its start."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds + START_S)


# Try the sandbox when the reward is built, so that a machine without it is refused before the run.
if share_of_tests("def f(): return 1", "assert f() == 1", 60.0, 512) != 1:
    raise OSError("code_tests: the sandbox does not run an answer")
if not sandbox.landlock_version():
    sandbox.hide_memory()  # this process holds all tests
    print("code_tests: this kernel has no Landlock: answers can read files", file=sys.stderr)
