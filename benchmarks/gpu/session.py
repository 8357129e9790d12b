"""Run one visit of a GPU session. gpu_session.sh starts this command.

A visit is one loan of a GPU machine. Its parts (benchmarks and tests) run one after the other.
gpu_session.json has the status and the reports of each part, and gpu_session.log has the output. A
part that has passed is skipped in the next visit at the same commit and on the same kind of GPU.

The exit status is 0 if every part passed, 1 if a part failed or ran out of time, 2 if nothing could
be run, and 3 if the smoke test failed and the other parts were therefore not run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.gpu import lacking
from benchmarks.gpu.parts import (
    BY_NAME,
    CARRY_SECONDS,
    PIECES,
    SESSION_SECONDS,
    START_SECONDS,
    VISIT_SECONDS,
    Part,
    of_visit,
    parts,
)
from benchmarks.measure import COMMIT_VARIABLE, commit
from benchmarks.report.files import write

COMMITTED = RESULTS / "gpu_session.json"
LEAST = 10  # seconds that must be left to start a part


class Session:
    """Status and reports of the parts of a session, which are also written to files.

    `where` is the commit and the GPU of this visit.
    """

    def __init__(self, out: Path, where: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.where = where
        self.file = out / "gpu_session.json"
        self.log = out / "gpu_session.log"
        self.parts: dict[str, dict[str, Any]] = {}
        for known in (COMMITTED, self.file):
            if known.is_file():
                self.parts |= json.loads(known.read_text())["parts"]

    def is_done(self, name: str) -> bool:
        known = self.parts.get(name, {})
        return known.get("status") == "done" and known.get("where") == self.where

    def record(self, name: str, status: str, seconds: float, reports: list[dict[str, Any]]) -> None:
        """Record the outcome of a part, and keep its reports of other commits and GPUs."""
        earlier = self.parts.get(name, {}).get("reports", [])
        kept = [report for report in earlier if report.get("where") != self.where]
        kept += [{**report, "where": self.where} for report in reports]
        done = {"status": status, "finished": now(), "seconds": round(seconds, 1)}
        self.parts[name] = {**done, "where": self.where, "reports": kept}
        write(self.file, {"benchmark": "gpu session", "parts": self.parts})

    def say(self, text: str) -> None:
        print(text, flush=True)
        with self.log.open("a") as log:
            log.write(text + "\n")

    def run_part(self, name: str, part: Part, limit: float) -> bool:
        """Run the commands of a part, and record their reports, even if the part fails."""
        started = time.monotonic()
        codes: list[int] = []
        reports: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            for number, command in enumerate(part.commands):
                if part.measures:
                    command = [*command, "--out", f"{folder}/{number}.json"]
                left = limit - (time.monotonic() - started)
                codes.append(run(command, left, part.environment, self.say))
                written = sorted(Path(folder).glob(f"{number}*.json"))
                reports += [json.loads(file.read_text()) for file in written]
        passed, seconds = not any(codes), time.monotonic() - started
        self.record(name, "done" if passed else "failed", seconds, reports)
        outcome = "done" if passed else "FAILED"
        self.say(f"== {name}: {outcome} in {seconds:.0f} s, exit codes {codes}")
        return passed


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def run(
    command: list[str], limit: float, environment: dict[str, str], say: Callable[[str], None]
) -> int:
    """Run a command and return its exit status. Pass each line of its output to `say`.

    After `limit` seconds, the command and all processes that it has started are killed. The status
    is then 124.
    """
    if limit <= 1:
        return 124
    say(f"$ {' '.join(command)}"[:400])  # the list of test files is long
    timed = ["timeout", "--signal=KILL", f"{limit:.1f}", *command]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    with subprocess.Popen(
        timed, cwd=ROOT, env=environment, start_new_session=True, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
    if process.returncode == -signal.SIGKILL:  # `timeout` kills its whole process group
        say(f"ended after {limit:.0f} s")
        return 124
    return process.returncode


def gpu_here() -> str:
    """Return a description of the GPU and its software, or an empty string without a GPU."""
    import torch
    import triton

    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return f"{torch.cuda.get_device_name()}, {versions}" if torch.cuda.is_available() else ""


def clock(every: dict[str, Part]) -> Iterator[str]:
    """Yield a table of a whole session, in which every part takes its limit.

    Each piece of the wheels but the last one of a visit needs a separate call before the visit.
    """
    yield f"# {SESSION_SECONDS} s for both visits, {START_SECONDS} s of them for each machine start"
    yield f"{'visit':5} {'part':9} {'limit':>6} {'ends at':>9}"
    end = 0
    for visit in VISIT_SECONDS:
        rows = [("start", START_SECONDS)]
        rows += [(f"wheels/{piece:02}", CARRY_SECONDS) for piece in range(PIECES[visit] - 1)]
        rows += [(name, part.seconds) for name, part in of_visit(every, visit).items()]
        for name, seconds in rows:
            end += seconds
            yield f"{visit:5} {name:9} {seconds:6} {end:9}"
    yield f"# slack: {SESSION_SECONDS - end} s if every part takes its limit"
    last = [name for name, part in every.items() if part.visit in VISIT_SECONDS and not part.stops]
    yield f"# if time is short, parts are cut in this order: {', '.join(reversed(last))}"
    left_out = [name for name, part in every.items() if part.visit == BY_NAME]
    yield f"# left out (--part NAME runs them): {', '.join(left_out)}"


def dry_run(chosen: dict[str, Part]) -> int:
    """Check that every part would run, by starting its dry commands.

    The commands cannot import packages that the GPU machine does not have. A part that needs such a
    package therefore fails here instead of on the GPU machine.
    """
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        lacking.write(Path(folder))
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        for name, part in chosen.items():
            print(f"== {name}: at most {part.seconds} s", flush=True)
            for command in part.commands:
                print(f"   would run: {' '.join(command)}")
                if shutil.which(command[0]) is None:
                    print(f"   {command[0]} is not on the PATH here")
            surroundings = {**part.environment, "PYTHONPATH": path}
            codes = [run(line, 300, surroundings, lambda x: print("  ", x)) for line in part.dry]
            print(f"   {'does NOT start' if any(codes) else 'starts'}", flush=True)
            failed |= any(codes)
    return 1 if failed else 0


def parse_arguments(arguments: list[str], names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_session.sh", description=__doc__)
    add = parser.add_argument
    add("--visit", type=int, choices=tuple(VISIT_SECONDS), help="default: the first not done")
    add("--part", action="append", choices=names, help="only this part; may be repeated")
    add("--again", action="store_true", help="repeat finished parts")
    add("--dry", action="store_true", help="start every part far enough to know that it would run")
    add("--commit", help="commit of the tree, which travels without .git")
    options = parser.parse_args(arguments)
    if options.visit and options.part:
        parser.error(f"--part: expected without --visit, got --visit {options.visit}")
    return options


def chosen_parts(
    every: dict[str, Part], options: argparse.Namespace, session: Session
) -> tuple[dict[str, Part], int]:
    """Return the parts to run, and the time for all of them in seconds."""
    if options.part or options.dry and not options.visit:
        chosen = {name: x for name, x in every.items() if name in (options.part or every)}
        return chosen, sum(VISIT_SECONDS.values())
    undone = [x.visit for name, x in every.items() if not (x.stops or session.is_done(name))]
    numbers = [visit for visit in VISIT_SECONDS if visit in undone] or [max(VISIT_SECONDS)]
    visit = options.visit or numbers[0]
    print(f"# visit {visit} of {len(VISIT_SECONDS)}, {VISIT_SECONDS[visit]} s", flush=True)
    return of_visit(every, visit), VISIT_SECONDS[visit]


def run_all(chosen: dict[str, Part], seconds: int, again: bool, session: Session) -> int:
    """Run the parts in order for at most `seconds`, and return the exit status of the session."""
    started = time.monotonic()
    failed = False
    for name, part in chosen.items():
        left = seconds - (time.monotonic() - started)
        limit = min(left, part.seconds)
        if session.is_done(name) and not (again or part.stops):
            session.say(f"== {name}: done before")
        elif left < LEAST:
            session.say(f"== {name}: no time left; call again")
            failed = True
        else:
            session.say(f"== {name}: at most {limit:.0f} s")
            passed = session.run_part(name, part, limit)
            failed |= not passed
            if part.stops and not passed:
                session.say(f"== stopped: {name} failed, nothing else was run")
                return 3
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    every = parts()
    options = parse_arguments(arguments, list(every))
    if options.commit:
        os.environ[COMMIT_VARIABLE] = options.commit
    gpu = gpu_here()
    session = Session(Path(os.environ.get("OUT") or RESULTS), f"{commit()} on {gpu}")
    chosen, seconds = chosen_parts(every, options, session)
    if options.dry and not (options.part or options.visit):
        print(*clock(every), sep="\n", flush=True)
    limits = ", ".join(f"{name} {part.seconds} s" for name, part in chosen.items())
    total = sum(part.seconds for part in chosen.values())
    print(f"# plan: {limits}; in all at most {total} s", flush=True)
    if options.dry:
        return dry_run(chosen)
    if not gpu:
        print("gpu_session: torch sees no NVIDIA GPU; --dry needs none", file=sys.stderr)
        return 2
    if commit() == "none":
        print("gpu_session: expected --commit HASH, since the tree has no .git", file=sys.stderr)
        return 2
    session.say(f"# {now()}  {gpu}")
    return run_all(chosen, seconds, options.again, session)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
