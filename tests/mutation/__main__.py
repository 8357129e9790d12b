"""Mutation tests: plant one bug at a time in a copy of the repository and run the tests.

    python -m tests.mutation [options]
    --list          print the bugs and check that every pattern fits; run nothing
    --only START    use only bugs whose name or file starts so, such as csrc/gemm; may be repeated
    --jobs N        use N copies of the repository at the same time (default 1)

The exit status is 0 if the tests catch at least 95% of the bugs, and 1 if they catch fewer. It is 2
if a pattern does not occur exactly once, if a test fails without a bug, or if a bug does not
compile. The bugs are defined in csrc.py, gpu.py and head.py.
"""

import argparse
import contextlib
import importlib.util
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutation import csrc, gpu, head
from tests.mutation.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("grpo_fast", "csrc", "tests", "benchmarks", "pyproject.toml")
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


def all_plants() -> list[Plant]:
    """Return the bugs of csrc.py, gpu.py and head.py in one list."""
    lists = (head.PLANTS, csrc.PLANTS, gpu.PLANTS)
    return [Plant(file, *p) for files in lists for file, plants in files.items() for p in plants]


def problems(plants: list[Plant]) -> list[str]:
    """Return one sentence for each bug whose original text does not occur exactly once."""
    counts = [(p, (ROOT / p.file).read_text().count(p.old)) for p in plants]
    return [f"{p.name}: {p.old!r} occurs {n} times in {p.file}" for p, n in counts if n != 1]


def engine_of(suite: str) -> str:
    """Return the backend that a suite tests: "csrc", "triton" or "torch"."""
    first = suite.partition("_")[0]
    return first if first in ("csrc", "triton") else "torch"


class Copy:
    """A copy of the repository, in which one bug at a time is planted and tested."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
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

    def environment(self, engine: str) -> dict[str, str]:
        """Return the environment for the tests of a backend, without the caller's settings.

        The tests and the package are imported from the copy instead of the original repository.
        """
        ours = ("GRPO_FAST_", "PYTEST_", "TRITON_", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
        found = {key: x for key, x in os.environ.items() if not key.startswith(ours)}
        found |= {"GRPO_FAST_CACHE": str(self.cache), "OPENBLAS_NUM_THREADS": "1",
                  "PYTHONPATH": str(self.folder),
                  "PYTHONPYCACHEPREFIX": str(self.cache / "pycache")}  # fmt: skip
        if engine != "csrc":
            found["GRPO_FAST_DISABLE_CSRC"] = "1"
        if engine == "triton":
            found["TRITON_INTERPRET"] = "1"
        return found

    def outcome(self, suite: str) -> tuple[str, str]:
        """Run a suite, and return "passed", "killed" or "ERROR", and the reason.

        "killed" means that a test failed. The reason is then the first failed test.
        """
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore"]
        log = self.folder.with_suffix(".log")
        with log.open("w") as file:
            tests = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *shlex.split(SUITES[suite])],
                cwd=self.folder, env=self.environment(engine_of(suite)), stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = tests.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return "ERROR", f"the tests took longer than {TIMEOUT_S} s"
            finally:  # also end the processes that the tests started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tests.pid, signal.SIGKILL)
        printed = log.read_text(encoding="utf-8", errors="replace")
        failed = [line for line in printed.splitlines() if line.startswith("FAILED ")]
        if "the compiler failed with status" in printed:
            return "ERROR", "the C++ sources do not compile"
        if status == 0:
            return "passed", ""
        if status < 0:
            return "killed", f"the tests crashed with signal {-status}"
        if status == 1 and failed:
            return "killed", failed[0].removeprefix("FAILED ").partition(" - ")[0]
        return "ERROR", f"pytest ended with {status}: {printed.strip()[-400:]}"


def outcome_of(task: Plant | str, copy: Copy) -> tuple[str, str, str]:
    """Test a bug, or a suite without a bug, in a copy. Return its name, the outcome and details."""
    if isinstance(task, str):
        outcome, detail = copy.outcome(task)
        return f"unchanged: {task}", "ERROR" if outcome == "killed" else outcome, detail
    text = (ROOT / task.file).read_text()
    copy.write(task.file, text.replace(task.old, task.new))
    outcome, detail = copy.outcome(task.suite)
    copy.write(task.file, text)
    detail += "" if outcome == "killed" else f"  ({task.why})"
    return task.name, "SURVIVED" if outcome == "passed" else outcome, detail


def judge(plants: list[Plant], jobs: int, folder: Path) -> list[str]:
    """Test every suite without a bug, then every bug, and return the outcomes of the bugs."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for job in range(jobs):
        copies.put(Copy(folder / f"copy-{job}", folder / "cache"))

    def test(task: Plant | str) -> str:
        copy, begin = copies.get(), time.monotonic()
        try:
            name, outcome, detail = outcome_of(task, copy)
        finally:
            copies.put(copy)  # otherwise the other tasks would wait forever
        print(f"{outcome:9} {time.monotonic() - begin:6.1f} s  {name:34} {detail}", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        unchanged = list(pool.map(test, dict.fromkeys(plant.suite for plant in plants)))
        return ["ERROR"] if "ERROR" in unchanged else list(pool.map(test, plants))


def missing(engine: str) -> str:
    """Return the reason why a backend cannot run on this machine, or an empty string."""
    if engine == "triton":
        return "" if importlib.util.find_spec("triton") else "triton is not installed"
    if engine == "torch":
        return ""
    from grpo_fast.kernels.cpu import loader  # slow, because it imports torch

    return loader.unavailable("rows") or ""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="START")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    return parser.parse_args()


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
    for engine in dict.fromkeys(engine_of(plant.suite) for plant in plants):
        if reason := missing(engine):
            print(f"left out: every bug of {engine}: {reason}")
            plants = [plant for plant in plants if engine_of(plant.suite) != engine]
    with tempfile.TemporaryDirectory(prefix="grpo_fast_mutation_") as name:
        outcomes = judge(plants, chosen.jobs, Path(name))
    killed, errors = outcomes.count("killed"), outcomes.count("ERROR")
    share = killed / max(len(outcomes), 1)
    print(f"{len(outcomes)} bugs: {killed} killed ({share:.1%}), "
          f"{outcomes.count('SURVIVED')} survived, {errors} errors")  # fmt: skip
    if errors:
        return 2
    return 0 if share >= REQUIRED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
