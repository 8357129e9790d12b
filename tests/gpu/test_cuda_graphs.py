"""Tests of CUDA graph capture without a GPU: the GPU path must not read values on the host.

A meta tensor has no values, so every operation that reads one (`nonzero`, `item`, `bool`, `cpu`, a
mask as index) raises an error, as it would during capture. In these tests, meta tensors report that
they are on a GPU. Triton kernels are not launched, because a launch reads no values on the host.
test_gpu_graphs.py captures and replays on a real GPU. test_argument_table.py checks that the GPU
path gives the values of a normal call.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from grpo_fast.kernels import route as backends
from grpo_fast.kernels.head import products, sources
from tests.gpu import test_gpu_graphs
from tests.pairs import pairs

# The modules whose kernels a loss or its gradients launch.
MODULES = ("linear", "rows", "gradients", "target_rows", "tokens")
IS_CUDA, IS_META = torch.Tensor.is_cuda.__get__, torch.Tensor.is_meta.__get__


class OnGpu(TorchFunctionMode):
    """Mode in which every tensor seems to be on a GPU, so that meta tensors take the GPU path."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is IS_CUDA or getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if function is IS_META or getattr(function, "__self__", None) is torch.Tensor.is_meta:
            return False
        return function(*args, **(kwargs or {}))


@pytest.fixture
def recorded(monkeypatch):
    """Simulate the capture of a CUDA graph.

    Tensors appear to be on an sm_90 GPU, and launches of Triton kernels do nothing.
    """
    pytest.importorskip("triton")
    gpu = "grpo_fast.kernels.gpu"
    for name in MODULES:
        monkeypatch.setattr(f"{gpu}.{name}.launch", lambda *args, **options: None)
    monkeypatch.setattr(f"{gpu}.linear.is_aligned", lambda matrix: True)
    monkeypatch.setattr(f"{gpu}.linear.tiles", lambda p, matrix, *shape: matrix)
    monkeypatch.setattr(f"{gpu}.linear.architecture", lambda device: "sm_90")
    monkeypatch.setattr(f"{gpu}.gradients.scale_", lambda gradients, factors: None)
    # torch.is_autocast_enabled does not support the meta device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    monkeypatch.setattr(backends, "_auto", lambda device_type: "triton")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with OnGpu():
        yield


def gradients(total, leaves):
    """Compute gradients without `torch.autograd.grad`, which would switch the mode `OnGpu` off.

    Each of them must have the shape and the dtype of its leaf.
    """
    found = _engine_run_backward(
        (total,), (torch.ones_like(total),), False, False, tuple(leaves), accumulate_grad=False
    )
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in leaves]
    return found


def on_meta(dtype=torch.bfloat16):
    x = test_gpu_graphs.values(0, 24, "meta")
    return {name: y.to(dtype) if y.dtype == torch.bfloat16 else y for name, y in x.items()}


@pairs(name=test_gpu_graphs.STEPS, dtype=[torch.bfloat16, torch.float32], workspace=["1024", "0"])
def test_no_value_is_read(recorded, monkeypatch, name, dtype, workspace):
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", workspace)
    # With these limits, the small sizes of this test use the code path of large sizes, in which a
    # single product writes dW in 16 bits.
    monkeypatch.setattr(sources, "TARGET_SHARE", 1)
    monkeypatch.setattr(products, "NARROW_FROM", 1)
    monkeypatch.setattr("grpo_fast.kernels.head.terms.READ_FROM", 0)
    results = test_gpu_graphs.STEPS[name](on_meta(dtype), gradients)
    assert all(x.shape.numel() for x in results[:2] + results[-1:] if x.dim())
