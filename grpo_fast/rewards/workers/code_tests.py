"""Unit tests as a reward: the share of a line's tests that hold for the code in the completion.

Each answer runs in a process of its own (`sandbox.py`). What an answer does there costs its own
reward: a test that was not reached does not hold.
"""

from __future__ import annotations

import ast
import json
import math
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # this file is run by itself, outside its package
import sandbox  # noqa: E402

sys.path.pop(0)

START_S = 30.0  # for the interpreter, on a machine that is busy
MIB = 1 << 20


def code_tests(
    *, completions: Sequence[str], tests: Sequence[str | list[str]], seconds: float = 5.0,
    memory: int = 512,
) -> list[float]:  # fmt: skip
    """The fraction of the asserts in `tests` that hold after the completion's code has run.

    Args:
        tests: of each line of the data Python source, or a list of such: asserts, calls such as
            `check(f)`, and the statements that prepare them.
        seconds: for each answer with its tests, of processor time and by the clock.
        memory: MiB for each answer, the interpreter included.
    """
    if not (0 < seconds <= 3600 and 64 <= memory <= 1 << 20):
        expected = "0 < seconds <= 3600 and 64 <= memory (MiB) <= 1048576"
        raise ValueError(f"code_tests: expected {expected}, got {seconds}, {memory}")
    sources = [t if isinstance(t, str) else "\n".join(t) for t in tests]
    counts = [count_tests(source) for source in sources]

    def one(text: str, source: str, count: int) -> float:
        return count_passed(code_of(text), source, count, seconds, memory) / count

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, completions, sources, counts))


def count_tests(source: str) -> int:
    """Count the tests in a source. Raises ValueError for none, or for no Python: faulty data."""
    try:
        count = sum(map(sandbox.is_test, ast.parse(source).body))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"tests: expected Python, got {source[:60]!r}: {error}") from None
    if not count:
        raise ValueError(f"tests: expected at least one assert or call, got {source[:60]!r}")
    return count


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


def count_passed(code: str, tests: str, count: int, seconds: float, memory: int) -> int:
    """Run the code and its `count` tests in a sandbox; returns how many held before it ended."""
    # The answer may write to every descriptor: only lines with this mark count.
    mark = secrets.token_hex(8)
    request = {"code": code, "tests": tests, "mark": mark, "memory": memory * MIB,
               "seconds": math.ceil(seconds)}  # fmt: skip
    memory_file = os.memfd_create("request")
    with os.fdopen(memory_file, "wb+") as stream:
        stream.write(json.dumps(request).encode())
        stream.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", sandbox.__file__],
            stdin=stream, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={},
        )  # fmt: skip
    line = mark.encode() + b"\n"
    with child:
        pipe = child.stdout.fileno()
        try:
            first = _read(pipe, len(line), START_S)
            output = _read(pipe, count * len(line) if first == line else 500, seconds)
        finally:
            child.kill()  # nothing that it started is left: it cannot start anything
    if first != line:
        said = (first + output).decode(errors="replace")
        raise OSError(f"code_tests: the sandbox did not start: {said or child.returncode}")
    return output.split(b"\n").count(mark.encode())


def _read(pipe: int, most: int, seconds: float) -> bytes:
    output, end = b"", time.monotonic() + seconds
    while len(output) < most and select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(pipe, most - len(output))
        if not part:
            break
        output += part
    return output


# Once, when the reward is built: a machine without the sandbox is refused before a run starts.
count_passed("", "assert 1", 1, 60.0, 512)
