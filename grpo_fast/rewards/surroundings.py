"""The process around a reward function that runs in it: put back after every call."""

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

# Folder, umask and streams belong to the process: functions that change them run one at a time.
_ALONE = threading.RLock()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the working folder, the umask, torch's gradient mode and default dtype and device, and
    escape what is printed meanwhile. Other threads wait.
    """
    with _ALONE, torch.set_grad_enabled(torch.is_grad_enabled()):
        home, streams, umask = open_folder(), (sys.stdout, sys.stderr), os.umask(0o077)
        os.umask(umask)  # it can be read by setting it only
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        escaped: Any = [s and EscapedStream(s) for s in streams]  # None: no terminal
        try:
            sys.stdout, sys.stderr = escaped
            yield
        finally:
            sys.stdout, sys.stderr = streams
            os.umask(umask)
            torch.set_default_dtype(dtype)
            if torch.get_default_device() != device:
                torch.set_default_device(device)
            if home is not None:
                os.fchdir(home)
                os.close(home)


class EscapedStream:
    """A text stream that escapes what is written; everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(escape_control(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def close(self) -> None:  # not the terminal of the others
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
