"""A GPU session: parts one after the other, in three calls; started by gpu_session.sh.

Resumable: a part that passed is marked in gpu_session.json and passed over by the next call. What a
part printed is in gpu_session.log, what it measured in the JSON. Exit code: 0 all asked for is
done, 1 a part failed or ran out of time, 2 nothing could be run, 3 the smoke test failed and the
rest was not run.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.gpu import lacking
from benchmarks.gpu.parts import CALL_SECONDS, PY, Part, of_call, parts
from benchmarks.gpu.risks import checklist
from benchmarks.report.files import write

COMMITTED = RESULTS / "gpu_session.json"
CALLS = (1, 2, 3)
LEAST = 15  # seconds: a part is not started with less


class Session:
    """Where results go, and what is known to be done."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file, self.log = out / "gpu_session.json", out / "gpu_session.log"
        self.parts: dict[str, dict[str, Any]] = {}
        for known in (COMMITTED, self.file):
            if known.is_file():
                self.parts |= json.loads(known.read_text())["parts"]

    def is_done(self, name: str) -> bool:
        return self.parts.get(name, {}).get("status") == "done"

    def record(self, name: str, status: str, seconds: float, reports: list[dict[str, Any]]) -> None:
        finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        done = {"status": status, "finished": finished, "seconds": round(seconds, 1)}
        self.parts[name] = {**done, "reports": reports}
        write(self.file, {"benchmark": "gpu session", "parts": self.parts})

    def say(self, text: str) -> None:
        print(text, flush=True)
        with self.log.open("a") as log:
            log.write(text + "\n")

    def run_part(self, name: str, part: Part, limit: float) -> bool:
        """Every command of a part; what was measured is kept even when the part fails."""
        started, codes, reports = time.monotonic(), [], []
        with tempfile.TemporaryDirectory() as folder:
            for number, command in enumerate(part.commands):
                if part.measures:
                    command = [*command, option_for(command), f"{folder}/{number}.json"]
                left = limit - (time.monotonic() - started)
                codes.append(run(command, left, part.environment, self.say))
                written = sorted(Path(folder).glob(f"{number}*.json"))
                reports += [json.loads(file.read_text()) for file in written]
        passed, seconds = not any(codes), time.monotonic() - started
        self.record(name, "done" if passed else "failed", seconds, reports)
        outcome = "done" if passed else "FAILED"
        self.say(f"== {name}: {outcome} in {seconds:.0f} s, exit codes {codes}")
        return passed


def option_for(command: list[str]) -> str:
    """The option that takes the file of a report."""
    return "--json" if any(word.startswith("benchmarks.trainers.") for word in command) else "--out"


def run(
    command: list[str], limit: float, environment: dict[str, str], say: Callable[[str], None]
) -> int:
    """A command with its output shown and logged; 124 when it ran past its limit.

    Its whole group is then ended.
    """
    if limit <= 1:
        return 124
    say(f"$ {' '.join(command)}")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except FileNotFoundError:
        say(f"{command[0]} is not on the PATH")
        return 127
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
        code = process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        say(f"ended after {limit:.0f} s")
        return 124
    return code


def gpu_or_reason() -> tuple[str | None, str]:
    """(None, what the GPU is) or (why there is none, "")."""
    try:
        import torch
        import triton
    except ImportError as error:
        return f"{PY} has no torch with triton: {error}", ""
    if not torch.cuda.is_available():
        return "no NVIDIA GPU: torch.cuda.is_available() is False", ""
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return None, f"{torch.cuda.get_device_name()}, {versions}"


def dry_run(chosen: dict[str, Part], reason: str | None, say: Callable[[str], None]) -> int:
    """Start every part far enough to know that it would run, without what the machine lacks."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        lacking.write(Path(folder))
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        for name, part in chosen.items():
            say(f"== {name}: at most {part.seconds} s")
            for command in part.commands:
                say(f"   would run: {' '.join(command)}")
                if shutil.which(command[0]) is None:
                    say(f"   {command[0]} is not on the PATH here")
            surroundings = {**part.environment, "PYTHONPATH": path}
            codes = [run(line, 300, surroundings, lambda x: say(f"   {x}")) for line in part.dry]
            say(f"   {'does NOT start' if any(codes) else 'starts'}")
            failed |= any(codes)
    if reason:
        say(f"== nothing was run: {reason}")
    return 1 if failed else 0


def parse_arguments(arguments: list[str], names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_session.sh", description=__doc__)
    parser.add_argument(
        "--call", type=int, choices=CALLS, help="default: the first that is not done"
    )
    parser.add_argument(
        "--part", action="append", choices=names, help="only this one; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="repeat finished parts")
    parser.add_argument("--force", action="store_true", help="go on after a failed smoke test")
    parser.add_argument(
        "--dry", action="store_true", help="start every part far enough to know that it would run"
    )
    parser.add_argument(
        "--deadline", type=float, default=CALL_SECONDS, help="seconds for the whole call"
    )
    options = parser.parse_args(arguments)
    if options.call and options.part:
        parser.error(f"--part: expected without --call, got --call {options.call}")
    return options


def chosen_parts(
    every: dict[str, Part], options: argparse.Namespace, session: Session
) -> dict[str, Part]:
    """What this call runs. The third begins with what the first two left undone."""
    if options.part:
        return {name: part for name, part in every.items() if name in options.part}
    if options.dry and not options.call:
        return every
    undone = [
        name for name, part in every.items()
        if part.call in CALLS and not (part.stops or session.is_done(name))
    ]  # fmt: skip
    left = [call for call in CALLS if any(every[name].call == call for name in undone)]
    call = options.call or (left or [CALLS[-1]])[0]
    names = set(of_call(every, call)) | (set(undone) if call == CALLS[-1] else set())
    print(f"# call {call} of {len(CALLS)}", flush=True)
    return {name: part for name, part in every.items() if name in names}


def run_all(chosen: dict[str, Part], options: argparse.Namespace, session: Session) -> int:
    """The parts in their order, as long as there is time."""
    started, failed = time.monotonic(), False
    for name, part in chosen.items():
        left = options.deadline - (time.monotonic() - started)
        limit = min(left, part.seconds)
        if session.is_done(name) and not (options.again or part.stops):
            session.say(f"== {name}: done before")
        elif left < LEAST:
            session.say(f"== {name}: no time left; call again")
            failed = True
        else:
            session.say(f"== {name}: at most {limit:.0f} s")
            passed = session.run_part(name, part, limit)
            failed |= not passed
            if part.stops and not passed and not options.force:
                session.say(f"== stopped: {name} failed, nothing else was run; --force goes on")
                return 3
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    every = parts()
    options = parse_arguments(arguments, list(every))
    reason, gpu = gpu_or_reason()
    is_dry = bool(options.dry or reason)
    session = Session(Path(os.environ.get("OUT") or RESULTS))
    chosen = chosen_parts(every, options, session)
    print(checklist())
    if is_dry:
        status = dry_run(chosen, reason, print)
        return status if options.dry else 2
    session.say(f"# {datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')}  {gpu}")
    return run_all(chosen, options, session)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
