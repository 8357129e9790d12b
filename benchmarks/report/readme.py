"""Measure all numbers in benchmarks/README.md that come from a CPU, and update all its tables.

    python -m benchmarks.report.readme                 measure everything (15 minutes)
    python -m benchmarks.report.readme --only loss     run one step (--help names all steps)
    python -m benchmarks.report.readme --tables        only update tables and pictures

Measure on a quiet machine. Each step writes a file to benchmarks/results/, usually cpu-STEP.json.
The command then draws kernels.png and readme.png from these files, draws step-real.png from the
results of the pretrained model, and updates the tables in benchmarks/README.md. The GPU tables
come from gpu_session.json, which benchmarks/gpu_session.sh writes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.options import new_parser
from benchmarks.report import plots
from benchmarks.report.files import cases_of, machine

PAGE = ROOT / "benchmarks" / "README.md"
DEVICES = ("cpu", "gpu")
BEGIN, END = "<!-- {} tables: begin -->", "<!-- {} tables: end -->"


CPU = "--device cpu --allocator default"
SMALL = "--shapes 1024,256,8192 512,896,32000"
FAST = "--providers grpo_fast plain compile CCE"
PARTS = "linear_logps linear_logps_backward logits_grpo_loss logits_grpo_loss_inplace"
LENGTHS = "--model cpu-s --tokens 64 256 1024 4096"
PEAKED = "--shapes 1024,256,8192 --active 1.0 0.2 --softmax peaked --mask ragged"
FAIR = "--device cpu --allocator fair"

# Commands of the steps. If a command ends with --out or --json, the path of the results is
# appended: benchmarks/results/cpu-STEP.json. Budgets are in seconds for each candidate and case.
STEPS = {
    "loss": f"benchmarks {CPU} --budget 2.5 --shapes 64,64,512 1024,256,8192 512,896,32000 --out",
    "loss-large": f"benchmarks {CPU} --budget 8 --shapes 512,896,151936 {FAST} --out",
    "gate": "benchmarks.kernels.gate --update",
    "parts": f"benchmarks {PARTS} {CPU} --budget 1.5 {SMALL} {FAST} TRL --out",
    "tokens": f"benchmarks {CPU} --budget 1.5 {LENGTHS} {FAST} TRL Liger --out",
    "fair": f"benchmarks {FAIR} --budget 1.5 {SMALL} --dtype fp32 bf16 {FAST} --out",
    "peaked": f"benchmarks {CPU} --budget 1 {PEAKED} {FAST} --out",
    "bf16": f"benchmarks {CPU} --budget 1.5 {SMALL} --dtype bf16 --out",
    "ceiling": "benchmarks.kernels.ceiling",
    "rollout": "benchmarks.trainers.rollout --device cpu --budget 6 --json",
}
PLOTTED = ("loss", "loss-large", "parts", "tokens")
# Results of benchmarks.trainers.step with a pretrained model. docs/real_model.md lists the
# commands.
REAL_STEPS = ("step-real", "step-real-2k", "step-real-2k-trl", "step-real-8k")


def file_of(name: str) -> Path:
    return RESULTS / f"cpu-{name}.json"


def run_step(name: str) -> int:
    """Run a step, and return its exit code."""
    started = time.monotonic()
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", *STEPS[name].split()]
    if command[-1] in ("--out", "--json"):
        command.append(str(file_of(name)))
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    print(f"== {name}: {time.monotonic() - started:.0f} s, exit code {code}", flush=True)
    return code


def tables(device: str) -> str:
    """Return the tables for "cpu" or "gpu" in Markdown, with one table for each operation."""
    files = [file_of(name) for name, command in STEPS.items() if command.endswith("--out")]
    if device == "gpu":
        files = [RESULTS / "gpu_session.json"]
    cases = cases_of(file for file in files if file.is_file())
    commits: dict[str, set[str]] = {}
    for case in cases:
        commits.setdefault(machine(case["hardware"]), set()).add(case["commit"])
    lines = []
    for name in sorted(commits):
        lines += [f"{name};", f"commits: {', '.join(sorted(commits[name]))}.", ""]
    for operation in dict.fromkeys(case["operation"] for case in cases):
        chosen = [case for case in cases if case["operation"] == operation]
        rows = [row for case in chosen for row in case["rows"].items()]
        shown = (n for n, x in rows if x["role"] in ("ours", "peer") and x["status"] != "missing")
        names = list(dict.fromkeys(shown))
        lines += [f"`{operation}`", "", f"| N, H, V | limit | {' | '.join(names)} |"]
        lines.append("|" + "---|" * (len(names) + 2))
        for case in chosen:
            cells = " | ".join(cell(case, name) for name in names)
            lines.append(f"| {label(case)} | {limit(case)} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def label(case: dict[str, Any]) -> str:
    words = [", ".join(map(str, case["shape"])), case["dtype"]]
    words += [case["allocator"]] if case["allocator"] == "fair" else []
    inactive = case.get("inactive", "masked")
    words += [f"{case['active']:g} active"] if case["active"] < 1 else []
    words += [f"(rest: {inactive})"] if inactive != "masked" else []
    words += [word for word in (case["softmax"], case["mask"]) if word not in ("flat", "full")]
    return " ".join(words)


def limit(case: dict[str, Any]) -> str:
    times = {name: row["median_ms"] for name, row in case["rows"].items() if row["role"] == "limit"}
    best = min(times, key=lambda name: times[name])
    return f"{best} {times[best]:.{0 if times[best] >= 100 else 2}f} ms"


def cell(case: dict[str, Any], name: str) -> str:
    row = case["rows"].get(name)
    if row is None:
        return ""
    if "median_ms" not in row:
        return str(row["status"])
    memory = f"{max(row['workspace_mib'], 0.0):.0f} MiB"
    error = max(value for key, value in row["errors"].items() if key != "loss")
    return f"{row['ratio_to_limit']:.2f}× {memory}" + (f" {error:.0e}" if error > 1e-3 else "")


def refreshed(text: str) -> str:
    """Return the text of the page with new tables between the marks `BEGIN` and `END`."""
    for device in DEVICES:
        before, begin, rest = text.partition(BEGIN.format(device))
        _, end, after = rest.partition(END.format(device))
        text = f"{before}{begin}\n{tables(device)}{end}{after}"
    return text


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS))
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    chosen = [] if options.tables else options.only or STEPS
    codes = [run_step(name) for name in chosen]
    plots.draw([str(file_of(name)) for name in PLOTTED], RESULTS / "kernels.png")
    plots.draw_bars([str(file_of("loss"))], RESULTS / "readme.png")
    plots.draw_steps([file_of(name) for name in REAL_STEPS], RESULTS / "step-real.png")
    PAGE.write_text(refreshed(PAGE.read_text()))
    print(f"written: {PAGE.relative_to(ROOT)} and three pictures in benchmarks/results")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
