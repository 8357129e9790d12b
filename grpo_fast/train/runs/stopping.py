"""SIGTERM, SIGINT and SIGHUP: the first one ends a run where it can be saved, a second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from grpo_fast.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopping:
    """A flag that a signal sets, and that `raise_if_asked` turns into `Stopped`.

    The next forward pass of the policy or the end of the step raises `Stopped`, unless the run
    must finish its step first: then `may_stop()` is False.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self.may_stop: Callable[[], bool] = lambda: True

    def raise_if_asked(self, *_: Any) -> None:
        """Raise `Stopped` if a signal has come and the run may stop."""
        if self.number is not None and self.may_stop():
            raise Stopped(self.number)

    @contextmanager
    def listening(
        self, model: Any, agreed: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Handle signals inside. Outside of Python's main thread nothing is handled.

        Args:
            model: A module whose forward passes raise `Stopped` after a signal.
            agreed: Returns the context in which a forward pass raises, for example one in which
                all ranks raise together.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # nohup ignores SIGHUP, so that a run goes on when its terminal is gone.
        handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]

        def ask(*_: Any) -> None:
            with agreed():
                self.raise_if_asked()

        def remember(number: int, _: Any) -> None:
            self.number = number
            for each in handled:  # the next signal ends the process, also in a call that hangs
                signal.signal(each, signal.SIG_DFL)

        hook = model.register_forward_pre_hook(ask)
        for number in handled:
            signal.signal(number, remember)
        try:
            yield
        finally:
            hook.remove()
            for number in handled:
                signal.signal(number, before[number] or signal.SIG_DFL)
