"""From completions to packed micro-batches: every token is known before the first forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from grpo_fast.attention import PackedGroups, pack_groups, plan_packs
from grpo_fast.rollout import Rollout


@dataclass
class MicroBatch:
    """B completions in one row: the trunk sees T tokens, the head the R that predict one."""

    packed: PackedGroups
    chosen: list[int]  # which completions of the step, in the order of B and R
    completion_mask: Tensor  # (R,) bool: the token counts
    advantages: Tensor  # (B,) fp32
    sampling_logps: Tensor  # (R,) fp32
    old_logps: Tensor | None = None  # (R,) fp32, where the batch is used for several updates
    ref_logps: Tensor | None = None  # (R,) fp32
    ref_hidden: Tensor | None = None  # (R, H) of the reference, for an exact KL

    @classmethod
    def pack(
        cls,
        rollout: Rollout,
        advantages: Tensor,  # (N·G,)
        groups: Sequence[Sequence[int]],
        device: torch.device | str,
        *,
        shared: bool = True,
        mask_truncated: bool = False,
    ) -> MicroBatch:
        """Pack completions of a rollout: each of `groups` lists completions of one prompt."""
        chosen = [i for group in groups for i in group]
        texts = [
            (rollout.prompt_ids[group[0]], [rollout.completion_ids[i] for i in group])
            for group in groups
        ]
        packed = pack_groups(texts, shared=shared, device=device)
        counts = torch.tensor([not (mask_truncated and rollout.truncated[i]) for i in chosen])
        return cls(
            packed=packed,
            chosen=chosen,
            completion_mask=counts.repeat_interleave(torch.tensor(packed.lengths)).to(device),
            advantages=advantages[chosen].float().to(device),
            sampling_logps=torch.cat([rollout.sampling_logps[i] for i in chosen]).to(device),
        )

    @property
    def active_tokens(self) -> int:
        return int(self.completion_mask.sum())

    @property
    def trunk_tokens(self) -> int:
        """T."""
        return self.packed.layout.total

    def __len__(self) -> int:
        return len(self.chosen)


class StepBatch:
    """The completions of one step in micro-batches of at most `budget` trunk tokens.

    `minibatches[k]` are the micro-batches of one optimizer step; a completion that exceeds the
    budget gets one of its own. `pack` with another budget starts again, and keeps what was computed
    about each completion where asked to.

    Args:
        rollout: N·G completions, the G of a prompt side by side.
        advantages: (N·G,).
        group_size: G.
        minibatches: optimizer steps per pass; it divides N·G.
        shared: the completions of a group share one copy of their prompt.
    """

    def __init__(
        self,
        rollout: Rollout,
        advantages: Tensor,
        *,
        group_size: int,
        minibatches: int,
        budget: int,
        device: torch.device | str,
        shared: bool = True,
        mask_truncated: bool = False,
    ) -> None:
        self.rollout, self.advantages, self.group_size = rollout, advantages, group_size
        self.device, self.shared, self.mask_truncated = device, shared, mask_truncated
        count = len(rollout.completion_ids)
        size = count // minibatches
        self.parts = [range(first, first + size) for first in range(0, count, size)]
        self.minibatches: list[list[MicroBatch]] = []
        self.has_fixed_logps = False
        self.pack(budget)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [batch for minibatch in self.minibatches for batch in minibatch]

    @property
    def trunk_tokens(self) -> int:
        """Tokens that one pass over the batch sends through the trunk."""
        return sum(batch.trunk_tokens for batch in self.micro_batches)

    @property
    def largest(self) -> int:
        """Trunk tokens of the largest micro-batch."""
        return max(batch.trunk_tokens for batch in self.micro_batches)

    def pack(self, budget: int, keep_logps: bool = False) -> None:
        """Distribute the completions over micro-batches of at most `budget` trunk tokens.

        keep_logps: hand the fixed logps on, completion by completion; else they are forgotten.
        """
        known = self._fixed_logps() if keep_logps else {}
        self.minibatches = [self._pack_part(part, budget) for part in self.parts]
        self.has_fixed_logps = self.has_fixed_logps and keep_logps
        for name, values in known.items():
            for batch in self.micro_batches:
                setattr(batch, name, torch.cat([values[i] for i in batch.chosen]))

    def _pack_part(self, part: range, budget: int) -> list[MicroBatch]:
        groups = [list(members) for _, members in groupby(part, key=lambda i: i // self.group_size)]
        prompts, completions = self.rollout.prompt_ids, self.rollout.completion_ids
        lengths = [
            (len(prompts[group[0]]), [len(completions[i]) for i in group]) for group in groups
        ]
        options: Any = {"shared": self.shared, "mask_truncated": self.mask_truncated}
        micro_batches = []
        for shares in plan_packs(lengths, budget, shared=self.shared):
            chosen = [[groups[s.group][i] for i in s.completions] for s in shares]
            micro_batches.append(
                MicroBatch.pack(self.rollout, self.advantages, chosen, self.device, **options)
            )
        return micro_batches

    def _fixed_logps(self) -> dict[str, dict[int, Tensor]]:
        """What stays while the batch is used, by completion: logps, and the reference's hidden."""
        known: dict[str, dict[int, Tensor]] = {}
        for batch in self.micro_batches:
            for name in ("old_logps", "ref_logps", "ref_hidden"):
                values = getattr(batch, name)
                if values is not None:
                    of_each = zip(batch.chosen, batch.packed.split(values), strict=True)
                    known.setdefault(name, {}).update(of_each)
        return known
