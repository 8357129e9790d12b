"""SIGTERM, SIGINT and SIGHUP: the first one ends a run where it can be saved, a second at once."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from grpo_fast.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHOW_CURSOR = b"\x1b[?25h"


class Stopping:
    """The first signal is remembered. The next forward pass of the policy, or the end of the step,
    raises `Stopped`, unless the run must finish its step first (`may_stop`).
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.may_stop: Callable[[], bool] = lambda: True

    def raise_if_asked(self, *_: Any) -> None:
        if self.number is not None and self.may_stop():
            raise Stopped(self.number)

    @contextmanager
    def listening(
        self, model: Any, agreed: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Answer signals inside. A forward pass of `model` raises `Stopped` within `agreed()`.

        Python takes no signals outside of the main thread: nothing changes there.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # A run under nohup goes on when its terminal is gone.
        own = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]

        def ask(*_: Any) -> None:
            with agreed():
                self.raise_if_asked()

        def remember(number: int, _: Any) -> None:
            if self.number is not None:  # both came before Python called this the first time
                os._exit(128 + number)
            self.number = number
            for each in own:
                # From now on the kernel ends the process, whatever runs here. Not by signal.signal:
                # Python prints a traceback for a second signal that has already arrived.
                ctypes.pythonapi.PyOS_setsig(each, None)
            with suppress(OSError, ValueError, AttributeError):
                if sys.stdout.isatty():
                    os.write(sys.stdout.fileno(), SHOW_CURSOR)

        hook = model.register_forward_pre_hook(ask)
        for number in own:
            signal.signal(number, remember)
        try:
            yield
        finally:
            hook.remove()
            for number in own:
                signal.signal(number, before[number] or signal.SIG_DFL)
