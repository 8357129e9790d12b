"""Helpers for memory: the workspace, copies to the host, and tensors of zeros.

The workspace is the buffer for the logits of one chunk. On a CPU, it is reused between calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# From this size in bytes, `zeros` uses fresh memory pages, which Linux has already set to zero. For
# smaller tensors, it uses torch.zeros.
ZERO_PAGES_FROM = 8 << 20
# The Linux constant MADV_POPULATE_WRITE, which Python's mmap module does not define.
MADV_POPULATE_WRITE = 23
# By default, the workspace may use 1/32 of a GPU's memory, which is 2.4 GiB on the smallest H100
# (78 GiB). A typical micro-batch of 8192 rows with 151936 16-bit logits takes 2.3 GiB, so it fits
# in one chunk.
GPU_SHARE = 32


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of zeros.

    A large tensor uses fresh memory pages, which Linux sets to zero. Several threads request the
    pages at the same time, which is faster than torch.zeros.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < ZERO_PAGES_FROM or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(pages, dtype=dtype).view(*shape)
    libc = ctypes.CDLL(None)

    def fault_in(start: int) -> None:
        length = min(ZERO_PAGES_FROM, size - start)
        address = ctypes.c_void_p(x.data_ptr() + start)
        # Ignore errors, because old Linux kernels do not support this advice. The pages are then
        # allocated when they are first written.
        libc.madvise(address, ctypes.c_size_t(length), MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fault_in, range(0, size, ZERO_PAGES_FROM)))
    return x


def copy_to_host_async(x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy of x to pinned host memory.

    Returns:
        The host tensor, and an event that completes when its values have arrived.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrived = torch.cuda.Event()
    # The copy runs on the current stream of x's device. This may not be the current device, so name
    # the stream.
    arrived.record(torch.cuda.current_stream(x.device))
    return host, arrived


def gpu_bytes(device: torch.device) -> int:
    """Return the memory of a GPU in bytes, or 0 if torch finds no GPU.

    A missing GPU is not an error, because a run for a GPU can be planned on another machine.
    """
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).total_memory


def workspace_bytes(
    device: torch.device, bytes_per_logit: int = 4, spared: int = 0, memory: int | None = None
) -> int:
    """Return the maximum size of the workspace, the buffer for the logits of one chunk, in bytes.

    The environment variable GRPO_FAST_WORKSPACE_MIB sets the size. On a GPU, the default is 1/32 of
    the memory and at least 1 GiB. On the CPU, it is 128 Mi logits, which take 512 MiB in fp32 and
    256 MiB in 16 bits.

    For comparison, 8192 rows of 151936 16-bit logits take 2.3 GiB, and the default of an H200 is
    4.3 GiB. Each additional chunk costs one more pass over W and dW.

    Args:
        device: the device of the logits.
        bytes_per_logit: size of a logit, which scales the default on the CPU.
        spared: bytes that are added to the result. A caller passes the memory that it saves
            elsewhere if all rows form a single chunk.
        memory: GPU memory in bytes, for a GPU in a different machine; None: query the device.

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


# Maximum size in bytes of a CPU workspace that is kept for the next call. Without this, a small
# loss would spend 20% of its time on fresh memory pages.
KEPT_BYTES = 128 << 20
# The workspace that is kept for the next call, if any. The list needs no lock, because `pop` and
# slice assignment are atomic.
_spare: list[Tensor] = []


def take_workspace(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised (rows, columns) tensor on the device of `like`.

    On the CPU, the kept workspace is reused if it is large enough.
    """
    spare = None
    # Reuse a workspace on the CPU only. On a GPU, the allocator of torch already caches memory.
    if like.is_cpu:
        with contextlib.suppress(IndexError):  # there is none
            spare = _spare.pop()
    if spare is None or spare.dtype != dtype or spare.numel() < rows * columns:
        return torch.empty((rows, columns), dtype=dtype, device=like.device)
    return spare.view(-1)[: rows * columns].view(rows, columns)


def give_back_workspace(workspace: Tensor | None) -> None:
    """Keep a CPU workspace for the next call, unless it is large.

    The caller must not use the workspace afterwards.
    """
    # A tensor created in inference mode cannot be modified outside inference mode, so a later call
    # could not reuse it.
    if workspace is None or not workspace.is_cpu or workspace.is_inference():
        return
    # Keep the full allocation, not a view of it.
    allocation = workspace if workspace._base is None else workspace._base
    if allocation.nbytes <= KEPT_BYTES:
        _spare[:] = [allocation]


def drop_workspace() -> None:
    """Free the workspace that is kept for the next call."""
    _spare.clear()
