"""How a run ends when it is asked to: SIGTERM, SIGINT and SIGHUP are answered between two passes.

The first signal is remembered, and the next forward pass of the policy raises `Stopped` in place of
its work; a second signal ends the process at once.
"""

from __future__ import annotations

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
    def __init__(self) -> None:
        self.number: int | None = None

    def raise_if_asked(self, *_: Any) -> None:
        if self.number is not None:
            raise Stopped(self.number)

    @contextmanager
    def listening(
        self, model: Any, agreed: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Inside, a signal raises `Stopped` at the next forward pass of `model`, within `agreed()`.

        Outside of the main thread Python takes no signals, and nothing is changed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # A run under nohup goes on when its terminal is gone.
        mine = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]

        def asked(*_: Any) -> None:
            with agreed():
                self.raise_if_asked()

        hook = model.register_forward_pre_hook(asked)
        for number in mine:
            signal.signal(number, self._remember)
        try:
            yield
        finally:
            hook.remove()
            for number in mine:
                signal.signal(number, before[number] or signal.SIG_DFL)

    def _remember(self, number: int, _: Any) -> None:
        self.number = number
        for each in SIGNALS:  # the kernel's own answer comes at once, whatever runs here
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, signal.SIG_DFL)
        with suppress(OSError, ValueError, AttributeError):
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)
