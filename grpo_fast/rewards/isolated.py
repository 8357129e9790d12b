"""A user's reward function in a process of its own, with a time limit on each call.

A function that hangs, crashes the interpreter or eats all memory then costs its samples, not the run. The child is a
fresh interpreter (running `calling.py`) that reads one JSON line per call and answers with one: no fork of a process
full of threads, and no pickle. It starts at the first call and again after a time-out.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from typing import Any

from grpo_fast.rewards import calling

START_LIMIT_S = 120.0  # what the user's module imports may take long; this is not the function's own time


class IsolatedReward:
    """Callable like the function at `path`, run elsewhere.

    Raises TimeoutError after `timeout` seconds, RuntimeError with the function's own message when it raises or dies.
    """

    def __init__(self, path: str, *, timeout: float, options: dict[str, Any] | None = None) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout: expected seconds > 0, got {timeout}")
        self.path, self.timeout, self.options = path, timeout, options or {}
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def __call__(self, *, prompts: list[Any], completions: list[str], answers: list[str]) -> list[Any]:
        child = self._start()
        request = {"prompts": prompts, "completions": completions, "answers": answers, **self.options}
        try:
            child.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
        except OSError as error:
            self.close()
            raise RuntimeError(f"the process of reward {self.path} ended: {error}") from None
        reply = json.loads(self._receive(self.timeout))
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return list(reply["rewards"])

    def close(self) -> None:
        """End the child process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            atexit.unregister(self.close)
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except OSError:  # a request was still in the buffer of a dead child
                        pass

    def _start(self) -> subprocess.Popen[str]:
        if self._child is not None:
            return self._child
        search = os.pathsep.join(p or os.getcwd() for p in sys.path)  # what can be imported here can be imported there
        self._child = subprocess.Popen(
            [sys.executable, "-P", calling.__file__, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": search},
        )
        atexit.register(self.close)
        self._lines = queue.Queue()
        threading.Thread(target=_pump, args=(self._child.stdout, self._lines), daemon=True).start()
        ready = json.loads(self._receive(START_LIMIT_S))
        if "error" in ready:
            self.close()
            raise RuntimeError(ready["error"])
        return self._child

    def _receive(self, limit: float) -> str:
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self.close()
            raise TimeoutError(f"reward {self.path} took longer than {limit:g} s") from None
        if not line:
            self.close()
            raise RuntimeError(f"the process of reward {self.path} ended in the middle of a call")
        return line


def _pump(stream: Any, lines: queue.Queue[str]) -> None:
    try:
        for line in stream:
            lines.put(line)
    except (OSError, ValueError):  # the pipe was closed by close()
        pass
    lines.put("")
