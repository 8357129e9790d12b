"""Budgets for the GPU work of a call, which benchmarks/gpu/trace.py counts."""

from __future__ import annotations

import json

import pytest

from tests.kernels.triton_tools.launcher import HAS_TRITON, run_python

if HAS_TRITON:
    from benchmarks.gpu import trace
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
TRAINED = ("full, H = 4096", "full, H = 2048", "full, H = 896", "1024 rows, H = 896")


@pytest.fixture(scope="module")
def budgets():
    return json.loads(run_python("-m", "benchmarks.gpu.trace", "--json", interpret=False))


@pytest.mark.parametrize("name", [*TRAINED, "with KL", "frozen head (LoRA)", "head alone"])
def test_launches_and_waits(budgets, name):
    """A call reads back from the GPU at most once, after a matrix product has been launched."""
    found = budgets[name]
    assert found["per_chunk"] <= 20 and found["outside"] <= 60
    assert found["syncs"] == 0 and found["reads"] == (name != "with KL")


def test_a_mask_costs_one_wait(budgets):
    assert budgets["with a mask"]["syncs"] == 1
    assert budgets["sequence level"]["syncs"] == 1


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("support, 50 ids", 8.5), ("support, frozen head", 3.9)]
)
def test_a_support(budgets, name, gigabytes):
    """The rows of W are read once, those of hidden once and dW written once, with no product of the
    vocabulary; the host waits for how many ids there are, before any work.
    """
    found = budgets[name]
    assert found["outside"] <= 125 and found["gigabytes"] <= gigabytes
    assert found["products"] == 0 and found["chunks"] == 0
    assert found["syncs"] == 1 and found["reads"] == 0


def test_one_chunk_stays_in_its_budget(budgets):
    assert [name for name in TRAINED if name in trace.ONE_CHUNK] == list(trace.ONE_CHUNK)
    for name in trace.ONE_CHUNK:
        found = trace.Budget(**budgets[name])
        assert not trace.overrun(name, found)
        for field in ("chunks", "per_chunk", "outside", "gigabytes"):
            more = found._replace(**{field: 1.1 * getattr(found, field)})
            assert f"{name}: expected at most" in trace.overrun(name, more), field


@pytest.mark.parametrize(
    ("name", "products"),
    [
        *[(name, 6) for name in (*TRAINED, "three heads of one weight", "sequence level")],
        ("frozen head (LoRA)", 4), ("head alone", 4), ("no gradient", 2),
    ],
)  # fmt: skip
def test_products(budgets, name, products):
    assert budgets[name]["products"] == pytest.approx(products, rel=1e-3)
