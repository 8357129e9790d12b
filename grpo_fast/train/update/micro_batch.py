"""Completions in one packed row, with all that their loss reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import PackedTree, pack_groups, pack_tree
from grpo_fast.rollout import Rollout


@dataclass
class MicroBatch:
    """B completions in one row: the trunk sees T tokens, the head the R that predict one."""

    packed: PackedTree
    chosen: list[int]  # which completions of the step, in the order of B and R
    completion_mask: Tensor  # (R,) bool: the token counts
    advantages: Tensor  # (B,) fp32
    sampling_logps: Tensor  # (R,) fp32
    support: Support | None = None  # of the R tokens: what the sampler drew each from
    old_logps: Tensor | None = None  # (R,) fp32, where the batch is used for several updates
    ref_logps: Tensor | None = None  # (R,) fp32
    ref_hidden: Tensor | None = None  # (R, H) of the reference, in their place for an exact KL
    teacher: Tensor | None = None  # (R, K, 2) fp64: ids and their logps, as a server says them
    old_values: Tensor | None = None  # (R,) fp32, of a critic, with the two that follow from them
    returns: Tensor | None = None  # (R,) fp32
    token_advantages: Tensor | None = None  # (R,) fp32; None: a token has its completion's
    prompt_items: Tensor | None = None  # (B,) fp64: by what `aggregation: prompt_mean` divides
    is_idle: bool = False  # no token counts: another rank has one micro-batch more

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
        """Pack completions of a rollout: each of `groups` lists completions of one prompt, or any
        recorded samples, whose common prefixes share rows.

        Tokens of a completion whose advantage is NaN, for want of a verdict, do not count.
        """
        chosen = [i for group in groups for i in group]
        packed: PackedTree
        if rollout.trained[chosen[0]] is not None:
            packed = pack_tree(samples_of(rollout, chosen), device=device)
        else:
            texts = [
                (rollout.prompt_ids[group[0]], [rollout.completion_ids[i] for i in group])
                for group in groups
            ]
            packed = pack_groups(texts, shared=shared, device=device)
        cut = torch.tensor([mask_truncated and rollout.truncated[i] for i in chosen])
        own = advantages[chosen].float()
        # A NaN tells who has no verdict: it is asked for before it becomes 0.
        counts = ~(cut | own.isnan().cpu())
        own = own.nan_to_num(nan=0.0).to(device)
        return cls(
            packed=packed,
            chosen=chosen,
            completion_mask=counts.repeat_interleave(torch.tensor(packed.lengths)).to(device),
            advantages=own,
            sampling_logps=torch.cat([rollout.sampling_logps[i] for i in chosen]).to(device),
            support=support_of(rollout, chosen, device),
            token_advantages=_credit_of(rollout, chosen, own),
        )

    def idle(self) -> MicroBatch:
        nothing = torch.zeros_like(self.completion_mask)
        return dataclasses.replace(self, completion_mask=nothing, is_idle=True)

    @property
    def active_tokens(self) -> int:
        return int(self.completion_mask.sum())

    @property
    def trunk_tokens(self) -> int:
        return self.packed.layout.total

    def __len__(self) -> int:
        return len(self.chosen)


def _credit_of(rollout: Rollout, chosen: Sequence[int], own: Tensor) -> Tensor | None:
    """(R,) advantages recorded by token, beside the `own` (B,) of samples without any."""
    credit = [rollout.credit[i] for i in chosen]
    if all(one is None for one in credit):
        return None
    by_token = [
        own[b].expand(rollout.lengths[i]) if one is None else one.to(own)
        for b, (i, one) in enumerate(zip(chosen, credit, strict=True))
    ]
    return torch.cat(by_token)


def samples_of(rollout: Rollout, chosen: Sequence[int]) -> list[tuple[list[int], Tensor]]:
    """Recorded samples, whole, with the places that are trained marked."""
    samples = []
    for i in chosen:
        mask = torch.zeros(len(rollout.prompt_ids[i]), dtype=torch.bool)
        mask[rollout.trained[i]] = True
        samples.append((rollout.prompt_ids[i], mask))
    return samples


def support_of(
    rollout: Rollout, chosen: Sequence[int], device: torch.device | str
) -> Support | None:
    kept = [rollout.kept[i] for i in chosen]
    sets = [None if one is None else (one.ids, one.offsets.diff()) for one in kept]
    return Support.join(sets, [rollout.lengths[i] for i in chosen], device)
