"""Run gloo process groups that share one head, and compare them with one process.

    python -m tests.loss.vocabulary_ranks FOLDER 2    # FOLDER/world2.0.json, FOLDER/world2.1.json

The ranks are forked processes, which saves the time of importing the package. Each rank runs
`CASES` in order.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from grpo_fast.kernels.route import unavailable
from tests.loss import vocabulary_refusals as refusals
from tests.loss import vocabulary_values as values
from tests.loss.vocabulary_world import Found, World, as_one, as_truth
from tests.loss_cases import LEAVES_AND_LEVELS, LOSS_LEVELS, make_case, options_for

DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16
CASES: dict[str, Callable[[World], Found]] = {
    "fp64-no-bias": partial(
        as_one, case=make_case(5, dtype=DOUBLE, bias=False, **options_for("grpo"))
    ),
    "fp64-hidden_rows": partial(values.hidden_rows, dtype=DOUBLE),
    "fp64-minus-infinity": values.columns_at_minus_infinity,
    "fp64-nothing-active": partial(
        as_one,
        case=make_case(
            3, dtype=DOUBLE, mask=torch.zeros(2, 4, dtype=torch.bool), **options_for("grpo")
        ),
    ),
}
for _index, (_type, _level) in enumerate(LOSS_LEVELS):
    _layout = ("padded", "packed")[_index % 2]
    _case = values.every_loss(_type, _level, DOUBLE)
    CASES[f"fp64-{_type}-{_level}-{_layout}"] = partial(as_one, case=_case, layout=_layout)
for _name, _rule in values.RULES.items():
    _case = make_case(6, dtype=DOUBLE, **options_for("grpo", beta=0.1)).with_options(**_rule)
    CASES[f"fp64-rule-{_name}"] = partial(as_one, case=_case)
for _level in ("token", "sequence"):
    _options = options_for("grpo", _level, beta=0.1)
    _case = make_case(4, dtype=DOUBLE, mask=values.LONG, **_options)
    CASES[f"fp64-chunks-{_level}"] = partial(as_one, case=_case)
for _kind in ("forward_kl", "reverse_kl", "jsd"):
    CASES[f"fp64-divergence-{_kind}"] = partial(values.divergence, kind=_kind, dtype=DOUBLE)
for _wants in ("hwb", "h", "w", "wb", ""):
    CASES[f"fp64-logps-{_wants or 'no_grad'}"] = partial(values.logps, wants=_wants)
for _count in (3, 61):
    for _by_mesh in (False, True):
        CASES[f"fp64-dtensor-{_count}-{'mesh' if _by_mesh else 'group'}"] = partial(
            values.of_dtensors, vocabulary=_count, by_mesh=_by_mesh
        )
BACKENDS = ["torch"] if unavailable("cpu", "cpu") else ["torch", "cpu"]
if os.environ.get("TRITON_INTERPRET") == "1":
    BACKENDS, CASES = ["triton"], {}
for _backend in BACKENDS:
    _cases = {
        f"fp32-{t}-{level}": values.every_loss(t, level, SINGLE)
        for t, level in (LEAVES_AND_LEVELS if _backend != "triton" else LOSS_LEVELS[:2])
    }
    for _name, _dtype in (("bf16", HALF), ("fp16", torch.float16)):
        _cases[f"{_name}-grpo"] = values.every_loss("grpo", "token", _dtype, entropy_coef=0.0)
    _options = options_for("grpo", beta=0.1, **values.RULES["everything"])
    _cases["fp32-softcap"] = make_case(6, **_options)
    _works = {name: partial(as_truth, case=x) for name, x in _cases.items()} | {
        "fp32-hidden_rows": partial(values.hidden_rows, dtype=SINGLE),
        "fp32-logps": partial(values.logps, wants="hwb", dtype=SINGLE),
        "fp32-divergence": partial(values.divergence, kind="jsd", dtype=SINGLE),
        "confident": values.confident,
        "bits": values.bits,
        "nan-hidden": partial(values.nan_is_seen, where="hidden"),
        "nan-weight": partial(values.nan_is_seen, where="weight"),
    }
    for _name, _work in _works.items():
        CASES[f"{_name}-{_backend}"] = partial(_work, backend=_backend)
if "triton" not in BACKENDS:
    CASES["collectives"] = values.collectives
    for _who in ("first", "last", "all"):
        CASES[f"refusals-{_who}"] = partial(refusals.refusals, who=_who)
    CASES["wrong-groups"] = refusals.wrong_groups


def rank_of(rank: int, size: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
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


def main(folder: Path, size: int) -> None:
    torch.set_num_threads(1)
    os.environ["GRPO_FAST_WORKSPACE_MIB"] = "0"  # gives the smallest chunks, of 32 rows
    multiprocessing.start_processes(rank_of, (size, folder), size, start_method="fork")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", type=int, help="number of ranks")
    main(**vars(parser.parse_args()))
