"""Selection of the rows that the gradient GEMMs need, with at most one asynchronous device read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import is_capturing
from grpo_fast.kernels.workspace import copy_to_host_async
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES

# On a GPU, the host reads the number of active rows only if the gradient GEMMs of all rows take at
# least this many flops, about 1 ms on an H100. For smaller GEMMs, skipping rows does not save
# enough time to pay for the launches that count the rows and for the wait.
READ_FROM = 7e11


class Activity:
    """The active rows of each chunk. A row is active if its coefficient is not 0.

    Args:
        active: (T,) bool; None: all rows are active, and the device is not read.
        chunk_rows: number of rows per chunk.
    """

    def __init__(self, active: Tensor | None, chunk_rows: int) -> None:
        self.active = active
        self.chunk_rows = chunk_rows
        # During CUDA graph capture, the host cannot read the counts, so treat all rows as active.
        if active is None or is_capturing(active):
            self.active = None
            return
        missing = -active.shape[0] % chunk_rows
        padded = torch.nn.functional.pad(active, (0, missing)) if missing else active
        # Start copying the counts to the host now, so that the copy overlaps with the first GEMM.
        self._counts = read_later(padded.view(-1, chunk_rows).sum(1))

    def keep(self, chunk: slice) -> Tensor | None:
        """Return the (n,) int64 indices of active rows in a chunk, or None if all are active."""
        if self.active is None:
            return None
        count = self._counts()[chunk.start // self.chunk_rows]
        if count == chunk.stop - chunk.start:
            return None
        # Use nonzero_static with the known count. `nonzero` would synchronise to find the count.
        return torch.nonzero_static(self.active[chunk], size=count)[:, 0]


def known_active(terms: RowTerms, config: LossConfig, flops: float) -> Tensor | None:
    """Return a mask of the rows that may have a nonzero coefficient, before any logp is known.

    Args:
        terms: the per-row inputs of the loss.
        config: the loss.
        flops: number of flops of the gradient GEMMs of all rows.

    Returns:
        (T,) bool, which is False where the coefficient is 0 or NaN for every value of the logp.
        None if every row may have a nonzero coefficient, or if skipping rows would save no time.
    """
    # Keep rows with advantage 0 if there is a KL or entropy term, which also gives them a gradient.
    has_more = terms.kl_weights is not None or terms.grad_entropy is not None
    if has_more or not OBJECTIVES[config.loss_type].follows_advantage:
        return None
    if not saves_time(terms.advantages, flops):
        return None
    return torch.logical_and(terms.advantages, terms.policy_weights)


def saves_time(x: Tensor, flops: float) -> bool:
    """Return whether skipping rows can save time.

    `x` is any tensor on the device of the gradient GEMMs. `flops` is the number of flops of these
    GEMMs for all rows.
    """
    return not x.is_cuda or flops >= READ_FROM


def active_rows(g: Tensor, g_entropy: Tensor | None) -> Tensor:
    """Return a mask of the rows with a nonzero coefficient, (T,) bool."""
    return g != 0 if g_entropy is None else (g != 0) | (g_entropy != 0)


def read_later(x: Tensor) -> Callable[[], list[int]]:
    """Start copying the integers of x to the host. Return a function that waits for them."""
    if not x.is_cuda:
        return x.tolist
    # Copy asynchronously, because a blocking copy would wait for all queued kernels.
    host, arrived = copy_to_host_async(x)

    def read() -> list[int]:
        arrived.synchronize()
        return host.tolist()

    return read
