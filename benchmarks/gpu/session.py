"""The parts of a GPU session, one after the other within a time limit; started by gpu_session.sh.

Resumable: a part that passed is marked in gpu_session.json and passed over by the next call. What a
part printed is in gpu_session.log, what it measured in the JSON. Exit code: 0 all asked for is
done, 1 a part failed or ran out of time, 2 nothing could be run.
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
from typing import Any, NamedTuple

from benchmarks import RESULTS, ROOT
from benchmarks.report.files import write

COMMITTED = RESULTS / "gpu_session.json"
PY = sys.executable
BENCH = [PY, "-m", "benchmarks"]
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
LEAST = 15  # seconds: a part is not started with less


class Part(NamedTuple):
    """Some commands, the seconds they may take together, and what is set in their environment.

    `--out FILE` is added to the commands of a part that measures (pytest's apart); a `dry` command
    shows that the part would start.
    """

    seconds: int
    commands: list[list[str]]
    dry: list[list[str]]
    measures: bool = True
    environment: dict[str, str] = {}


def bench(seconds: int, *arguments: str) -> Part:
    commands = [[*BENCH, *line.split(), "--device", "cuda"] for line in arguments]
    return Part(seconds, commands, [[*command, "--dry"] for command in commands])


def pytest(*files: str) -> list[str]:
    return [PY, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]


def collected(command: list[str]) -> list[str]:
    return [*command, "-q", "--collect-only"]


def parts() -> dict[str, Part]:
    """Most valuable first; together a little under ten minutes."""
    tests, attention_tests = (pytest(*files) for files in gpu_tests())
    tune = [PY, "-m", "benchmarks.gpu.tune"]
    attention = bench(45, "attention")
    ours = "--providers grpo_fast trl --budget 1"
    return {
        "tests": Part(100, [tests], [collected(tests)], measures=False),
        "bench-loss": bench(
            150,
            "linear_grpo_loss --budget 1.5",
            f"linear_grpo_loss --model qwen3-8b --tokens 8192 --active 0.2 {ours}",
            f"linear_grpo_loss --model qwen3-8b --tokens 512 1024 131072 {ours}",
        ),
        "bench-logits": bench(
            40, "logits_grpo_loss logits_grpo_loss_inplace --shapes 8192,64,151936 --budget 1"
        ),
        "bench-logps": bench(
            55, "linear_logps linear_logps_backward --model qwen3-8b qwen2.5-0.5b --budget 1"
        ),
        "sanitize": sanitize(70),
        "tune": Part(70, [tune], [[*tune, "--dry"]]),
        "bench-step": bench(40, "step", "rollout"),
        "attention": attention._replace(
            commands=[attention_tests, *attention.commands],
            dry=[collected(attention_tests), *attention.dry],
        ),
        "trl": bench(25, "trl"),
    }


def sanitize(seconds: int) -> Part:
    """Every operation under compute-sanitizer, a hundred times slower: small shapes.

    Without torch's caching allocator each tensor is an allocation of its own, so that an access
    past its end is seen.
    """
    operations = "linear_grpo_loss linear_logps linear_logps_backward logits_grpo_loss_inplace"
    options = "--shapes 64,64,512 64,72,1003 --device cuda --verify-only --backend triton"
    checked = [*BENCH, *operations.split(), *options.split(), "--providers", "grpo_fast"]
    flags = ["--error-exitcode", "9", "--target-processes", "all"]
    commands = [["compute-sanitizer", "--tool", t, *flags, *checked] for t in SANITIZER_TOOLS]
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Part(seconds, commands, [[*checked, "--dry"]], False, environment)


def gpu_tests() -> tuple[list[str], list[str]]:
    """(the tests that need a GPU, those of the attention, which a part of its own runs)."""
    tests = ROOT / "tests"
    found = {*tests.rglob("test_gpu*.py"), *(tests / "gpu").glob("test_*.py")}
    files = sorted(str(path.relative_to(ROOT)) for path in found)
    attention = [file for file in files if "attention" in file]
    return [file for file in files if file not in attention], attention


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
                if part.measures and "pytest" not in command:
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
    """Start every part far enough to know that it would run."""
    failed = False
    for name, part in chosen.items():
        say(f"== {name}: at most {part.seconds} s")
        for command in part.commands:
            say(f"   would run: {' '.join(command)}")
            if shutil.which(command[0]) is None:
                say(f"   {command[0]} is not on the PATH here")
        codes = [run(line, 300, part.environment, lambda x: say(f"   {x}")) for line in part.dry]
        say(f"   {'does NOT start' if any(codes) else 'starts'}")
        failed |= any(codes)
    if reason:
        say(f"== nothing was run: {reason}")
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    every = parts()
    parser = argparse.ArgumentParser(prog="gpu_session.sh", description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=list(every), help="only this one; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="repeat finished parts")
    parser.add_argument(
        "--dry", action="store_true", help="start every part far enough to know that it would run"
    )
    parser.add_argument("--deadline", type=float, default=570, help="seconds for the whole call")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    session = Session(Path(os.environ.get("OUT") or RESULTS))
    chosen = {name: every[name] for name in options.part or every}
    reason, gpu = gpu_or_reason()
    if options.dry or reason:
        status = dry_run(chosen, reason, print)
        return status if options.dry else 2
    session.say(f"# {datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')}  {gpu}")
    failed = False
    for name, part in chosen.items():
        left = options.deadline - (time.monotonic() - started)
        if session.is_done(name) and not options.again:
            session.say(f"== {name}: done before")
        elif left < LEAST:
            session.say(f"== {name}: no time left; call again")
            failed = True
        else:
            session.say(f"== {name}: at most {min(left, part.seconds):.0f} s")
            failed |= not session.run_part(name, part, min(left, part.seconds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
