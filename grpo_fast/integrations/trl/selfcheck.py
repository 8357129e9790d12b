"""Self-check of `FastGRPOTrainer`.

The check computes the logps of a few rows in three ways: with our packed forward, with TRL's padded
forward, and for each row alone, without padding. The third result is the expected result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast.attention import (
    RANDOM_FACTOR,
    check_tolerance,
    draw_groups,
    random_weights,
    small_windows,
)
from grpo_fast.integrations.fast_head import reshard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORED = 5  # number of columns of completion tokens, which are the last columns

# Type of a function (model, input_ids (B, L), attention_mask (B, L)) → logps (B, SCORED).
Scores = Callable[["PreTrainedModel", Tensor, Tensor], Tensor]


class Gaps(NamedTuple):
    """Largest difference of the logps of each forward from the logps of unpadded rows, in nats."""

    packed: float
    padded: float


def measure_gaps(lm: PreTrainedModel, padded: Scores, packed: Scores) -> Gaps:
    """Measure the errors of the packed and the padded forward, compared with single unpadded rows.

    A large error of the packed forward means that it does not support the model, for example
    because of an unknown logit transform. The first round uses the weights
    of the model. They may hide an error, for example because a new LoRA adapter has no effect. The
    second round therefore uses random weights.

    Args:
        lm: The transformers model.
        padded: TRL's forward on a padded batch.
        packed: Our packed forward.

    Returns:
        The larger error of the two rounds for each forward, in nats. The errors of the second round
        are divided by `RANDOM_FACTOR`, because random weights amplify rounding errors.
    """
    gaps = _measure_once(lm, padded, packed)
    with random_weights(lm) as are_random:
        # With 16-bit weights, `are_random` is False, and the second round is skipped, because its
        # rounding errors would hide an error of the packed forward.
        if are_random:
            again = (gap / RANDOM_FACTOR for gap in _measure_once(lm, padded, packed))
            gaps = Gaps(*map(max, gaps, again))  # a NaN of the second round is ignored
    return gaps


@torch.no_grad()
def _measure_once(lm: PreTrainedModel, padded: Scores, packed: Scores) -> Gaps:
    """Measure the errors in eval mode, with the model's current weights."""
    ids, real = trial_rows(lm)
    alone = torch.zeros(ids.shape[0], SCORED, device=ids.device)
    is_training = lm.training
    lm.eval()
    try:
        with small_windows(lm):
            for row in range(ids.shape[0]):
                own = ids[row, real[row]][None]
                length = int(real[row, -SCORED:].sum())
                scores = padded(lm, own, torch.ones_like(own))
                alone[row, :length] = scores[0, -length:].float()
            both = [forward(lm, ids, real.long()).float() for forward in (packed, padded)]
    finally:
        lm.train(is_training)
        reshard(lm)
    return Gaps(*(float((x - alone)[real[:, -SCORED:]].abs().max()) for x in both))


def trial_rows(lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
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
