"""Tests that a call stays within its budget of GPU work, as counted by benchmarks/gpu/trace.py."""

from __future__ import annotations

import json

import pytest

from tests.kernels.triton_tools.launcher import HAS_TRITON, run_python

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
TRAINED = ("full, H = 4096", "full, H = 2048", "full, H = 896", "1024 rows, H = 896")
# For each case, the exact number of chunks and of products of N·V·H, and the largest number of
# kernels per chunk, of other kernels, and of gigabytes that the kernels read and write. A full call
# has 8192 rows at V = 151936. A call with `support=` computes no logits of the full vocabulary. It
# may read the weight and `hidden` once, and write the gradient of the weight once.
LIMITS: dict[str, dict[str, float]] = {
    TRAINED[0]: dict(chunks=1, products=6, per_chunk=10, outside=11, gigabytes=0.75),
    TRAINED[1]: dict(chunks=1, products=6, per_chunk=10, outside=11, gigabytes=0.38),
    TRAINED[2]: dict(chunks=1, products=6, per_chunk=10, outside=11, gigabytes=0.18),
    TRAINED[3]: dict(products=6, per_chunk=10, outside=11),
    "with KL": dict(per_chunk=10, outside=11),
    "frozen head (LoRA)": dict(products=4, per_chunk=10, outside=11),
    "head alone": dict(products=4, per_chunk=10, outside=11),
    "with a mask": dict(outside=12),
    "sequence level": dict(products=6, outside=52),
    "three heads of one weight": dict(products=6),
    "no gradient": dict(products=2),
    "support, 50 ids": dict(chunks=0, products=0, outside=52, gigabytes=8.5),
    "support, frozen head": dict(chunks=0, products=0, outside=44, gigabytes=3.9),
}
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


@pytest.fixture(scope="module")
def budgets():
    return json.loads(run_python("-m", "benchmarks.gpu.trace", "--json", interpret=False))


@pytest.mark.parametrize("name", LIMITS)
def test_a_call_stays_in_its_limits(budgets, name):
    for what, limit in LIMITS[name].items():
        found = budgets[name][what]
        if what in ("chunks", "products"):
            assert found == pytest.approx(limit, rel=1e-3), what
        else:
            assert found <= limit, what


def test_waits(budgets):
    """Check every case, including zero advantages and several chunks.

    A call may also wait for the number of active rows while the GPU has other work. If the GEMMs of
    the gradient are small, it does not wait. In the case "several chunks", the wait ends while the
    GPU computes the first product.
    """
    assert {name: x["syncs"] for name, x in budgets.items() if x["syncs"]} == WAITS
    assert {name for name, x in budgets.items() if x["reads"]} == {
        *TRAINED[:3], "with a mask", "frozen head (LoRA)", "head alone", "several chunks",
        "three heads of one weight",
    }  # fmt: skip
