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
    """Keeps the working folder, the umask, torch's gradient mode and default dtype and device;
    what is printed meanwhile is escaped.
    """
    device = torch.get_default_device()
    mode = torch.set_grad_enabled(torch.is_grad_enabled())
    try:
        with mode, _PROCESS:  # mode and device are the thread's, the rest the process's
            yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(device)


class _Process:
    """Folder, streams and the like while reward functions run, in one thread or in several.

    The first thread in notes them, since what a later one finds may be another function's; each
    that leaves returns to the folder, the last one to the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._home: int | None = None
        self._streams: tuple[Any, Any] = (None, None)
        self._umask, self._dtype = 0, torch.float32

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._home, self._dtype = open_folder(), torch.get_default_dtype()
                self._umask = os.umask(0o077)  # it can be read by setting it only
                os.umask(self._umask)
                self._streams = (sys.stdout, sys.stderr)
                escaped: Any = [s and EscapedStream(s) for s in self._streams]  # None: no terminal
                sys.stdout, sys.stderr = escaped
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.stdout, sys.stderr = self._streams
                os.umask(self._umask)
                torch.set_default_dtype(self._dtype)
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

    def close(self) -> None:
        """Not the terminal of the others."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
