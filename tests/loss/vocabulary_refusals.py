"""Calls with invalid arguments on ranks that share a head. All ranks must raise the same error."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import grpo_fast
from tests.loss.vocabulary_world import Found, World
from tests.loss_cases import call, make_case, options_for

NAN = float("nan")


def plain_call(world: World, **changes: Any) -> Any:
    case = make_case(14, **options_for("grpo"))
    plain = {"group": distributed.group.WORLD, "old_logps": None, "backend": "auto"}
    return call("linear", world.shard(case), **{**plain, **changes})


def wrong_arguments(world: World) -> dict[str, dict[str, Any]]:
    """Return arguments that are invalid or differ between ranks, keyed by the expected message."""
    case = make_case(14, **options_for("grpo"))
    head, ids, advantages = world.shard(case), case.ids.clone(), case.advantages.clone()
    ids[0, 0], advantages[0] = 23, NAN
    turned = case.ids.roll(1, 0)
    return {
        "bias: expected shape (V,)": {"bias": torch.zeros(99)},
        "bias: expected the same": {"bias": None},
        "lm_head_weight: expected (V, H)": {"lm_head_weight": head.weight[:, :-1]},
        "lm_head_weight: expected the dtype": {"lm_head_weight": head.weight.double()},
        "hidden: expected": {"hidden": None},
        "hidden: expected shape (B, L, H)": {"hidden": case.hidden[0, 0, 0]},
        "target_ids: expected ids": {"target_ids": ids},
        "target_ids: expected the same": {"target_ids": turned},
        "advantages: expected": {"advantages": advantages},
        "backend: expected": {"backend": "cuda"},
        "backend: expected one that runs": {"backend": "triton"},
        "config: expected the same": {"config": grpo_fast.LossConfig(loss_type="sapo")},
        "grad_filter=0.1 conflicts with group": {"grad_filter": 0.1},
        "requires_grad: expected the same": {"hidden": case.hidden.clone().requires_grad_()},
        "old_logps: expected": {"old_logps": torch.zeros(2)},
        "lm_head_weight: expected a floating": {"lm_head_weight": 3},
        "config: expected a LossConfig": {"config": None},
    }


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "nothing"


def refusals(world: World, who: str) -> Found:
    """Return this rank's errors for calls in which some ranks pass a bad argument.

    `who` selects these ranks: "first", "last" or "all".
    """
    one = {"first": 0, "last": world.size - 1}.get(who)
    told = {}
    for name, changes in wrong_arguments(world).items():
        if one is None and name.endswith("the same"):
            continue
        is_here = one is None or world.rank == one
        told[name] = said(lambda c=changes if is_here else {}: plain_call(world, **c))
        assert torch.isfinite(plain_call(world).loss)  # a valid call must still work
    is_here = world.rank == (one or 0)
    with mock.patch.dict(os.environ, {"GRPO_FAST_WORKSPACE_MIB": "7" if is_here else "8"}):
        told["GRPO_FAST_WORKSPACE_MIB: expected the same"] = said(lambda: plain_call(world))
    told["lm_head_weight: expected at least one vocabulary row on"] = said(
        lambda: plain_call(world, lm_head_weight=torch.zeros(0, 8), bias=None)
    )
    return {"told": told}


def wrong_groups(world: World) -> Found:
    """Return the errors of calls whose `group` or DTensor does not match the ranks of the head."""
    other = distributed.new_group([0])
    weight = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    plane = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("dp", "tp"))
    by_columns = distribute_tensor(weight, world.mesh, [Shard(1)])
    copies = distribute_tensor(weight, world.mesh, [Replicate()])
    rows, one_dimension = "the rows of this rank, or a DTensor", "a mesh of one dimension"
    wrong: dict[str, dict[str, Any]] = {
        "group: expected a process group": {"group": 0},
        f"group: expected a process group or {one_dimension}, got a mesh": {"group": plane},
        f"lm_head_weight: expected {rows}": {"lm_head_weight": by_columns},
        f"lm_head_weight: expected {rows} with placements": {"lm_head_weight": copies},
        "hidden: expected a plain tensor": {
            "hidden": distribute_tensor(weight, world.mesh, [Shard(0)])
        },
    }
    if world.rank:
        wrong[f"group: expected a process group or {one_dimension} that"] = {"group": other}
    told = {name: said(partial(plain_call, world, **x)) for name, x in wrong.items()}
    distributed.barrier()
    return {"told": told}
