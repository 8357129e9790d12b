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
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# A reward's worker runs this file outside its package, which would import torch.
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "data")]
import answers  # noqa: E402
import sandbox  # noqa: E402
import unit_tests  # noqa: E402

del sys.path[:2]

# CPython 3.11 counts the depth of a syntax tree for all threads together. It sometimes raises a
# SystemError if two threads build trees at once.
PARSING = threading.Lock()
START_S = 30.0  # time limit for starting the interpreter on a busy machine
# Limit in bytes. It is constant, because a limit that depended on the tests would reveal something
# about them.
MOST_OUTPUT = 16 << 20
OPENED = re.compile(r"^[^`~\n]*(`{3,}+|~{3,}+)([^`\n]*)$", re.M)
PYTHON = re.compile(r"\A[{. \t]*(python|py)[\d.]*(\W|\Z)", re.I)
DEFINED = re.compile(r"^(?:def|async def|class) +(\w+)|^(\w+) *[:=]", re.M)
# HumanEval and LeetCode import these names before the answer, so answers use them without import.
TYPING = re.compile(r"\b(?:Any|Callable|Dict|List|Optional|Set|Tuple|Union)\b")
# The folder from which the judge may import pytest.
PATHS = [str(Path(unit_tests.PYTEST).parents[1])] if unit_tests.PYTEST else []
# Import the script as a module, which uses cached bytecode. Running the script would compile it at
# each start. Then remove the folder from sys.path, so that the answer's code cannot import from it.
LAUNCH = (
    f"import sys; sys.path.insert(0, {str(HERE)!r}); main = __import__(sys.argv[1]).main; "
    "del sys.path[0]; main(sys.argv[2])"
)


def code_tests(
    *,
    completions: Sequence[str],
    tests: Sequence[Any],
    prefills: Sequence[str] | None = None,
    seconds: float = 5.0,
    memory: int = 512,
) -> list[Any]:
    """Return for each completion the fraction of its unit tests that its code passes.

    For a completion with tests that are not supported, the result is the ValueError. If a process
    of its sandbox does not start, the result is the OSError.

    Args:
        completions: N completions. See `code_of` for the code of a completion.
        tests: the tests of each completion, as Python source or as inputs and outputs. Python
            source (a string or a list of strings) has asserts, setup statements, test functions,
            and calls of functions that the tests define, such as `check(f)`. Inputs and outputs are
            for a program that reads stdin and writes stdout: a list of
            `{"input": …, "output": …}`, or `{"inputs": […], "outputs": […]}`.
        prefills: the beginning of each completion that the prompt contains, such as `<think>`.
        seconds: limit of processor time and of elapsed time, for each completion with its tests.
        memory: memory limit in MiB of each process, including the interpreter.

    Raises:
        ValueError: a limit is out of range.
    """
    if not (0 < seconds <= 3600 and 64 <= memory <= 1 << 20):
        expected = "0 < seconds <= 3600 and 64 <= memory (MiB) <= 1048576"
        raise ValueError(f"code_tests: expected {expected}, got {seconds}, {memory}")
    limits = {"seconds": seconds, "memory": memory << 20, "output": MOST_OUTPUT, "paths": []}

    def one(turn: str, entry: Any) -> float | Exception:
        try:
            tests = unit_tests.read_tests(entry)
            share = share_of_tests if isinstance(tests, str) else share_of_programs
            return share(answers.final_part(turn), tests, limits)  # type: ignore[operator]
        except (ValueError, OSError) as error:  # costs only this sample
            return error

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, answers.turns(completions, prefills), tests))


def code_of(text: str, names: Iterable[str] = ()) -> list[str]:
    """Return the code in a completion as blocks. An error in a block before the last is ignored.

    The last one is the last fenced block that defines one of the names, or else the last fenced
    block. Only blocks that are marked as Python count, if there is one. A block that is not closed
    ends at the end of the text. Without names, only the last block is returned. A text without a
    fence is code.

    Args:
        text: the completion.
        names: names that the answer must define.
    """
    fenced = [(mark, textwrap.dedent("".join(lines))) for mark, lines in _fenced(text)]
    blocks = [code for mark, code in fenced if PYTHON.match(mark)] or [code for _, code in fenced]
    blocks = blocks or [answers.marked_content(text, (answers.TAG,)) or text]
    if not names:
        return blocks[-1:]
    defined = [{name for pair in DEFINED.findall(code) for name in pair} for code in blocks]
    last = [i for i, found in enumerate(defined, 1) if not found.isdisjoint(names)]
    return blocks[: last[-1]] if last else blocks


def _fenced(text: str) -> list[tuple[str, list[str]]]:
    """Return the mark and the lines of each fenced block. A regular expression could be slow."""
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    deepest = 0  # deepest indentation of the end of the block; docstrings may contain fences, too
    for line in text.splitlines(keepends=True):
        ends = fence and line.strip().startswith(fence) and not line.strip().strip(fence[0])
        if ends and len(line) - len(line.lstrip()) <= deepest:
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
        elif opened := OPENED.match(line):
            fence = opened[1]
            deepest = opened.start(1) + 3
            blocks.append((opened[2], []))
    return blocks


def share_of_tests(text: str, tests: str, limits: dict[str, Any]) -> float:
    """Run the code of a completion and its tests in two sandboxes. Return the fraction that passes.

    Raises:
        ValueError: the tests pass a value to the answer that is not plain data.
    """
    with PARSING:
        prepared = unit_tests.prepared(tests)
    blocks = code_of(text, prepared["names"].values())
    if TYPING.search("".join(blocks)):
        blocks.insert(0, "from typing import *")
    request = {"blocks": blocks, "program": False, **limits}
    left, right = socket.socketpair()
    with left, right, _file() as results:
        with _process("answer", request, left, subprocess.DEVNULL):
            with _process("judge", limits | prepared | {"paths": PATHS}, right, results) as judge:
                # Close our copies of the sockets. While they are open, neither process notices the
                # end of the other.
                left.close()
                right.close()
                _wait(judge, limits["seconds"])
        said = _content(results).splitlines()
    for line in said:
        if line != sandbox.HELD:
            raise ValueError(f"tests: expected plain data as arguments, got {line}")
    return len(said) / prepared["count"]


def share_of_programs(text: str, pairs: list[tuple[str, str]], limits: dict[str, Any]) -> float:
    """Run the code as a program on each input. Return the fraction of correct outputs."""
    right = 0
    end = time.monotonic() + limits["seconds"]
    for given, expected in pairs:
        left = end - time.monotonic()
        if left <= 0:
            break
        request = {"blocks": code_of(text), "program": True, **limits, "seconds": left}
        with _file(given.encode()) as stdin, _file() as stdout:
            with _process("answer", request, stdin, stdout) as child:
                _wait(child, left)
            printed = _content(stdout)
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


def _content(stream: Any) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


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
            [sys.executable, "-I", "-S", "-c", LAUNCH, script, str(passed)],
            stdin=stdin, stdout=stdout, stderr=errors, pass_fds=[passed], env={},
        )  # fmt: skip
        with child:
            try:
                yield child
            finally:
                child.kill()
        if said := _content(errors):
            raise OSError(f"code_tests: the sandbox did not start: {said}")


def _wait(child: subprocess.Popen, seconds: float) -> None:
    """Wait until a process ends, for at most `seconds` plus the time limit for its start.

    Normally, the sandbox ends the process after `seconds`, before this function gives up.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds + START_S)


# Try the sandbox at import, so that a run fails at its start on a machine without sandbox support.
[tried] = code_tests(completions=["def f(): return 1"], tests=["assert f() == 1"], seconds=60.0)
if tried != 1:
    raise OSError(f"code_tests: the sandbox does not run an answer: {tried}")
if not sandbox.has_landlock():
    sandbox.hide_memory()  # answers could read the tests from this process's memory
    print("code_tests: this kernel has no Landlock: answers can read files", file=sys.stderr)
