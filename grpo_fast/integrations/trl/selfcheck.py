"""Self-check of FastGRPOTrainer's packed and padded forward passes.

Both are compared with the forward pass of single rows without padding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

log = logging.getLogger(__name__)
SCORED = 5  # number of completion tokens, which are at the end of each row

# Type of a function (model, input_ids (B, L), attention_mask (B, L)) → logps (B, SCORED).
Scores = Callable[["PreTrainedModel", Tensor, Tensor], Tensor]


class Gaps(NamedTuple):
    """Largest difference in nats of each forward's logps from the logps of unpadded rows."""

    packed: float
    padded: float


def measure_gaps(lm: PreTrainedModel, padded: Scores, packed: Scores | None) -> Gaps:
    """Compare the packed and the padded forward with rows that are computed alone, without padding.

    The comparison detects models that our packed forward does not support: attention sinks,
    position encodings other than RoPE, and heads with an unknown logit transform. A second round
    uses random weights, because the model's weights may hide a difference. For example, a new LoRA
    adapter has no effect.

    Args:
        lm: The transformers model.
        padded: TRL's forward on a padded batch.
        packed: The packed forward. If None, it is not checked, and its difference in the result is
            0.

    Returns:
        For each forward pass, the largest difference in nats of the two rounds. Differences of the
        second round are divided by `RANDOM_FACTOR`, because random weights amplify rounding.
    """
    gaps = _measure_once(lm, padded, packed)
    with random_weights(lm) as are_random:
        # Skip the second round for 16-bit weights (`are_random` is False), because rounding errors
        # with random weights would hide a difference.
        if are_random:
            again = [gap / RANDOM_FACTOR for gap in _measure_once(lm, padded, packed)]
            pairs = zip(gaps, again, strict=True)
            gaps = Gaps(*(a if math.isnan(b) else max(a, b) for a, b in pairs))
    return gaps


@torch.no_grad()
def _measure_once(lm: PreTrainedModel, padded: Scores, packed: Scores | None) -> Gaps:
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


def trial_rows(lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return two rows of random token ids with the same prompt.

    Both rows are padded on the left. The second row has a shorter completion and is also padded on
    the right.

    Returns:
        Token ids and a bool mask of the real tokens, each of shape (2, L).
    """
    weight = lm.get_output_embeddings().weight
    ((prompt, completions),) = draw_groups(1, weight.shape[0])
    ids = torch.tensor([prompt + completion for completion in completions])
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, -2:] = False
    return pad(ids, (2, 0)).to(weight.device), pad(real, (2, 0)).to(weight.device)


def tolerance(lm: PreTrainedModel, mixed_precision: str | None) -> float:
    """Return the largest difference in nats that rounding in the used precisions can explain."""
    dtypes = {parameter.dtype for parameter in lm.parameters()}
    if mixed_precision in ("bf16", "fp16"):
        dtypes = {torch.bfloat16}
    return max(map(check_tolerance, dtypes))


def warn_of_padding(kind: str, gap: float, *, is_packed: bool) -> None:
    """Warn that TRL computes wrong logps for rows with padding on the left.

    Args:
        kind: The model type, for the message.
        gap: The difference from the correct logps in nats.
        is_packed: True if our packed rows avoid the error.
    """
    ours = "TRL's forward is used here, too: use prompts of one length"
    if is_packed:
        ours = "FastGRPOTrainer packs rows without padding, which is right"
    log.warning(
        "%s: TRL's logps of left-padded rows differ by %.2g nats from those of the same rows "
        "without padding. TRL passes no position_ids, so absolute positions count the padding. %s",
        kind, gap, ours,
    )  # fmt: skip


@contextmanager
def evaluating(lm: PreTrainedModel) -> Iterator[None]:
    """Put all modules into eval mode in a `with` block, and restore the mode of each afterwards."""
    modes = [(module, module.training) for module in lm.modules()]
    lm.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(lm)
