"""Self-check of packed rows and the fused LM head, which runs when a policy is loaded."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.attention import PackedTree, check_tolerance, pack_groups, small_windows, trial
from grpo_fast.errors import require
from grpo_fast.train.models.policy import Policy


@torch.no_grad()
def self_check(policy: Policy) -> float:
    """Compare log-probabilities of packed rows with the model's logits on random tokens.

    The check finds models that packed training does not support: heads that transform the logits in
    an unknown way, attention that ignores the packed layout, experts that are chosen at random in
    training mode, and position limits that packed rows would exceed. A second round uses random
    fp32 weights, with which small errors are visible.

    If packed rows of the model are wrong, the check switches the policy to computing each
    completion alone, and compares again. Every causal LM passes then, unless its head is unknown or
    it chooses experts at random.

    Returns:
        The largest difference of a log-probability in nats, in the round with the model's weights.

    Raises:
        ValueError: the difference exceeds the tolerance of the dtype, or logits are NaN.
    """
    if policy.unshared is None:
        try:
            return _check(policy)
        except ValueError as error:
            policy.compute_alone(str(error))
    return _check(policy)


def _check(policy: Policy) -> float:
    """Compare once, with packed rows or with each completion alone (see `self_check`)."""
    least = trial.LENGTH
    expected = f"at least {least}"
    require(policy.positions >= least, "max_position_embeddings", expected, policy.positions)
    kind = policy.lm.config.model_type
    training = policy.lm.training
    try:
        with trial.in_fp32(policy):
            dtype = policy.autocast or policy.head.weight.dtype
            difference, worst = trial.worst_gap(policy, lambda starts: _largest_gap(policy, starts))
    except (AttributeError, KeyError, TypeError) as error:  # from models that require a mask
        raise ValueError(f"model_type {kind}: packed attention fails: {error}") from error
    finally:
        policy.lm.train(training)
    tolerance = check_tolerance(dtype)
    fits = not math.isnan(difference)
    require(fits, f"model_type {kind}", "weights with finite logits", "NaN")
    if not worst <= tolerance:
        what = "packed attention" if policy.unshared is None else "each sequence alone"
        raise ValueError(
            f"model_type {kind}: {what} with the fused head differs from its own logits by "
            f"{worst:.3g} nats (expected ≤ {tolerance} in {dtype}); its head, attention or "
            "training mode does something that this trainer does not support"
        )
    return difference


def _largest_gap(policy: Policy, starts: Sequence[int]) -> float:
    """Return the largest log-prob difference between packed rows and padded batches, in nats.

    Args:
        policy: the policy.
        starts: first position of each group, as in `trial.worst_gap`. If it is empty, all groups
            begin at position 0.
    """
    is_shared = policy.unshared is None
    if not is_shared:
        starts = ()  # the model's own forward is right at every position
    groups = trial.draw_groups(max(len(starts), 1), policy.head.weight.shape[0])
    lm = policy.lm
    # 1. If `starts` is empty, check a group at position 0 with completions of different lengths.
    if not starts:
        ((prompt, (first, second)),) = groups
        ragged = [first, second[:3]]
        pack = pack_groups([(prompt, ragged)], shared=is_shared, device=policy.device)
        with small_windows(lm):
            return _gap(policy, pack, [[prompt + ids] for ids in ragged], [()] * 2)
    # 2. Otherwise check groups whose first positions are the values in `starts`.
    pack = pack_groups(groups, shared=is_shared, device=policy.device)
    layout = copy.copy(pack.layout)
    vars(layout)["position_ids"] = trial.moved_positions(layout, starts)
    rows = [prompt + ids for prompt, pair in groups for ids in pair]
    places = [start for start in starts for _ in "ab"]
    # Let the model compute each group in a separate batch, because the results of some models
    # depend on the largest position in a batch.
    batches = [rows[:2], rows[2:]][: len(starts)]
    with small_windows(lm, positions=False):
        pack = dataclasses.replace(pack, layout=layout)
        return _gap(policy, pack, batches, [places[:2], places[2:]])


def _gap(
    policy: Policy, pack: PackedTree, rows: list[list[list[int]]], starts: Sequence[Sequence[int]]
) -> float:
    """Return the largest log-prob difference between a packed row and padded batches, in nats.

    Args:
        policy: the policy.
        pack: the packed row.
        rows: token ids of each row of each batch. The model pads the rows of a batch.
        starts: first position of each row of each batch.
    """
    policy.lm.train()  # training mode reveals a random choice of experts
    before = _random_state(policy.device)
    ours = policy.logps(pack)
    draws = not torch.equal(before, _random_state(policy.device))
    kind = f"model_type {policy.lm.config.model_type}"
    require(not draws, kind, "a forward pass without random numbers", "some in training mode")
    with policy.generation():
        pairs = zip(rows, starts, strict=False)
        theirs = [policy.model_logps(batch, first)[:, trial.PROMPT - 1 :] for batch, first in pairs]
    return float((ours - torch.cat([logps.flatten() for logps in theirs])).abs().max())


def _random_state(device: torch.device) -> Tensor:
    is_gpu = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if is_gpu else torch.get_rng_state()
