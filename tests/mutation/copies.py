"""A copy of the repository in which one bug at a time is planted and judged by pytest.

What costs a bug nothing twice: the imports (warm.py has done them), the .pyc of files that are as
they were, the C++ that a bug leaves as it is.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutation.mutants import SUITES, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("grpo_fast", "csrc", "tests", "benchmarks", "pyproject.toml")
TIMEOUT_S = 600
DOES_NOT_COMPILE = "the compiler failed with status"


class Verdict(NamedTuple):
    mutant: Mutant
    outcome: str  # "killed", "SURVIVED", "ERROR"
    seconds: float
    detail: str  # the test that failed first, or what went wrong


class Copy:
    """A copy of the repository in a temporary folder; all copies share a cache of compiled C++."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repository"
        self.cache = folder.parent / "cache"
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
            if not k.startswith(("GRPO_FAST_", "PYTEST_", "TRITON_", "PYTHONDONTWRITEBYTECODE"))
        }
        kept |= {
            "GRPO_FAST_CACHE": str(self.cache),
            "PYTHONPYCACHEPREFIX": str(self.cache / "pycache"),
            "OPENBLAS_NUM_THREADS": "1",
        }
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
        """Write a file with a time of its own: Python finds its .pyc by size and second alone."""
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
