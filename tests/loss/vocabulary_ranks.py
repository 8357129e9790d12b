"""Ranks of gloo worlds that share one head, compared with one process that has the whole of it.

    python -m tests.loss.vocabulary_ranks FOLDER 2 4    # FOLDER/world2.0.json, …, world4.3.json

The package is imported once and the ranks are forks. All ranks go through `CASES` in order. A case
returns what is compared: "off", how far each value is from its truth; "told", the refusals; or
"same", what must be equal on all ranks.
"""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import grpo_fast
from grpo_fast.kernels.route import unavailable
from tests import loss_cases
from tests.loss_cases import LOSS_LEVELS, Case, Result, make_case, options_for, relative_l2

Found = dict[str, Any]
# Rows of the vocabulary of 23 by rank: no rank has as many as another, and one has none.
SIZES = {1: (23,), 2: (16, 7), 4: (9, 0, 10, 4)}
INF, NAN = float("inf"), float("nan")


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


def flat(result: Result, cut: Callable[[Any], Any] = lambda x: x) -> dict[str, Tensor]:
    """Everything that a call returned, by name; weight and bias cut to the rows of a rank."""
    found = {"loss": result.loss, "logps": result.logps, **result.metrics}
    if result.entropy is not None:
        found["entropies"] = result.entropy
    grads = {n: x if n == "hidden" else cut(x) for n, x in result.grads.items()}
    return found | {f"d{n}": x for n, x in grads.items()}


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Found:
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    return {"off": {name: relative_l2(x, wanted[name]) for name, x in found.items()}}


def as_one(world: World, case: Case, **more: Any) -> Found:
    """Values, metrics and gradients beside those of one process."""
    one = loss_cases.run("linear", case, **more)
    return off(flat(world.run(case, **more)), flat(one, world.cut))


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


# ------------------------------------------------------------------------------------- cases
def every_loss(loss_type: str, level: str, dtype: torch.dtype, **more: Any) -> Case:
    extras = {"beta": 0.2, "entropy_coef": 0.1, **more}
    return make_case(7, dtype=dtype, sampling=True, **options_for(loss_type, level, **extras))


LONG = torch.arange(40)[None, :] < torch.tensor([40, 17, 0, 33])[:, None]  # 90 rows, three chunks
RULES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperatures": {"temperature": 0.5 + torch.rand(5, 7, generator=torch.Generator())},
    "softcap": {"softcap": 2.0, "logit_scale": 1.5},
    "negative_scale": {"logit_scale": -0.8},
    "everything": {"temperature": 0.8, "softcap": 3.0, "logit_scale": 1.2, "entropy_coef": 0.1},
    "metrics_entropy": {"compute_entropy": True},
    "top_entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "off_policy": {"off_policy_threshold": 0.2},
}


def columns_at_minus_infinity(world: World) -> Found:
    """Some columns, and all of one rank's."""
    case = make_case(8, dtype=torch.float64, **options_for("grpo", entropy_coef=0.1))
    case.bias[:7] = case.bias[-3:] = -INF
    last = world.size - 1
    case.bias[sum(SIZES[world.size][:last]) :] = -INF
    start = case.ids.clamp(7, sum(SIZES[world.size][:last]) - 1)
    return as_one(world, case.but(ids=start))


def confident(world: World, backend: str) -> Found:
    """p of the target up to 1 - 1e-6, wherever its shard is: logps and rows of dH by their size."""
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


def hidden_rows(world: World, dtype: torch.dtype, **more: Any) -> Found:
    """Rows of hidden that predict several targets."""
    case = make_case(10, dtype=dtype, mask=LONG, **options_for("grpo", beta=0.1))
    rows = torch.randint(0, 50, case.ids.shape, generator=torch.Generator().manual_seed(1))
    hidden, found = case.hidden.reshape(-1, 8)[:50].clone(), []
    for shared in (False, True):
        head = world.shard(case) if shared else case
        leaves = [x.clone().requires_grad_() for x in (hidden, head.weight, head.bias)]
        given = loss_cases.arguments(case, "padded")
        advantages, config = given.pop("advantages"), grpo_fast.LossConfig(**case.options)
        group = distributed.group.WORLD if shared else None
        out = grpo_fast.linear_grpo_loss(
            *leaves[:2], case.ids, advantages, config, bias=leaves[2], hidden_rows=rows,
            group=group, **more, **given,
        )  # fmt: skip
        out.loss.backward()
        d_head = [x.grad if shared else world.cut(x.grad) for x in leaves[1:]]
        names = ("loss", "logps", "dhidden", "dweight", "dbias")
        values = (out.loss.detach(), out.logps, leaves[0].grad, *d_head)
        found.append(dict(zip(names, values, strict=True)))
    return off(found[1], found[0])


def logps_of(
    case: Case, shared: bool, world: World, *, wants: str = "hwb", **more: Any
) -> dict[str, Tensor]:
    """`linear_logps` and the gradients of a sum with both of its outputs."""
    head = world.shard(case) if shared else case
    tensors = dict(zip("hwb", (case.hidden, head.weight, head.bias), strict=True))
    leaves = {n: x.clone().requires_grad_(n in wants) for n, x in tensors.items()}
    ids = torch.where(case.mask, case.ids, -100)
    group = distributed.group.WORLD if shared else None
    lp, entropy = grpo_fast.linear_logps(
        leaves["h"], leaves["w"], ids, bias=leaves["b"], return_entropy=True, group=group, **more
    )
    found = {"logps": lp.detach(), "entropy": entropy.detach()}
    if wants:
        weights = torch.linspace(-1, 1, lp.numel()).reshape(lp.shape)
        (weights * lp + 0.3 * weights.flip(0) * entropy).sum().backward()
        for n in wants:
            grad = leaves[n].grad
            found[f"d{n}"] = grad if shared or n == "h" else world.cut(grad)
    return found


def logps(world: World, wants: str, dtype: torch.dtype = torch.float64, **more: Any) -> Found:
    case = make_case(11, dtype=dtype, mask=LONG, **options_for("grpo"))
    ours = logps_of(case, True, world, wants=wants, **more)
    return off(ours, logps_of(case, False, world, wants=wants, **more))


def frozen(world: World, wanted: str) -> Found:
    """The gradients of one of the three tensors; under no_grad of none."""
    case, results = make_case(12, dtype=torch.float64, **options_for("grpo", beta=0.1)), []
    for shared in (True, False):
        head = world.shard(case) if shared else case
        tensors = {"hidden": case.hidden, "weight": head.weight, "bias": head.bias}
        leaves = {n: x.clone().requires_grad_(n == wanted) for n, x in tensors.items()}
        given = loss_cases.arguments(case, "padded")
        advantages, config = given.pop("advantages"), grpo_fast.LossConfig(**case.options)
        with torch.set_grad_enabled(wanted != "nothing"):
            out = grpo_fast.linear_grpo_loss(
                leaves["hidden"], leaves["weight"], case.ids, advantages, config,
                bias=leaves["bias"], group=distributed.group.WORLD if shared else None, **given,
            )  # fmt: skip
        found = {"loss": out.loss.detach(), "logps": out.logps}
        if wanted != "nothing":
            out.loss.backward()
            grad = leaves[wanted].grad
            found["grad"] = grad if shared or wanted == "hidden" else world.cut(grad)
        results.append(found)
    return off(*results)


def twice(world: World) -> Found:
    """A second backward through a retained graph, with another upstream gradient."""
    case, found = make_case(13, dtype=torch.float64, **options_for("dapo")), []
    for shared in (True, False):
        head = world.shard(case) if shared else case
        leaves = [case.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()]
        group = distributed.group.WORLD if shared else None
        config = grpo_fast.LossConfig(**case.options)
        out = grpo_fast.linear_grpo_loss(
            *leaves, case.ids, case.advantages, config, completion_mask=case.mask, group=group
        )
        out.loss.backward(retain_graph=True)
        (3 * out.loss).backward()
        dh, dw = (x.grad for x in leaves)
        found.append({"dhidden": dh, "dweight": dw if shared else world.cut(dw)})
    return off(*found)


# ------------------------------------------------------------------------------------- DTensors
def of_dtensors(world: World, vocabulary: int, by_mesh: bool) -> Found:
    """Torch's own chunks, of which the last ranks may have none; gradients stay where they are."""
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


# ------------------------------------------------------------------------------------- refusals
def plain_call(world: World, **changes: Any) -> Any:
    case = make_case(14, **options_for("grpo"))
    head = world.shard(case)
    given = {
        "hidden": case.hidden, "lm_head_weight": head.weight, "target_ids": case.ids,
        "advantages": case.advantages, "config": grpo_fast.LossConfig(**case.options),
        "bias": head.bias, "group": distributed.group.WORLD, "completion_mask": case.mask,
    }  # fmt: skip
    return grpo_fast.linear_grpo_loss(**{**given, **changes})


def wrong_arguments(world: World) -> dict[str, dict[str, Any]]:
    """Arguments that one rank refuses, or has alone, by what the message begins with."""
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
        "grad_filter: expected": {"grad_filter": 0.1},
        "requires_grad: expected the same": {"hidden": case.hidden.clone().requires_grad_()},
        "old_logps: expected": {"old_logps": torch.zeros(2)},
        "lm_head_weight: expected a floating": {"lm_head_weight": 3},
        "config: expected a LossConfig": {"config": None},
    }


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before, os.environ[name] = os.environ.get(name, ""), value
    yield
    os.environ[name] = before


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def refusals(world: World, who: str) -> Found:
    """What every rank says when one rank, or every one, is given a wrong argument."""
    one = {"first": 0, "last": world.size - 1}.get(who)
    told = {}
    for name, changes in wrong_arguments(world).items():
        if one is None and name.endswith("the same"):
            continue
        is_here = one is None or world.rank == one
        told[name] = said(lambda c=changes if is_here else {}: plain_call(world, **c))
        assert torch.isfinite(plain_call(world).loss)  # and the next call works
    is_here = world.rank == (one or 0)
    with environment("GRPO_FAST_WORKSPACE_MIB", "7" if is_here else "8"):
        told["GRPO_FAST_WORKSPACE_MIB: expected the same"] = said(lambda: plain_call(world))
    told["lm_head_weight: expected at least one vocabulary row on"] = said(
        lambda: plain_call(world, lm_head_weight=torch.zeros(0, 8), bias=None)
    )
    return {"told": told}


def compiled_in_one_graph(world: World) -> str:
    """What dynamo says of the refusal; without fullgraph the call runs beside the graph."""
    case = world.shard(make_case(14, **options_for("grpo")))

    def call(weight: Tensor) -> Tensor:
        return grpo_fast.linear_logps(
            case.hidden, weight, case.ids, bias=case.bias, group=distributed.group.WORLD
        )

    try:
        torch.compile(call, backend="eager", fullgraph=True)(case.weight)
    except Exception as error:
        assert torch.equal(torch.compile(call, backend="eager")(case.weight), call(case.weight))
        return str(error)[str(error).find("group: ") :]
    return "nothing"


def wrong_groups(world: World) -> Found:
    """What is no group of ranks that share this head."""
    other = distributed.new_group([0])
    weight = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    plane = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("dp", "tp"))
    by_columns = distribute_tensor(weight, world.mesh, [Shard(1)])
    copies = distribute_tensor(weight, world.mesh, [Replicate()])
    told = {
        "group: expected a process group": said(lambda: plain_call(world, group=0)),
        "group: expected a process group or a mesh of one dimension, got a mesh": said(
            lambda: plain_call(world, group=plane)
        ),
        "lm_head_weight: expected the rows of this rank, or a DTensor": said(
            lambda: plain_call(world, lm_head_weight=by_columns)
        ),
        "lm_head_weight: expected the rows of this rank, or a DTensor with placements": said(
            lambda: plain_call(world, lm_head_weight=copies)
        ),
        "hidden: expected a plain tensor": said(
            lambda: plain_call(world, hidden=distribute_tensor(weight, world.mesh, [Shard(0)]))
        ),
    }
    if world.rank:
        told["group: expected a process group or a mesh of one dimension that"] = said(
            lambda: plain_call(world, group=other)
        )
    told["group: expected None in a graph of torch.compile"] = compiled_in_one_graph(world)
    distributed.barrier()
    return {"told": told}


# ------------------------------------------------------------------------------------- NaN, bits
def nan_is_seen(world: World, where: str, backend: str) -> Found:
    """A NaN in one rank's weight, or in an active row of hidden, reaches all ranks."""
    case = make_case(15, **options_for("grpo", beta=0.1, entropy_coef=0.1))
    head = world.shard(case)
    if where == "hidden":
        case.hidden[0, 0, 0] = NAN
    elif world.rank == world.size - 1:
        head.weight[2, 1] = NAN
    result = loss_cases.run(
        "linear",
        case.but(weight=head.weight, bias=head.bias),
        backend=backend,
        group=distributed.group.WORLD,
    )
    seen = [result.loss.isnan().item(), result.grads["hidden"].isnan().any().item()]
    if len(head.weight):
        seen.append(result.grads["weight"].isnan().any().item())
    return {"same": all(seen)}


def masked_slots_are_inert(world: World, backend: str) -> Found:
    """NaN and impossible ids where masked: the same bits."""
    case = every_loss("grpo", "token", torch.float32)
    hidden = torch.where(case.mask[..., None], case.hidden, NAN)
    bad = case.but(hidden=hidden, ids=torch.where(case.mask, case.ids, -100))
    clean, dirty = (flat(world.run(x, backend=backend)) for x in (case, bad))
    return {"same": all(torch.equal(x, dirty[name]) for name, x in clean.items())}


def bits(world: World, backend: str) -> Found:
    """Logps: the same on all ranks, and of a row alone those of the row among others."""
    case = make_case(16, mask=LONG, **options_for("grpo"))
    whole = logps_of(case, True, world, wants="", backend=backend)
    alone = torch.zeros_like(LONG)
    alone[3, 5:9] = True
    part = logps_of(case.but(mask=alone), True, world, wants="", backend=backend)
    assert all(torch.equal(part[n][alone], x[alone]) for n, x in whole.items())
    return {"same": [x.double().sum().item().hex() for x in whole.values()]}


def collectives(world: World) -> Found:
    """Calls of torch.distributed: two and one per chunk forward, one for dH; none for dW and db."""
    called: list[str] = []
    real = {n: getattr(distributed, n) for n in dir(distributed) if n in COLLECTIVES}

    def counted(name: str) -> Callable:
        return lambda *a, **k: (called.append(name), real[name](*a, **k))[1]

    for name in real:
        setattr(distributed, name, counted(name))
    found = {}
    try:
        for loss_type, level in (("dapo", "token"), ("dapo", "sequence")):
            case = make_case(17, mask=LONG, **options_for(loss_type, level))
            called.clear()
            world.run(case)
            found[level] = sorted(called)
        called.clear()
        logps_of(case, True, world)
        found["logps"] = sorted(called)
        called.clear()
        logps_of(case, True, world, wants="wb")
        found["frozen hidden"] = sorted(called)
        called.clear()
        logps_of(case, True, world, wants="")
        found["forward"] = sorted(called)
    finally:
        for name, function in real.items():
            setattr(distributed, name, function)
    return {"same": found}


COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "all_to_all", "gather")
COLLECTIVES += ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object", "barrier")

# ------------------------------------------------------------------------------------- the list
DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16
CASES: dict[str, Callable[[World], Found]] = {}
for _type, _level in LOSS_LEVELS:
    for _i, _layout in enumerate(("padded", "packed")):
        CASES[f"fp64-{_type}-{_level}-{_layout}"] = lambda w, t=_type, v=_level, y=_layout: as_one(
            w, every_loss(t, v, DOUBLE), layout=y
        )
    CASES[f"plain64-{_type}-{_level}"] = lambda w, t=_type, v=_level: as_one(
        w, make_case(5, dtype=DOUBLE, bias=False, **options_for(t, v))
    )
for _name, _rule in RULES.items():
    CASES[f"fp64-rule-{_name}"] = lambda w, r=_rule: as_one(
        w, make_case(6, dtype=DOUBLE, **options_for("grpo", beta=0.1)).with_options(**r)
    )
for _level in ("token", "sequence"):
    CASES[f"fp64-chunks-{_level}"] = lambda w, v=_level: as_one(
        w, make_case(4, dtype=DOUBLE, mask=LONG, **options_for("grpo", v, beta=0.1))
    )
CASES["fp64-hidden_rows"] = lambda w: hidden_rows(w, DOUBLE)
CASES["fp64-minus-infinity"] = columns_at_minus_infinity
CASES["fp64-twice"] = twice
CASES["fp64-nothing-active"] = lambda w: as_one(
    w, make_case(3, dtype=DOUBLE, mask=torch.zeros(2, 4, dtype=torch.bool), **options_for("grpo"))
)
for _wants in ("hwb", "h", "w", "wb", ""):
    CASES[f"fp64-logps-{_wants or 'no_grad'}"] = lambda w, x=_wants: logps(w, x)
for _wanted in ("hidden", "weight", "bias", "nothing"):
    CASES[f"fp64-frozen-{_wanted}"] = lambda w, x=_wanted: frozen(w, x)
for _count in (3, 61):
    for _by_mesh in (False, True):
        CASES[f"fp64-dtensor-{_count}-{'mesh' if _by_mesh else 'group'}"] = (
            lambda w, n=_count, m=_by_mesh: of_dtensors(w, n, m)
        )
BACKENDS = ["torch"] if unavailable("cpu", "cpu") else ["torch", "cpu"]
if os.environ.get("TRITON_INTERPRET") == "1":
    BACKENDS, CASES = ["triton"], {}
for _backend in BACKENDS:
    for _type, _level in LOSS_LEVELS if _backend != "triton" else LOSS_LEVELS[:2]:
        CASES[f"fp32-{_type}-{_level}-{_backend}"] = lambda w, t=_type, v=_level, b=_backend: (
            as_truth(w, every_loss(t, v, SINGLE), backend=b)
        )
    CASES[f"bf16-grpo-{_backend}"] = lambda w, b=_backend: as_truth(
        w, every_loss("grpo", "token", HALF, entropy_coef=0.0), backend=b
    )
    CASES[f"fp16-grpo-{_backend}"] = lambda w, b=_backend: as_truth(
        w, every_loss("grpo", "token", torch.float16, entropy_coef=0.0), backend=b
    )
    CASES[f"fp32-softcap-{_backend}"] = lambda w, b=_backend: as_truth(
        w, make_case(6, **options_for("grpo", beta=0.1, **RULES["everything"])), backend=b
    )
    CASES[f"fp32-hidden_rows-{_backend}"] = lambda w, b=_backend: hidden_rows(w, SINGLE, backend=b)
    CASES[f"fp32-logps-{_backend}"] = lambda w, b=_backend: logps(w, "hwb", SINGLE, backend=b)
    CASES[f"confident-{_backend}"] = lambda w, b=_backend: confident(w, b)
    CASES[f"inert-{_backend}"] = lambda w, b=_backend: masked_slots_are_inert(w, b)
    CASES[f"bits-{_backend}"] = lambda w, b=_backend: bits(w, b)
    for _where in ("hidden", "weight"):
        CASES[f"nan-{_where}-{_backend}"] = lambda w, x=_where, b=_backend: nan_is_seen(w, x, b)
if "triton" not in BACKENDS:
    CASES["collectives"] = collectives
    for _who in ("first", "last", "all"):
        CASES[f"refusals-{_who}"] = lambda w, x=_who: refusals(w, x)
    CASES["wrong-groups"] = wrong_groups


# ------------------------------------------------------------------------------------- ranks
def rank_of(size: int, rank: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{size}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    world = World(rank, size, init_device_mesh("cpu", (size,)))
    results: Found = {}
    for name, case in CASES.items():
        try:
            results[name] = case(world)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            break
    (folder / f"world{size}.{rank}.json").write_text(json.dumps(results))
    gc.collect()
    distributed.destroy_process_group()


def main(folder: Path, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    os.environ["GRPO_FAST_WORKSPACE_MIB"] = "0"  # chunks of the fewest rows: 32
    fork = multiprocessing.get_context("fork")
    for size in sizes:
        ranks = [fork.Process(target=rank_of, args=(size, rank, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        print("exit codes", [process.exitcode for process in ranks], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
