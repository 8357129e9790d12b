"""The order in which a run uses its prompts, and the groups that a step uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from grpo_fast.data import Example

Use = Literal["kept", "filled", "dropped"]


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


def uses_of(judged: Tensor, wanted: int) -> list[Use]:
    """Choose the groups that a step uses.

    A group is kept if its rewards are not all equal. If fewer than `wanted` groups are kept, groups
    with equal rewards complete the batch. All other groups are dropped.

    Args:
        judged: rewards of shape (groups, G). NaN marks samples without a reward, which are ignored.
        wanted: number of groups that the step uses.

    Returns:
        "kept", "filled" or "dropped" for each group.
    """
    # If no sample of a group has a reward, the minimum is +inf and the maximum is -inf. The group
    # then counts as a group with equal rewards.
    low = judged.nan_to_num(nan=torch.inf).amin(1)
    spread = (judged.nan_to_num(nan=-torch.inf).amax(1) > low).tolist()
    missing = wanted - sum(spread)
    uses: list[Use] = []
    for has_spread in spread:
        if has_spread:
            uses.append("kept")
        elif missing > 0:
            uses.append("filled")
            missing -= 1
        else:
            uses.append("dropped")
    return uses
