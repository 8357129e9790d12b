"""Unit tests as a reward: the share of a line's tests that hold for the code in the completion.

Each answer runs in a process of its own (`answer.py`), which never holds the tests. Another process
(`judge.py`) runs them and calls the answer's functions; this one compares what programs print. What
an answer does costs its own reward: a test that was not reached does not hold.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # this file is run by itself, outside its package
import sandbox  # noqa: E402
import sources  # noqa: E402

sys.path.pop(0)

START_S = 30.0  # for the interpreter, on a machine that is busy
MIB = 1 << 20
# Imports from their bytecode what a script would compile each time; the answer finds none of it.
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
    """Return the fraction of each line's tests that hold for the completion's code.

    Args:
        completions: the last fenced block of each is its code.
        tests: for each line of the data either Python source (or a list of sources): asserts,
            calls of functions that the tests define, such as `check(f)`, and the statements that
            prepare them; or a list of `{"input": …, "output": …}` for a program that reads stdin
            and writes stdout, also as `{"inputs": […], "outputs": […]}`.
        seconds: for each answer with its tests, of processor time and by the clock.
        memory: MiB for each process, the interpreter included.

    Raises:
        ValueError: limits out of range, or tests of another form.
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
    """Return a line's tests as one source, or as pairs of a program's input and output.

    Raises ValueError for no test, no Python, or any other form: faulty data.
    """
    with contextlib.suppress(TypeError, ValueError):
        entry = json.loads(entry)  # data sets store inputs and outputs as text
    listed = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    programs = [pair for part in listed for pair in _pairs(part)]
    if programs and all(isinstance(part, dict) for part in listed):
        return programs
    for part in listed:
        if not isinstance(part, str):
            expected = 'Python source, a list of sources, or {"input": text, "output": text}'
            came = f"{part!r:.60} ({type(part).__name__})"
            raise ValueError(f"tests: expected {expected}, got {came}")
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
    """The pairs of {input, output} or {inputs, outputs}; none for anything else."""
    if not isinstance(part, dict):
        return []
    inputs = part.get("inputs", [part.get("input")])
    outputs = part.get("outputs", [part.get("output")])
    is_listed = isinstance(inputs, list) and isinstance(outputs, list)
    if not is_listed or len(inputs) != len(outputs):
        return []
    pairs = list(zip(inputs, outputs, strict=True))
    return pairs if all(isinstance(text, str) for pair in pairs for text in pair) else []


def code_of(text: str) -> str:
    """The last fenced block, an open one to its end; the whole text where there is no fence."""
    parts = text.split("```")
    if len(parts) < 3:
        code = parts[-1]
    else:
        code = parts[-2] if len(parts) % 2 else parts[-1]
    first, line_end, rest = code.partition("\n")
    is_name = len(parts) > 1 and first.strip().lower() in ("python", "python3", "py", "")
    return rest if is_name and line_end else code


def share_of_tests(code: str, tests: str, seconds: float, memory: int) -> float:
    """Run the code in one sandbox and its tests in another; returns the share that held."""
    count = sources.count_tests(tests)
    limits = {"memory": memory * MIB, "seconds": math.ceil(seconds)}
    with contextlib.ExitStack() as stack:
        to_answer, to_judge, results = (_pipe(stack) for _ in range(3))
        request = {"code": code, "program": False, **limits}
        stack.enter_context(_process("answer", request, to_answer[0], to_judge[1]))
        request = {"tests": tests, **limits}
        ends = (to_judge[0], to_answer[1], results[1])
        stack.enter_context(_process("judge", request, *ends))
        for end in (*to_answer, *to_judge, results[1]):
            end.close()  # the children's: an open copy would hide that one of them is gone
        _wait_until_ready(results[0])
        output = _read(results[0], count * len(sandbox.HELD), seconds)
    return output.count(sandbox.HELD) / count


def share_of_programs(
    code: str, pairs: list[tuple[str, str]], seconds: float, memory: int
) -> float:
    """Run the code as a program on each input; returns the share of outputs that are right."""
    request = {"code": code, "program": True, "memory": memory * MIB,
               "seconds": math.ceil(seconds)}  # fmt: skip
    right, left = 0, seconds
    for given, expected in pairs:
        start = time.monotonic()
        right += _lines(expected) == _lines(_printed(request, given, len(expected), left))
        left = max(0.0, left - (time.monotonic() - start))
    return right / len(pairs)


def _printed(request: dict[str, Any], given: str, expected: int, seconds: float) -> str | None:
    """What a program prints in time, a little more than expected at most; None if it fails."""
    with contextlib.ExitStack() as stack:
        read_end, write_end = _pipe(stack)
        stdin = stack.enter_context(_file(given.encode()))
        child = stack.enter_context(_process("answer", request, stdin, write_end))
        write_end.close()
        _wait_until_ready(read_end)
        end = time.monotonic() + seconds
        printed = _read(read_end, 4 * expected + 65536, seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))
        return printed.decode(errors="replace") if child.returncode == 0 else None


def _lines(text: str | None) -> list[str] | None:
    return None if text is None else [line.rstrip() for line in text.rstrip().splitlines()]


def _pipe(stack: contextlib.ExitStack) -> tuple[Any, Any]:
    read_end, write_end = os.pipe()
    reader = stack.enter_context(os.fdopen(read_end, "rb", 0))
    return reader, stack.enter_context(os.fdopen(write_end, "wb", 0))


def _file(content: bytes) -> Any:
    stream = os.fdopen(os.memfd_create("given"), "wb+")
    stream.write(content)
    stream.seek(0)
    return stream


@contextlib.contextmanager
def _process(
    script: str, request: dict[str, Any], stdin: Any, stdout: Any, *others: Any
) -> Iterator[subprocess.Popen]:
    """A process without an environment, killed at the end. It cannot have started another."""
    with _file(json.dumps(request).encode()) as stream:
        passed = [stream.fileno(), *(end.fileno() for end in others)]
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCH, str(HERE), script, *map(str, passed)],
            stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, pass_fds=passed, env={},
        )  # fmt: skip
    with child:
        try:
            yield child
        finally:
            child.kill()


def _wait_until_ready(stream: Any) -> None:
    first = _read(stream, len(sandbox.READY), START_S)
    if first != sandbox.READY:
        said = (first + _read(stream, 500, 1.0)).decode(errors="replace")
        raise OSError(f"code_tests: the sandbox did not start: {said}")


def _read(stream: Any, most: int, seconds: float) -> bytes:
    output, end = b"", time.monotonic() + seconds
    while (
        len(output) < most and select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]
    ):
        part = os.read(stream.fileno(), most - len(output))
        if not part:
            break
        output += part
    return output


# Once, when the reward is built: a machine without the sandbox is refused before a run starts.
if share_of_tests("def f(): return 1", "assert f() == 1", 60.0, 512) != 1:
    raise OSError("code_tests: the sandbox does not run an answer")
if not sandbox.landlock_version():
    sandbox.hide_memory()  # which has all tests
    print("code_tests: this kernel has no Landlock: answers can read files", file=sys.stderr)
