"""What the ranks of a group that share a head tell each other before they work together.

A call with `group=` tells twice, in one small all-gather each: how large every shard is, and, when
all arguments have been checked, what is about to be computed. A rank that refuses an argument says
so in place of that, so that every rank raises the same ValueError and none waits for another.
"""

from __future__ import annotations

import zlib
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed

from grpo_fast.kernels.gpu.capture import refuse
from grpo_fast.kernels.head.vocabulary import VocabularyShard
from grpo_fast.kernels.route import head_route
from grpo_fast.kernels.workspace import workspace_bytes
from grpo_fast.loss.sharded import process_group

TEXT_BYTES = 1024  # of a message, in a tensor
FINE, REFUSED = b"+", b"-"


class Agreement:
    """A block in which the arguments of one call are checked, on every rank of a group.

    Args:
        group: as the public functions take it; None: there is nobody to agree with.
    """

    def __init__(self, group: Any) -> None:
        self.group = None if group is None else process_group(group)
        self.is_open = self.group is not None  # the other ranks wait for a word of this one

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_open and isinstance(error, Exception):
            self._tell(REFUSED, str(error) or type(error).__name__)

    def shard(self, weight: Tensor) -> VocabularyShard | None:
        """The shard that holds the rows of this weight; None without a group.

        Raises:
            ValueError: nobody holds a row, or a rank has refused an argument.
        """
        if self.group is None:
            return None
        refuse("group", weight, "a group")
        sizes = tuple(map(int, self._tell(FINE, str(weight.shape[0]))))
        if not any(sizes):
            raise ValueError(
                "lm_head_weight: expected at least one vocabulary row on the ranks of group, got "
                f"{len(sizes)} empty shards"
            )
        return VocabularyShard(self.group, sizes, distributed.get_rank(self.group))

    def ready(
        self,
        tensors: tuple,  # (hidden, weight, bias)
        target_ids: Tensor,  # (T,) of the active rows
        wanted: list[bool],
        backend: str,
        numbers: str,
    ) -> None:
        """Every argument is in order on this rank: do all ranks make the same call?

        Raises:
            ValueError: a rank has refused an argument, or makes another call.
        """
        if self.group is None:
            return
        hidden, weight, bias = tensors
        head_route(backend, weight, is_shard=True)  # which may not run here
        facts = {
            "hidden": f"{tuple(hidden.shape)} in {hidden.dtype}",
            "bias": "None" if bias is None else "a tensor",
            "target_ids": f"{len(target_ids)} active ones with checksum {checksum(target_ids)}",
            "requires_grad": f"{wanted} of hidden, weight and bias",
            "config": f"numbers with checksum {zlib.crc32(numbers.encode())}",
            "GRPO_FAST_WORKSPACE_MIB": f"{workspace_bytes(weight.device) >> 20}",
        }
        told = [text.split("\n") for text in self._tell(FINE, "\n".join(facts.values()))]
        self.is_open = False
        for rank, others in enumerate(told):
            for name, expected, got in zip(facts, told[0], others, strict=True):
                if expected != got:
                    raise ValueError(
                        f"{name}: expected the same on every rank of group, got {expected} on rank "
                        f"0 and {got} on rank {rank}"
                    )

    def _tell(self, verdict: bytes, text: str) -> list[str]:
        """What every rank has to say, in their order; the ValueError of all where one refuses."""
        assert self.group is not None
        self.is_open = False  # where this fails nobody waits any more
        ranks = distributed.get_world_size(self.group)
        is_cuda = distributed.get_backend(self.group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else "cpu"
        line = (verdict + text.encode())[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        mine = torch.tensor(list(line), dtype=torch.uint8, device=device)
        everyone = [torch.empty_like(mine) for _ in range(ranks)]
        distributed.all_gather(everyone, mine, group=self.group)
        lines = [bytes(x.tolist()).rstrip(b"\0") for x in everyone]
        texts = [x[1:].decode(errors="ignore") for x in lines]
        refusals = {rank: texts[rank] for rank, x in enumerate(lines) if x[:1] == REFUSED}
        if not refusals:
            self.is_open = True
            return texts
        rank, message = next(iter(refusals.items()))
        is_common = len(refusals) == ranks and len(set(texts)) == 1
        raise ValueError(message if is_common else f"{message} (on rank {rank} of group)")


ALONE = Agreement(None)


def checksum(x: Tensor) -> int:
    """A number that tells other ids, or another order of them, apart; wraps around."""
    return int((x * torch.arange(1, len(x) + 1, device=x.device)).sum())
