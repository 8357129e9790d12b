"""Peak memory of the loss and its gradients on a CPU, over the number of tokens.

    python -m benchmarks.kernels.memory          writes benchmarks/results/cpu-memory.json

Each provider and number of tokens runs in a new process, whose memory is limited to 8 GiB
(RLIMIT_DATA). If the process runs out of memory, the report says so, and larger numbers of tokens
are not tried for this provider. Every result is compared with the exact one in fp64.
benchmarks/report/readme.py draws the report.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import RESULTS, measure
from benchmarks.kernels.exact import acceptable, bars_of
from benchmarks.kernels.operations import COMPLETIONS, OURS, Shape
from benchmarks.kernels.problem import Problem, make_problem
from benchmarks.kernels.providers import Provider, providers_of
from benchmarks.options import new_parser

OPERATION = "linear_grpo_loss"
HIDDEN, VOCABULARY = 64, 32768
ROWS = 64  # tokens of the problem that is repeated
TOKENS = [512, 2048, 4096, 8192, 16384, 32768, 65536]
COMPILED = ("torch.compile", "CCE", "Liger")  # providers that compile once for each shape
LIMIT_GIB = 8
OUT_OF_MEMORY = "out of memory"
# How Linux and torch report that an allocation failed.
MESSAGES = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "MemoryError")


def candidates() -> list[Provider]:
    """Return grpo_fast with its default backend, and all peers."""
    found = providers_of(OPERATION)
    return [one for one in found if one.name == OURS or one.role == "peer"]


def repeated(problem: Problem, times: int) -> Problem:
    """Return a problem in which each completion repeats its tokens.

    The loss is a mean over tokens, so the loss and the gradient of the weight do not change. The
    gradients of all copies of a hidden state add up to its gradient in the original problem.
    """

    def repeat(rows: Tensor) -> Tensor:
        copies = rows.detach().unflatten(0, (COMPLETIONS, -1)).repeat_interleave(times, dim=0)
        return copies.flatten(0, 1)

    return Problem(
        repeat(problem.hidden).requires_grad_(), problem.weight, repeat(problem.target_ids),
        problem.advantages, repeat(problem.old_logps), repeat(problem.mask),
        problem.cu_seqlens * times,
    )  # fmt: skip


def measured(provider: Provider, tokens: int) -> dict[str, Any]:
    """Limit the memory of this process, measure the peak of a call and verify its result."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    small = make_problem(Shape(ROWS, HIDDEN, VOCABULARY), torch.float32)
    truth = small.truth("loss")
    times = tokens // ROWS
    problem = repeated(small, times)
    limit = LIMIT_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # The first call loads libraries or compiles. This memory is not part of the peak.
    step = provider.prepare(problem)
    warm = step if provider.name in COMPILED else provider.prepare(small)
    warm()
    results: list[measure.Result] = []

    def kept() -> measure.Result:
        results.append(step())
        return results[0]

    peak = measure.peak_memory(kept, "cpu")
    copies = results[0]["grad_hidden"].unflatten(0, (COMPLETIONS, times, -1))
    errors = truth.errors({**results[0], "grad_hidden": copies.sum(1).flatten(0, 1)})
    is_right = acceptable(errors, bars_of(provider.role, torch.float32))
    return {"status": "ok" if is_right else "wrong", "errors": errors, "workspace_mib": peak}


def run_child(name: str, tokens: int) -> dict[str, Any]:
    """Measure one provider and number of tokens in a new process, and return its results."""
    command = [sys.executable, "-m", "benchmarks.kernels.memory", "--child", name, str(tokens)]
    environment = measure.child_environment(TORCHINDUCTOR_COMPILE_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if any(message in done.stderr for message in MESSAGES):
        return {"status": OUT_OF_MEMORY, "reason": last}
    return {"status": "failed", "reason": last}


def run(path: Path) -> int:
    """Measure all providers. Print and store each result as soon as it exists."""
    report: dict[str, Any] = {
        **measure.header("memory over tokens", "cpu"),
        "operation": OPERATION, "hidden": HIDDEN, "vocabulary": VOCABULARY, "dtype": "fp32",
        "threads": 1, "limit_gib": LIMIT_GIB, "providers": {},
    }  # fmt: skip
    for provider in candidates():
        reason = provider.missing("cpu", torch.float32)
        rows: dict[str, Any] = {}
        report["providers"][provider.name] = {"role": provider.role, "missing": reason} | (
            {} if reason else {"tokens": rows}
        )
        for count in TOKENS if reason is None else []:
            row = rows[str(count)] = run_child(provider.name, count)
            shown = row.get("workspace_mib", row.get("reason", ""))
            number = f"{shown:.0f} MiB" if isinstance(shown, float) else shown
            print(f"{provider.name:18} {count:8,} tokens  {row['status']:14} {number}", flush=True)
            measure.write(path, report)
            if row["status"] != "ok":
                break
    measure.write(path, report)
    print(f"written: {os.path.relpath(path)}")
    ours = report["providers"][OURS]["tokens"].values()
    return 0 if all(row["status"] == "ok" for row in ours) else 1


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-memory.json")
    parser.add_argument("--child", nargs=2, metavar=("PROVIDER", "N"), help="used internally")
    options = parser.parse_args(arguments)
    if options.child:
        provider = next(one for one in candidates() if one.name == options.child[0])
        print(json.dumps(measured(provider, int(options.child[1]))))
        return 0
    return run(options.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
