"""Fixtures that several kernel tests share."""

from __future__ import annotations

import pytest

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, layers


@pytest.fixture
def calls(monkeypatch):
    """Make the fast layers use the csrc matrix product on every CPU, and record its calls.

    Yield a list to which each product appends the shape of its output.
    """
    monkeypatch.setenv("GRPO_FAST_GEMM", "own")
    route.gemm_choice.cache_clear()
    counted = []

    def counting(a, b, out, product=gemm.mm_):
        counted.append(tuple(out.shape))
        return product(a, b, out)

    monkeypatch.setattr(layers.gemm, "mm_", counting)
    yield counted
    route.gemm_choice.cache_clear()
