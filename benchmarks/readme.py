"""Everything the README says about a CPU, measured in one go on a quiet machine, and its tables as Markdown.

    python -m benchmarks.readme                 about a quarter of an hour; then the tables
    python -m benchmarks.readme --only loss     one step; --list names them
    python -m benchmarks.readme --tables        the tables again, from the committed JSON

Writes benchmarks/results/cpu-STEP.json, the gate's ratios and kernels.png. A step is not started after the deadline.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reports import cases_of, machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PY = sys.executable


class Step(NamedTuple):
    """A command (after the interpreter) that writes benchmarks/results/cpu-NAME.json by its option `out`."""

    name: str
    command: str
    out: str = "--out"


CPU = "--device cpu --allocator default"
SMALL = "--shapes 1024,256,8192 512,896,32000"
FAST = "--providers grpo_fast plain compile CCE"
PARTS = "linear_logps linear_logps_backward logits_grpo_loss logits_grpo_loss_inplace"

# In the order of their worth, should the time run out. Budgets are seconds for each candidate and case.
STEPS = [
    Step("loss", f"-m benchmarks {CPU} --budget 2.5 --shapes 64,64,512 1024,256,8192 512,896,32000"),
    Step("loss-large", f"-m benchmarks {CPU} --budget 8 --shapes 512,896,151936 {FAST}"),
    Step("gate", "-m benchmarks.gate --update", ""),
    Step("parts", f"-m benchmarks {PARTS} {CPU} --budget 1.5 {SMALL} {FAST} TRL"),
    Step("tokens", f"-m benchmarks {CPU} --budget 1.5 --model cpu-s --tokens 64 256 1024 4096 {FAST} TRL Liger"),
    Step("fair", f"-m benchmarks --device cpu --allocator fair --budget 1.5 {SMALL} --dtype fp32 bf16 {FAST}"),
    Step(
        "peaked",
        f"-m benchmarks {CPU} --budget 1 --shapes 1024,256,8192 --active 1.0 0.2 --softmax peaked --mask ragged {FAST}",
    ),
    Step("bf16", f"-m benchmarks {CPU} --budget 1.5 {SMALL} --dtype bf16"),
    Step("rollout", "-m benchmarks.bench_rollout --device cpu --budget 6", "--json"),
]
PLOTTED = ("loss", "loss-large", "parts", "tokens")


def file_of(name: str) -> Path:
    return RESULTS / f"cpu-{name}.json"


def run_steps(steps: list[Step], deadline: float) -> int:
    started, status = time.monotonic(), 0
    for step in steps:
        passed = time.monotonic() - started
        if passed > deadline:
            print(f"== {step.name}: not started after {passed:.0f} s; run it with --only {step.name}")
            status = 1
            continue
        print(f"== {step.name}", flush=True)
        command = [PY, *step.command.split(), *([step.out, str(file_of(step.name))] if step.out else [])]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        status = max(status, min(code, 1))
        print(f"== {step.name}: {time.monotonic() - started - passed:.0f} s, exit code {code}", flush=True)
    return status


def tables() -> str:
    """Every measured case as Markdown: × the limit and MiB, one table for each operation."""
    files = [file_of(step.name) for step in STEPS if step.out == "--out" and file_of(step.name).is_file()]
    cases = cases_of(files)
    if not cases:
        return "nothing is measured yet"
    heads = sorted({f"{machine(case['hardware'])}; commit {case['commit']}" for case in cases})
    lines = [*heads, ""]
    for operation in dict.fromkeys(case["operation"] for case in cases):
        chosen = [case for case in cases if case["operation"] == operation]
        names = list(
            dict.fromkeys(name for case in chosen for name, row in case["rows"].items() if is_shown(name, row))
        )
        lines += [f"`{operation}`", "", f"| N, H, V | limit | {' | '.join(names)} |", "|" + "---|" * (len(names) + 2)]
        lines += [
            f"| {label(case)} | {limit(case)} | {' | '.join(cell(case, name) for name in names)} |" for case in chosen
        ]
        lines.append("")
    return "\n".join(lines)


def is_shown(name: str, row: dict[str, Any]) -> bool:
    return row["role"] in ("ours", "peer") and row["status"] != "missing"


def label(case: dict[str, Any]) -> str:
    words = [", ".join(map(str, case["shape"])), case["dtype"]]
    words += [case["allocator"]] if case["allocator"] == "fair" else []
    words += [f"{case['active']:g} active"] if case["active"] < 1 else []
    return " ".join([*words, *(word for word in (case["softmax"], case["mask"]) if word not in ("flat", "full"))])


def limit(case: dict[str, Any]) -> str:
    times = {name: row["median_ms"] for name, row in case["rows"].items() if row["role"] == "limit"}
    best = min(times, key=lambda name: times[name])
    return f"{best} {times[best]:.3g} ms"


def cell(case: dict[str, Any], name: str) -> str:
    row = case["rows"].get(name)
    if row is None:
        return "not in this run"
    if "median_ms" not in row:
        return str(row["status"])
    return f"{row['ratio_to_limit']:.2f}× {row['workspace_mib']:.0f} MiB"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS])
    parser.add_argument("--list", action="store_true", help="the steps and their commands")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--deadline", type=float, default=780, help="seconds after which no step is started")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    if options.list:
        print("\n".join(f"{step.name:12} python {step.command}" for step in steps))
        return 0
    status = 0 if options.tables else run_steps(steps, options.deadline)
    plotted = [str(file_of(name)) for name in PLOTTED if file_of(name).is_file()]
    if plotted:
        status = max(status, subprocess.run([PY, "-m", "benchmarks.plots", *plotted], cwd=ROOT, check=False).returncode)
    print(tables())
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
