"""Server process that forks ranks (processes of torch.distributed with the gloo backend).

A test sends jobs to the server. A job is the list [function, argument, …]. The server imports the
modules of the jobs and then forks the ranks, because the imports are slow. All ranks run every job.
`alive` and `wait_until` also serve tests of other processes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch


def alive(pid: int) -> bool:
    """Return whether a process runs. A process that ended but was not reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


ROOT = Path(__file__).resolve().parents[1]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def function_of(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def child(rank: int, ranks: int, ports: tuple[str, str], jobs: list[Any], file: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": ports[0], "ANOTHER_PORT": ports[1]}  # fmt: skip
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    found = []
    try:
        for name, *arguments in jobs:
            found.append(function_of(name)(*arguments))
    except BaseException:
        found.append({"error": "unexpected", "text": traceback.format_exc()})
    file.write_text(json.dumps(found), encoding="utf-8")


def serve(folder: Path) -> None:
    """Run the jobs that arrive on stdin, and write their results to the pipe `ANSWERS`.

    A request is a JSON line [number of ranks, [job, …]]. The loop ends when stdin is closed.
    """
    for number, line in enumerate(sys.stdin):
        ranks, jobs = json.loads(line)
        for name, *_ in jobs:
            function_of(name)
        ports, children = (free_port(), free_port()), []
        files = [folder / f"{number}.{rank}.json" for rank in range(ranks)]
        for rank, file in enumerate(files):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    child(rank, ranks, ports, jobs, file)
                finally:
                    os._exit(0)
        for pid in children:
            os.waitpid(pid, 0)
        read = [json.loads(f.read_text()) if f.is_file() else [] for f in files]
        print(json.dumps(read), file=ANSWERS, flush=True)


def name_of(function: FunctionType) -> str:
    """Return "module:function" as the server can import it.

    pytest imports a test file under a name without its folders.
    """
    file = Path(function.__code__.co_filename).relative_to(ROOT).with_suffix("")
    return f"{'.'.join(file.parts)}:{function.__name__}"


class Ranks:
    """Client of the server process that forks the ranks. Call the client to run jobs on them.

    The end of a `with` block kills the server.

    Args:
        folder: A folder for the results and the log of the server.
        warm_up: Function that the server calls first, with the folder. The ranks then need not
            import what it imports.
        **environment: Environment variables of the server.
    """

    def __init__(
        self, folder: Path, warm_up: FunctionType | None = None, **environment: str
    ) -> None:
        words = [str(folder), *([] if warm_up is None else [name_of(warm_up)])]
        self.log = (folder / "log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_server", *words], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip

    def __call__(self, ranks: int, *jobs: list[Any], timeout: float = 240) -> list[list[Any]]:
        """Run jobs on the given number of ranks, and return their results.

        Returns:
            One list per rank, with the results of its jobs. The list of a rank that died is empty.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Timer(timeout, self.kill)
        late.start()
        try:
            named = [[name_of(function), *given] for function, *given in jobs]
            print(json.dumps([ranks, named]), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        finally:
            late.cancel()
        assert answer, f"no answer within {timeout} s: {Path(self.log.name).read_text()[-2000:]}"
        found = json.loads(answer)
        ends = [x for each in found for x in each if isinstance(x, dict)]
        unexpected = [x["text"] for x in ends if x.get("error") == "unexpected"]
        assert not unexpected, unexpected[0]
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


if __name__ == "__main__":
    # Redirect stdout of the runs to the log file, so that the pipe to the client contains only
    # the results of the jobs.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[2:]:
        function_of(name)(Path(sys.argv[1]))
    serve(Path(sys.argv[1]))
