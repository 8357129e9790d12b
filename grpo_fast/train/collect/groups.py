"""The order in which a run uses its prompts, and the groups that a step uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.data import Example


class PromptQueue:
    """Endless sequence of training prompts, which cycles through the training set in order.

    A place is an index into this sequence. It is also the number of the prompt's group.

    Args:
        examples: the training set.
        consumed: number of prompts that were already used, which is also the next place.
    """

    def __init__(self, examples: Sequence[Example], consumed: int = 0) -> None:
        self.examples = examples
        self.consumed = consumed

    def next(self, count: int) -> range:
        """Return the next `count` places (queue positions) without consuming them."""
        return range(self.consumed, self.consumed + count)

    def take(self, count: int) -> range:
        """Return the next `count` places (queue positions) and consume them."""
        places = self.next(count)
        self.consumed = places.stop
        return places

    def example(self, place: int) -> Example:
        return self.examples[place % len(self.examples)]


def used_groups(judged: Tensor, wanted: int) -> tuple[Tensor, int]:
    """Choose the groups that a step uses.

    A group is used if its rewards are not all equal. If these are fewer than `wanted` groups, the
    first groups with equal rewards complete the batch. All other groups are dropped.

    Args:
        judged: rewards of shape (groups, G). NaN marks samples without a reward, which are ignored.
        wanted: number of groups that the step uses.

    Returns:
        A mask of the used groups, and the number of used groups with equal rewards.
    """
    # If no sample of a group has a reward, the minimum is +inf and the maximum is -inf. The group
    # then counts as a group with equal rewards.
    low = judged.nan_to_num(nan=torch.inf).amin(1)
    has_spread = judged.nan_to_num(nan=-torch.inf).amax(1) > low
    missing = wanted - int(has_spread.sum())
    is_filled = ~has_spread & ((~has_spread).cumsum(0) <= missing)
    return has_spread | is_filled, int(is_filled.sum())
