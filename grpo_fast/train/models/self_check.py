"""The trial of packed rows and the fused head, which every policy passes when it is loaded."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch

from grpo_fast.attention import PackedTree, check_tolerance, pack_groups, small_windows, trial
from grpo_fast.errors import require
from grpo_fast.train.models.policy import Policy


@torch.no_grad()
def self_check(policy: Policy) -> float:
    """Compare packed logps with the model's own logits on random tokens.

    Finds a head with an unknown rule, attention that ignores the layout, experts drawn at random in
    training, and limits of the configuration that packed rows miss. Weights in fp32 are replaced by
    random ones in a second round.

    Returns:
        The largest difference with the model's weights, in nats.

    Raises:
        ValueError: a difference beyond the dtype's tolerance, or logits that are NaN.
    """
    least = trial.LENGTH
    expected = f"at least {least}"
    require(policy.positions >= least, "max_position_embeddings", expected, policy.positions)
    kind, dtype = policy.lm.config.model_type, policy.autocast or policy.head.weight.dtype
    training, tolerance = policy.lm.training, check_tolerance(dtype)
    try:
        difference, worst = trial.worst_gap(policy, lambda starts: _largest_gap(policy, starts))
    except (AttributeError, TypeError) as error:  # the model computes with its mask
        raise ValueError(f"model_type {kind}: packed attention fails: {error}") from error
    finally:
        policy.lm.train(training)
    fits = not math.isnan(difference)
    require(fits, f"model_type {kind}", "weights with finite logits", "NaN")
    if not worst <= tolerance:
        raise ValueError(
            f"model_type {kind}: packed attention with the fused head "
            f"differs from its own logits by {worst:.3g} nats (expected ≤ "
            f"{tolerance} in {dtype}); its head, attention or training mode "
            "has a rule this trainer does not know"
        )
    return difference


def _largest_gap(policy: Policy, starts: Sequence[int]) -> float:
    """Return the largest difference in nats; `starts`: see `trial.worst_gap`."""
    groups = trial.draw_groups(max(len(starts), 1), policy.head.weight.shape[0])
    is_shared, lm = policy.unshared is None, policy.lm
    if not starts:
        ((prompt, (first, second)),) = groups
        ragged = [first, second[:3]]
        pack = pack_groups([(prompt, ragged)], shared=is_shared, device=policy.device)
        with small_windows(lm):
            return _gap(policy, pack, [[prompt + ids] for ids in ragged], [()] * 2)
    pack = pack_groups(groups, shared=is_shared, device=policy.device)
    layout = copy.copy(pack.layout)
    vars(layout)["position_ids"] = trial.moved_positions(layout, starts)
    rows = [prompt + ids for prompt, pair in groups for ids in pair]
    places = [start for start in starts for _ in "ab"]
    # The first group passes alone: a model may look at the largest position of all.
    batches = [rows[:2], rows[2:]][: len(starts)]
    with small_windows(lm, positions=False):
        pack = dataclasses.replace(pack, layout=layout)
        return _gap(policy, pack, batches, [places[:2], places[2:]])


def _gap(
    policy: Policy, pack: PackedTree, rows: list[list[list[int]]], starts: Sequence[Sequence[int]]
) -> float:
    """Compare packed logps with the model's own of batches of rows that begin at `starts`."""
    policy.lm.train()  # experts that are drawn at random in training would show
    ours = policy.logps(pack)
    with policy.generation():
        pairs = zip(rows, starts, strict=False)
        theirs = [policy.model_logps(batch, first)[:, trial.PROMPT - 1 :] for batch, first in pairs]
    return float((ours - torch.cat([logps.flatten() for logps in theirs])).abs().max())
