"""Runner of the benchmark cases. It verifies all providers, and times the correct ones."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks.kernels.exact import acceptable, bars_of
from benchmarks.kernels.operations import OPERATIONS, Shape
from benchmarks.kernels.problem import Problem, Variant, make_problem
from benchmarks.kernels.providers import Provider, providers_of
from benchmarks.measure import Step
from benchmarks.report.tables import case_table
from grpo_fast.kernels import route

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Plan(NamedTuple):
    """Settings of a run. They are stored in its report.

    Attributes:
        operations: names in `OPERATIONS`.
        shapes: numbers of token rows, hidden sizes and vocabulary sizes.
        dtypes: names in `DTYPES`.
        variants: properties of the token rows. Each combination of an operation, shape, dtype and
            variant is one case.
        device: "cpu" or "cuda".
        allocators: the memory allocators for a CPU: "default", "fair" or both.
        backends: backends of grpo_fast.
        providers: substrings of provider names. A provider runs if its name contains one of them.
            An empty list selects all providers. Limits (bare matrix products, copies) always run.
        threads: number of CPU threads.
        budget: time for each provider and case, in seconds.
        rounds: maximum number of rounds. At least 2 rounds are run, even if they exceed the budget.
        verify_only: check the results without timing them.
    """

    operations: list[str]
    shapes: list[Shape]
    dtypes: list[str]
    variants: list[Variant]
    device: str
    allocators: list[str]
    backends: list[str]
    providers: list[str]
    threads: int
    budget: float
    rounds: int
    verify_only: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Plan:
        """Build a plan from the settings of a report, which were read from JSON."""
        shapes = [Shape(*shape) for shape in settings["shapes"]]
        variants = [Variant(*variant) for variant in settings["variants"]]
        return cls(**{**settings, "shapes": shapes, "variants": variants})

    def candidates(self, operation: str) -> list[Provider]:
        """Return the providers of an operation that this plan runs, including the limits."""
        ours = [f"grpo_fast ({name})" for name in self.backends]
        parts = [part.lower() for part in self.providers] or [""]

        def is_wanted(provider: Provider) -> bool:
            has_part = any(part in provider.name.lower() for part in parts)
            is_chosen = provider.role != "ours" or provider.name in ours
            return provider.role == "limit" or has_part and is_chosen

        return [provider for provider in providers_of(operation) if is_wanted(provider)]


def run(path: Path) -> list[dict[str, Any]]:
    """Run all cases of a report, whose settings are a plan, and return them.

    The report is written after each case, so an interrupted run keeps the cases that had finished.
    On a CPU, the cases run in one child process for each allocator, because a process chooses its
    allocator when it starts.
    """
    settings = json.loads(path.read_text())["settings"]
    if settings["device"] == "cuda":
        run_cases(path, "cuda")
    for allocator in settings["allocators"] if settings["device"] == "cpu" else ():
        changes = measure.FAIR_ALLOCATOR if allocator == "fair" else {}
        print(f"\n# allocator: {allocator}", flush=True)
        command = [sys.executable, "-m", "benchmarks.kernels.runner", str(path), allocator]
        environment = measure.child_environment(**changes)
        try:
            status = subprocess.run(command, env=environment, check=False).returncode
        except KeyboardInterrupt:
            status = -2
        if status:
            print(f"# interrupted (status {status}): the finished cases remain", file=sys.stderr)
    return json.loads(path.read_text())["cases"]


def run_cases(path: Path, allocator: str) -> None:
    """Run the cases of a report in this process. Write the report after each case.

    All operations of a shape, dtype and variant use the same tensors.
    """
    report = json.loads(path.read_text())
    plan = Plan.of(report["settings"])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(plan.threads)
    for dtype, shape, variant in itertools.product(plan.dtypes, plan.shapes, plan.variants):
        problem = make_problem(shape, DTYPES[dtype], plan.device, variant)
        for operation in plan.operations:
            case = run_case(operation, problem, dtype, variant, plan)
            report["cases"].append({"allocator": allocator, **case})
            measure.write(path, report)
        del problem
        release(plan.device)


def run_case(
    operation: str, problem: Problem, dtype_name: str, variant: Variant, plan: Plan
) -> dict[str, Any]:
    """Verify all providers, time the correct ones, print a table and return the results."""
    dtype = DTYPES[dtype_name]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    for provider in plan.candidates(operation):
        if provider.role == "limit" and provider.missing(plan.device, dtype):
            continue
        shape = ",".join(map(str, problem.shape))
        words = f"# {operation} {shape} {dtype_name}: verifying {provider.name}"
        print(words, flush=True)
        rows[provider.name], step = verify(provider, operation, problem, dtype, plan.device)
        if step:
            steps[provider.name] = step
    if not plan.verify_only:
        print(f"# timing {len(steps)} candidates", flush=True)
        time_steps(steps, rows, operation, problem, plan)
    case = {
        "operation": operation, "shape": list(problem.shape), "dtype": dtype_name,
        **variant._asdict(), "threads": plan.threads, "route": route_of(operation, problem),
        "rows": rows,
    }  # fmt: skip
    print(case_table(case), flush=True)
    return case


def route_of(operation: str, problem: Problem) -> str:
    """Describe the backend and the kernels that "auto" selects for an operation."""
    if operation.startswith("logits"):
        return str(route.rows_route("auto", problem.hidden))
    return str(route.head_route("auto", problem.weight))


def time_steps(
    steps: dict[str, Step], rows: dict[str, Any], operation: str, problem: Problem, plan: Plan
) -> None:
    """Add the times, the peak memory and the rate of work of each step to its row in `rows`.

    All N token rows count as work, although a provider may skip inactive rows.
    """
    times = measure.interleaved(steps, plan.device, plan.budget, plan.rounds)
    limit = min(times[name]["median_ms"] for name in steps if rows[name]["role"] == "limit")
    for name, step in steps.items():
        row, median = rows[name], times[name]["median_ms"]
        row |= times[name]
        row["ratio_to_limit"] = median / limit
        work = problem.shape, problem.hidden.element_size()
        row["rate"], row["unit"] = OPERATIONS[operation].rate(*work, median)
        if row["role"] != "limit":
            row["workspace_mib"] = measure.peak_memory(step, plan.device)


def verify(
    provider: Provider, operation: str, problem: Problem, dtype: torch.dtype, device: str
) -> tuple[dict[str, Any], Step | None]:
    """Run a provider once. Return its row of the report, and its step if its result is correct."""
    row: dict[str, Any] = {"role": provider.role, "status": "ok"}
    try:
        reason = provider.missing(device, dtype)
        if provider.role == "peer" and problem.support_ids is not None:
            reason = "computes over all ids"
        if reason:
            return row | {"status": "missing", "reason": reason}, None
        step = provider.prepare(problem)
        row |= {"path": step.path} if step.path else {}
        result = step()
        if provider.role == "limit":
            return row, step
        row["errors"] = problem.truth(OPERATIONS[operation].truth).errors(result)
    except Exception as error:  # a peer may raise anything; its row says so, and the run continues
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        row |= {"status": "failed", "reason": reason}
    # Release the memory only after the handler, because the exception still refers to tensors.
    if row["status"] == "failed":
        release(device)
        return row, None
    bars = bars_of(provider.role, dtype)
    if not acceptable(row["errors"], bars):
        words = f"beyond {bars[0]:.0e} (gradients), {bars[1]:.0e} nats (logps): not timed"
        return row | {"status": "wrong", "reason": words}, None
    return row, step


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), sys.argv[2])
