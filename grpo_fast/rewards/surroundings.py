"""What a reward function that runs in this process does not change for the others in it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from grpo_fast.data import escape_control
from grpo_fast.rewards.calling import open_folder


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps the working folder and the gradient mode; what is printed meanwhile is escaped."""
    mode = torch.set_grad_enabled(torch.is_grad_enabled())
    with mode, _PROCESS:  # the mode is the thread's, the rest the process's
        yield


class _Process:
    """Folder and streams while reward functions run, in one thread or in several.

    The first thread in notes them, since what a later one finds may be another function's; each
    that leaves returns to the folder, the last one to the streams.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._home: int | None = None
        self._streams: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._home = open_folder()
                self._streams = (sys.stdout, sys.stderr)
                escaped: Any = [s and EscapedStream(s) for s in self._streams]  # None: no terminal
                sys.stdout, sys.stderr = escaped
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.stdout, sys.stderr = self._streams
            if self._home is not None:
                os.fchdir(self._home)
                if not self._inside:
                    os.close(self._home)


_PROCESS = _Process()


class EscapedStream:
    """A text stream that escapes what is written; everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(escape_control(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
