"""Cases in which ranks share one head, and the job that compares them with one process."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from grpo_fast.kernels.route import unavailable
from grpo_fast.objective.divergences import DIVERGENCES
from tests.loss import vocabulary_refusals as refusals
from tests.loss import vocabulary_values as values
from tests.loss.vocabulary_world import Found, World, as_one, as_truth
from tests.loss_cases import LAYOUTS, LEAVES_AND_LEVELS, LOSS_LEVELS, make_case, options_for

DOUBLE, SINGLE = torch.float64, torch.float32
Case = Callable[[World], Found]


def one(seed: int, level: str = "token", rule: Any = None, **options: Any) -> Case:
    made = make_case(seed, dtype=DOUBLE, **options_for("grpo", level, beta=0.1), **options)
    return partial(as_one, case=made.with_options(**rule or {}))


def cases_in_fp64() -> dict[str, Case]:
    of = partial(partial, dtype=DOUBLE)
    found = {
        "no-bias": one(5, bias=False), "minus-infinity": values.columns_at_minus_infinity,
        "nothing-active": one(3, mask=torch.zeros(2, 4, dtype=torch.bool)),
        "hidden_rows": of(values.hidden_rows),
        **{f"rule-{name}": one(6, rule=rule) for name, rule in values.RULES.items()},
        **{f"chunks-{level}": one(4, level, mask=values.LONG) for level in ("token", "sequence")},
        **{f"divergence-{kind}": of(values.divergence, kind=kind) for kind in DIVERGENCES},
        **{f"logps-{x or 'no_grad'}": of(values.logps, wants=x)
           for x in ("hwb", "h", "w", "wb", "")},
        **{f"dtensor-{n}-{name}": partial(values.of_dtensors, vocabulary=n, by_mesh=name == "mesh")
           for n in (3, 61) for name in ("group", "mesh")},
    }  # fmt: skip
    for (loss_type, level), layout in zip(LOSS_LEVELS, itertools.cycle(LAYOUTS)):  # noqa: B905
        case = values.every_loss(loss_type, level, DOUBLE)
        found[f"{loss_type}-{level}-{layout}"] = partial(as_one, case=case, layout=layout)
    return found


def cases_of(backend: str) -> dict[str, Case]:
    losses = LEAVES_AND_LEVELS if backend != "triton" else LOSS_LEVELS[:2]
    cases = {f"fp32-{t}-{level}": values.every_loss(t, level, SINGLE) for t, level in losses}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        cases[f"{name}-grpo"] = values.every_loss("grpo", "token", dtype, entropy_coef=0.0)
    options = options_for("grpo", beta=0.1, **values.RULES["everything"])
    cases["fp32-softcap"] = make_case(6, **options)
    works = {name: partial(as_truth, case=x) for name, x in cases.items()} | {
        "fp32-hidden_rows": partial(values.hidden_rows, dtype=SINGLE),
        "fp32-logps": partial(values.logps, wants="hwb", dtype=SINGLE),
        "fp32-divergence": partial(values.divergence, kind="jsd", dtype=SINGLE),
        "confident": values.confident, "bits": values.bits,
        **{f"nan-{x}": partial(values.nan_is_seen, where=x) for x in ("hidden", "weight")},
    }  # fmt: skip
    return {f"{name}-{backend}": partial(work, backend=backend) for name, work in works.items()}


if os.environ.get("TRITON_INTERPRET") == "1":
    CASES = cases_of("triton")
else:
    CASES = {f"fp64-{name}": case for name, case in cases_in_fp64().items()} | cases_of("torch")
    CASES |= {} if unavailable("cpu", "cpu") else cases_of("cpu")
    CASES |= {f"refusals-{x}": partial(refusals.refusals, who=x) for x in ("first", "last", "all")}
    CASES |= {"collectives": values.collectives, "wrong-groups": refusals.wrong_groups}


def results() -> Found:
    """Run all cases on this rank in order. The last result holds the error that ended the job."""
    os.environ["GRPO_FAST_WORKSPACE_MIB"] = "0"  # gives the smallest chunks, of 32 rows
    size = distributed.get_world_size()
    world = World(distributed.get_rank(), size, init_device_mesh("cpu", (size,)))
    found: Found = {}
    for name, case in CASES.items():
        try:
            found[name] = case(world)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    return found
