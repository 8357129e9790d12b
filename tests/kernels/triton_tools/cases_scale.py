"""Interpreter cases for the scaling of gradients (kernels/gpu/gradients.py)."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels.gpu import gradients
from tests.kernels.triton_tools.interpreter import only_memory_of
from tests.pairs import pairs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pairs(programs=[1, 2, 2048], size=[0, 1, 4095, 4096, 4097, 20000], dtype=DTYPES, count=[1, 2, 3])
def test_scaled(dtype, size, programs, count, monkeypatch):
    """Check that `scale_` multiplies each element once, even if a program processes several blocks.

    The product is computed in fp32 and rounded once. Each gradient has a different factor.
    """
    monkeypatch.setattr(gradients, "SCALE_PROGRAMS", programs)
    generator = torch.Generator().manual_seed(size)
    before = [torch.randn(size + i, generator=generator).to(dtype) for i in range(count)]
    x = [y.clone() for y in before]
    factors = [torch.tensor(-0.3 - i) for i in range(count)]
    with only_memory_of(*x, *factors):
        gradients.scale_(x, factors)
    for found, y, factor in zip(x, before, factors, strict=True):
        assert torch.equal(found, (y.float() * factor).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_upstream_of_one_writes_nothing(dtype):
    x = torch.randn(5000).to(dtype)
    x[7], x[8] = float("nan"), float("inf")
    bits = x.view(torch.uint8).clone()
    gradients.scale_([x], [torch.ones((), dtype=dtype)])
    assert torch.equal(x.view(torch.uint8), bits)
