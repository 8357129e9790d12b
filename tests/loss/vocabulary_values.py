"""Functions that compare an LM head that is sharded over ranks with a full head in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import grpo_fast
from tests import loss_cases, oracles
from tests.loss.vocabulary_world import SIZES, Found, World, as_one, beside_one, off
from tests.loss_cases import IS_INTERPRETER, Case, make_case, options_for

INF, NAN = float("inf"), float("nan")


def every_loss(loss_type: str, level: str, dtype: torch.dtype, **more: Any) -> Case:
    extras = {"beta": 0.2, "entropy_coef": 0.1, **more}
    return make_case(7, dtype=dtype, sampling=True, **options_for(loss_type, level, **extras))


# The 90 rows form three chunks. Triton's interpreter is slow, so it gets 36 rows in two chunks.
LENGTHS = [16, 9, 0, 11] if IS_INTERPRETER else [40, 17, 0, 33]
LONG = torch.arange(LENGTHS[0])[None, :] < torch.tensor(LENGTHS)[:, None]
RULES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperatures": {"temperature": 0.5 + torch.rand(5, 7, generator=torch.Generator())},
    "softcap": {"softcap": 2.0, "logit_scale": 1.5},
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
    rows = torch.randint(0, 50, case.ids.shape, generator=torch.Generator().manual_seed(1))

    def compute(case: Case, group: Any) -> dict[str, Tensor]:
        leaves = loss_cases.leaves_of("linear", case)
        leaves["hidden"] = leaves["hidden"].reshape(-1, 8)[:50]
        leaves = {n: x.requires_grad_() for n, x in leaves.items()}
        out = loss_cases.call("linear", case, **leaves, hidden_rows=rows, group=group, **more)
        return gradients(out.loss, leaves, loss=out.loss, logps=out.logps)

    return beside_one(world, case, compute)


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


def divergence(world: World, kind: str, dtype: torch.dtype, backend: str = "auto") -> Found:
    """Compare `linear_divergence` and a loss with a `DivergenceTerm` on sharded and full heads.

    The teacher is sharded like the student.
    """
    case = make_case(4, dtype=dtype, mask=LONG, **options_for("grpo", beta=0.1))
    g = torch.Generator().manual_seed(5)
    h, w, b = (torch.randn(*x, generator=g).to(dtype) for x in ((*LONG.shape, 6), (23, 6), (23,)))
    weights = torch.rand(LONG.shape, generator=g).to(dtype)

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
