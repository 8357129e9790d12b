"""Token budget of micro-batches.

The budget is predicted from the usable memory. It is halved if memory runs out.
"""

from __future__ import annotations

import logging

import torch

from grpo_fast.train.planning.memory_model import USABLE_CPU, USABLE_GPU, Memory, host_memory
from grpo_fast.train.ranks import distributed
from grpo_fast.train.update.batch import StepBatch

log = logging.getLogger(__name__)

UNLIMITED = 1 << 40
GIB = 2**30

# Substrings of error messages that mean "out of memory" although the error is not a
# torch.OutOfMemoryError.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class TokenBudget:
    """Maximum number of trunk tokens in a micro-batch.

    Args:
        device: the training device.
        memory: predicted memory of a step. None, for models whose memory cannot be predicted,
            makes the budget unlimited.
        fixed: initial budget (`tokens_per_microbatch`). None uses the prediction.
        in_step: True if the weights are sharded. A single rank then cannot repeat a pass.
    """

    def __init__(
        self, device: torch.device, memory: Memory | None, fixed: int | None, in_step: bool
    ) -> None:
        self.device = device
        self.memory = memory
        self.in_step = in_step
        self.largest = 0  # largest number of trunk tokens in a micro-batch so far
        self.tokens = fixed or min(distributed.gather(self._default()))

    def _default(self) -> int:
        if self.memory is None:
            return UNLIMITED
        # The limit must not depend on other processes, so that a repeated run packs the same
        # batches.
        limit = USABLE_CPU * host_memory()
        if self.device.type == "cuda":
            limit = USABLE_GPU * torch.cuda.get_device_properties(self.device).total_memory
        tokens = self.memory.tokens(limit)
        if tokens == 0:
            needed = (self.memory.fixed + self.memory.head) / GIB
            log.warning(
                "memory: %.1f GiB predicted before the first token, %.1f GiB usable; "
                "trying one completion at a time", needed, limit / GIB,
            )  # fmt: skip
        return max(tokens, 1)

    def refuse(self, error: Exception) -> str:
        """Return the message of an out-of-memory error, and re-raise every other error.

        Raises:
            ValueError: memory ran out and the weights are sharded, so the pass cannot be repeated.
        """
        if not is_out_of_memory(error):
            raise error
        failure = str(error).splitlines()[0]
        if self.in_step:
            raise ValueError(
                f"tokens_per_microbatch: memory ran out ({failure}), and ranks that hold "
                "shards cannot try again; set fewer tokens and resume=auto"
            ) from error
        return failure

    def lower(self, batch: StepBatch, reason: str) -> None:
        """Halve the budget. All ranks must call this.

        Call this method after the exception has been released, because its frames hold the tensors
        of the failed pass.

        Args:
            batch: the batch that did not fit into memory.
            reason: the error message.

        Raises:
            ValueError: every micro-batch already consists of a single completion.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        alone = all(len(micro) == 1 for micro in batch.micro_batches)
        of_ranks = distributed.gather((alone, batch.largest))
        largest = max(tokens for _, tokens in of_ranks)
        if all(is_alone for is_alone, _ in of_ranks):
            with distributed.together():  # an error of all ranks, so that the run is saved
                raise ValueError(
                    f"tokens_per_microbatch: one completion with its prompt ({largest} tokens) "
                    f"does not fit into memory ({reason}); `grpo-fast plan` shows what "
                    "model.gradient_checkpointing, model.tiled_mlp and model.lora save"
                )
        self.tokens = min(self.tokens, largest) // 2
        log.warning("out of memory: tokens_per_microbatch lowered to %d (%s)", self.tokens, reason)


def is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(text in str(error) for text in OUT_OF_MEMORY)
