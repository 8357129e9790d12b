"""Interpreter cases for the scaling of gradients (kernels/gpu/gradients.py)."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels.gpu import gradients
from tests.kernels.triton_tools.interpreter import only_memory_of
from tests.pairs import pairs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pairs(programs=[1, 2, 2048], size=[0, 1, 4095, 4096, 4097, 20000], dtype=DTYPES)
def test_scaled(dtype, size, programs, monkeypatch):
    """Check that `scale_` multiplies each element once, even if a program processes several blocks.

    The product is computed in fp32 and rounded once.
    """
    monkeypatch.setattr(gradients, "SCALE_PROGRAMS", programs)
    before = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    x, factor = before.clone(), torch.tensor(-0.3)
    with only_memory_of(x, factor):
        assert gradients.scale_(x, factor) is x
    assert torch.equal(x, (before.float() * factor).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_upstream_of_one_writes_nothing(dtype):
    x = torch.randn(5000).to(dtype)
    x[7], x[8] = float("nan"), float("inf")
    bits = x.view(torch.uint8).clone()
    gradients.scale_(x, torch.ones((), dtype=dtype))
    assert torch.equal(x.view(torch.uint8), bits)
