"""Times of the kernels in one call of `linear_grpo_loss` on a GPU, by kernel name.

    python -m benchmarks.gpu.kernel_times [--out FILE] [--device cpu]

torch's profiler records a forward and backward pass. The report lists the 25 slowest kernels, with
their launches and microseconds in one call. Kernels of vendor libraries, copies and fills are
included. The report also has the time of a call without the profiler. The GPU is idle for the part
of this time that exceeds the sum of the kernel times. To explain this part, the command prints the
CUDA functions in which the host spends most time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import measure
from benchmarks.kernels.operations import Shape
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.providers import our_loss
from benchmarks.options import measuring

# The last shape is so small that launching its kernels may take longer than running them.
SHAPES = (Shape(8192, 4096, 151936), Shape(8192, 896, 151936), Shape(1024, 896, 151936))
SMALL = Shape(16, 32, 96)  # the only shape on a CPU
CALLS, SHOWN = 3, 25


def profiled(shape: Shape, device: str) -> dict[str, Any]:
    """Return the entry of the report for one shape, with the slowest kernel first.

    Raises:
        RuntimeError: the profiler saw no kernel.
    """
    step = our_loss("auto", make_problem(shape, torch.bfloat16, device))
    for _ in range(2):
        step.run()
    measure.synchronize(device)
    with profile(activities=[getattr(ProfilerActivity, device.upper())]) as profiler:
        for _ in range(CALLS):
            step.run()
        measure.synchronize(device)
    events = profiler.key_averages()
    field = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    found = [
        {"kernel": event.key, "calls": event.count / CALLS, "us": getattr(event, field) / CALLS}
        for event in events
    ]
    found.sort(key=lambda row: -row["us"])
    kernels = [row for row in found[:SHOWN] if row["us"] > 0]
    if not kernels:
        raise RuntimeError("profiler: expected the times of kernels, got none")
    inside = sum(row["us"] for row in found)
    alone = measure.seconds(step, CALLS, device) * 1e6
    print(f"{tuple(shape)}: {inside / 1e3:.2f} ms in kernels, {alone / 1e3:.2f} ms a call")
    print(events.table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=70))
    entry = {"us_in_kernels": inside, "us_without_profiler": alone}
    return {"shape": list(shape), "kernels": kernels, **entry}


def main(arguments: list[str]) -> int:
    options = measuring(__doc__, arguments)
    report = measure.header("kernel times", options.device) | {"cases": [], "profiles": []}
    for shape in SHAPES if options.device == "cuda" else [SMALL]:
        report["profiles"].append(profiled(shape, options.device))
        if options.out:  # after each shape, because the session ends the command at a time limit
            measure.write(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
