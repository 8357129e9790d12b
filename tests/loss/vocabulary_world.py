"""A rank of a world that shares one head, and how its results are compared.

A comparison is a dict: "off", how far each value is from its truth; "told", the refusals; or
"same", what must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from tests import loss_cases
from tests.loss_cases import Case, Result, relative_l2

Found = dict[str, Any]
# Rows of the vocabulary of 23 by rank: no rank has as many as another, and one has none.
SIZES = {1: (23,), 2: (16, 7), 4: (9, 0, 10, 4)}


class World(NamedTuple):
    rank: int
    size: int
    mesh: DeviceMesh

    def cut(self, x: Tensor | None) -> Tensor | None:
        """The rows of this rank."""
        return None if x is None else x.split(SIZES[self.size])[self.rank]

    def shard(self, case: Case) -> Case:
        return case.but(weight=self.cut(case.weight), bias=self.cut(case.bias))

    def run(self, case: Case, **more: Any) -> Result:
        group = distributed.group.WORLD
        return loss_cases.run("linear", self.shard(case), group=group, **more)


def flat(result: Result) -> dict[str, Tensor]:
    """Everything that a call returned, by name."""
    found = {"loss": result.loss, "logps": result.logps, **result.metrics}
    if result.entropy is not None:
        found["entropies"] = result.entropy
    return found | {f"d{n}": x for n, x in result.grads.items()}


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Found:
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    return {"off": {name: relative_l2(x, wanted[name]) for name, x in found.items()}}


def beside_one(world: World, case: Case, compute: Callable[..., dict[str, Tensor]]) -> Found:
    """What `compute(case, group)` gives for a rank's shard beside what it gives for the whole head;
    of what ends in "dweight" or "dbias" the rows of this rank.
    """
    shared, one = compute(world.shard(case), distributed.group.WORLD), compute(case, None)
    of_head = ("dweight", "dbias")
    return off(shared, {n: world.cut(x) if n.endswith(of_head) else x for n, x in one.items()})


def as_one(world: World, case: Case, **more: Any) -> Found:
    """Values, metrics and gradients beside those of one process."""
    return beside_one(
        world, case, lambda x, group: flat(loss_cases.run("linear", x, group=group, **more))
    )


def as_truth(world: World, case: Case, **more: Any) -> Found:
    """Loss, logps and gradients beside the fp64 oracle; "own": the error of one process there."""
    result, truth = world.run(case, **more), loss_cases.truth("linear", case)
    one = loss_cases.run("linear", case, **more)
    own = {f"d{n}": relative_l2(x, getattr(truth, f"{n}_grad")) for n, x in one.grads.items()}
    grads = {f"d{n}": getattr(truth, f"{n}_grad") for n in result.grads}
    wanted = {n: x if n == "dhidden" else world.cut(x) for n, x in grads.items()}
    found = {f"d{n}": x for n, x in result.grads.items()}
    loss = abs(result.loss.item() - truth.loss.item()) / max(1.0, abs(truth.loss.item()))
    logps = (result.logps - loss_cases.reference_logps(case)[0])[case.mask].abs().max().item()
    return {"off": {"loss": loss, **off(found, wanted)["off"]}, "own": own, "logps": logps}
