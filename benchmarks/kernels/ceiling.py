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

SOURCE = r"""
#include <ctime>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
constexpr int kBytes = 64, kChains = 24;
#else
constexpr int kBytes = 32, kChains = 12;
#endif
typedef float Vec __attribute__((vector_size(kBytes)));

static double now() {  // CPU time of this thread, which other programs do not change
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void work(long rounds, float seed, float* sum, double* seconds) {
  const double start = now();
  Vec x[kChains];  // the loops are unrolled, so that each element stays in a register
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) x[i] = Vec{} + seed * (i + 1);
  const Vec a = Vec{} + 0.999f, b = Vec{} + seed;
  for (long r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) x[i] = x[i] * a + b;
  }
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) x[0] += x[i];
  *sum = x[0][0];
  *seconds = now() - start;
}

extern "C" double rate(int threads, long rounds) {  // flop/s
  std::vector<std::thread> pool;
  std::vector<float> sums(threads);
  std::vector<double> seconds(threads);
  for (int t = 0; t < threads; ++t)
    pool.emplace_back(work, rounds, 0.001f * (t + 1), &sums[t], &seconds[t]);
  for (auto& thread : pool) thread.join();
  double total = 0;
  for (double s : seconds) total += 2.0 * rounds * kChains * (kBytes / sizeof(float)) / s;
  return total;
}
"""
ROUNDS = 2_000_000  # iterations of the loop in one run, which takes a few milliseconds
ATTEMPTS = 500
COPIED = 1 << 29  # size of the copied tensor in bytes


def multiply_add_rate(threads: int) -> float:
    """Return the fp32 flop/s of all threads together, as the best of `ATTEMPTS` short runs."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "ceiling.cpp"
        library = Path(folder) / "ceiling.so"
        source.write_text(SOURCE)
        compiler = os.environ.get("CXX", "c++")
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
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
