"""Ranks of gloo worlds that share one head, compared with one process that has the whole of it.

    python -m tests.loss.vocabulary_ranks FOLDER 2 4    # FOLDER/world2.0.json, …, world4.3.json

The package is imported once and the ranks are forks. All ranks go through `CASES` in order.
"""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from grpo_fast.kernels.route import unavailable
from tests.loss import vocabulary_refusals as refusals
from tests.loss import vocabulary_values as values
from tests.loss.vocabulary_world import Found, World, as_one, as_truth
from tests.loss_cases import LEAVES_AND_LEVELS, LOSS_LEVELS, make_case, options_for

DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16
CASES: dict[str, Callable[[World], Found]] = {}
for _index, (_type, _level) in enumerate(LOSS_LEVELS):
    _layout = ("padded", "packed")[_index % 2]
    CASES[f"fp64-{_type}-{_level}-{_layout}"] = lambda w, t=_type, v=_level, y=_layout: as_one(
        w, values.every_loss(t, v, DOUBLE), layout=y
    )
CASES["fp64-no-bias"] = lambda w: as_one(
    w, make_case(5, dtype=DOUBLE, bias=False, **options_for("grpo"))
)
for _name, _rule in values.RULES.items():
    CASES[f"fp64-rule-{_name}"] = lambda w, r=_rule: as_one(
        w, make_case(6, dtype=DOUBLE, **options_for("grpo", beta=0.1)).with_options(**r)
    )
for _level in ("token", "sequence"):
    CASES[f"fp64-chunks-{_level}"] = lambda w, v=_level: as_one(
        w, make_case(4, dtype=DOUBLE, mask=values.LONG, **options_for("grpo", v, beta=0.1))
    )
CASES["fp64-hidden_rows"] = lambda w: values.hidden_rows(w, DOUBLE)
CASES["fp64-minus-infinity"] = values.columns_at_minus_infinity
CASES["fp64-nothing-active"] = lambda w: as_one(
    w, make_case(3, dtype=DOUBLE, mask=torch.zeros(2, 4, dtype=torch.bool), **options_for("grpo"))
)
for _kind in ("forward_kl", "reverse_kl", "jsd"):
    CASES[f"fp64-divergence-{_kind}"] = lambda w, k=_kind: values.divergence(w, k, DOUBLE)
for _wants in ("hwb", "h", "w", "wb", ""):
    CASES[f"fp64-logps-{_wants or 'no_grad'}"] = lambda w, x=_wants: values.logps(w, x)
for _count in (3, 61):
    for _by_mesh in (False, True):
        CASES[f"fp64-dtensor-{_count}-{'mesh' if _by_mesh else 'group'}"] = (
            lambda w, n=_count, m=_by_mesh: values.of_dtensors(w, n, m)
        )
BACKENDS = ["torch"] if unavailable("cpu", "cpu") else ["torch", "cpu"]
if os.environ.get("TRITON_INTERPRET") == "1":
    BACKENDS, CASES = ["triton"], {}
for _backend in BACKENDS:
    for _type, _level in LEAVES_AND_LEVELS if _backend != "triton" else LOSS_LEVELS[:2]:
        CASES[f"fp32-{_type}-{_level}-{_backend}"] = lambda w, t=_type, v=_level, b=_backend: (
            as_truth(w, values.every_loss(t, v, SINGLE), backend=b)
        )
    CASES[f"bf16-grpo-{_backend}"] = lambda w, b=_backend: as_truth(
        w, values.every_loss("grpo", "token", HALF, entropy_coef=0.0), backend=b
    )
    CASES[f"fp16-grpo-{_backend}"] = lambda w, b=_backend: as_truth(
        w, values.every_loss("grpo", "token", torch.float16, entropy_coef=0.0), backend=b
    )
    CASES[f"fp32-softcap-{_backend}"] = lambda w, b=_backend: as_truth(
        w, make_case(6, **options_for("grpo", beta=0.1, **values.RULES["everything"])), backend=b
    )
    CASES[f"fp32-hidden_rows-{_backend}"] = lambda w, b=_backend: values.hidden_rows(
        w, SINGLE, backend=b
    )
    CASES[f"fp32-logps-{_backend}"] = lambda w, b=_backend: values.logps(
        w, "hwb", SINGLE, backend=b
    )
    CASES[f"fp32-divergence-{_backend}"] = lambda w, b=_backend: values.divergence(
        w, "jsd", SINGLE, b
    )
    CASES[f"confident-{_backend}"] = lambda w, b=_backend: values.confident(w, b)
    CASES[f"inert-{_backend}"] = lambda w, b=_backend: values.masked_slots_are_inert(w, b)
    CASES[f"bits-{_backend}"] = lambda w, b=_backend: values.bits(w, b)
    for _where in ("hidden", "weight"):
        CASES[f"nan-{_where}-{_backend}"] = lambda w, x=_where, b=_backend: values.nan_is_seen(
            w, x, b
        )
if "triton" not in BACKENDS:
    CASES["collectives"] = values.collectives
    for _who in ("first", "last", "all"):
        CASES[f"refusals-{_who}"] = lambda w, x=_who: refusals.refusals(w, x)
    CASES["wrong-groups"] = refusals.wrong_groups


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
