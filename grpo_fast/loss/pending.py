"""Checks of values that live on a device: at once on the CPU and under `validate="full"`, else when
they have arrived.

On a GPU under "auto" a flag is computed there and copied to the host behind the work; the next call
that finds it there raises. Nothing is read or written out of bounds meanwhile: values.py clamps ids
and offsets.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import is_capturing
from grpo_fast.kernels.workspace import on_its_way

Check = tuple[Tensor, str]  # a 0-d bool, and what to say where it is set


class _Pending(NamedTuple):
    flags: Tensor  # (K,) bool on the host, valid once `ready`
    ready: torch.cuda.Event
    messages: tuple[str, ...]


_pending: list[_Pending] = []
_lock = threading.Lock()


def told_late(x: Tensor, validate: str) -> bool:
    """Whether what is wrong with x is told when it has reached the host: the work meets it."""
    return x.is_cuda and validate == "auto"


def raise_pending() -> None:
    """Raise what earlier calls on a GPU found wrong, all that has arrived."""
    if not _pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    arrived: list[_Pending] = []
    waiting: list[_Pending] = []
    with _lock:
        for check in _pending:  # each is asked once: it may arrive at any time
            (arrived if check.ready.query() else waiting).append(check)
        _pending[:] = waiting
    wrong = [
        message
        for check in arrived
        for flag, message in zip(check.flags.tolist(), check.messages, strict=True)
        if flag
    ]
    if wrong:
        told = "; ".join(dict.fromkeys(wrong))
        raise ValueError(f"{told} (in an earlier call; validate='full' checks at once)")


def check_values(checks: list[Check], validate: str) -> None:
    """A ValueError for the first flag that is set: at once, or when it has reached the host."""
    if not checks or is_capturing(checks[0][0]):
        return
    if told_late(checks[0][0], validate):
        flags, messages = zip(*checks, strict=True)
        host, ready = on_its_way(torch.stack(flags))
        with _lock:
            _pending.append(_Pending(host, ready, messages))
        return
    for flag, message in checks:
        if flag:
            raise ValueError(message)


def elements(x: Tensor, odd: Tensor, expected: str, on_device: str) -> Check:
    """The elements of x: where some are `odd`, the first of them and how many.

    Args:
        expected: the beginning of the sentence, up to ", got".
        on_device: what came, where saying more would cost a sync.
    """
    flag = odd.any()
    if x.device.type != "cpu" or not flag:
        return flag, f"{expected}, got {on_device}"
    return flag, f"{expected}, got {x[odd][0].item():g} ({int(odd.sum())} of {x.numel()} values)"
