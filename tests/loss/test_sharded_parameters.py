"""Test which DTensors the public functions accept, and which raise an error.

The tests run in one process. test_vocabulary_shards.py compares gradients over several processes.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import grpo_fast

pytestmark = pytest.mark.usefixtures("one_process")
CONFIG = grpo_fast.LossConfig(loss_type="reinforce")


def arguments() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(2, 3, 8, generator=random),
        "lm_head_weight": torch.randn(31, 8, generator=random),
        "bias": torch.randn(31, generator=random),
        "target_ids": torch.randint(0, 31, (2, 3), generator=random),
        "advantages": torch.randn(2, generator=random),
    }


def sharded(x: torch.Tensor, placements: Any = None, names: Any = None) -> DTensor:
    placements = placements or [Shard(0)]
    mesh = init_device_mesh("cpu", (1,) * len(placements), mesh_dim_names=names)
    return DTensor.from_local(x, mesh, placements, run_check=False)


def losses(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = given.pop("advantages")
    loss = grpo_fast.linear_grpo_loss(**given, advantages=advantages, config=CONFIG).loss
    return loss, grpo_fast.linear_logps(**given).sum()


class Unused(torch.autograd.Function):
    """Function whose input gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_weight_without_a_gradient_gets_zeros():
    """Check that a rank takes part in the collective even if its logps get no gradient."""
    given = arguments()
    del given["advantages"]
    weight = nn.Parameter(sharded(given["lm_head_weight"]))
    given["lm_head_weight"] = weight
    Unused.apply(grpo_fast.linear_logps(**given)).backward()
    assert isinstance(weight.grad, DTensor) and not weight.grad.full_tensor().any()


@pytest.mark.parametrize("name", ["lm_head_weight", "bias"])
@pytest.mark.parametrize(
    ("placements", "names", "came"),
    [
        ([Shard(0)], ("tp",), "Shard.* over mesh dimensions .*'tp'"),
        ([Replicate(), Shard(0)], ("dp_replicate", "dp_shard"), "mesh dimensions .*'dp_shard'"),
        ([Shard(0), Shard(0)], None, "mesh dimensions 2"),
        ([Partial()], None, "Partial"),
    ],
    ids=["tensor_parallel", "named_mesh_of_two", "mesh_of_two", "partial_sums"],
)
def test_shards_that_cannot_be_served(name, placements, names, came):
    given = arguments()
    wrong = {**given, name: sharded(given[name], placements, names)}
    with pytest.raises(ValueError, match=f"^{name}: expected .*FSDP2.*{came}"):
        grpo_fast.linear_logps(**{n: x for n, x in wrong.items() if n != "advantages"})
    with pytest.raises(ValueError, match=f"^{name}: expected .*FSDP2.*{came}"):
        grpo_fast.linear_grpo_loss(**wrong, config=CONFIG)
    losses(**given)


def test_other_arguments_are_plain():
    given = arguments()
    for name in ("hidden", "advantages"):
        with pytest.raises(ValueError, match=f"^{name}: expected a plain tensor, got a DTensor"):
            losses(**{**given, name: sharded(given[name])})
    logits, targets = torch.randn(2, 3, 31), given["target_ids"]
    with pytest.raises(ValueError, match="^logits: expected a plain tensor, got a DTensor"):
        grpo_fast.logits_logps(sharded(logits, [Shard(2)]), targets)
    with pytest.raises(ValueError, match="^logps: expected a plain tensor, got a DTensor"):
        grpo_fast.grpo_loss(sharded(logits[..., 0]), given["advantages"], CONFIG)
