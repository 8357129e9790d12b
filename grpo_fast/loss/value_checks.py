"""`ValueChecks`: checks of argument values, at once or after a GPU has computed the values.

Values on the CPU are checked at once. With `validate="full"`, values on a GPU are also checked at
once. With `validate="auto"`, the checks on a GPU do not wait for the device: the numbers that they
need are copied to the host in the background, and the next call that finds a wrong number raises
the error. Until then, ids and offsets are clamped, so that no kernel reads out of bounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import is_capturing
from grpo_fast.kernels.workspace import copy_to_host_async

# A function that receives numbers, or tensors on the CPU, and returns an error message, or "" if
# the values are allowed.
Judge = Callable[..., str]


class ValueChecks:
    """The value checks of one call.

    `add` raises a ValueError if a check fails. On a GPU with `validate="auto"`, `add` only stores
    the numbers of the check, and `send` starts to copy all stored numbers to the host, once at the
    end of a call. If the call raises an error before `send`, the stored numbers are dropped,
    because the call returns no result that could be wrong.

    Args:
        validate: "auto" or "full", as in `linear_grpo_loss`.
    """

    numbers: dict[torch.dtype, Tensor]  # stored numbers on the host, valid after `ready`
    ready: torch.cuda.Event

    def __init__(self, validate: str) -> None:
        self.validate = validate
        self.kept: list[tuple[Judge, tuple[Tensor, ...]]] = []

    def are_late(self, x: Tensor) -> bool:
        """Return whether a wrong value in x raises an error only in a later call.

        The caller must then clamp x, because the kernels of this call still use it.
        """
        return x.is_cuda and self.validate == "auto"

    def add(self, judge: Judge, *tensors: Tensor) -> ValueChecks:
        """Check the values of some tensors with `judge`. All tensors must be on one device.

        `judge` receives a number for each 0-d tensor, and a copy on the CPU for other tensors.
        """
        if self.are_late(tensors[0]):
            self.kept.append((judge, tensors))
        elif not is_capturing(tensors[0]) and (message := judge(*map(_on_host, tensors))):
            raise ValueError(message)
        return self

    def add_flag(self, is_wrong: Tensor, message: str) -> ValueChecks:
        """Check that a 0-d bool tensor is False. `message` is the error otherwise."""
        return self.add(lambda flag: message if flag else "", is_wrong)

    def send(self) -> None:
        """Start to copy the stored numbers to the host, where `raise_pending` checks them."""
        if not self.kept or is_capturing(self.kept[0][1][0]):
            return
        parts: dict[torch.dtype, list[Tensor]] = {}
        for x in self._tensors():
            parts.setdefault(x.dtype, []).append(x.reshape(-1))
        self.numbers = {}
        for dtype, tensors in parts.items():
            copied = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            # The copies run one after another, so the event of the last copy is enough.
            self.numbers[dtype], self.ready = copy_to_host_async(copied)
        # A second backward pass checks its logps with this object, too. That pass must not change
        # or repeat the checks that were already sent.
        with _lock:
            _pending.append(copy(self))
        self.kept = []

    def messages(self) -> Iterator[str]:
        """Yield the message of each stored check, or "" if it has not failed."""
        sizes: dict[torch.dtype, list[int]] = {}
        for x in self._tensors():
            sizes.setdefault(x.dtype, []).append(x.numel())
        parts = {dtype: iter(x.split(sizes[dtype])) for dtype, x in self.numbers.items()}
        for judge, tensors in self.kept:
            yield judge(*(_on_host(next(parts[x.dtype]).view(x.shape)) for x in tensors))

    def _tensors(self) -> Iterator[Tensor]:
        return (x for _, tensors in self.kept for x in tensors)


def _on_host(x: Tensor) -> Any:
    return x.cpu() if x.dim() else x.item()


_pending: list[ValueChecks] = []
_lock = threading.Lock()


def raise_pending() -> None:
    """Raise a ValueError if a value check of an earlier GPU call failed.

    Only checks whose results have been copied to the host are considered.
    """
    if not _pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        arrived = [x for x in _pending if x.ready.query()]
        _pending[:] = [x for x in _pending if x not in arrived]
    text = "; ".join(dict.fromkeys(y for x in arrived for y in x.messages() if y))
    if text:
        raise ValueError(f"{text} (in an earlier call; validate='full' checks at once)")
