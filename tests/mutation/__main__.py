"""`python -m tests.mutation`: plant one bug at a time in a copy of the repository; do tests see it?

    --list          print the bugs, check that every pattern fits, run nothing
    --only NAME     one bug, or every bug whose name starts with NAME; may be repeated
    --area FOLDER   the bugs below a folder, as grpo_fast/train; may be repeated
    --jobs N        copies of the repository that are worked on side by side (default 1)

Ends with status 0 when at least 95% of the bugs were killed, 1 when fewer were, 2 when something is
wrong with the list or with the tests themselves (they must pass before anything is planted).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import itertools
import json
import os
import queue
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.mutation.mutants import SUITES, Mutant, all_mutants, problems

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("grpo_fast", "csrc", "tests", "benchmarks", "pyproject.toml")
REQUIRED_SHARE = 0.95
TIMEOUT_S = 600
DOES_NOT_COMPILE = "the compiler failed with status"


class Verdict(NamedTuple):
    mutant: Mutant
    outcome: str  # "killed", "SURVIVED", "ERROR"
    seconds: float
    detail: str  # the test that failed first, or what went wrong


class Copy:
    """A copy of the repository in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repository"
        self.cache = folder.parent / "cache"  # of compiled C++: all copies have the same
        self.written = itertools.count(1)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, self.folder / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy2(source, self.folder / name)

    def environment(self, engine: str) -> dict[str, str]:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("GRPO_FAST_", "PYTEST_", "TRITON_"))
        }
        kept |= {"GRPO_FAST_CACHE": str(self.cache), "OPENBLAS_NUM_THREADS": "1"}
        kept["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(self.folder / "tests")])
        if engine != "csrc":
            kept["GRPO_FAST_DISABLE_CSRC"] = "1"
        if engine == "triton":
            kept["TRITON_INTERPRET"] = "1"
        return kept

    def python(self, engine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment(engine), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
        )  # fmt: skip

    def warm(self, engine: str) -> subprocess.Popen[str]:
        """The process of this engine that forks for every call of pytest (warm.py)."""
        if engine not in self.processes:
            self.processes[engine] = subprocess.Popen(
                [sys.executable, "tests/mutation/warm.py"], cwd=self.folder, text=True,
                env=self.environment(engine), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            self.processes[engine].stdout.readline()
        return self.processes[engine]

    def test(self, suite: str, engine: str) -> tuple[int, str]:
        """pytest's exit status for a suite, and what it printed.

        Raises:
            TimeoutError: it took longer than TIMEOUT_S.
        """
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore"]
        process, log = self.warm(engine), self.folder.parent / "log"
        words = [f"tests/{w}" if ".py" in w else w for w in shlex.split(SUITES[suite])]
        process.stdin.write(json.dumps([str(log), [*options, *words]]) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
            os.killpg(int(log.with_name("log.pid").read_text()), signal.SIGKILL)
            process.stdout.readline()
            raise TimeoutError
        return int(process.stdout.readline()), log.read_text(encoding="utf-8", errors="replace")

    def write(self, path: Path, text: str) -> None:
        """Python takes a .pyc for a file's own by size and second, so each text gets its second."""
        path.write_text(text)
        second = next(self.written)
        os.utime(path, (second, second))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def judge(self, mutant: Mutant) -> Verdict:
        """Plant, run the tests, restore."""
        path = self.folder / mutant.file
        original = path.read_text()
        self.write(path, original.replace(mutant.old, mutant.new))
        begin = time.monotonic()
        try:
            outcome, detail = verdict(*self.test(mutant.suite, mutant.engine))
        except TimeoutError:
            outcome, detail = "ERROR", f"the tests took longer than {TIMEOUT_S} s"
        finally:
            self.write(path, original)
        return Verdict(mutant, outcome, time.monotonic() - begin, detail)


def verdict(status: int, printed: str) -> tuple[str, str]:
    """A kill is a failed test or a crash; one that cannot be imported or compiled is a mistake of
    the list.
    """
    if DOES_NOT_COMPILE in printed:
        return "ERROR", "the C++ sources do not compile"
    if status == 0:
        return "SURVIVED", ""
    if status < 0:
        return "killed", f"the tests crashed with signal {-status}"
    failed = [line for line in printed.splitlines() if line.startswith("FAILED ")]
    if status == 1 and failed:
        return "killed", failed[0].removeprefix("FAILED ").partition(" - ")[0]
    return "ERROR", f"pytest ended with {status}: {printed.strip()[-400:]}"


def missing_engines(copy: Copy) -> dict[str, str]:
    """The engines that cannot run on this machine, and why: their bugs are left out, visibly."""
    missing = {}
    if importlib.util.find_spec("triton") is None:
        missing["triton"] = "triton is not installed"
    ask = "from grpo_fast.kernels.cpu import loader; print(loader.load('rows') or '')"
    reason = copy.python("csrc", "-c", ask).stdout.strip()
    if reason:
        missing["csrc"] = reason.splitlines()[0]
    return missing


def in_parallel(copies: list[Copy], tasks: list, work: Callable) -> list:
    """[work(copy, task) for every task], each copy used by one task at a time."""
    free: queue.Queue[Copy] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def one(task):
        copy = free.get()
        try:
            return work(copy, task)
        finally:
            free.put(copy)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(one, tasks))


def baseline(copies: list[Copy], mutants: list[Mutant]) -> list[str]:
    """The suites that fail with nothing planted."""

    def one(copy: Copy, task: tuple[str, str]) -> str:
        begin = time.monotonic()
        status, printed = copy.test(*task)
        print(f"unchanged  {time.monotonic() - begin:6.1f} s  {task[0]}", flush=True)
        return "" if status == 0 else f"{task[0]} fails with nothing planted:\n{printed[-1500:]}"

    tasks = list(dict.fromkeys((m.suite, m.engine) for m in mutants))
    return [message for message in in_parallel(copies, tasks, one) if message]


def report(verdicts: list[Verdict], left_out: int) -> int:
    """Print the table; the exit status."""
    count = {
        outcome: sum(v.outcome == outcome for v in verdicts)
        for outcome in ("killed", "SURVIVED", "ERROR")
    }
    print(f"\n{'bug':34} {'outcome':9} {'s':>6}  first failing test")
    for v in verdicts:
        print(f"{v.mutant.name:34} {v.outcome:9} {v.seconds:6.1f}  {v.detail}")
    for v in verdicts:
        if v.outcome == "SURVIVED":
            m = v.mutant
            print(f"\n{m.name} survived {m.suite}: {m.why}\n  {m.old!r}\n  {m.new!r}")
    share = count["killed"] / max(len(verdicts), 1)
    killed, survived = count["killed"], count["SURVIVED"]
    print(
        f"\n{len(verdicts)} bugs: {killed} killed ({share:.1%}), {survived} survived, "
        f"{count['ERROR']} errors, {left_out} left out"
    )
    if count["ERROR"]:
        return 2
    return 0 if share >= REQUIRED_SHARE else 1


def judge_all(mutants: list[Mutant], jobs: int) -> int:
    """Copy, check that the tests pass, plant every bug, report."""
    with tempfile.TemporaryDirectory(prefix="grpo_fast_mutation_") as folder:
        copies = [Copy(Path(folder) / str(job)) for job in range(jobs)]
        missing = missing_engines(copies[0])
        for engine, reason in missing.items():
            print(f"left out: every bug of {engine}: {reason}")
        chosen = [m for m in mutants if m.engine not in missing]
        failures = baseline(copies, chosen)
        if failures:
            print("\n".join(failures))
            return 2

        def one(copy: Copy, mutant: Mutant) -> Verdict:
            found = copy.judge(mutant)
            print(f"{found.outcome:9}  {found.seconds:6.1f} s  {mutant.name}", flush=True)
            return found

        try:
            return report(in_parallel(copies, chosen, one), len(mutants) - len(chosen))
        finally:
            for copy in copies:
                copy.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--list", action="store_true", help="print the bugs and check the patterns")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="bugs whose name starts with NAME",
    )
    parser.add_argument(
        "--area", action="append", default=[], metavar="FOLDER",
        help="bugs planted below this folder, as grpo_fast/train",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="work on N copies side by side"
    )
    options = parser.parse_args()
    mutants = all_mutants()
    wrong = problems(mutants, lambda file: (ROOT / file).read_text())
    if options.only:
        mutants = [m for m in mutants if m.name.startswith(tuple(options.only))]
        if not mutants:
            wrong.append(f"--only: no bug has a name that starts with {options.only}")
    if options.area:
        areas = tuple(area.rstrip("/") for area in options.area)
        mutants = [m for m in mutants if m.file.startswith(areas)]
        if not mutants:
            wrong.append(f"--area: no bug is planted below {options.area}")
    if options.list:
        for m in mutants:
            print(f"{m.name:34} {m.suite:13} {m.file:36} {m.why}")
        print(f"{len(mutants)} bugs")
    for message in wrong:
        print(message, file=sys.stderr)
    if wrong or options.list:
        return 2 if wrong else 0
    begin = time.monotonic()
    status = judge_all(mutants, max(1, options.jobs))
    print(f"{time.monotonic() - begin:.0f} s in all")
    return status


if __name__ == "__main__":
    sys.exit(main())
