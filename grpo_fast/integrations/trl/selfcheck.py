"""Comparison of our packed forward, and of TRL's padded forward, with single unpadded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast.attention import Pair, check_tolerance, draw_groups, small_windows, worst_gap
from grpo_fast.integrations.fast_head import reshard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORED = 5  # number of columns of completion tokens, which are the last columns

# Type of a function (input_ids (B, L), attention_mask (B, L)) → logps (B, SCORED).
Scores = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def largest_gap(lm: PreTrainedModel, ours: Scores, single: Scores) -> float:
    """Return the largest difference between logps of a padded batch and of single rows, in nats.

    The model's weights may hide an error, for example because a new LoRA adapter has no effect.
    Fp32 weights are therefore also replaced with random weights, see `worst_gap`.

    Args:
        lm: The transformers model.
        ours: The function that computes the batch.
        single: TRL's forward, which computes each row alone, without padding.
    """
    ids, real = padded_rows(lm)
    is_scored = real[:, -SCORED:]

    def batch() -> Tensor:
        with small_windows(lm):
            return ours(ids, real.long())[is_scored].float()

    def alone() -> Tensor:
        found = []
        with small_windows(lm):
            for row, is_real, scored in zip(ids, real, is_scored, strict=True):
                own = row[is_real][None]
                found.append(single(own, torch.ones_like(own))[0, -int(scored.sum()) :].float())
        return torch.cat(found)

    is_training = lm.training
    lm.eval()
    try:
        return worst_gap(lm, lambda _: Pair(batch, alone, (), 0.0, in_nats=True))
    finally:
        lm.train(is_training)
        reshard(lm)


def padded_rows(lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return two rows of random token ids with the same prompt, and a bool mask of real tokens.

    Both tensors have shape (2, L). The rows are padded on the left. The second row has a shorter
    completion and is also padded on the right.
    """
    weight = lm.get_output_embeddings().weight
    ((prompt, completions),) = draw_groups(1, weight.shape[0])
    ids = torch.tensor([prompt + completion for completion in completions])
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, -2:] = False
    return pad(ids, (2, 0)).to(weight.device), pad(real, (2, 0)).to(weight.device)


def tolerance(lm: PreTrainedModel, mixed_precision: str | None) -> float:
    """Return the largest difference that rounding errors can explain, in nats."""
    dtypes = {parameter.dtype for parameter in lm.parameters()}
    if mixed_precision in ("bf16", "fp16"):
        dtypes = {torch.bfloat16}
    return max(map(check_tolerance, dtypes))
