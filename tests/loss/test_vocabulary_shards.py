"""Test that `group=`, a vocabulary split over 2 or 4 ranks, gives the results of one process.

The first part of the module has the cases in which ranks share one LM head, and the job that
compares them with one process. It also has calls with invalid arguments, for which all ranks must
raise the same error. The process groups run the cases once for all tests.
"""

import functools
import itertools
import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import grpo_fast
from grpo_fast.kernels.head.shards import ShardedHead, VocabularyShard
from grpo_fast.kernels.route import head_route, unavailable
from grpo_fast.kernels.types import ActiveRows, HeadTensors, LogitTransform
from grpo_fast.objective.kl import DIVERGENCES
from tests import loss_cases, oracles, rank_server
from tests.loss_cases import (
    IS_INTERPRETER,
    LAYOUTS,
    LEAVES_AND_LEVELS,
    Case,
    Result,
    call,
    make_case,
    options_for,
    relative_l2,
)

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


# ---- Functions that compare an LM head that is sharded over ranks with a full head in one process
INF, NAN = float("inf"), float("nan")


def every_loss(loss_type: str, level: str, dtype: torch.dtype, **more: Any) -> Case:
    extras = {"beta": 0.2, "entropy_coef": 0.1, **more}
    return make_case(7, dtype=dtype, sampling=True, **options_for(loss_type, level, **extras))


# The 90 rows form three chunks. Triton's interpreter is slow, so it gets 36 rows in two chunks.
LENGTHS = [16, 9, 0, 11] if IS_INTERPRETER else [40, 17, 0, 33]
LONG = torch.arange(LENGTHS[0])[None, :] < torch.tensor(LENGTHS)[:, None]
RULES: dict[str, dict[str, Any]] = {
    "negative_scale": {"logit_scale": -0.8},
    "everything": {"temperature": 0.8, "softcap": 3.0, "logit_scale": 1.2, "entropy_coef": 0.1},
    "metrics_entropy": {"compute_entropy": True},
    "top_entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "off_policy": {"corrections": [oracles.off_policy(0.2)]},
}


def columns_at_minus_infinity(world: World) -> Found:
    """Compare the sharded and the full head if some vocabulary columns have the logit -inf.

    All columns of the last rank are -inf, so that this rank has no finite logit.
    """
    case = make_case(8, dtype=torch.float64, **options_for("grpo", entropy_coef=0.1))
    case.bias[:7] = case.bias[-3:] = -INF
    last = world.size - 1
    case.bias[sum(SIZES[world.size][:last]) :] = -INF
    start = case.ids.clamp(7, sum(SIZES[world.size][:last]) - 1)
    return as_one(world, case.but(ids=start))


def confident(world: World, backend: str) -> Found:
    """Compare logps and dH with fp64 for targets with probabilities up to 1 - 1e-6.

    Every shard contains targets. The error of a logp is relative to this logp, and the error of a
    row of dH is relative to this row.
    """
    case = make_case(9, bias=False, **options_for("reinforce"))
    towards = case.weight[case.ids] / case.weight[case.ids].square().sum(-1, keepdim=True)
    steps = torch.linspace(1.0, 17.0, case.ids.numel()).reshape(case.ids.shape)
    case = case.but(hidden=1e-3 * case.hidden + steps[..., None] * towards)
    result, truth = world.run(case, backend=backend), loss_cases.truth("linear", case)
    exact = loss_cases.reference_logps(case)[0]
    miss = ((result.logps - exact) / exact)[case.mask].abs().max().item()
    ours, rows = (x[case.mask].double() for x in (result.grads["hidden"], truth.hidden_grad))
    worst = ((ours - rows).norm(dim=1) / rows.norm(dim=1).clamp(min=1e-12)).max().item()
    return {"off": {"logps": miss, "rows of dhidden": worst}}


def gradients(out: Any, leaves: dict[str, Tensor], **values: Tensor) -> dict[str, Tensor]:
    """Run backward, and return the values and the gradients of the leaves in one dictionary."""
    out.backward()
    named = {n.removeprefix("lm_head_"): x for n, x in leaves.items() if x.requires_grad}
    return {n: x.detach() for n, x in values.items()} | {f"d{n}": x.grad for n, x in named.items()}


def hidden_rows(world: World, dtype: torch.dtype, **more: Any) -> Found:
    """Compare the sharded and the full head if a row of `hidden` may predict several targets."""
    case = make_case(10, dtype=dtype, mask=LONG, **options_for("grpo", beta=0.1))
    count = sum(loss_cases.spans(LONG))
    rows = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(1))
    return as_one(world, case, layout="packed", hidden_rows=rows, **more)


def logps_of(case: Case, group: Any, *, wants: str = "hwb", **more: Any) -> dict[str, Tensor]:
    """Call `linear_logps`, and return its outputs and the gradients of their weighted sum.

    `wants` names the tensors that require grad: "h" for hidden, "w" for weight, "b" for bias.
    """
    names = dict(zip("hwb", ("hidden", "lm_head_weight", "bias"), strict=True))
    leaves = loss_cases.leaves_of("linear", case)
    for n in wants:
        leaves[names[n]].requires_grad_()
    ids = torch.where(case.mask, case.ids, -100)
    lp, entropy = grpo_fast.linear_logps(
        **leaves, target_ids=ids, return_entropy=True, group=group, **more
    )
    if not wants:
        return {"logps": lp, "entropy": entropy}
    weights = torch.linspace(-1, 1, lp.numel()).reshape(lp.shape)
    total = (weights * lp + 0.3 * weights.flip(0) * entropy).sum()
    return gradients(total, leaves, logps=lp, entropy=entropy)


def logps(world: World, wants: str, dtype: torch.dtype = torch.float64, **more: Any) -> Found:
    case = make_case(11, dtype=dtype, mask=LONG, **options_for("grpo"))
    return beside_one(world, case, lambda x, group: logps_of(x, group, wants=wants, **more))


def of_dtensors(world: World, vocabulary: int, by_mesh: bool) -> Found:
    """Compare a head whose weight is a sharded DTensor with the full head.

    If the vocabulary is small, the last ranks have no row. Gradients must remain sharded DTensors.
    """
    g = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((2, 5, 8), (vocabulary, 8), (vocabulary,))
    )
    ids, advantages = torch.randint(0, vocabulary, (2, 5), generator=g), torch.tensor([1.0, -0.5])
    group = world.mesh if by_mesh else distributed.group.WORLD
    found, placed = [], []
    for shared in (True, False):
        h, w, b = (nn.Parameter(x.clone()) for x in (hidden, weight, bias))
        if shared:
            w, b = (nn.Parameter(distribute_tensor(x, world.mesh, [Shard(0)])) for x in (w, b))
        out = grpo_fast.linear_grpo_loss(
            h, w, ids, advantages, grpo_fast.LossConfig(), bias=b, group=group if shared else None
        )
        lp = grpo_fast.linear_logps(h, w, ids, bias=b, group=group if shared else None)
        (out.loss + lp.square().mean()).backward()
        placed += [isinstance(x.grad, DTensor) == shared for x in (w, b)]
        dw, db = (x.grad.full_tensor() if shared else x.grad for x in (w, b))
        found.append({"loss": out.loss, "logps": lp, "dhidden": h.grad, "dweight": dw, "dbias": db})
    return {**off(*found), "same": all(placed)}


# Placements of the weight and of the bias, as FSDP2 makes them. None is a plain tensor.
PLACED = {
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Replicate()),
    "copies": (Replicate(), None),
}


def gathered(world: World, kind: str, frozen: tuple[str, ...] = ()) -> Found:
    """Compare a head that is gathered from DTensors with one process on the rows of all ranks.

    Each rank has different rows of `hidden`. The gradients are averaged over the ranks, and keep
    the placements of their parameters. `frozen` names parameters that do not require grad.
    """
    g = torch.Generator().manual_seed(3)
    shapes = {"hidden": (world.size, 5, 12), "weight": (61, 12), "bias": (61,)}
    student, teacher = (
        {name: torch.randn(*shape, generator=g, dtype=DOUBLE) for name, shape in shapes.items()}
        for _ in range(2)
    )
    ids = torch.randint(61, (world.size, 5), generator=g)
    advantages = torch.randn(world.size, 5, generator=g)
    config = grpo_fast.LossConfig(loss_type="reinforce", aggregation="token_mean_global")
    placements = dict(zip(("weight", "bias"), PLACED[kind], strict=True))

    def compute(rows: slice, shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
        own, other = ({**x, "hidden": x["hidden"][rows]} for x in (student, teacher))
        for tensors in (own, other) if shared else ():
            for name, how in placements.items():
                if how is not None:
                    tensors[name] = distribute_tensor(tensors[name], world.mesh, [how])
        leaves = {n: nn.Parameter(x, requires_grad=n not in frozen) for n, x in own.items()}
        head = leaves["hidden"], leaves["weight"], ids[rows]
        term = grpo_fast.DivergenceTerm(grpo_fast.TeacherHead(**other), "reverse_kl")
        out = grpo_fast.linear_grpo_loss(
            *head, advantages[rows], config, bias=leaves["bias"], divergence=term,
            num_items_in_batch=1.0,
        )  # fmt: skip
        lp = grpo_fast.linear_logps(*head, bias=leaves["bias"])
        (out.loss + lp.square().sum()).backward()
        return lp.detach(), {n: x for n, x in leaves.items() if n not in frozen}

    rows = slice(world.rank, world.rank + 1)
    lp, leaves = compute(rows, True)
    expected, wanted = compute(slice(None), False)
    found, right, same = {"logps": lp}, {"logps": expected[rows]}, True
    for name, x in leaves.items():
        right[name] = wanted[name].grad
        if name == "hidden":
            found[name], right[name] = x.grad, right[name][rows]
        elif placements[name] is None:  # the caller reduces the gradient of a plain tensor
            distributed.all_reduce(x.grad)
            found[name] = x.grad
        else:
            same &= x.grad.placements == x.placements
            found[name] = x.grad.full_tensor() * world.size
    return {**off(found, right), "same": same}


def divergence(world: World, kind: str, dtype: torch.dtype, backend: str = "auto") -> Found:
    """Compare `linear_divergence` and a loss with a `DivergenceTerm` on sharded and full heads.

    The teacher is sharded like the student.
    """
    mask = LONG[1:, :2] if IS_INTERPRETER else LONG  # the interpreter needs seconds for a row
    case = make_case(4, dtype=dtype, mask=mask, **options_for("grpo", beta=0.1))
    g = torch.Generator().manual_seed(5)
    h, w, b = (torch.randn(*x, generator=g).to(dtype) for x in ((*mask.shape, 6), (23, 6), (23,)))
    weights = torch.rand(mask.shape, generator=g).to(dtype)

    def compute(case: Case, group: Any) -> dict[str, Tensor]:
        of = (lambda x: x) if group is None else world.cut
        teacher = grpo_fast.TeacherHead(h, of(w), of(b), softcap=2.0)
        leaves = {n: x.requires_grad_() for n, x in loss_cases.leaves_of("linear", case).items()}
        out = grpo_fast.linear_divergence(
            **leaves, teacher=teacher, kind=kind, weights=weights, group=group, backend=backend,
            temperature=0.7, softcap=3.0,
        )  # fmt: skip
        found = gradients(out.loss, leaves, loss=out.loss, values=out.values)
        term = grpo_fast.DivergenceTerm(teacher._replace(softcap=None), kind, 0.3)
        more = {"divergence": term, "backend": backend, "group": group}
        of_term = loss_cases.run("linear", case, **more).named()
        return found | {f"term {n}": x for n, x in of_term.items()}

    return beside_one(world, case, compute)


def nan_is_seen(world: World, where: str, backend: str) -> Found:
    """Check that a NaN in one rank's weight, or in an active row of `hidden`, reaches all ranks."""
    case = make_case(15, **options_for("grpo", beta=0.1, entropy_coef=0.1))
    head = world.shard(case)
    if where == "hidden":
        case.hidden[0, 0, 0] = NAN
    elif world.rank == world.size - 1:
        head.weight[2, 1] = NAN
    case = case.but(weight=head.weight, bias=head.bias)
    result = loss_cases.run("linear", case, backend=backend, group=distributed.group.WORLD)
    seen = [result.loss.isnan().item(), result.grads["hidden"].isnan().any().item()]
    if len(head.weight):
        seen.append(result.grads["weight"].isnan().any().item())
    return {"same": all(seen)}


def bits(world: World, backend: str) -> Found:
    """Check that other rows do not change the bits of logps and entropies.

    The result contains the bits, which must be the same on all ranks.
    """
    case = make_case(16, mask=LONG, **options_for("grpo"))
    group = distributed.group.WORLD
    whole = logps_of(world.shard(case), group, wants="", backend=backend)
    alone = torch.zeros_like(LONG)
    alone[3, 5:9] = True
    part = logps_of(world.shard(case.but(mask=alone)), group, wants="", backend=backend)
    assert all(torch.equal(part[n][alone], x[alone]) for n, x in whole.items())
    return {"same": [x.double().sum().item().hex() for x in whole.values()]}


def collectives(world: World) -> Found:
    """Record the collective calls in the forward and backward passes of losses and logps."""
    called: list[str] = []

    def counted(name: str, real: Callable) -> Callable:
        return lambda *a, **k: (called.append(name), real(*a, **k))[1]

    counters = {name: counted(name, getattr(distributed, name)) for name in COLLECTIVES}
    found, group = {}, distributed.group.WORLD
    case = make_case(17, mask=LONG, **options_for("dapo"))
    calls = {
        level: lambda x=level: world.run(case.with_options(importance_sampling_level=x))
        for level in ("token", "sequence")
    }
    for name, wants in (("logps", "hwb"), ("frozen hidden", "wb"), ("forward", "")):
        calls[name] = lambda x=wants: logps_of(world.shard(case), group, wants=x)
    with mock.patch.multiple(distributed, **counters):
        for name, call in calls.items():
            called.clear()
            call()
            found[name] = sorted(called)
    return {"same": found}


COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "all_to_all", "gather")
COLLECTIVES += ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object", "barrier")


# ---- Calls with invalid arguments on ranks that share a head. All ranks must raise the same error
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
        "hidden: expected shape (B, L, H)": {"hidden": case.hidden[0, 0, 0]},
        "target_ids: expected ids": {"target_ids": ids},
        "target_ids: expected the same": {"target_ids": turned},
        "advantages: expected": {"advantages": advantages},
        "backend: expected one that runs": {"backend": "triton"},
        "config: expected the same": {"config": grpo_fast.LossConfig(loss_type="sapo")},
        "grad_filter=0.1 conflicts with group": {"grad_filter": 0.1},
        "requires_grad: expected the same": {"hidden": case.hidden.clone().requires_grad_()},
        "old_logps: expected": {"old_logps": torch.zeros(2)},
    }


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "nothing"


def refused_by(world: World, who: str) -> Found:
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


# ------------ Cases in which ranks share one head, and the job that compares them with one process
DOUBLE, SINGLE = torch.float64, torch.float32
Compared = Callable[[World], Found]


def one(seed: int, level: str = "token", rule: Any = None, **options: Any) -> Compared:
    made = make_case(seed, dtype=DOUBLE, **options_for("grpo", level, beta=0.1), **options)
    return partial(as_one, case=made.with_options(**rule or {}))


def cases_in_fp64() -> dict[str, Compared]:
    of = partial(partial, dtype=DOUBLE)
    found = {
        "no-bias": one(5, bias=False), "minus-infinity": columns_at_minus_infinity,
        "nothing-active": one(3, mask=torch.zeros(2, 4, dtype=torch.bool)),
        "hidden_rows": of(hidden_rows),
        **{f"rule-{name}": one(6, rule=rule) for name, rule in RULES.items()},
        **{f"chunks-{level}": one(4, level, mask=LONG) for level in ("token", "sequence")},
        **{f"divergence-{kind}": of(divergence, kind=kind) for kind in DIVERGENCES},
        **{f"logps-{x or 'no_grad'}": of(logps, wants=x)
           for x in ("hwb", "h", "w", "wb", "")},
        **{f"dtensor-{n}-{name}": partial(of_dtensors, vocabulary=n, by_mesh=name == "mesh")
           for n in (3, 61) for name in ("group", "mesh")},
        **{f"gathered-{kind}": partial(gathered, kind=kind) for kind in PLACED},
        "gathered-frozen-weight": partial(gathered, kind="rows", frozen=("weight",)),
        "gathered-frozen-others": partial(gathered, kind="rows", frozen=("hidden", "bias")),
    }  # fmt: skip
    for (loss_type, level), layout in zip(LEAVES_AND_LEVELS, itertools.cycle(LAYOUTS)):  # noqa: B905
        case = every_loss(loss_type, level, DOUBLE)
        found[f"loss-{loss_type}-{level}-{layout}"] = partial(as_one, case=case, layout=layout)
    return found


def cases_of(backend: str) -> dict[str, Compared]:
    losses = (("dapo", "token"), ("gspo", "sequence"))
    cases = {f"fp32-{t}-{level}": every_loss(t, level, SINGLE) for t, level in losses}
    cases["bf16-grpo"] = every_loss("grpo", "token", torch.bfloat16, entropy_coef=0.0)
    works = {name: partial(as_truth, case=x) for name, x in cases.items()} | {
        "fp32-logps": partial(logps, wants="hwb", dtype=SINGLE),
        "fp32-divergence": partial(divergence, kind="jsd", dtype=SINGLE),
        "bits": bits, "nan-hidden": partial(nan_is_seen, where="hidden"),
    }  # fmt: skip
    if backend != "triton":  # the interpreter needs a minute for these
        fp16 = every_loss("grpo", "token", torch.float16, entropy_coef=0.0)
        softcap = make_case(6, **options_for("grpo", beta=0.1, **RULES["everything"]))
        works |= {
            "fp16-grpo": partial(as_truth, case=fp16),
            "fp32-softcap": partial(as_truth, case=softcap),
            "fp32-hidden_rows": partial(hidden_rows, dtype=SINGLE),
            "confident": confident, "nan-weight": partial(nan_is_seen, where="weight"),
        }  # fmt: skip
    return {f"{name}-{backend}": partial(work, backend=backend) for name, work in works.items()}


if os.environ.get("TRITON_INTERPRET") == "1":
    CASES = cases_of("triton")
else:
    CASES = {f"fp64-{name}": case for name, case in cases_in_fp64().items()} | cases_of("torch")
    CASES |= {} if unavailable("cpu", "cpu") else cases_of("cpu")
    CASES |= {f"refusals-{x}": partial(refused_by, who=x) for x in ("first", "last", "all")}
    CASES |= {"collectives": collectives, "wrong-groups": wrong_groups}


def cases_for(size: int) -> dict[str, Compared]:
    """Return the cases for a number of ranks. Each loss is tested with two ranks only."""
    return {n: case for n, case in CASES.items() if size == 2 or not n.startswith("fp64-loss-")}


def results() -> Found:
    """Run all cases on this rank in order. The last result holds the error that ended the job."""
    os.environ["GRPO_FAST_WORKSPACE_MIB"] = "0"  # gives the smallest chunks, of 32 rows
    size = distributed.get_world_size()
    world = World(distributed.get_rank(), size, init_device_mesh("cpu", (size,)))
    found: Found = {}
    for name, case in cases_for(size).items():
        try:
            found[name] = case(world)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    return found


RANKS = (2, 4)
# Tolerances of the numerical contract. BARS are relative L2 errors of values and gradients, and
# LOGPS is the absolute error of a logp.
BARS = {"fp64": 1e-12, "fp32": 2e-6, "bf16": 3e-3, "fp16": 1e-3}
BARS["confident"], LOGPS = 1e-5, 1e-5
# The error of one process with the full head may exceed a tolerance in BARS. The allowed error on
# the ranks is then the error of that process, multiplied by this factor.
TIMES = {"fp32": 3.0, "bf16": 1.5, "fp16": 1.5}
COMPARED = [(size, name) for size in RANKS for name in cases_for(size)]
Ranks = list[dict[str, dict[str, Any]]]


def run_world(folder: Path, size: int, **environment: str) -> Ranks:
    with rank_server.Ranks(folder, **environment) as server:
        return [found for (found,) in server(size, [results], timeout=600)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Callable[[int], Ranks]:
    """Return a function that takes a number of ranks and returns the results of these ranks.

    The function runs the ranks when it is first called with this number.
    """
    return functools.cache(lambda size: run_world(tmp_path_factory.mktemp("ranks"), size))


def check(ranks: Ranks, name: str) -> None:
    kind = name.partition("-")[0]
    for results in ranks:
        assert name in results, list(results.values())[-1].get("error")
        found = results[name]
        assert "error" not in found, found["error"]
        # `own` holds the errors of one process with the full head, multiplied by TIMES. They may
        # exceed the tolerances in BARS.
        own = {what: TIMES.get(kind, 1) * x for what, x in found.get("own", {}).items()}
        off = found.get("off", {})
        wrong = {n: x for n, x in off.items() if not x <= max(BARS[kind], own.get(n, 0.0))}
        assert not wrong, wrong
        assert found.get("logps", 0.0) <= LOGPS
        assert found.get("same") is not False
        assert found.get("same") == ranks[0][name].get("same")
        for begin, message in found.get("told", {}).items():
            assert message.startswith(begin), (begin, message)


@pytest.mark.parametrize(("size", "name"), COMPARED, ids=lambda x: str(x))
def test_a_shared_head_is_the_whole_head(worlds, size, name):
    check(worlds(size), name)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_what_one_rank_refuses_all_refuse_in_the_same_words(worlds, size, who):
    told = [ranks[f"refusals-{who}"]["told"] for ranks in worlds(size)]
    assert len(told[0]) > 10 and all(x == told[0] for x in told)
    odd = {"first": 0, "last": size - 1}.get(who)
    if odd is not None:
        assert f"(on rank {odd} of group)" in told[0]["target_ids: expected ids"]
    else:
        assert "of group)" not in told[0]["target_ids: expected ids"]


@pytest.mark.parametrize("size", RANKS)
def test_one_collective_for_each_chunk_and_one_for_the_gradient_of_hidden(worlds, size):
    """Check that a call has one collective per chunk, and one for the gradient of `hidden`.

    The 90 rows form three chunks. Before the first chunk, two all-gathers exchange the shard sizes
    and a description of the call.
    """
    forward = ["all_gather"] * (2 + 3)
    assert worlds(size)[0]["collectives"]["same"] == {
        "token": [*forward, "all_reduce"],
        "sequence": [*forward, "all_reduce"],
        "logps": [*forward, "all_reduce"],
        "frozen hidden": forward,
        "forward": forward,
    }


def test_all_ranks_cut_the_same_chunks(monkeypatch):
    """Check that all ranks use the same chunks, although their shards have different sizes.

    Each chunk needs a collective, so ranks with different chunks would deadlock.
    """
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", "1")
    hidden, ids, sizes = torch.zeros(500, 4), torch.zeros(500, dtype=torch.int64), (4000, 10, 0)
    rows = ActiveRows(500, None, ids, LogitTransform(), None)
    cut = []
    for rank, size in enumerate(sizes):
        shard, weight = VocabularyShard(None, sizes, rank), torch.zeros(size, 4)
        route = head_route("torch", weight, is_shard=True)
        cut.append(
            ShardedHead(HeadTensors(hidden, weight, None), rows, route, shard).chunks(stores=True)
        )
    assert len(cut[0]) > 5 and cut[0] == cut[1] == cut[2]


def test_the_triton_row_kernels_know_shards(tmp_path):
    pytest.importorskip("triton")
    ranks = run_world(tmp_path, 2, TRITON_INTERPRET="1")
    assert len(ranks[0]) > 6
    for name in ranks[0]:
        check(ranks, name)
