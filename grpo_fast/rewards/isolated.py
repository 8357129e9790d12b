"""Reward function in a worker process, with a time limit for each call.

If a function hangs, crashes or uses all memory, its samples get no reward, but the run continues.
The worker is a new Python process that runs `calling.py`. It starts at the first call. If it does
not reply to a call, it is ended, and a new worker starts at the next call.

`multiprocessing`, and pebble, which builds on it, are not suitable. They would import the user's
main script and torch in each worker, and would not kill the programs that a function has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from typing import Any

from grpo_fast.rewards import calling
from grpo_fast.rewards.calling import RewardFailure
from grpo_fast.rewards.conventions import ONLY_TRL, OURS, TRL, Loaded, Parameters

START_LIMIT_S = 120.0  # time limit for importing the user's module before the first call


class IsolatedReward:
    """Reward function that runs in a worker process. Concurrent calls run one after another.

    Args:
        path: "package.module:function" or "file.py:function".
        timeout: time limit for a call in seconds.
        options: arguments of every call, or of the constructor if `path` names a class. They must
            be JSON values.
        bounded: if True, `timeout` is multiplied by the number of completions of a call.
        convention: one of `conventions.CONVENTIONS`. None detects it from the parameters.

    Raises:
        RewardFailure: the function raised an error, a call took longer than the time limit, or the
            worker ended.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout: float,
        options: dict[str, Any] | None = None,
        bounded: bool = False,
        convention: str | None = OURS,
    ) -> None:
        self.path = path
        self.timeout = float(timeout)
        self.options = options or {}
        self.bounded = bounded
        self.per_sample = False  # set by the worker; see `conventions.is_per_sample`
        self._convention = convention
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None

    def __call__(self, **columns: Any) -> list[Any]:
        objects = {}
        with self._lock:
            self._start()
            if self._convention == TRL:
                # These objects cannot be sent to the worker. The worker replaces them, and returns
                # all that the function has logged.
                objects = {name: columns.pop(name) for name in ONLY_TRL if name in columns}
            state = vars(objects["trainer_state"]) if objects else None
            arguments = self._parameters.select(columns)
            count = len(next(iter(columns.values())))
            limit = self.timeout * max(1, count) if self.bounded else self.timeout
            reply = self._request({"count": count, "arguments": arguments, "state": state}, limit)
        for column, values in reply["extra"].items():
            objects["log_extra"](column, values)
        for name, values in reply["metrics"].items():
            for value in values:
                objects["log_metric"](name, value)
        return reply["scores"]

    def load(self) -> Loaded:
        """Start the worker. Return the function with its convention and parameters.

        Raises:
            RewardFailure: the function cannot be imported.
        """
        with self._lock:
            self._start()
        assert self._convention is not None
        return Loaded(self, self._convention, self._parameters)

    def close(self) -> None:
        """End the worker and all programs that it has started. The next call starts a new one."""
        if self._child is not None:
            self._kill()
            self._child.wait()
            self._child = None
            self._pipe.close()
            self._lifeline.close()

    def _start(self) -> None:
        """Start the worker if it is not running, and learn how to call the function."""
        if self._child is None:
            # 1. Open a pipe for requests, and a second pipe that closes when this process ends.
            self._pipe, theirs = Pipe()
            read_end, write_end = os.pipe()
            # Nothing is written to the second pipe. The kernel closes it, even after a crash.
            self._lifeline = os.fdopen(write_end, "wb", 0)
            # 2. Run calling.py in a new Python process with this process's module search path.
            search = os.pathsep.join(p or os.getcwd() for p in sys.path)
            # Close our copies of the worker's ends of the pipes. Otherwise the pipes would stay
            # open after the worker has ended, and we would wait forever for a reply.
            with os.fdopen(read_end, "rb", 0), theirs:
                handles = theirs.fileno(), read_end
                self._child = subprocess.Popen(
                    [sys.executable, "-uP", calling.__file__, self.path, *map(str, handles)],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a function prints goes to stderr
                    pass_fds=handles,
                    env={**os.environ, "PYTHONPATH": search},
                    start_new_session=True,  # no Ctrl-C for the worker; killpg ends all of it
                )
            # 3. Let the worker import the function and describe its parameters.
            first = {"convention": self._convention, "options": self.options}
            try:
                loaded = self._request(first, START_LIMIT_S)
            except RewardFailure:
                self.close()
                raise
            self.per_sample = loaded["per_sample"]
            self._convention = loaded["convention"]
            self._parameters = Parameters(*loaded["parameters"])

    def _request(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send a request to the worker and return its reply. Fail after `limit` seconds."""
        data = json.dumps(request).encode()
        end = time.monotonic() + limit
        timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._kill)
        timer.daemon = True
        timer.start()
        try:
            self._pipe.send_bytes(data)
            reply = json.loads(self._pipe.recv_bytes())
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
        if "error" in reply:
            raise RewardFailure(reply["error"], reply["why"])
        return reply

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # the worker has ended by itself
            os.killpg(self._child.pid, signal.SIGKILL)
