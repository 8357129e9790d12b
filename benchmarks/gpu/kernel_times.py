"""Where a call's time goes on a GPU, by the names of the kernels, the vendor's among them.

    python -m benchmarks.gpu.kernel_times [--out FILE] [--device cpu]

`linear_grpo_loss`, forward and backward, under torch's profiler: the 25 kernels with the most time,
their calls and microseconds for one call of the loss, and the time between kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import measure
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.providers.ours import loss
from benchmarks.kernels.shapes import Shape
from benchmarks.options import measuring
from benchmarks.report.files import write

# The last is bound by launches, if any is.
SHAPES = (Shape(8192, 4096, 151936), Shape(8192, 896, 151936), Shape(1024, 896, 151936))
CALLS, SHOWN = 3, 25


def kernels_of(shape: Shape, device: str) -> dict[str, Any]:
    """One entry of the report: a shape with its kernels, most time first."""
    step = loss("auto")(make_problem(shape, torch.bfloat16, device))
    for _ in range(2):
        step.run()
    measure.synchronize(device)
    is_gpu = device == "cuda"
    activities = [ProfilerActivity.CUDA] if is_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(CALLS):
            step.run()
        measure.synchronize(device)
    field = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    found = [
        {"kernel": event.key, "calls": event.count / CALLS, "us": getattr(event, field) / CALLS}
        for event in profiler.key_averages()
    ]
    found.sort(key=lambda row: -row["us"])
    alone = measure.seconds(step, CALLS, device) * 1e6
    return {
        "shape": list(shape),
        "kernels": [row for row in found[:SHOWN] if row["us"] > 0],
        "us_in_kernels": sum(row["us"] for row in found),
        "us_without_profiler": alone,
        "launches": sum(row["calls"] for row in found),
    }


def main(arguments: list[str]) -> int:
    options = measuring("python -m benchmarks.gpu.kernel_times", __doc__, arguments)
    report = {**measure.header("kernel times", options.device), "cases": [], "profiles": []}
    for shape in SHAPES if options.device == "cuda" else [Shape(64, 64, 512)]:
        entry = kernels_of(shape, options.device)
        report["profiles"].append(entry)
        times = (entry["us_in_kernels"] / 1e3, entry["us_without_profiler"] / 1e3)
        print(f"{tuple(shape)}: {times[0]:.2f} ms in kernels, {times[1]:.2f} ms a call")
        for row in entry["kernels"]:
            print(f"{row['us']:10.1f} us {row['calls']:6.1f} x  {row['kernel'][:110]}")
        if options.out:
            write(Path(options.out), report)
    return 0 if all(entry["kernels"] for entry in report["profiles"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
