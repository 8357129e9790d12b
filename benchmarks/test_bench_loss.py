"""pytest-benchmark wrappers for the small shapes: `make bench-small`, or `pytest benchmarks/test_bench_loss.py`.

The same providers and the same check before timing as in bench_linear_loss.py, which makes the tables of the README;
this one compares quickly (`--benchmark-compare`) while a kernel is being worked on.
"""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import measure
from benchmarks.problem import Problem, make_problem
from benchmarks.providers import PROVIDERS, Provider

SHAPES = [(64, 64, 512), (1024, 256, 8192)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def problem_of(shape: tuple[int, int, int], dtype: str) -> Problem:
    return make_problem(shape, DTYPES[dtype], DEVICE)


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "N{}-H{}-V{}".format(*shape))
def test_linear_loss(benchmark, shape: tuple[int, int, int], dtype: str, provider: Provider) -> None:
    missing = provider.missing(DEVICE, DTYPES[dtype])
    if missing:
        pytest.skip(missing)
    problem = problem_of(shape, dtype)
    step = provider.prepare(problem)
    truth = provider.truth(problem)
    result = step()
    if truth is not None:
        errors = measure.errors(result, truth)
        assert errors.acceptable(DTYPES[dtype]), f"wrong, so not timed: {errors}"

    def synchronized() -> None:
        step()
        measure.synchronize(DEVICE)

    benchmark.group = f"{dtype} {shape}"
    benchmark.extra_info |= {"threads": torch.get_num_threads(), "commit": measure.commit()}
    slow = measure.seconds(step, 1, DEVICE) > 1.0
    benchmark.pedantic(synchronized, rounds=2 if slow else 9, iterations=1)
