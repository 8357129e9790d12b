"""Trunk tokens of a micro-batch: predicted by the memory model, halved when memory runs out."""

from __future__ import annotations

import dataclasses
import logging
import resource
from dataclasses import dataclass

import torch

from grpo_fast.train.config.base import Count, Positive
from grpo_fast.train.planning.memory_model import USABLE_CPU, USABLE_GPU, Memory, host_memory
from grpo_fast.train.ranks import distributed
from grpo_fast.train.update.batch import StepBatch

log = logging.getLogger(__name__)

UNLIMITED = 1 << 40
GIB = 2**30

# What allocators say when there is no room, beside torch.OutOfMemoryError.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass
class BudgetState:
    """The budget as it was lowered, and the largest micro-batches so far."""

    tokens: Positive
    largest: Count
    most_rows: Count


class TokenBudget:
    """The token budget of a run for a model.

    Args:
        memory: what a step takes; None: not known.
        fixed: `tokens_per_microbatch`, to start with.
        in_step: the ranks hold shards, and cannot try again one by one.
    """

    def __init__(
        self, device: torch.device, memory: Memory | None, fixed: int | None, in_step: bool
    ) -> None:
        self.device = device
        self.memory = memory
        self.in_step = in_step
        self.largest = self.most_rows = 0  # trunk and completion tokens of a micro-batch, so far
        self.tokens = fixed or min(distributed.gather(self._default()))

    def _default(self) -> int:
        if self.memory is None:
            return UNLIMITED
        limit = usable_memory(self.device)
        tokens = self.memory.tokens(limit)
        if tokens == 0:
            needed = (self.memory.fixed + self.memory.head) / GIB
            said = "memory: %.1f GiB predicted before the first token, usable are %.1f; one "
            log.warning(said + "completion at a time is tried", needed, limit / GIB)
        return max(tokens, 1)

    def note(self, batch: StepBatch) -> None:
        """Remember the largest micro-batch so far."""
        rows = [len(micro.rows) for micro in batch.micro_batches]
        self.largest = max(self.largest, batch.largest)
        self.most_rows = max(self.most_rows, *rows)

    def refuse(self, error: Exception) -> str:
        """Return the message of an out-of-memory error. Raise any other error.

        Raises ValueError for ranks that hold shards: they cannot try again one by one.
        """
        if not is_out_of_memory(error):
            raise error
        failure = str(error).splitlines()[0]
        if self.in_step:
            raise ValueError(
                f"tokens_per_microbatch: memory ran out ({failure}), and ranks that hold "
                "shards cannot try again; expected fewer tokens (resume=auto goes on)"
            ) from error
        return failure

    def lower(self, batch: StepBatch, reason: str) -> None:
        """Halve the budget. Raises ValueError if each micro-batch has one completion. Collective.

        Call it without the exception: its frames hold the memory of the failed attempt.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        alone = all(len(micro) == 1 for micro in batch.micro_batches)
        of_ranks = distributed.gather((alone, batch.largest))
        largest = max(tokens for _, tokens in of_ranks)
        if all(is_alone for is_alone, _ in of_ranks):
            raise ValueError(
                f"tokens_per_microbatch: one completion with its prompt ({largest} tokens) "
                f"does not fit into memory ({reason}); `grpo-fast plan` shows what "
                "model.gradient_checkpointing, model.tiled_mlp, model.checkpoint_offload, "
                "model.lora and optim.states save"
            )
        self.tokens = min(self.tokens, largest) // 2
        log.warning("out of memory: tokens_per_microbatch lowered to %d (%s)", self.tokens, reason)

    def state_dict(self) -> BudgetState:
        return BudgetState(self.tokens, self.largest, self.most_rows)

    def load_state_dict(self, state: BudgetState) -> None:
        self.tokens, self.largest, self.most_rows = dataclasses.astuple(state)

    @property
    def predicted_peak(self) -> int | None:
        """Bytes, for the largest micro-batch so far."""
        return None if self.memory is None else self.memory.peak(self.largest, self.most_rows)


def is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(text in str(error) for text in OUT_OF_MEMORY)


def usable_memory(device: torch.device) -> float:
    """Bytes a run may plan with: the same whatever else runs, and with it the packing."""
    if device.type == "cuda":
        return USABLE_GPU * torch.cuda.get_device_properties(device).total_memory
    return USABLE_CPU * host_memory()


def host_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
