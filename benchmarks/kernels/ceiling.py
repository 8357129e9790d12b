"""Measured upper limits of this machine's CPU: fp32 multiply-add rate and memory bandwidth.

    python -m benchmarks.kernels.ceiling     writes benchmarks/results/ceiling-CPU.json

benchmarks/report/plots.py draws these limits as the roof of its roofline. The multiply-add rate is
the best rate of many short runs of a loop. The loop runs independent fp32 multiply-adds in
registers on all cores. No matrix product on the same machine can be faster. The bandwidth is
measured with a copy that is larger than every cache.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, measure
from benchmarks.options import new_parser
from benchmarks.report.files import write

SOURCE = Path(__file__).with_suffix(".cpp")
ROUNDS = 2_000_000  # iterations of the loop in one run, which takes a few milliseconds
ATTEMPTS = 500
COPIED = 1 << 29  # size of the copied tensor in bytes


def multiply_add_rate(threads: int) -> float:
    """Return the fp32 flop/s of all threads together, as the best of `ATTEMPTS` short runs."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ceiling.so"
        compiler = os.environ.get("CXX", "c++")
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
        rate = ctypes.CDLL(str(library)).rate
    rate.restype = ctypes.c_double
    rate.argtypes = [ctypes.c_int, ctypes.c_long]
    return max(rate(threads, ROUNDS) for _ in range(ATTEMPTS))


def copy_rate(threads: int) -> float:
    """Return the memory bandwidth of a copy in bytes/s, counting both reads and writes."""
    torch.set_num_threads(threads)
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    best = min(measure.seconds(lambda: target.copy_(source), 1, "cpu") for _ in range(40))
    return 2 * COPIED / best


def file_of(hardware: dict[str, Any]) -> Path:
    """Return the path of the JSON file with the limits of this hardware."""
    return RESULTS / f"ceiling-{measure.cpu_class(hardware)}.json"


def main() -> None:
    new_parser(__doc__).parse_args()
    threads = os.cpu_count() or 1
    found = {
        **measure.header("ceiling", "cpu"),
        "threads": threads,
        "flops": {"fp32": multiply_add_rate(threads)},
        "copy_bytes": copy_rate(threads),
        "source": "measured: python -m benchmarks.kernels.ceiling",
    }
    path = file_of(found["hardware"])
    write(path, found)
    print(f"{found['flops']['fp32'] / 1e9:.0f} GFLOP/s, {found['copy_bytes'] / 1e9:.1f} GB/s")
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
