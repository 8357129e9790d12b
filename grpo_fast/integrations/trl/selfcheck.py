"""Trial of the packed forward, and of TRL's padded one, on two short rows before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention import check_tolerance, small_windows
from grpo_fast.integrations.fast_head import reshard

SCORED = 5  # tokens of each row that count as its completion

# (model, input_ids (B, L), attention_mask (B, L)) → (B, SCORED) logps
Scores = Callable[[Any, Tensor, Tensor], Tensor]


class Gaps(NamedTuple):
    """Largest differences, in nats, from the logps of the same rows without padding."""

    packed: float
    padded: float


@torch.no_grad()
def measure_gaps(lm: Any, padded: Scores, packed: Scores | None) -> Gaps:
    """Compare both forward passes with rows that are computed alone and without padding.

    The rows find attention sinks, positions other than RoPE's, and heads with an unknown logit
    transform. `packed` is None if the packed forward is not used.
    """
    ids, real = trial_rows(lm)
    with evaluating(lm), small_windows(lm):
        alone = torch.zeros(ids.shape[0], SCORED, device=ids.device)
        for row in range(ids.shape[0]):
            own = ids[row, real[row]][None]
            length = int(real[row, -SCORED:].sum())
            scores = padded(lm, own, torch.ones_like(own))
            alone[row, :length] = scores[0, -length:].float()
        gaps = []
        for forward in (packed, padded):
            gap = 0.0
            if forward is not None:
                scores = forward(lm, ids, real.long()).float()
                gap = float((scores - alone)[real[:, -SCORED:]].abs().max())
            gaps.append(gap)
    return Gaps(*gaps)


def trial_rows(lm: Any) -> tuple[Tensor, Tensor]:
    """Return ids and mask, (2, 12) each, padded on the left, and one row on the right, too."""
    weight = lm.get_output_embeddings().weight
    first = torch.tensor([[3], [3]], device=weight.device)
    ids = (torch.arange(12, device=weight.device) * 7 + first) % weight.shape[0]
    ids[1, 7:] = (ids[1, 7:] + 5) % weight.shape[0]
    real = torch.ones_like(ids, dtype=torch.bool)
    real[:, :2] = False
    real[1, 10:] = False
    return ids, real


def tolerance(lm: Any, mixed_precision: str | None) -> float:
    """Return the largest difference that rounding explains; the lowest precision decides."""
    dtypes = {parameter.dtype for parameter in lm.parameters()}
    if mixed_precision in ("bf16", "fp16"):
        dtypes = {torch.bfloat16}
    return max(map(check_tolerance, dtypes))


@contextmanager
def evaluating(lm: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in lm.modules()]
    lm.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(lm)
