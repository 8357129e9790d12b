"""Tests of CUDA graph capture without a GPU: the GPU path must not read values on the host.

A meta tensor has no values, so every operation that reads one (`nonzero`, `item`, `bool`, `cpu`, a
mask as index) raises an error, as it would during capture. In these tests, meta tensors report that
they are on a GPU. Triton kernels are not launched, because a launch reads no values on the host.
tests/gpu/test_gpu_graphs.py captures and replays on a real GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from grpo_fast import (
    LossConfig,
    grpo_loss,
    linear_grpo_loss,
    linear_logps,
    logits_grpo_loss,
    logits_logps,
)
from grpo_fast.kernels import route as backends
from grpo_fast.kernels.head import products, sources
from tests.pairs import pairs

T, H, V, B = 24, 32, 96, 3
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
    """Simulate the capture of a CUDA graph, and yield a function that switches it on or off.

    Tensors appear to be on an sm_90 GPU, and launches of Triton kernels do nothing.
    """
    pytest.importorskip("triton")
    gpu = "grpo_fast.kernels.gpu"
    for name in ("linear", "rows", "exponentials", "coefficients", "gradients", "target_rows"):
        monkeypatch.setattr(f"{gpu}.{name}.launch", lambda *args, **options: None)
    monkeypatch.setattr(f"{gpu}.linear.is_aligned", lambda matrix: True)
    monkeypatch.setattr(f"{gpu}.linear.tiles", lambda p, matrix, *shape: matrix)
    monkeypatch.setattr(f"{gpu}.linear.architecture", lambda device: "sm_90")
    monkeypatch.setattr(f"{gpu}.gradients.scale_", lambda gradients, factors: None)
    # torch.is_autocast_enabled does not support the meta device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    monkeypatch.setattr(backends, "_auto", lambda device_type: "triton")

    def set_capturing(on: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on)

    set_capturing(True)
    with OnGpu():
        yield set_capturing


def rand(*shape, dtype=torch.float32, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def tokens(**more):
    per_token = {name: rand(T) for name in ("old_logps", "ref_logps")}
    cu_seqlens = torch.zeros(B + 1, dtype=torch.int32, device="meta")
    return per_token | {"cu_seqlens": cu_seqlens, "num_items_in_batch": rand()} | more


def ids():
    return torch.zeros(T, dtype=torch.long, device="meta")


def head(dtype=torch.bfloat16):
    return [rand(n, H, dtype=dtype, grad=True) for n in (T, V)]


CONFIGS = {
    "token level": {"loss_type": "dapo", "beta": 0.1},
    "entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.1, "beta": 0.1},
    "sequence level": {"loss_type": "gspo", "beta": 0.1, "softcap": 20.0},
    "by length": {"loss_type": "grpo", "beta": 0.1, "compute_entropy": True},
}


def gradients(total, leaves):
    """Compute gradients without `torch.autograd.grad`, which would switch the mode `OnGpu` off."""
    leaves = tuple(leaves)
    return _engine_run_backward(
        (total,), (torch.ones_like(total),), False, False, leaves, accumulate_grad=False
    )


def finish(result, *leaves):
    assert result.metrics
    for gradient, leaf in zip(gradients(result.loss, leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype


@pairs(workspace=["1024", "0"], dtype=[torch.bfloat16, torch.float32], name=CONFIGS)
def test_linear_grpo_loss(recorded, monkeypatch, name, dtype, workspace):
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", workspace)
    # With these limits, the small sizes of this test use the code path of large sizes, in which a
    # single product writes dW in 16 bits.
    monkeypatch.setattr(sources, "TARGET_SHARE", 1)
    monkeypatch.setattr(products, "NARROW_FROM", 1)
    config, leaves, bias = LossConfig(**CONFIGS[name]), head(dtype), rand(V, dtype=dtype, grad=True)
    finish(linear_grpo_loss(*leaves, ids(), rand(B), config, bias=bias, **tokens()), *leaves, bias)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_grpo_loss(recorded, name):
    leaf = rand(T, V, dtype=torch.bfloat16, grad=True)
    finish(logits_grpo_loss(leaf, ids(), rand(B), LossConfig(**CONFIGS[name]), **tokens()), leaf)


@pytest.mark.parametrize("name", CONFIGS)
def test_grpo_loss(recorded, name):
    options = {key: value for key, value in CONFIGS[name].items() if key != "softcap"}
    leaf = rand(T, grad=True)
    finish(grpo_loss(leaf, rand(B), LossConfig(**options), entropy=rand(T), **tokens()), leaf)


def logps_gradients(function, leaves, **options):
    results = function(*leaves, ids(), **options)
    total = sum(x.sum() for x in (results if options["return_entropy"] else [results]))
    return gradients(total, leaves)


@pairs(workspace=["1024", "0"], dtype=[torch.bfloat16, torch.float32], return_entropy=[False, True])
def test_logps(recorded, monkeypatch, dtype, return_entropy, workspace):
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", workspace)
    options = {"return_entropy": return_entropy}
    found = logps_gradients(linear_logps, head(dtype), temperature=rand(T), **options)
    logits = rand(T, V, dtype=dtype, grad=True)
    found += logps_gradients(logits_logps, [logits], **options)
    assert [x.shape for x in found] == [(T, H), (V, H), (T, V)]
    with torch.no_grad():
        linear_logps(*head(dtype), ids())


def test_the_test_sees_a_sync(recorded, monkeypatch):
    """Check that the tests of this file notice if the host reads a value of a tensor.

    Outside of a capture, the same calls read the number of inactive rows or search for targets of
    -100. On meta tensors, either must raise an error.
    """
    recorded(False)
    # Disable the value checks, because they copy numbers to pinned host memory, which needs a GPU.
    monkeypatch.setattr("grpo_fast.loss.checks.ValueChecks.send", lambda self: None)
    # Skip rows even if the GEMMs are small.
    monkeypatch.setattr("grpo_fast.kernels.head.terms.READ_FROM", 0)

    def copy_to_host_async(x):  # pinned memory needs a GPU
        raise RuntimeError("to the host")

    monkeypatch.setattr("grpo_fast.kernels.head.driver.copy_to_host_async", copy_to_host_async)
    for call in (
        lambda: linear_logps(*head(), ids()),
        lambda: linear_grpo_loss(*head(), ids(), rand(B), LossConfig(), **tokens(ref_logps=None)),
        lambda: grpo_loss(
            rand(T), rand(B), LossConfig(beta=0.1), **tokens(completion_mask=rand(T) == 0)
        ),
    ):
        with pytest.raises((NotImplementedError, RuntimeError), match="nonzero|to the host"):
            call()


@pytest.mark.parametrize("return_entropy", [False, True])
def test_a_capture_computes_what_a_normal_call_skips(monkeypatch, return_entropy):
    """Check that a simulated graph capture on the CPU gives the same results as a normal call.

    Some rows have a target of -100 or an advantage of 0. A normal call skips these rows, and a
    capture computes them with a coefficient of 0.
    """
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / 4
    target_ids, advantages = torch.randint(V, (T,), generator=g), torch.randn(T, generator=g)
    some, config = target_ids.clone(), LossConfig(loss_type="dapo")
    some[3:9], advantages[5:20] = -100, 0.0
    cu_seqlens = torch.tensor([0, 10, T])

    def run():
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        results = linear_logps(*leaves, some, return_entropy=return_entropy, backend="torch")
        results = list(results) if return_entropy else [results]
        found = torch.autograd.grad(sum((x * (1 + i)).sum() for i, x in enumerate(results)), leaves)
        loss = linear_grpo_loss(
            *leaves, target_ids, advantages, config, cu_seqlens=cu_seqlens, num_items_in_batch=9,
            backend="torch",
        ).loss  # fmt: skip
        return [*results, *found, loss, *torch.autograd.grad(loss, leaves)]

    expected = run()
    for module in ("loss.call", "loss.checks", "kernels.head.driver"):
        monkeypatch.setattr(f"grpo_fast.{module}.is_capturing", lambda x: True)
    monkeypatch.setattr(
        "grpo_fast.kernels.head.terms.active_rows",
        lambda g, _: torch.ones_like(g, dtype=torch.bool),
    )
    for actual, want in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["completion_mask", "grad_filter", "validate"])
def test_refused(recorded, name):
    value = {"completion_mask": rand(T) == 0, "grad_filter": 0.01, "validate": "full"}[name]
    with pytest.raises(
        ValueError, match=f"{name}: expected .* while a CUDA graph is recorded, got"
    ):
        linear_grpo_loss(*head(), ids(), rand(B), LossConfig(beta=0.1), **tokens(**{name: value}))
