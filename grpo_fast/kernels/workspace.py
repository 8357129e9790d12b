"""Memory of ours: copies to the host, the chunk loop's workspace, zeros that nobody writes."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Zeros of this many bytes come from pages that are zeros (the advice's number is Linux's).
ZERO_PAGES_FROM = 8 << 20
MADV_POPULATE_WRITE = 23
# The share of a GPU's memory that logits may take by default: 1/48.
GPU_SHARE = 48


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU: large ones from pages that Linux hands over to several threads as zeros."""
    size = math.prod(shape) * dtype.itemsize
    if size < ZERO_PAGES_FROM or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(pages, dtype=dtype).view(*shape)
    libc = ctypes.CDLL(None)

    def take(start: int) -> None:  # where Linux does not know this, whoever writes takes the page
        length = min(ZERO_PAGES_FROM, size - start)
        address = ctypes.c_void_p(x.data_ptr() + start)
        libc.madvise(address, ctypes.c_size_t(length), MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(take, range(0, size, ZERO_PAGES_FROM)))
    return x


def copy_to_host_async(x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A copy of x on the host, and the event that says when it is there."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(x.device))  # x may lie on another than the current one
    return host, arrived


def gpu_bytes(device: torch.device) -> int:
    """Memory of a GPU; 0 where torch sees none, and a call is planned for one."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).total_memory


def workspace_bytes(
    device: torch.device, bytes_per_logit: int = 4, spared: int = 0, memory: int | None = None
) -> int:
    """Bytes of logits held at a time: GRPO_FAST_WORKSPACE_MIB, by default a 48th of a GPU's memory
    and at least 1 GiB, on the CPU 128 Mi logits; and what a chunk that is the only one spares
    elsewhere.

    These take 512 MiB in fp32 and 256 MiB at 16 bits; 8192 rows of 151936 in 16 bits 2.3 GiB, of
    the 2.9 GiB that an H200 has. A second chunk costs a second sweep of W and dW. `memory`: of a
    GPU that is not here.
    """
    default = 128 * bytes_per_logit
    if device.type == "cuda":
        default = max(1024, (gpu_bytes(device) if memory is None else memory) // GPU_SHARE >> 20)
    text = os.environ.get("GRPO_FAST_WORKSPACE_MIB", str(default))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"GRPO_FAST_WORKSPACE_MIB: expected a whole number of MiB, got {text!r}")
    return (int(text) << 20) + spared


# A CPU workspace of at most this many bytes is kept: fresh pages cost a small loss 20%.
KEPT_BYTES = 128 << 20
# At most one; taken and put by single operations, which threads cannot tear.
_spare: list[Tensor] = []


def take_workspace(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, columns), not filled, on the device of `like`."""
    spare = None
    if _spare and like.is_cpu:
        try:
            spare = _spare.pop()
        except IndexError:
            pass  # another thread was faster
    if spare is None or spare.dtype != dtype or spare.numel() < rows * columns:
        return like.new_empty((rows, columns), dtype=dtype)
    return spare.view(-1)[: rows * columns].view(rows, columns)


def give_back_workspace(workspace: Tensor | None) -> None:
    """Nobody reads it any more: the next call may have it."""
    if workspace is None or not workspace.is_cpu or workspace.is_inference():
        return
    whole = workspace if workspace._base is None else workspace._base
    if whole.nbytes <= KEPT_BYTES:
        _spare[:] = [whole]


def drop_workspace() -> None:
    _spare.clear()
