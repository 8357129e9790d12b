"""Layouts for the tests of packed attention."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_fast.attention import TreeLayout


def two_levels(
    lengths: Sequence[int], sharing: Sequence[int] = (), device: str = "cpu"
) -> TreeLayout:
    """`sharing`: how many of the segments behind the prompts continue each of the first ones."""
    parents = [-1] * len(sharing) + [p for p, count in enumerate(sharing) for _ in range(count)]
    parents += [-1] * (len(lengths) - len(parents))
    return TreeLayout.of(lengths, device, parents=parents)
