"""The process around a reward function that runs in it: put back after every call."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator

import torch

from grpo_fast.data import escape_control
from grpo_fast.rewards.calling import open_folder

# The folder and the streams belong to the process: functions that change them run one at a time.
_ALONE = threading.RLock()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the working folder and torch's gradient mode; print what a function has printed,
    escaped, to stderr. Other threads wait.
    """
    with _ALONE, torch.set_grad_enabled(torch.is_grad_enabled()):
        home, said = open_folder(), io.StringIO()  # inside of the lock: another may have moved
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                yield
        finally:
            if home is not None:
                os.fchdir(home)
                os.close(home)
            print(escape_control(said.getvalue()), end="", file=sys.stderr)
