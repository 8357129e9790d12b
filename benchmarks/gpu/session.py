"""Run one visit of a GPU session. gpu_session.sh starts this command.

A visit is one loan of a GPU machine. Its parts (benchmarks and tests) run one after the other.
Visit 1 checks that the kernels are right, and measures the values for which report.py has bars.
Visit 2 measures other libraries and hybrid models. All other parts run only if the command line
names them.

gpu_session.json has the status and the reports of each part, and gpu_session.log has the output. A
part that has passed is skipped in the next visit at the same commit and on the same kind of GPU.

The exit status is 0 if every part passed, 1 if a part failed or ran out of time, 2 if nothing could
be run, and 3 if the smoke test failed and the other parts were therefore not run.

A training step with a context as long as report.py demands is in no part. With 561,000 tokens, the
attention of Qwen2.5-0.5B alone needs 6e16 flop, which take more than two minutes on an H100.
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
from typing import Any, NamedTuple

from benchmarks import RESULTS, ROOT
from benchmarks.measure import COMMIT_VARIABLE, commit, write

# ---- the parts ----
PY = sys.executable
SESSION_SECONDS = 900  # for both visits, including the time in which the machines start
START_SECONDS = 120  # assumed time in which a machine starts
# A call is one command on the GPU machine. It transfers at most 64 MiB. This is the assumed time of
# a call that only transfers a piece of the wheels.
CARRY_SECONDS = 30
SLACK_SECONDS = 60  # must be left after both visits, even if every part takes its limit
VISIT_SECONDS = {1: 370, 2: 170}
# Number of pieces of the wheels that each visit needs. Visit 1 needs the wheels of `wheels.sh`, and
# visit 2 those of `wheels.sh --cute`. The call that runs the visit transfers the last piece.
PIECES = {1: 1, 2: 3}
BY_NAME = 0  # the visit number of a part that runs only if the command line names it
REPORTS = "FOLDER-OF-REPORTS"
PROCESSES = 16  # processes that run tests, one for each core of the machine
OURS = "--providers grpo_fast --backend auto"
# Benchmark commands for all shapes for which report.py has a bar.
LARGE = f"--shapes 8192,qwen3-8b {OURS} --budget 0.7"
BARS = (
    f"linear_grpo_loss linear_logps {LARGE} --active 1.0 0.2",
    "linear_grpo_loss linear_logps --shapes 8192,qwen3-1.7b 1024,qwen3-1.7b 8192,qwen2.5-0.5b "
    f"1024,qwen2.5-0.5b {OURS} --budget 0.7",
    f"logits_grpo_loss_inplace logits_grpo_loss --shapes 8192,64,151936 {OURS} --budget 0.5",
    f"linear_grpo_loss {LARGE} --active 0.2 --inactive zero-advantage",
)
PEERS = (
    "linear_grpo_loss --shapes 8192,qwen3-8b 8192,qwen3-1.7b 8192,qwen2.5-0.5b --budget 1",
    "linear_logps --shapes 8192,qwen3-8b --budget 0.5",
    "logits_grpo_loss --shapes 8192,64,151936 --budget 0.5",
)
SUPPORT = (
    f"linear_grpo_loss linear_logps --support 50 {LARGE}",
    f"linear_grpo_loss_frozen --support 50 {LARGE}",
)
SMALL = "linear_grpo_loss --shapes 1024,qwen2.5-0.5b --budget 0.5"
FROZEN = (
    "linear_grpo_loss_frozen --shapes 8192,qwen2.5-0.5b 8192,qwen3-8b 8192,qwen3-1.7b "
    "--budget 0.3 --backend auto --providers grpo_fast TRL torch.compile",
)
# Heads whose kernels are written in the CuTe-DSL. QuACK computes only a cross entropy.
HEADS = (
    "linear_cross_entropy linear_grpo_loss --shapes 8192,qwen3-8b 8192,qwen2.5-0.5b "
    "--budget 0.3 --backend auto --providers grpo_fast QuACK SM90",
)
# TRL 1.15 reports for gemma-3-1b on 79 GiB that its Triton head raises the longest sequence that
# can be scored from 28,672 to 114,688 tokens. This part measures the time and the peak of the head
# at these lengths, with random weights.
LONGEST = (
    "linear_logps linear_grpo_loss --shapes 28672,gemma-3-1b 114688,gemma-3-1b --budget 0.3 "
    "--backend auto --providers grpo_fast TRL",
)
STEPS = ((8192, 512, 16), (1500, 250, 16), (150, 200, 8))  # prompt, completion, group
# The limits of the parts below are estimates. In the visit of 2026-11-26, a process needed 8 s
# before its first kernel, three shapes with all peers took 115 s, and the long step took 82 s. It
# is assumed that compiling a CuTe-DSL kernel takes 10 s, and that the exact results of 114,688 rows
# take 10 s.


class Part(NamedTuple):
    """Commands that belong together.

    Attributes:
        visit: 1, 2, or `BY_NAME`.
        seconds: time limit for all commands together.
        commands: command lines. In each word, REPORTS is replaced by the path of a folder. The JSON
            files in this folder are the reports of the part.
        dry: command lines for a machine without a GPU, which check that the part would start.
        environment: environment variables of the commands.
        stops: True for a part that begins every visit, and that ends the visit if it fails.
    """

    visit: int
    seconds: int
    commands: list[list[str]]
    dry: list[list[str]]
    environment: dict[str, str] = {}
    stops: bool = False


def parts() -> dict[str, Part]:
    """Return all parts, keyed by name. The most valuable part of each visit comes first."""
    long = f"linear_grpo_loss --shapes 131072,qwen3-8b {OURS} --budget 2"
    return {
        "smoke": own(1, 25, "smoke")._replace(stops=True),
        "bars": bench(1, 50, *BARS),
        "small": bench(1, 35, SMALL),
        "profile": own(1, 20, "kernel_times"),
        "steps": steps(1, 65, STEPS[1:]),
        "support": bench(1, 30, *SUPPORT),
        "tests": tests(1, 100),
        "rows": own(1, 45, "row_candidates"),
        "frozen": bench(2, 40, *FROZEN),
        "heads": bench(2, 50, *HEADS),
        "hybrid": trees(2, 25, "--hybrid"),
        "longest": bench(2, 30, *LONGEST),
        "step": steps(BY_NAME, 95, STEPS[:1]),
        "peers": bench(BY_NAME, 130, *PEERS),
        "memcheck": sanitize(BY_NAME, 60, "memcheck"),
        "races": sanitize(BY_NAME, 240, "racecheck", "synccheck"),
        "trees": trees(BY_NAME, 40),
        "long": bench(BY_NAME, 60, long),
    }


def of_visit(every: dict[str, Part], visit: int) -> dict[str, Part]:
    """Return the parts of a visit.

    Every visit includes the smoke test, because every visit gets a fresh machine.
    """
    return {name: part for name, part in every.items() if part.stops or part.visit == visit}


def bench(visit: int, seconds: int, *lines: str) -> Part:
    """Return a part that runs several benchmarks in one process, which imports torch only once."""
    timed = [f"{line} --device cuda --out {REPORTS}/{n}.json" for n, line in enumerate(lines)]
    dry = [f"{line} --device cuda --dry" for line in lines]
    commands = [[PY, "-m", "benchmarks", *" + ".join(words).split()] for words in (timed, dry)]
    return Part(visit, seconds, commands[:1], commands[1:])


def own(visit: int, seconds: int, module: str) -> Part:
    """Return a part that runs a module of this folder. Its dry run uses tiny sizes on a CPU."""
    command = [PY, "-m", f"benchmarks.gpu.{module}"]
    timed = [*command, "--out", f"{REPORTS}/0.json"]
    return Part(visit, seconds, [timed], [[*command, "--device", "cpu"]])


def steps(visit: int, seconds: int, sizes: tuple[tuple[int, int, int], ...]) -> Part:
    """Return a part that compares our training step, which shares prompts, to TRL's step."""
    command = [PY, "-m", "benchmarks.trainers.step", "--providers", "shared", "TRL"]
    where = "--device cuda --model-config qwen2.5-0.5b --rounds 4 --budget 2"
    commands = [
        [*command, *f"{where} --prompt {p} --completion {c} --group {g}".split(),
         "--out", f"{REPORTS}/{number}.json"]
        for number, (p, c, g) in enumerate(sizes)
    ]  # fmt: skip
    return Part(visit, seconds, commands, [[*command, *"--device cpu --quick --layers 1".split()]])


def trees(visit: int, seconds: int, *models: str) -> Part:
    """Return a part that times trees of samples against plain packed rows."""
    command = [PY, "-m", "benchmarks.trainers.trees", *models]
    options = f"--device cuda --rounds 9 --budget 1 --out {REPORTS}/0.json"
    timed = [*command, *options.split()]
    return Part(visit, seconds, [timed], [[*command, *"--quick --device cpu".split()]])


def tests(visit: int, seconds: int) -> Part:
    """Return a part that runs the GPU tests. At the limit, pytest still prints the tracebacks."""
    pytest = [PY, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *gpu_tests()]
    spread = ["-v", "-n", str(PROCESSES), "--dist", "worksteal"]
    # Use --foreground, so that pytest stays in the process group that ends with the part.
    timed = ["timeout", "--foreground", "--signal=INT", str(seconds - 10), *pytest, *spread]
    # Run few examples of the fuzz test. It is a single test, so one process runs all of its
    # examples, and more of them would take longer than the limit.
    few = {"GRPO_FAST_FUZZ_CASES": "40"}
    return Part(visit, seconds, [timed], [[*pytest, "--collect-only", "-q"]], few)


def sanitize(visit: int, seconds: int, *tools: str) -> Part:
    """Return a part that runs every operation at small shapes under compute-sanitizer."""
    # Set PYTORCH_NO_CUDA_MEMORY_CACHING, so that each tensor is allocated separately. In torch's
    # caching allocator, an access past the end of a tensor would hit the next block and remain
    # undetected.
    operations = "linear_grpo_loss linear_logps linear_logps_backward logits_grpo_loss_inplace"
    options = "--shapes 64,64,512 64,72,1003 --device cuda --verify-only --backend triton"
    checked = [PY, "-m", "benchmarks", *operations.split(), *options.split()]
    checked += ["--providers", "grpo_fast"]
    flags = ["--error-exitcode", "9", "--target-processes", "all"]
    commands = [["compute-sanitizer", "--tool", tool, *flags, *checked] for tool in tools]
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Part(visit, seconds, commands, [[*checked, "--dry"]], environment)


def gpu_tests() -> list[str]:
    """Return the files of all GPU tests. Files with short names test the loss and come first."""
    tests = ROOT / "tests"
    found = {*tests.rglob("test_gpu*.py"), *(tests / "gpu").glob("test_*.py")}
    found |= {x for x in (tests / "loss").glob("test_*.py") if "EVERYWHERE" in x.read_text()}
    return sorted((str(path.relative_to(ROOT)) for path in found), key=lambda f: (len(f), f))


# ---- the packages of the machine ----
# Modules that the GPU machine does not have. It has torch, triton, transformers, accelerate, peft,
# pytest, rich, typer, pyyaml, matplotlib, safetensors, tokenizers, numpy and pyarrow.
PACKAGES = (
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "datasets", "dill",
    "multiprocess", "trl", "liger_kernel", "cut_cross_entropy", "cutlass", "quack", "einops",
    "math_verify", "latex2sympy2_extended", "antlr4", "verl", "openrlhf", "vllm", "flash_attn",
    "bitsandbytes", "httpx2", "httpcore2",
)  # fmt: skip

# Import hook for a dry run. A Python process that has the hook on its PYTHONPATH cannot import the
# modules in PACKAGES. It can still import copies of them in a folder of PYTHONPATH, such as the
# wheels that session.sh unpacks.
SOURCE = '''"""Written by benchmarks/gpu/session.py."""
import os, sys
from importlib.machinery import PathFinder

PACKAGES = {packages!r}
CARRIED = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]

class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, CARRIED if name in PACKAGES else path, target)

    @classmethod
    def find_distributions(cls, context):
        if context.name and context.name.replace("-", "_") in PACKAGES:
            context = type(context)(name=context.name, path=CARRIED)
        return PathFinder.find_distributions(context)

sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
'''


def hide_packages(folder: Path) -> None:
    """Write the hook to sitecustomize.py in a folder. Python imports this file when it starts."""
    (folder / "sitecustomize.py").write_text(SOURCE.format(packages=PACKAGES))


# ---- a visit ----
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
        with tempfile.TemporaryDirectory() as folder:
            for command in part.commands:
                command = [word.replace(REPORTS, folder) for word in command]
                left = limit - (time.monotonic() - started)
                codes.append(run(command, left, part.environment, self.say))
            written = sorted(Path(folder).glob("*.json"))
            reports = [json.loads(file.read_text()) for file in written]
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
        hide_packages(Path(folder))
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
