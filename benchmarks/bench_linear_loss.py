"""hidden -> GRPO loss and gradients: ours against the peers, and against the three matrix products alone.

    python benchmarks/bench_linear_loss.py [--quick] [--dtypes fp32 bf16] [--shapes 512,896,32000 ...]

Shapes are N,H,V (tokens, hidden size, vocabulary). Every result is verified against fp64 before it is timed; all are
timed in one process on the same tensors, in interleaved rounds. On the CPU each case runs in two processes: under
glibc's default allocator, and under one that keeps its pages ("fair", see benchmarks/measure.py). Prints tables, writes
JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (the path above makes the script runnable without installation)

from benchmarks import measure  # noqa: E402
from benchmarks.problem import make_problem  # noqa: E402
from benchmarks.providers import PROVIDERS, Provider, Step, versions  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Shape = tuple[int, int, int]

QUICK_SHAPES: list[Shape] = [(64, 64, 512), (1024, 256, 8192)]
CPU_SHAPES: list[Shape] = [*QUICK_SHAPES, (512, 896, 32000), (512, 896, 151936)]
GPU_SHAPES: list[Shape] = [(8192, 896, 151936), (8192, 2048, 151936), (8192, 4096, 151936), (4096, 4096, 128256)]


def main() -> None:
    """Runs every case under every allocator, prints the tables, writes the JSON."""
    options = parse_arguments()
    if options.child:
        run_cases(options)
        return
    cases: list[dict[str, Any]] = []
    for allocator in options.allocators:
        cases += run_child(allocator)
    report = {
        "benchmark": "linear_loss, forward + backward",
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": measure.commit(),
        "hardware": measure.hardware(options.device),
        "versions": {"python": platform.python_version(), **versions()},
        "threads": options.threads,
        "settings": {"budget_s": options.budget, "rounds": options.rounds, "allocators": options.allocators},
        "method": {"memory": " ".join((measure.peak_memory.__doc__ or "").split())},
        "cases": cases,
    }
    path = Path(options.out or default_path(options, report["commit"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(verdict(cases))
    print(f"written: {os.path.relpath(path)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two small shapes, a fraction of the time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", nargs="+", type=shape_argument, metavar="N,H,V")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES))
    parser.add_argument("--providers", nargs="+", metavar="NAME", help="only those whose name contains one of these")
    parser.add_argument("--allocators", nargs="+", choices=("default", "fair"))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--budget", type=float, help="seconds of timing for each provider and case")
    parser.add_argument("--rounds", type=int, help="at most this many rounds; at least 2 are run, whatever the budget")
    parser.add_argument("--out", help="where the JSON goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.shapes = options.shapes or (
        QUICK_SHAPES if options.quick else GPU_SHAPES if options.device == "cuda" else CPU_SHAPES
    )
    options.dtypes = options.dtypes or (["bf16"] if options.device == "cuda" else ["fp32", "bf16"])
    options.allocators = ["cuda"] if options.device == "cuda" else options.allocators or ["default", "fair"]
    options.budget = options.budget or (2.0 if options.quick else 20.0)
    options.rounds = options.rounds or (9 if options.quick else 25)
    return options


def shape_argument(text: str) -> Shape:
    n, h, v = (int(part) for part in text.split(","))
    if n % 8:
        raise argparse.ArgumentTypeError(f"N: expected a multiple of 8 (there are 8 completions), got {n}")
    return n, h, v


def run_child(allocator: str) -> list[dict[str, Any]]:
    """The same command in a fresh process, with its allocator set before it starts. Cut short, it keeps what it has."""
    environment = {**os.environ, **(measure.FAIR_ALLOCATOR if allocator == "fair" else {})}
    print(f"\n# allocator: {allocator}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text("[]")
        command = [sys.executable, __file__, *sys.argv[1:], "--child", str(file)]
        try:
            status = subprocess.run(command, env=environment, check=False).returncode
        except KeyboardInterrupt:
            status = -2
        if status:
            print(f"# cut short with status {status}: the cases so far are kept", file=sys.stderr)
        return [{"allocator": allocator, **case} for case in json.loads(file.read_text())]


def run_cases(options: argparse.Namespace) -> None:
    """The child's work: every dtype and shape, written after each."""
    file = Path(options.child)
    cases: list[dict[str, Any]] = []
    for dtype_name in options.dtypes:
        for shape in options.shapes:
            cases.append(run_case(shape, dtype_name, options))
            scratch = file.with_suffix(".new")
            scratch.write_text(json.dumps(cases))
            scratch.replace(file)


def run_case(shape: Shape, dtype_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Verify every provider, time those that are right, weigh them, print the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    dtype, device = DTYPES[dtype_name], options.device
    problem = make_problem(shape, dtype, device)
    chosen = [
        p
        for p in PROVIDERS
        if p.role == "limit" or not options.providers or any(o in p.name for o in options.providers)
    ]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    torch._dynamo.reset()
    for provider in chosen:
        if provider.role == "limit" and provider.missing(device, dtype):
            continue
        rows[provider.name], step = verify(provider, problem, dtype, device)
        if step:
            steps[provider.name] = step
    for name, samples in measure.interleaved(steps, device, options.budget, options.rounds).items():
        rows[name] |= measure.spread(samples) | {"samples_ms": [round(s * 1e3, 4) for s in samples]}
        if rows[name]["role"] != "limit":
            rows[name] |= measure.peak_memory(steps[name], device)
    limit = min(
        (name for name, row in rows.items() if row["role"] == "limit"), key=lambda name: rows[name]["median_ms"]
    )
    for row in rows.values():
        if "median_ms" in row:
            row["ratio_to_limit"] = row["median_ms"] / rows[limit]["median_ms"]
            row["gflops"] = problem.flops / row["median_ms"] / 1e6
    case = {"shape": list(shape), "dtype": dtype_name, "limit": limit, "rows": rows}
    print(table(case), flush=True)
    return case


def verify(provider: Provider, problem: Any, dtype: torch.dtype, device: str) -> tuple[dict[str, Any], Step | None]:
    """The provider's row so far, and its step when the result is right."""
    row: dict[str, Any] = {"role": provider.role, "status": "ok"}
    try:
        reason = provider.missing(device, dtype)
        if reason:
            return row | {"status": "missing", "reason": reason}, None
        step = provider.prepare(problem)
        result = step()
        truth = provider.truth(problem)
        if truth is None:
            return row, step
        found = measure.errors(result, truth)
    except Exception as error:  # a peer may fail in any way; it is listed, and the others go on
        return row | {
            "status": "failed",
            "reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
        }, None
    row["errors"] = found._asdict()
    if not found.acceptable(dtype):
        return row | {"status": "wrong", "reason": f"beyond {measure.TOLERANCE[dtype]:.0e} of fp64: not timed"}, None
    return row, step


def table(case: dict[str, Any]) -> str:
    """One case as text."""
    n, h, v = case["shape"]
    lines = [
        f"\n{case['dtype']}  N={n} H={h} V={v}   (limit: {case['limit']}; MiB: peak beyond inputs and gradients)",
        f"{'':32}{'ms':>11}{'±':>10}{'× limit':>9}{'GFLOP/s':>9}{'MiB':>8}{'err dH':>9}{'err dW':>9}",
    ]
    for name, row in case["rows"].items():
        error = row.get("errors")
        tail = f"{error['grad_hidden']:>9.0e}{error['grad_weight']:>9.0e}" if error else ""
        if "median_ms" in row:
            digits = 1 if row["median_ms"] >= 100 else 3
            line = f"{row['median_ms']:>11.{digits}f}{row['spread_ms']:>10.{digits}f}{row['ratio_to_limit']:>9.2f}"
            line += f"{row['gflops']:>9.0f}" + (f"{row['workspace_mib']:>8.0f}" if "workspace_mib" in row else " " * 8)
        else:
            line, tail = f"  {row['status']}: {row['reason']}", f"  ({tail.strip()})" if tail else ""
        lines.append(f"{name:32}{line}{tail}")
    return "\n".join(lines)


def verdict(cases: list[dict[str, Any]]) -> str:
    """For every case: ours against the limit, and against the fastest peer that was right."""
    lines = ["\nours (auto) against the limit (the faster three GEMMs), and the fastest right peer's time over ours"]
    for case in cases:
        rows = case["rows"]
        label = f"{case['allocator']:8}{case['dtype']:6}{str(tuple(case['shape'])):22}"
        ours = rows.get("grpo_fast (auto)", {})
        peers = {name: row for name, row in rows.items() if row["role"] == "peer" and "median_ms" in row}
        if "median_ms" not in ours:
            lines.append(f"{label} {ours.get('status', 'not run')}: {ours.get('reason', '')}")
            continue
        line = f"{label}{ours['ratio_to_limit']:6.2f} × limit"
        if peers:
            best = min(peers, key=lambda name: peers[name]["median_ms"])
            line += f"   {peers[best]['median_ms'] / ours['median_ms']:6.2f} × faster than {best}"
        lines.append(line)
    return "\n".join(lines)


def default_path(options: argparse.Namespace, commit: str) -> Path:
    device = torch.cuda.get_device_name().replace(" ", "-") if options.device == "cuda" else "cpu"
    quick = "quick-" if options.quick else ""
    day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    return ROOT / "benchmarks" / "results" / f"{quick}linear_loss-{device}-{day}-{commit}.json"


if __name__ == "__main__":
    main()
