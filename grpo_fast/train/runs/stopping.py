"""Signal handler for SIGTERM, SIGINT and SIGHUP.

After the first signal, a run ends at the next point where it can be saved. A second signal ends the
process immediately.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from grpo_fast.errors import Stopped
from grpo_fast.kernels.cpu.modules import Observer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopping:
    """Signal handler of a run. After a signal, the run ends with the exception `Stopped`.

    The exception is raised at the next forward pass of the policy, or at the end of the step. If
    the function `may_stop` returns False, forward passes do not raise it, and the run finishes its
    step.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # number of the received signal
        self.may_stop: Callable[[], bool] = lambda: True

    def raise_if_asked(self) -> None:
        """Raise `Stopped` if a signal was received and the run may stop at this point."""
        if self.number is not None and self.may_stop():
            raise Stopped(self.number)

    @contextmanager
    def listening(
        self,
        model: PreTrainedModel | PeftModel,
        agreed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[None]:
        """Handle signals inside this context.

        Python handles signals only in its main thread. In any other thread, the context has no
        effect.

        Args:
            model: module whose forward passes raise `Stopped` after a signal.
            agreed: function that returns a context manager, inside which `Stopped` is raised. With
                several ranks, it makes all ranks raise `Stopped` together.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # Do not handle a signal that is already ignored. For example, nohup ignores SIGHUP, so that
        # a run continues when its terminal closes.
        handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]

        def ask(*_: object) -> None:
            with agreed():
                self.raise_if_asked()

        def remember(number: int, _: object) -> None:
            self.number = number
            for each in handled:  # the next signal ends the process immediately
                signal.signal(each, signal.SIG_DFL)

        hook = model.register_forward_pre_hook(Observer(ask))
        for number in handled:
            signal.signal(number, remember)
        try:
            yield
        finally:
            hook.remove()
            for number in handled:
                signal.signal(number, before[number] or signal.SIG_DFL)
