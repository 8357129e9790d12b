"""A rollout as JSON and as tensors by name, for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grpo_fast.rollout import Kept, Rollout

Tensors = dict[str, Tensor]
# Of a rollout, what is no tensor.
LISTS = ("prompts", "prompt_ids", "completion_ids", "texts", "truncated", "weight_versions")


def store(rollout: Rollout) -> tuple[dict[str, Any], Tensors]:
    """What `restore` makes the same rollout of."""
    tensors = numbered("sampling_logps", rollout.sampling_logps)
    for i, kept in enumerate(rollout.kept):
        known = {} if kept is None else kept._asdict()
        tensors |= {f"kept/{i}/{name}": x for name, x in known.items() if x is not None}
    return {name: getattr(rollout, name) for name in LISTS}, plain(tensors)


def restore(lists: dict[str, Any], tensors: Tensors) -> Rollout:
    """The rollout that was stored; other tensors may lie beside its own.

    Raises KeyError for a tensor that is missing, ValueError for one of another length.
    """
    count = len(lists["texts"])
    if any(len(lists[name]) != count for name in LISTS):
        raise ValueError(f"rollout: expected lists of one length, {count} as its texts")
    logps = [tensors[f"sampling_logps/{i}"] for i in range(count)]
    if [len(x) for x in logps] != [len(ids) for ids in lists["completion_ids"]]:
        raise ValueError("rollout: expected one of sampling_logps for each token of a completion")
    kept = [
        Kept(*(tensors.get(f"kept/{i}/{name}") for name in Kept._fields))
        if f"kept/{i}/ids" in tensors
        else None
        for i in range(count)
    ]
    return Rollout(**lists, sampling_logps=logps, kept=kept)


def numbered(name: str, values: Sequence[Tensor]) -> Tensors:
    return {f"{name}/{i}": value for i, value in enumerate(values)}


def plain(tensors: Tensors) -> Tensors:
    """Views of one storage are written as tensors of their own."""
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}
