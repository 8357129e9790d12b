"""A reward function in a worker process, with a time limit on each call.

A function that hangs, crashes or uses all memory costs its samples, not the run. The worker is a
new interpreter that runs `calling.py`. It starts at the first call, and again after a call that
ended without a reply. Multiprocessing, and pebble, which builds on it, would import the user's main
script and torch in each worker, and would not end the programs that a function has started.
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

START_LIMIT_S = 120.0  # for importing the user's module, which is not part of a call


class IsolatedReward:
    """Callable like the function at `path`. Calls from several threads take turns.

    Args:
        path: "package.module:function" or "file.py:function".
        timeout: seconds for a call, or if `bounded` for each completion of a call.
        options: arguments of every call, or of a class's constructor, as JSON can carry them.
        convention: how the function is called; None recognises it by its parameters.

    Raises:
        TimeoutError: a call took longer.
        RewardFailure: the function raised, or its process ended; has the message.
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
        self._asked = convention
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None
        self._loaded: dict[str, Any] = {}

    def __call__(self, **columns: Any) -> list[Any]:
        objects = {}
        with self._lock:
            parameters = self._start()
            if self._loaded["convention"] == TRL:
                objects = {name: columns.pop(name) for name in ONLY_TRL if name in columns}
            count = len(next(iter(columns.values())))
            limit = self.timeout * max(1, count) if self.bounded else self.timeout
            state = vars(objects["trainer_state"]) if objects else None
            arguments = parameters.select(columns)
            answer = self._ask({"count": count, "arguments": arguments, "state": state}, limit)
        for column, values in answer["extra"].items():
            objects["log_extra"](column, values)
        for name, values in answer["metrics"].items():
            for value in values:
                objects["log_metric"](name, value)
        return answer["scores"]

    def load(self) -> Loaded:
        """Start the worker. Raises RewardFailure if the function cannot be imported."""
        with self._lock:
            parameters = self._start()
            known = self._loaded
            return Loaded(self, known["convention"], known["options"], parameters)

    @property
    def per_sample(self) -> bool:
        """Whether the function declares that each value depends on one completion alone."""
        return self._loaded.get("per_sample", False)

    def close(self) -> None:
        """End the worker and the programs that it started; the next call starts another."""
        if self._child is not None:
            self._kill()
            self._child.wait()
            self._child = None
            self._pipe.close()
            self._lifeline.close()

    def _start(self) -> Parameters:
        if self._child is None:
            self._pipe, theirs = Pipe()
            read_end, write_end = os.pipe()
            # Never written to. The kernel closes it if this process ends in any way.
            self._lifeline = os.fdopen(write_end, "wb", 0)
            search = os.pathsep.join(p or os.getcwd() for p in sys.path)
            # Our copies of the worker's ends are closed: an open one would hide that it ended.
            with os.fdopen(read_end, "rb", 0), theirs:
                handles = theirs.fileno(), read_end
                self._child = subprocess.Popen(
                    [sys.executable, "-uP", calling.__file__, self.path, *map(str, handles)],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a function prints goes to stderr
                    pass_fds=handles,
                    env={**os.environ, "PYTHONPATH": search},
                    start_new_session=True,  # Ctrl-C is for us; one signal ends the whole group
                )
            try:
                first = {"convention": self._asked, "options": self.options}
                self._loaded = self._ask(first, START_LIMIT_S)
            except RewardFailure:
                self.close()
                raise
        return Parameters(*self._loaded["parameters"])

    def _ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        data = json.dumps(request).encode()
        end = time.monotonic() + limit
        timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._kill)
        timer.daemon = True
        timer.start()
        try:
            self._pipe.send_bytes(data)
            answer = json.loads(self._pipe.recv_bytes())
        except BaseException as error:  # also Ctrl-C: the reply must not go to the next call
            self.close()
            if time.monotonic() >= end:
                raise TimeoutError(f"reward {self.path} took longer than {limit:g} s") from None
            if isinstance(error, (EOFError, OSError)):
                said = f"the process of reward {self.path} ended in the middle of a call"
                raise RewardFailure(said, "died") from None
            raise
        finally:
            timer.cancel()
        if time.monotonic() >= end:  # the reply came as the worker was killed
            self.close()
        if "error" in answer:
            raise RewardFailure(answer["error"], answer["why"])
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended by itself
            os.killpg(self._child.pid, signal.SIGKILL)
