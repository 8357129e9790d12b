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
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.mutation.copies import ROOT, Copy, Verdict
from tests.mutation.mutants import Mutant, all_mutants, problems

REQUIRED_SHARE = 0.95


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


def baseline(copies: list[Copy], mutants: list[Mutant]) -> tuple[dict[str, float], list[str]]:
    """The seconds of every suite with nothing planted, and what those that fail have printed."""
    failures = []

    def one(copy: Copy, task: tuple[str, str]) -> float:
        begin = time.monotonic()
        status, printed = copy.test(*task)
        seconds = time.monotonic() - begin
        print(f"unchanged  {seconds:6.1f} s  {task[0]}", flush=True)
        if status:
            failures.append(f"{task[0]} fails with nothing planted:\n{printed[-1500:]}")
        return seconds

    engines = {m.suite: m.engine for m in mutants}
    seconds = dict(zip(engines, in_parallel(copies, list(engines.items()), one), strict=True))
    return seconds, failures


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

        def one(copy: Copy, mutant: Mutant) -> Verdict:
            found = copy.judge(mutant)
            print(f"{found.outcome:9}  {found.seconds:6.1f} s  {mutant.name}", flush=True)
            return found

        try:
            seconds, failures = baseline(copies, chosen)
            if failures:
                print("\n".join(failures))
                return 2
            # The slow ones first, so that no copy is left alone with one at the end.
            chosen.sort(key=lambda mutant: -seconds[mutant.suite])
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
