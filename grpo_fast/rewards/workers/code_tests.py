"""Reward for code: the fraction of unit tests that the code of a completion passes.

The code in a completion is called the answer. Each answer runs in a separate process (`answer.py`),
which never contains the tests. A second process (`judge.py`) runs the tests, and calls the answer's
functions. If the answer is a program, this module compares its output. A misbehaving answer can
only lower its own reward, because a test that was not reached counts as failed.
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

START_S = 30.0  # time limit for starting the interpreter on a busy machine
MIB = 1 << 20
_OUTPUT = 1 << 16  # smallest output limit of a process in bytes
# Import the script as a module, which uses cached bytecode. Running the script would compile it at
# each start. Then remove the folder from sys.path, so that the answer's code cannot import from it.
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
    """Return for each completion the fraction of its unit tests that its code passes.

    Args:
        completions: N completions. The code of a completion is its last fenced block that is
            marked as Python, or else its last fenced block.
        tests: the tests of each completion, as Python source or as inputs and outputs. Python
            source (a string or a list of strings) has asserts, setup statements, and calls of
            functions that the tests define, such as `check(f)`. Inputs and outputs are for a
            program that reads stdin and writes stdout: a list of `{"input": …, "output": …}`, or
            `{"inputs": […], "outputs": […]}`.
        seconds: limit of processor time and of elapsed time, for each completion with its tests.
        memory: memory limit in MiB of each process, including the interpreter.

    Raises:
        ValueError: a limit is out of range, or the tests have neither form.
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
    """Return the tests of a completion as Python source, or as pairs of input and output.

    Raises:
        ValueError: there is no test, or the tests have an unknown form.
    """
    # 1. Try to read the inputs and outputs of a program, which data sets may store as JSON text.
    with contextlib.suppress(TypeError, ValueError):
        entry = json.loads(entry)
    listed = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    programs = [pair for part in listed for pair in _pairs(part)]
    if programs and all(isinstance(part, dict) for part in listed):
        return programs
    # 2. Otherwise, the tests must be Python source that contains a test.
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
    """Return the (input, output) pairs of a program's test, or [] for any other value.

    Raises:
        ValueError: the inputs are arguments of a function, as in LiveCodeBench and APPS.
    """
    if not isinstance(part, dict):
        return []
    if part.get("fn_name") or part.get("testtype") == "functional":
        got = f"inputs of the function {part.get('fn_name') or '(testtype: functional)'}"
        raise ValueError(f"tests: expected inputs of a program, got {got}; write asserts instead")
    inputs = part.get("inputs", [part.get("input")])
    outputs = part.get("outputs", [part.get("output")])
    is_listed = isinstance(inputs, list) and isinstance(outputs, list)
    if not is_listed or len(inputs) != len(outputs):
        return []
    if not all(isinstance(text, str) for text in inputs + outputs):
        return []
    return list(zip(inputs, outputs, strict=True))


def code_of(text: str) -> str:
    """Return the code in a completion, or the full text if it has no fence.

    The code is the last fenced block that is marked as Python, because a block with an example of
    the output may follow. Without such a block, it is the last block. A block that is not closed
    ends at the end of the text.
    """
    blocks = [block.partition("\n") for block in text.split("```")[1::2]]
    if not blocks:
        return text
    marked = [block for block in blocks if _is_python(block[0])]
    first, line_end, rest = (marked or blocks)[-1]
    return rest if line_end else first


def _is_python(mark: str) -> bool:
    """Return whether the text after the opening fence names Python, but not pycon or pytb."""
    words = mark.lower().split(maxsplit=1)
    return bool(words) and words[0].rstrip("0123456789.") in ("py", "python")


def share_of_tests(code: str, tests: str, seconds: float, memory: int) -> float:
    """Run the code and its tests in two sandboxes. Return the fraction of passed tests."""
    count = sources.count_tests(tests)
    limits = {"memory": memory * MIB, "seconds": seconds, "output": _OUTPUT * count}
    left, right = socket.socketpair()
    with left, right, _file() as results:
        request = {"code": code, "program": False, **limits}
        with _process("answer", request, left, subprocess.DEVNULL):
            with _process("judge", {"tests": tests, **limits}, right, results) as judge:
                # Close our copies of the sockets. While they are open, neither process notices the
                # end of the other.
                left.close()
                right.close()
                _wait(judge, seconds)
        results.seek(0)
        return results.read().count(sandbox.HELD) / count


def share_of_programs(
    code: str, pairs: list[tuple[str, str]], seconds: float, memory: int
) -> float:
    """Run the code as a program on each input. Return the fraction of correct outputs."""
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
    """Return a file in memory with this content, opened at its beginning."""
    stream = os.fdopen(os.memfd_create("file"), "wb+")
    stream.write(content)
    stream.seek(0)
    return stream


@contextlib.contextmanager
def _process(
    script: str, request: dict[str, Any], stdin: Any, stdout: Any
) -> Iterator[subprocess.Popen]:
    """Run a script with an empty environment, and kill its process at the end.

    The script cannot leave other processes running, because the sandbox forbids starting them.

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
    """Wait until a process ends, for at most `seconds` plus the time limit for its start.

    Normally, the sandbox ends the process after `seconds`, before this function gives up.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds + START_S)


# Try the sandbox at import, so that a run fails at its start on a machine without sandbox support.
if share_of_tests("def f(): return 1", "assert f() == 1", 60.0, 512) != 1:
    raise OSError("code_tests: the sandbox does not run an answer")
if not sandbox.landlock_version():
    sandbox.hide_memory()  # answers could read the tests from this process's memory
    print("code_tests: this kernel has no Landlock: answers can read files", file=sys.stderr)
