"""Class `World` for one rank of a process group that shares a head, and comparisons of results.

A comparison returns a dictionary. "off" maps the name of each value to its error. "told" maps each
faulty call to its error message. "same" holds values that must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from tests import loss_cases
from tests.loss_cases import Case, Result, relative_l2

Found = dict[str, Any]
# Number of vocabulary rows of each rank, keyed by the number of ranks. The 23 rows are split
# unevenly, and one of four ranks has no row.
SIZES = {1: (23,), 2: (16, 7), 4: (9, 0, 10, 4)}


class World(NamedTuple):
    rank: int
    size: int
    mesh: DeviceMesh

    def cut(self, x: Tensor | None) -> Tensor | None:
        """Return the rows of x that belong to this rank's vocabulary shard."""
        return None if x is None else x.split(SIZES[self.size])[self.rank]

    def shard(self, case: Case) -> Case:
        return case.but(weight=self.cut(case.weight), bias=self.cut(case.bias))

    def run(self, case: Case, **more: Any) -> Result:
        group = distributed.group.WORLD
        return loss_cases.run("linear", self.shard(case), group=group, **more)


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Found:
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    return {"off": {name: relative_l2(x, wanted[name]) for name, x in found.items()}}


def beside_one(world: World, case: Case, compute: Callable[..., dict[str, Tensor]]) -> Found:
    """Compare `compute` on this rank's shard with `compute` on the full head.

    Values whose names end in "dweight" or "dbias" are compared only in the rows of this rank.
    """
    shared, one = compute(world.shard(case), distributed.group.WORLD), compute(case, None)
    of_head = ("dweight", "dbias")
    return off(shared, {n: world.cut(x) if n.endswith(of_head) else x for n, x in one.items()})


def as_one(world: World, case: Case, **more: Any) -> Found:
    """Return the errors of a sharded head relative to one process.

    Values, metrics and gradients are compared.
    """
    return beside_one(
        world, case, lambda x, group: loss_cases.run("linear", x, group=group, **more).named()
    )


def as_truth(world: World, case: Case, **more: Any) -> Found:
    """Compare loss, logps and gradients of a sharded head with the fp64 oracle.

    "own" in the result holds the errors of one process with the full head.
    """
    result, truth = world.run(case, **more), loss_cases.truth("linear", case)
    one = loss_cases.run("linear", case, **more)
    own = {f"d{n}": relative_l2(x, getattr(truth, f"{n}_grad")) for n, x in one.grads.items()}
    grads = {f"d{n}": getattr(truth, f"{n}_grad") for n in result.grads}
    wanted = {n: x if n == "dhidden" else world.cut(x) for n, x in grads.items()}
    found = {f"d{n}": x for n, x in result.grads.items()}
    loss = abs(result.loss.item() - truth.loss.item()) / max(1.0, abs(truth.loss.item()))
    logps = (result.logps - loss_cases.reference_logps(case)[0])[case.mask].abs().max().item()
    return {"off": {"loss": loss, **off(found, wanted)["off"]}, "own": own, "logps": logps}
