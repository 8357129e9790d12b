"""Mutation tests: plant one bug at a time in a copy of the repository and run the tests.

    python -m tests.mutation [options]
    --list          print the bugs and check that every pattern fits; run nothing
    --only START    use only bugs whose name or file starts so, such as csrc/gemm; may be repeated
    --jobs N        use N copies of the repository at the same time (default 1)

The exit status is 0 if the tests catch at least 95% of the bugs, and 1 if they catch fewer. It is 2
if a pattern does not occur exactly once, if a test fails without a bug, or if a bug does not
compile. The bugs are defined in csrc.py, gpu.py and head.py.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutation import csrc, gpu, head
from tests.mutation.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("grpo_fast", "csrc", "tests", "benchmarks", "pyproject.toml")
# These modules take seconds to import. One process imports them, and forks for every run of pytest,
# so that each run starts quickly.
PRELOADED = "pytest hypothesis torch torch._dynamo numpy pydantic transformers".split()
REQUIRED_SHARE = 0.95
TIMEOUT_S = 600


class Plant(NamedTuple):
    """A planted bug: in `file`, the text `old`, which occurs exactly once, becomes `new`."""

    file: str
    name: str
    suite: str
    why: str
    old: str
    new: str

    @property
    def engine(self) -> str:
        """Name of the backend that the suite tests: "csrc", "triton" or "torch"."""
        first = self.suite.partition("_")[0]
        return first if first in ("csrc", "triton") else "torch"


def all_plants() -> list[Plant]:
    """Return the bugs of csrc.py, gpu.py and head.py in one list."""
    lists = (head.PLANTS, csrc.PLANTS, gpu.PLANTS)
    return [Plant(file, *p) for files in lists for file, plants in files.items() for p in plants]


def problems(plants: list[Plant]) -> list[str]:
    """Return one sentence for each bug whose original text does not occur exactly once."""
    counts = [(p, (ROOT / p.file).read_text().count(p.old)) for p in plants]
    return [f"{p.name}: {p.old!r} occurs {n} times in {p.file}" for p, n in counts if n != 1]


def set_environment(engine: str, cache: Path) -> None:
    """Set the environment for the tests of a backend, without the caller's settings."""
    ours = ("GRPO_FAST_", "PYTEST_", "TRITON_", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    for key in [key for key in os.environ if key.startswith(ours)]:
        del os.environ[key]
    os.environ |= {"GRPO_FAST_CACHE": str(cache), "PYTHONPYCACHEPREFIX": str(cache / "pycache"),
                   "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
    if engine != "csrc":
        os.environ["GRPO_FAST_DISABLE_CSRC"] = "1"
    if engine == "triton":
        os.environ["TRITON_INTERPRET"] = "1"


class Copy:
    """A copy of the repository, in which one bug at a time is planted and tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.writes = 0
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy2(source, folder / name)

    def write(self, file: str, text: str) -> None:
        """Write a file, and give it a modification time that no earlier write has.

        Python compares only the size and the time in seconds to detect an outdated .pyc file. If
        two writes had the same time, Python could run the .pyc file of an earlier bug.
        """
        path = self.folder / file
        path.write_text(text)
        self.writes += 1
        os.utime(path, (self.writes, self.writes))

    def start(self, suite: str) -> int:
        """Run a suite in a forked process, and return its process id."""
        child = os.fork()
        if child:
            return child
        os.setsid()  # a timeout must also end the tests' processes
        signal.alarm(TIMEOUT_S)
        handle = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        # In this process and its children, import the tests and the package from the copy instead
        # of the original repository.
        os.chdir(self.folder)
        folders = [str(self.folder), str(self.folder / "tests")]
        sys.path[:] = folders + [path for path in sys.path if path not in ("", str(ROOT))]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore"]
        status = int(pytest.main([*options, *shlex.split(SUITES[suite])]))
        sys.stdout.flush()
        os._exit(status)

    def outcome(self, status: int) -> tuple[str, str]:
        """Return "killed", "SURVIVED" or "ERROR" for an exit status, and the reason.

        "killed" means that the tests detected the bug. The reason is then the first failed test.
        """
        printed = self.log.read_text(encoding="utf-8", errors="replace")
        failed = [line for line in printed.splitlines() if line.startswith("FAILED ")]
        if "the compiler failed with status" in printed:
            return "ERROR", "the C++ sources do not compile"
        if status == 0:
            return "SURVIVED", ""
        if status == -signal.SIGALRM:
            return "ERROR", f"the tests took longer than {TIMEOUT_S} s"
        if status < 0:
            return "killed", f"the tests crashed with signal {-status}"
        if status == 1 and failed:
            return "killed", failed[0].removeprefix("FAILED ").partition(" - ")[0]
        return "ERROR", f"pytest ended with {status}: {printed.strip()[-400:]}"


def run(copies: list[Copy], tasks: list[Plant | str]) -> list[tuple[Plant | str, str]]:
    """Test every bug, or every suite without a bug, and return the tasks with their outcomes."""
    waiting = deque(tasks)
    free = list(copies)
    running = {}
    found = []
    while waiting or running:
        while waiting and free:
            copy, task = free.pop(), waiting.popleft()
            if isinstance(task, Plant):
                copy.write(task.file, (ROOT / task.file).read_text().replace(task.old, task.new))
            suite = task.suite if isinstance(task, Plant) else task
            running[copy.start(suite)] = copy, task, time.monotonic()
        child, status = os.wait()
        copy, task, begin = running.pop(child)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        outcome, detail = copy.outcome(os.waitstatus_to_exitcode(status))
        if isinstance(task, Plant):
            copy.write(task.file, (ROOT / task.file).read_text())
            name, reason = task.name, f"  ({task.why})" if outcome != "killed" else ""
        else:
            name, reason = f"unchanged: {task}", ""
            outcome = "passed" if outcome == "SURVIVED" else "ERROR"
        print(
            f"{outcome:9} {time.monotonic() - begin:6.1f} s  {name:34} {detail}{reason}", flush=True
        )
        free.append(copy)
        found.append((task, outcome))
    return found


def judge(plants: list[Plant], jobs: int, folder: Path) -> list[str]:
    """Test the bugs of one backend in this process, and return their outcomes."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # makes the garbage collection of pytest skip torch's objects
    copies = [Copy(folder / f"copy-{plants[0].engine}-{job}") for job in range(jobs)]
    unchanged = run(copies, list(dict.fromkeys(plant.suite for plant in plants)))
    if any(outcome != "passed" for _, outcome in unchanged):
        return ["ERROR"]
    return [outcome for _, outcome in run(copies, list(plants))]


def missing(engine: str) -> str:
    """Return the reason why a backend cannot run on this machine, or an empty string."""
    if engine == "triton":
        return "" if importlib.util.find_spec("triton") else "triton is not installed"
    if engine == "torch":
        return ""
    ask = "from grpo_fast.kernels.cpu import loader; print(loader.unavailable('rows') or '')"
    command = [sys.executable, "-c", ask]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    # The loader logs to stderr that it compiles, so only a failure's stderr is a reason.
    return (done.stdout + (done.stderr if done.returncode else "")).strip()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="START")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    return parser.parse_args()


def judge_by_engine(plants: list[Plant], jobs: int) -> list[str]:
    """Test all bugs with a separate process for each backend, and return their outcomes.

    Separate processes are needed, because Triton reads TRITON_INTERPRET when it is imported.
    """
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="grpo_fast_mutation_") as name:
        for engine in dict.fromkeys(plant.engine for plant in plants):
            set_environment(engine, Path(name) / "cache")
            reason = missing(engine)
            if reason:
                print(f"left out: every bug of {engine}: {reason}")
                continue
            chosen = [plant for plant in plants if plant.engine == engine]
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                outcomes += pool.submit(judge, chosen, jobs, Path(name)).result()
    return outcomes


def main() -> int:
    chosen = options()
    wrong, starts = problems(all_plants()), tuple(chosen.only or [""])
    plants = [p for p in all_plants() if p.name.startswith(starts) or p.file.startswith(starts)]
    if not plants:
        wrong.append(f"no bug fits --only {chosen.only}")
    if chosen.list:
        for plant in plants:
            print(f"{plant.name:34} {plant.suite:16} {plant.file:38} {plant.why}")
        print(f"{len(plants)} bugs")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if chosen.list:
        return 0
    outcomes = judge_by_engine(plants, chosen.jobs)
    killed, errors = outcomes.count("killed"), outcomes.count("ERROR")
    share = killed / max(len(outcomes), 1)
    print(f"{len(outcomes)} bugs: {killed} killed ({share:.1%}), "
          f"{outcomes.count('SURVIVED')} survived, {errors} errors")  # fmt: skip
    if errors:
        return 2
    return 0 if share >= REQUIRED_SHARE else 1


if __name__ == "__main__":
    # Processes of multiprocessing can import this module by its name only.
    sys.exit(importlib.import_module("tests.mutation.__main__").main())
