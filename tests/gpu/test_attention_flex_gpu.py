"""flex_attention on a real GPU, compiled: what CUDA falls back to without a FlashAttention that
fits.

    python -m pytest -m gpu tests/gpu/test_attention_flex_gpu.py

Not part of a GPU session: every kind of input is compiled, forward and backward. Skipped where
there is no GPU.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.attention.dispatch import Kind, self_test
from grpo_fast.attention.kernels import flex, reference
from grpo_fast.attention.spans import Rule
from tests.attention.layouts import two_levels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("kind", "bar"),
    [
        (Kind("cuda", BF16, 64, has_softcap=True), 1e-2),
        (Kind("cuda", BF16, 256, has_window=True, has_softcap=True), 1e-2),
        (Kind("cuda", BF16, 60), 1e-2),
        (Kind("cuda", FP32, 64), 1e-3),  # flex takes products of fp32 in TF32 where torch lets it
    ],
    ids=str,
)
def test_flex_is_the_dense_reference(kind, bar):
    """The self-test's tiny row, then one of many blocks, compiled once for both."""
    assert self_test(flex.attend, kind) <= bar
    layout = two_levels([300, 1, 64, 1, 128, 200, 3, 129, 333], [3, 4], "cuda")
    rule = Rule(
        kind.head_dim**-0.5, 100 if kind.has_window else None, 5.0 if kind.has_softcap else None
    )
    generator = torch.Generator().manual_seed(3)
    shapes = [(layout.total, heads, kind.head_dim) for heads in (6, 2, 2, 6)]
    *qkv, grad = (torch.randn(s, generator=generator).to("cuda", kind.dtype) for s in shapes)
    found = []
    for attention, dtype in ((flex.attend, kind.dtype), (reference.attend, torch.float64)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in qkv]
        out = attention(*leaves, layout, rule)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))])
    for x, y in zip(*found, strict=True):
        assert (x.double() - y).norm() <= bar * y.norm()
