"""A user's reward function in a process of its own, with a time limit on each call.

A function that hangs, crashes or eats all memory then costs its samples, not the run. The child, a
fresh interpreter that runs `calling.py`, answers in JSON: no fork of a process full of threads, no
pickle. It starts at the first call, and again after one that ended without its answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, BinaryIO, TextIO

from grpo_fast.data import escape_control
from grpo_fast.errors import number, require
from grpo_fast.rewards import calling
from grpo_fast.rewards.calling import RewardFailure

START_LIMIT_S = 120.0  # for the import of the user's module, which is not the function's own time


class IsolatedReward:
    """Callable like the function at `path`, run elsewhere. Calls of several threads take turns.

    Raises:
        ValueError: a `timeout` that cannot be waited for, `options` that JSON cannot carry.
        TimeoutError: (a call) after `timeout` seconds; `per_sample`: so many for each completion.
        RewardFailure: (a call) with the function's own message when it raises or dies.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout: float,
        options: dict[str, Any] | None = None,
        per_sample: bool = False,
    ) -> None:
        expected = f"seconds, above 0 and below {threading.TIMEOUT_MAX:.3g}, for reward {path}"
        number("timeout", timeout, expected, lambda x: 0 < x < threading.TIMEOUT_MAX)
        self.path, self.timeout, self.options = path, float(timeout), options or {}
        self.per_sample = per_sample
        expected = f"values that JSON can carry for reward {path}"
        require(_same_as_json(self.options), "options", expected, self.options)
        self._lock = threading.Lock()
        self._numbers = itertools.count(calling.LOADED + 1)
        self._worker: _Worker | None = None
        self._parameters: calling.Parameters | None = None

    def __call__(self, **columns: list[Any]) -> list[float | str]:
        count = len(next(iter(columns.values())))
        with self._closed_by_an_error():
            arguments = {**self._start().select(columns), **self.options}
            request = {"number": next(self._numbers), "count": count, "arguments": arguments}
            limit = self.timeout * max(1, count * self.per_sample)
            answer = self._worker.ask(request, min(limit, threading.TIMEOUT_MAX))
        if "error" in answer:
            raise RewardFailure(answer["error"], answer["why"])
        return answer["rewards"]

    @property
    def parameters(self) -> calling.Parameters:
        """The function's parameters. Raises RewardFailure where it cannot be loaded."""
        with self._closed_by_an_error():
            return self._start()

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    @contextlib.contextmanager
    def _closed_by_an_error(self) -> Iterator[None]:
        """One thread at a time. An error or Ctrl-C ends the worker, whose answer may still come."""
        with self._lock:
            try:
                yield
            except BaseException:
                self.close()
                raise

    def _start(self) -> calling.Parameters:
        # A fork has a copy of its parent's worker and must not talk to it.
        if self._worker is None or self._worker.owner != os.getpid():
            self._worker = _Worker(self.path)
            loaded = self._worker.ask({"number": calling.LOADED}, START_LIMIT_S)
            if "error" in loaded:
                raise RewardFailure(loaded["error"], loaded["why"])
            self._parameters = calling.Parameters(*loaded["parameters"])
        return self._parameters


class _Worker:
    """The child process and our end of its pipe; `end()`s with the object and the program."""

    def __init__(self, path: str) -> None:
        search = os.pathsep.join(p or os.getcwd() for p in sys.path)  # the same can be imported
        self.path, self.owner = path, os.getpid()
        self._pipe, theirs = Pipe()
        read_end, write_end = os.pipe()
        lifeline = os.fdopen(write_end, "wb", 0)  # never written to; the kernel closes it if not we
        # Our copies of the child's ends are closed: an open one would hide that the child is gone.
        with os.fdopen(read_end, "rb", 0), theirs:
            handles = theirs.fileno(), read_end
            self.child = subprocess.Popen(
                [sys.executable, "-P", calling.__file__, path, *map(str, handles)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=handles,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "PYTHONPATH": search},
                # A group of its own: Ctrl-C is for us, and what the function starts ends with it.
                start_new_session=True,
            )
        shown = threading.Thread(target=_show, args=(self.child.stdout,), daemon=True)
        shown.start()
        self.end = weakref.finalize(self, _end, self.owner, self.child, shown, lifeline, self._pipe)

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The answer to a request, within `limit` seconds: also of a child that does not read, or
        that stops in the middle of its answer.
        """
        late = threading.Event()
        timer = threading.Timer(limit, _hang_up, [self._pipe, late])
        timer.daemon = True
        timer.start()
        answer = None
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):  # the end of the pipe
            pass
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"reward {self.path} took longer than {limit:g} s")
        if answer is None:
            said = f"the process of reward {self.path} ended in the middle of a call"
            raise RewardFailure(said, "died")
        if answer["number"] != request["number"]:  # a fork inside the function answers, too
            said = f"answered request {answer['number']}, not {request['number']}"
            raise RewardFailure(f"the process of reward {self.path} {said}", "died")
        return answer


def _hang_up(pipe: Connection, late: threading.Event) -> None:
    """End a pipe for whoever reads or writes, which closing it in another thread does not."""
    late.set()
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _end(
    owner: int, child: subprocess.Popen, shown: threading.Thread, lifeline: BinaryIO,
    pipe: Connection,
) -> None:  # fmt: skip
    """End the child and what it started. No method of `_Worker`, which it would keep alive."""
    if os.getpid() != owner:  # the copy in a fork
        return
    with contextlib.suppress(OSError):  # it ended by itself
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    pipe.close()
    lifeline.close()
    with contextlib.suppress(RuntimeError):  # the garbage collector may run in that very thread
        shown.join(1.0)


def _show(stream: TextIO) -> None:
    with stream:
        for text in iter(lambda: stream.readline(4096), ""):
            # It may be closed, or None: then the pipe is emptied all the same.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stderr.write(escape_control(text))
                sys.stderr.flush()


def _same_as_json(options: dict[str, Any]) -> bool:
    try:
        return json.loads(json.dumps(options)) == options
    except (TypeError, ValueError):
        return False
