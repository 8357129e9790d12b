"""From completions to packed micro-batches: every token and normaliser is known before the first forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from grpo_fast.attention import PackedLayout
from grpo_fast.rollout import Rollout


@dataclass
class MicroBatch:
    """B completions packed in one row. The trunk sees T tokens, the head the R rows that predict a completion token.

    A segment is prompt + completion without its last token, which predicts nothing.
    """

    input_ids: Tensor  # (1, T) int64
    layout: PackedLayout  # of the B segments
    predicting: Tensor  # (R,) int64: rows of T whose prediction is a completion token
    target_ids: Tensor  # (R,) int64: what they predict; row r holds the prediction of target_ids[r]
    cu_seqlens: Tensor  # (B+1,) int32: completions in R
    completion_mask: Tensor  # (R,) bool: the token counts
    advantages: Tensor  # (B,) fp32
    sampling_logps: Tensor  # (R,) fp32
    old_logps: Tensor | None = None  # (R,) fp32, when the weights change before the batch is used up
    ref_logps: Tensor | None = None  # (R,) fp32

    @classmethod
    def pack(
        cls,
        rollout: Rollout,
        advantages: Tensor,
        chosen: Sequence[int],
        device: torch.device | str,
        mask_truncated: bool = False,
    ) -> MicroBatch:
        """Pack the completions `chosen` of a rollout."""
        prompts = [rollout.prompt_ids[i] for i in chosen]
        completions = [rollout.completion_ids[i] for i in chosen]
        layout = PackedLayout.of([len(p) + len(c) - 1 for p, c in zip(prompts, completions, strict=True)], device)
        starts = [0, *accumulate(layout.lengths)]
        rows = [
            torch.arange(s + len(p) - 1, s + len(p) - 1 + len(c))
            for s, p, c in zip(starts, prompts, completions, strict=False)
        ]
        segments = sum(((p + c)[:-1] for p, c in zip(prompts, completions, strict=True)), [])
        counts = [not (mask_truncated and rollout.truncated[i]) for i in chosen]
        lengths = torch.tensor([len(c) for c in completions])
        return cls(
            input_ids=torch.tensor([segments], device=device),
            layout=layout,
            predicting=torch.cat(rows).to(device),
            target_ids=torch.tensor(sum(completions, []), device=device),
            cu_seqlens=torch.tensor([0, *accumulate(map(len, completions))], dtype=torch.int32, device=device),
            completion_mask=torch.tensor(counts).repeat_interleave(lengths).to(device),
            advantages=advantages[list(chosen)].float().to(device),
            sampling_logps=torch.cat([rollout.sampling_logps[i] for i in chosen]).to(device),
        )

    @property
    def active_tokens(self) -> int:
        return int(self.completion_mask.sum())

    def __len__(self) -> int:
        return self.advantages.numel()


def split(costs: Sequence[int], pieces: int, budget: int | None) -> Iterator[list[int]]:
    """Cut completions 0…n−1, in order, into micro-batches: `pieces` of equal number, or under a token `budget`.

    A completion larger than the budget gets a micro-batch of its own.
    """
    if budget is None:
        size = len(costs) // pieces
        yield from (list(range(i, i + size)) for i in range(0, len(costs), size))
        return
    current: list[int] = []
    total = 0
    for index, cost in enumerate(costs):
        if current and total + cost > budget:
            yield current
            current, total = [], 0
        current.append(index)
        total += cost
    if current:
        yield current
