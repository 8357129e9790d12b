"""Reward function in a worker process, with a time limit for each call.

If a function hangs, crashes or uses all memory, its samples get no reward, but the run continues.
A worker is a new Python process that runs `conventions.py`. It starts at the first call. If it does
not reply to a call, it is ended, and a new worker starts at the next call.

`multiprocessing`, and pebble, which builds on it, are not suitable. They would import the user's
main script and torch in each worker, and would not kill the programs that a function has started.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from grpo_fast.rewards import conventions, workers
from grpo_fast.rewards.conventions import OURS, Reply, RewardFailure, Signature

START_LIMIT_S = 120.0  # time limit for importing the user's module before the first call


class IsolatedReward:
    """Reward function that runs in a worker process.

    Args:
        path: "package.module:function" or "file.py:function".
        timeout: time limit for a call in seconds.
        options: arguments of every call, or of the constructor if `path` names a class. They must
            be JSON values.
        convention: one of `conventions.CONVENTIONS`.
        bounded: if True, `timeout` is multiplied by the number of completions of a call.

    Raises:
        RewardFailure: the function raised an error, a call took longer than the time limit, or the
            worker ended.
    """

    def __init__(
        self, path: str, timeout: float, options: Mapping[str, Any] | None = None,
        convention: str = OURS, bounded: bool = False,
    ) -> None:  # fmt: skip
        self.path = path
        self.timeout = timeout
        self.options = dict(options or {})
        self.convention = convention
        self.bounded = bounded
        self.lock = threading.RLock()
        self.child: subprocess.Popen | None = None

    def __call__(self, **columns: Any) -> list[Any]:
        """Return the scores of completions, with NaN for a completion without a score."""
        count = len(next(iter(columns.values())))
        scores, _ = self.call(count, columns)
        return [math.nan if isinstance(score, str) else score for score in scores]

    def call(self, count: int, columns: Mapping[str, Any], *others: Any) -> Reply:
        """Call the function in the worker; see `conventions.Function.call`."""
        limit = self.timeout * max(1, count) if self.bounded else self.timeout
        with self.lock:
            self.load()
            scores, note = self._request(limit, [count, columns, *others])
            return scores, note

    def load(self) -> None:
        """Start the worker if it does not run, and let it import the function. Set `signature`.

        Raises:
            RewardFailure: the function cannot be imported.
        """
        with self.lock:
            if self.child is None:
                self._start()
                given = [self.path, self.convention, self.options]
                try:
                    self.signature = Signature(*self._request(START_LIMIT_S, given))
                except RewardFailure:
                    self.close()
                    raise

    def close(self) -> None:
        """End the worker and all programs that it has started. The next call starts a new one."""
        if self.child is not None:
            self._kill()
            self.child.wait()
            self.child = None
            self.pipe.close()
            self.lifeline.close()

    def _start(self) -> None:
        # 1. Open a pipe for requests, and a second pipe that closes when this process ends.
        self.pipe, theirs = Pipe()
        read_end, write_end = os.pipe()
        # Nothing is written to the second pipe. The kernel closes it, even after a crash.
        self.lifeline = os.fdopen(write_end, "wb", 0)
        # 2. Run conventions.py in a new Python process with this process's module search path.
        search = os.pathsep.join(p or os.getcwd() for p in sys.path)
        # Close our copies of the worker's ends of the pipes. Otherwise the pipes would stay open
        # after the worker has ended, and we would wait forever for a reply.
        with os.fdopen(read_end, "rb", 0), theirs:
            handles = theirs.fileno(), read_end
            self.child = subprocess.Popen(
                [sys.executable, "-uP", conventions.__file__, *map(str, handles)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints goes to stderr
                pass_fds=handles,
                env={**os.environ, "PYTHONPATH": search},
                start_new_session=True,  # Ctrl-C does not reach it; killpg ends its children, too
            )

    def _request(self, limit: float, request: list[Any]) -> list[Any]:
        """Send a request in the format of `conventions.serve`, and return the worker's reply."""
        data = json.dumps(request).encode()
        end = time.monotonic() + limit
        timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._kill)
        timer.daemon = True
        timer.start()
        try:
            self.pipe.send_bytes(data)
            reply = json.loads(self.pipe.recv_bytes())
        except BaseException as error:
            # End the worker, also after Ctrl-C. Otherwise the next call would get the reply to this
            # request.
            self.close()
            if time.monotonic() >= end:
                message = f"reward {self.path} took longer than {limit:g} s"
                raise RewardFailure(message, "timeout") from None
            if isinstance(error, (EOFError, OSError)):
                message = f"the process of reward {self.path} ended in the middle of a call"
                raise RewardFailure(message, "died") from None
            raise
        finally:
            timer.cancel()
        if time.monotonic() >= end:  # the timer may have killed the worker after its reply
            self.close()
        if isinstance(reply, dict):
            raise RewardFailure(reply["error"], reply["why"])
        return reply  # type: ignore[no-any-return]

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # the worker has ended by itself
            os.killpg(self.child.pid, signal.SIGKILL)


def path_of(function: str) -> str:
    """Return the path of a function in a file of the folder `workers`, given as "file.py:function".

    A worker starts quickly, because it imports only this file and not the package.
    """
    return str(Path(workers.__file__).with_name(function))


@functools.cache
def built_in(function: str, timeout: float = 20.0) -> IsolatedReward:
    """Return the worker of a function in the folder `workers`, which all callers share."""
    return IsolatedReward(path_of(function), timeout)
