"""Memory management: asynchronous copies to the host, the chunk workspace and fast zeros on
CPUs.
"""

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

# From this size on, zeros come from fresh pages, which Linux has already cleared.
ZERO_PAGES_FROM = 8 << 20
# Linux's value of the constant, which Python's mmap module does not define.
MADV_POPULATE_WRITE = 23
# By default logits may take 1/48 of a GPU's memory.
GPU_SHARE = 48


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU. Large tensors use fresh pages, which several threads fault in."""
    size = math.prod(shape) * dtype.itemsize
    if size < ZERO_PAGES_FROM or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(pages, dtype=dtype).view(*shape)
    libc = ctypes.CDLL(None)

    def take(start: int) -> None:
        length = min(ZERO_PAGES_FROM, size - start)
        address = ctypes.c_void_p(x.data_ptr() + start)
        # A kernel that does not know the advice ignores it; pages are then faulted in on first
        # write.
        libc.madvise(address, ctypes.c_size_t(length), MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(take, range(0, size, ZERO_PAGES_FROM)))
    return x


def copy_to_host_async(x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy of x to pinned host memory.

    Returns:
        The host tensor, and an event that completes when its values have arrived.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrived = torch.cuda.Event()
    # Record on the stream of x's device, which may differ from the current device.
    arrived.record(torch.cuda.current_stream(x.device))
    return host, arrived


def gpu_bytes(device: torch.device) -> int:
    """Return a GPU's memory in bytes, or 0 if torch sees no GPU (when a run is only planned)."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).total_memory


def workspace_bytes(
    device: torch.device, bytes_per_logit: int = 4, spared: int = 0, memory: int | None = None
) -> int:
    """Return how many bytes of logits may exist at a time.

    GRPO_FAST_WORKSPACE_MIB sets the size. The default is 1/48 of a GPU's memory and at least 1 GiB,
    and on the CPU 128 Mi logits: 512 MiB in fp32, 256 MiB in 16 bits. For scale, 8192 rows of
    151936 16-bit logits take 2.3 GiB, and the default of an H200 is 2.9 GiB. Every further chunk
    costs one more pass over W and dW.

    Args:
        device: where the logits are.
        bytes_per_logit: scales the default on the CPU.
        spared: bytes added to the result: what a single chunk saves elsewhere.
        memory: GPU memory in bytes, for a GPU of another machine; None: ask the device.

    Raises:
        ValueError: GRPO_FAST_WORKSPACE_MIB is not a whole number.
    """
    default = 128 * bytes_per_logit
    if device.type == "cuda":
        default = max(1024, (gpu_bytes(device) if memory is None else memory) // GPU_SHARE >> 20)
    text = os.environ.get("GRPO_FAST_WORKSPACE_MIB", str(default))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"GRPO_FAST_WORKSPACE_MIB: expected a whole number of MiB, got {text!r}")
    return (int(text) << 20) + spared


# Keep one CPU workspace up to this size between calls. Fresh pages cost a small loss 20% of its
# time.
KEPT_BYTES = 128 << 20
# Holds at most one workspace. `pop` and slice assignment are atomic, so threads need no lock.
_spare: list[Tensor] = []


def take_workspace(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised (rows, columns) tensor on the device of `like`, reusing the spare
    one.
    """
    spare = None
    if _spare and like.is_cpu:
        try:
            spare = _spare.pop()
        except IndexError:
            pass  # another thread took it first
    if spare is None or spare.dtype != dtype or spare.numel() < rows * columns:
        return like.new_empty((rows, columns), dtype=dtype)
    return spare.view(-1)[: rows * columns].view(rows, columns)


def give_back_workspace(workspace: Tensor | None) -> None:
    """Keep a workspace for the next call. The caller must not use it any more."""
    if workspace is None or not workspace.is_cpu or workspace.is_inference():
        return
    whole = workspace if workspace._base is None else workspace._base
    if whole.nbytes <= KEPT_BYTES:
        _spare[:] = [whole]


def drop_workspace() -> None:
    """Free the spare workspace."""
    _spare.clear()
