"""Run GPU tests in several processes that share the GPU.

    python -m benchmarks.gpu.shards [--processes 16] [--seconds 105] [--dry] FILE ...
    python -m benchmarks.gpu.shards --failed

Every result is printed immediately, with the traceback of a failed test, and added to
gpu_tests.json in $OUT, so that a run that is killed keeps its results. Tests with small sizes run
first. `--failed` repeats the tests that benchmarks/results/gpu_tests.json lists as failed or
unfinished, unless they have been deleted. The exit code is 0 if every test passed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import RESULTS, ROOT
from benchmarks.gpu import session
from benchmarks.options import new_parser
from benchmarks.report.files import write

OPTIONS = ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.shards", "-m", "gpu"]
NO_TESTS = 5  # pytest's exit status if it collected nothing
NAME = "gpu_tests.json"
RESULT = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S.*)$")


class Tracebacks:
    """pytest plugin that prints each traceback immediately instead of after the last test."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{report.longreprtext[-3000:]}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Register `Tracebacks`, except in the workers of pytest-xdist, which have no terminal."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        session.config.pluginmanager.register(Tracebacks(terminal))


def collected(files: list[str]) -> list[str]:
    """Return the ids of all GPU tests in the files. Tests with small sizes come first.

    Raises:
        ValueError: pytest cannot read the files. The message contains pytest's output.
    """
    command = [sys.executable, "-m", "pytest", "-q", *OPTIONS, "--collect-only", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, NO_TESTS):
        said = (done.stdout + done.stderr)[-2000:]
        raise ValueError(f"files: expected tests, pytest ended with {done.returncode}: {said}")
    return sorted((x for x in done.stdout.splitlines() if "::" in x), key=largest_size)


def largest_size(test: str) -> int:
    """Return the largest number in the parameters of a test, as an estimate of its duration."""
    return max(map(int, re.findall(r"\d+", test.partition("[")[2])), default=0)


def results_of(*paths: Path) -> dict[str, str]:
    """Return the result of each test, from the first of the given files that exists."""
    known = next(filter(Path.is_file, paths), None)
    return json.loads(known.read_text())["results"] if known else {}


def failed_before(path: Path) -> list[str]:
    """Return the tests that an earlier run did not pass or finish, and that still exist."""
    passed = ("PASSED", "SKIPPED", "XFAIL")
    failed = {test for test, result in results_of(path).items() if result not in passed}
    files = {test.partition("::")[0] for test in failed}
    present = sorted(file for file in files if (ROOT / file).is_file())
    return [test for test in collected(present) if test in failed] if present else []


def run(tests: list[str], processes: int, seconds: float, out: Path) -> int:
    """Run the tests with pytest-xdist until all of them have ended, or until time runs out."""
    # Read the earlier results, and add to them. Several parts of a visit write this file, and the
    # next visit repeats all failed tests.
    results = results_of(out, RESULTS / NAME) | dict.fromkeys(tests, "unfinished")

    def record(line: str) -> None:
        print(line, flush=True)
        found = RESULT.match(line.strip())
        if found and found[2] in results:
            results[found[2]] = found[1]
            write(out, {"benchmark": "gpu tests", "results": results})

    spread = ["-v", "-n", str(processes), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *spread, *tests]
    status = session.run(command, seconds, {}, record)
    write(out, {"benchmark": "gpu tests", "results": results})
    unfinished = [test for test in tests if results[test] == "unfinished"]
    print(f"{len(tests) - len(unfinished)} of {len(tests)} tests ended")
    print(*(f"unfinished: {test}" for test in unfinished), sep="\n")
    return 1 if status or unfinished else 0


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600, help="stop after this time")
    parser.add_argument("--failed", action="store_true", help="only the tests that failed before")
    parser.add_argument("--dry", action="store_true", help="print the number of tests")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        tests = failed_before(RESULTS / NAME) if options.failed else collected(options.files)
    except ValueError as error:
        print(f"shards: {error}", file=sys.stderr)
        return 2
    print(f"{len(tests)} tests in {options.processes} processes", flush=True)
    if options.dry or options.failed and not tests:
        return 0 if tests or options.failed else 1
    if not tests:
        return 2
    out = Path(os.environ.get("OUT") or RESULTS) / NAME
    return run(tests, options.processes, options.seconds - (time.monotonic() - started), out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
