"""The trainer's own noise: how far its log-probabilities depend on the batch of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import linear_logps
from grpo_fast.doctor.models import cast
from grpo_fast.doctor.prompts import AS_SENT
from grpo_fast.doctor.recompute import Recomputed

DTYPES = (torch.float32, torch.bfloat16)
BAND = 0.9, 1.1  # of a ratio; PPO's clips are about as wide


class Noise(NamedTuple):
    """Two passes over the same tokens, in packs of another size and order."""

    dtype: str
    mean: float  # of the absolute difference, nats per token
    share: float  # of the tokens whose ratio leaves BAND


@torch.no_grad()
def own_noise(recomputed: Recomputed, temperature: float) -> list[Noise]:
    """The noise of the policy in its own dtype first, then in fp32 and bf16; without any engine."""
    policy, found = recomputed.policy, []
    own = policy.autocast or policy.head.weight.dtype
    for dtype in dict.fromkeys((own, *DTYPES)):
        twin = policy if dtype == own else cast(policy, dtype)
        head = twin.head

        def logps(*, turned: bool, policy=twin, head=head) -> Tensor:
            states = recomputed.packed(policy, recomputed.readings[AS_SENT], turned=turned)
            return linear_logps(
                states, head.weight, recomputed.drawn.targets, bias=head.bias,
                temperature=temperature, **head.rule,
            )  # fmt: skip

        gap = logps(turned=True) - logps(turned=False)
        ratio = gap.exp()
        outside = (ratio < BAND[0]) | (ratio > BAND[1])
        name = str(dtype).removeprefix("torch.")
        found.append(Noise(name, float(gap.abs().mean()), float(outside.float().mean())))
    return found
