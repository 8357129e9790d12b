"""Tests that a call stays within its budget of GPU work, as counted by benchmarks/gpu/trace.py."""

from __future__ import annotations

import json

import pytest

from tests.kernels.triton_tools.launcher import HAS_TRITON, run_python

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
TRAINED = ("full, H = 4096", "full, H = 2048", "full, H = 896", "1024 rows, H = 896")


@pytest.fixture(scope="module")
def budgets():
    return json.loads(run_python("-m", "benchmarks.gpu.trace", "--json", interpret=False))


@pytest.mark.parametrize("name", [*TRAINED, "with KL", "frozen head (LoRA)", "head alone"])
def test_launches_and_waits(budgets, name):
    """Check that a call launches few kernels, and waits for the GPU at most once.

    At most 10 kernels per chunk and 12 other kernels are allowed. While the host waits for the
    number of active rows, the GPU must have other work. If the GEMMs of the gradient are small, the
    host does not wait.
    """
    found = budgets[name]
    assert found["per_chunk"] <= 10 and found["outside"] <= 12
    waits = name not in ("with KL", "1024 rows, H = 896")
    assert found["syncs"] == 0 and found["reads"] == waits


# The number of times that a call waits while the GPU has no other work. The number of tokens that a
# mask keeps, of targets in a large call with gradients, of rows without gradient in the backward
# pass of such a call, and of ids in a support determine shapes.
WAITS = {
    "with a mask": 1,
    "with a mask, 1024 rows": 1,
    "logits_grpo_loss, mask": 1,
    "linear_logps, gradient": 2,
    "support, 50 ids": 1,
    "support, frozen head": 1,
}


def test_waits(budgets):
    """Check every case, including zero advantages and several chunks.

    In the case "several chunks", a second wait ends while the GPU computes the first product.
    """
    assert {name: x["syncs"] for name, x in budgets.items() if x["syncs"]} == WAITS
    reads = {name for name, x in budgets.items() if x["reads"]}
    assert reads <= {*TRAINED[:3], "with a mask", "frozen head (LoRA)", "head alone",
                     "several chunks", "three heads of one weight"}  # fmt: skip


def test_launches_outside_of_chunks(budgets):
    assert budgets["with a mask"]["outside"] <= 21 and budgets["sequence level"]["outside"] <= 60


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("support, 50 ids", 8.5), ("support, frozen head", 3.9)]
)
def test_a_support(budgets, name, gigabytes):
    """Check that a call with `support=` does not compute the logits of the full vocabulary.

    The allowed memory traffic is one read of the weight and of `hidden`, and one write of the
    gradient of the weight. The host may wait only once: at the start, for the number of distinct
    ids.
    """
    found = budgets[name]
    assert found["outside"] <= 66 and found["gigabytes"] <= gigabytes
    assert found["products"] == 0 and found["chunks"] == 0
    assert found["syncs"] == 1 and found["reads"] == 0


@pytest.mark.parametrize(
    ("name", "per_chunk", "gigabytes"),
    [(TRAINED[0], 14, 0.75), (TRAINED[1], 14, 0.38), (TRAINED[2], 13, 0.18)],
)
def test_one_chunk_stays_in_its_budget(budgets, name, per_chunk, gigabytes):
    """Check a call with dH and dW whose 8192 rows are one chunk at V = 151936."""
    found = budgets[name]
    assert found["chunks"] == 1 and found["per_chunk"] <= per_chunk
    assert found["gigabytes"] <= gigabytes


@pytest.mark.parametrize(
    ("name", "products"),
    [
        *[(name, 6) for name in (*TRAINED, "three heads of one weight", "sequence level")],
        ("frozen head (LoRA)", 4), ("head alone", 4), ("no gradient", 2),
    ],
)  # fmt: skip
def test_products(budgets, name, products):
    assert budgets[name]["products"] == pytest.approx(products, rel=1e-3)
