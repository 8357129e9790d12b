"""Benchmarks of the small shapes with pytest-benchmark. `make bench-small` runs them.

Use them while you work on a kernel: `--benchmark-compare` shows the change since an earlier run.
The providers, and the verification before timing, are the same as in `python -m benchmarks`.
"""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import measure
from benchmarks.kernels.operations import OPERATIONS, QUICK, Shape
from benchmarks.kernels.problem import Problem, make_problem
from benchmarks.kernels.providers import providers_of
from benchmarks.kernels.runner import DTYPES, verify

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THREADS = 2
CANDIDATES = [
    (operation, provider) for operation in OPERATIONS for provider in providers_of(operation)
]


@functools.cache
def problem_of(shape: Shape, dtype: str) -> Problem:
    return make_problem(shape, DTYPES[dtype], DEVICE)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda pair: f"{pair[0]}-{pair[1].name}")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", QUICK, ids=lambda shape: "N{}-H{}-V{}".format(*shape))
def test_operation(benchmark, shape: Shape, dtype: str, candidate: tuple) -> None:
    operation, provider = candidate
    torch.set_num_threads(THREADS)
    row, step = verify(provider, operation, problem_of(shape, dtype), DTYPES[dtype], DEVICE)
    if row["status"] == "missing":
        pytest.skip(row["reason"])
    assert step is not None, f"{row['status']}: {row['reason']}"

    def synchronized() -> None:
        step.run()
        measure.synchronize(DEVICE)

    def reset() -> None:  # must return None: pytest-benchmark passes a setup's result as arguments
        step.reset()

    benchmark.group = f"{operation} {dtype} {tuple(shape)}"
    benchmark.extra_info |= {"threads": THREADS, "commit": measure.commit()}
    slow = measure.seconds(step, 1, DEVICE) > 1.0
    benchmark.pedantic(synchronized, setup=reset, rounds=2 if slow else 9, iterations=1)
