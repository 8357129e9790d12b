"""Tests of CUDA graphs, on a real GPU and without one.

On a GPU, a replay with new input values must give the same bits as a normal call with these values.
`benchmarks/gpu_session.sh --part tests` runs these tests. grpo_fast/kernels/gpu/launch.py documents
what can be captured.

Without a GPU, the GPU path must not read values on the host. A meta tensor has no values, so every
operation that reads one (`nonzero`, `item`, `bool`, `cpu`, a mask as index) raises an error, as it
would during capture. In this test, meta tensors report that they are on a GPU. Triton kernels are
not launched, because a launch reads no values on the host. test_argument_table.py checks that the
GPU path gives the values of a normal call.
"""

from collections.abc import Callable

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

T, H, V, B = 192, 128, 5000, 3


def values(seed: int, T: int = T, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Return a random batch of T tokens in which every row has a nonzero coefficient.

    A call outside of a graph then skips no row. Its GEMMs have the same shapes as the GEMMs in a
    graph, and therefore the same bits.
    """
    g = torch.Generator().manual_seed(seed)
    cut = torch.randint(1, T - 1, (2,), generator=g).sort().values
    found = {
        "hidden": torch.randn(T, H, generator=g).bfloat16(),
        "lm_head_weight": (torch.randn(V, H, generator=g) * (2 / H**0.5)).bfloat16(),
        "bias": torch.randn(V, generator=g).bfloat16(),
        "logits": torch.randn(T, V, generator=g).bfloat16(),
        "logps": -torch.rand(T, generator=g) - 0.5,
        "entropy": torch.rand(T, generator=g),
        "target_ids": torch.randint(V, (T,), generator=g),
        "advantages": torch.rand(B, generator=g) + 0.5,
        "ref_logps": -torch.rand(T, generator=g) - 0.5,
        "cu_seqlens": torch.tensor([0, *cut, T], dtype=torch.int32),
        "num_items_in_batch": torch.tensor(float(200 + seed)),
    }
    return {name: x.to(device) for name, x in found.items()}


def loss_of(function: Callable, *names: str, **options) -> Callable[..., list]:
    """Return a function that runs a loss function on a batch.

    The returned function computes loss, logps, metrics and the gradients of the tensors in `names`.
    """
    config = LossConfig(beta=0.1, **options)
    more = ["advantages", "cu_seqlens", "ref_logps", "num_items_in_batch"]
    more += [] if function is grpo_loss else ["target_ids"]

    def step(x: dict, gradients: Callable = torch.autograd.grad) -> list:
        leaves = {name: x[name].detach().requires_grad_() for name in names}
        result = function(**leaves, config=config, **{name: x[name] for name in more})
        metrics = list(result.metrics.values())
        return [result.loss, result.logps, *metrics, *gradients(result.loss, [*leaves.values()])]

    return step


def logps_of(function: Callable, *names: str, **options) -> Callable[..., list]:
    def step(x: dict, gradients: Callable = torch.autograd.grad) -> list:
        leaves = {name: x[name].detach().requires_grad_() for name in names}
        found = function(**leaves, target_ids=x["target_ids"], **options)
        results = list(found) if isinstance(found, tuple) else [found]
        total = (results[0] * x["ref_logps"]).sum()
        return [*results, *gradients(total, [*leaves.values()])]

    return step


def frozen_step(x: dict, gradients: Callable | None = None) -> list:
    with torch.no_grad():
        return [linear_logps(x["hidden"], x["lm_head_weight"], x["target_ids"])]


HEAD = "hidden", "lm_head_weight"
masked_step = logps_of(linear_logps, *HEAD)
STEPS = {
    "linear_grpo_loss": loss_of(linear_grpo_loss, *HEAD, "bias"),
    "linear_grpo_loss, entropy bonus": loss_of(linear_grpo_loss, *HEAD, entropy_coef=0.01),
    "linear_grpo_loss, by sequence": loss_of(
        linear_grpo_loss, *HEAD, loss_type="gspo", softcap=20.0
    ),
    "linear_grpo_loss, by length": loss_of(
        linear_grpo_loss, *HEAD, loss_type="grpo", compute_entropy=True
    ),
    "logits_grpo_loss": loss_of(logits_grpo_loss, "logits"),
    "logits_grpo_loss, by sequence": loss_of(logits_grpo_loss, "logits", loss_type="gspo"),
    "grpo_loss": loss_of(grpo_loss, "logps"),
    "grpo_loss, entropy bonus": loss_of(grpo_loss, "logps", "entropy", entropy_coef=0.1),
    "linear_logps": masked_step,
    "linear_logps, entropy": logps_of(linear_logps, *HEAD, return_entropy=True, temperature=0.8),
    "linear_logps without a gradient": frozen_step,
    "logits_logps": logps_of(logits_logps, "logits", return_entropy=True),
}


def recorded(step: Callable[[dict], list], static: dict) -> tuple[torch.cuda.CUDAGraph, list]:
    """Capture a step with static inputs in a CUDA graph, after a warm-up on a side stream.

    Returns:
        The graph, and the outputs of the captured step.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(static)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(static)
    return graph, results


REPLAYED = [(name, mib, [T]) for name in STEPS for mib in ("1024", "0")]
REPLAYED += [("linear_grpo_loss", "1024", [T, 2 * T])]  # two graphs that are replayed in turn


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "workspace", "sizes"), REPLAYED)
def test_replay(name, workspace, sizes, monkeypatch):
    """Check that a replayed graph and a normal call give the same bits for new input values.

    With the workspace size 1024, the call has a single chunk. With 0, its chunks have 32 rows.
    """
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", workspace)
    step, batches = STEPS[name], [values(0, size) for size in sizes]
    graphs = [recorded(step, static) for static in batches]
    for seed in (1, 2, 1):
        for size, static, (graph, results) in zip(sizes, batches, graphs, strict=True):
            fresh = values(seed, size)
            for key, x in static.items():
                x.copy_(fresh[key])
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, results, step(fresh)))


@pytest.mark.gpu
def test_rows_without_a_target_or_coefficient():
    """Check that a replayed graph and a normal call agree if some rows have no target.

    The graph masks these rows, and the normal call skips them. The logps must have the same bits.
    The gradients may differ by rounding, because the GEMMs of different sizes add in different
    orders.
    """
    static = values(0)
    static["target_ids"][5:60] = -100
    graph, results = recorded(masked_step, static)
    graph.replay()
    expected = masked_step(static)
    assert torch.equal(results[0], expected[0]) and (results[1][5:60] == 0).all()
    for actual, want in zip(results[1:], expected[1:], strict=True):
        assert (actual.double() - want.double()).norm() <= 3e-3 * want.double().norm()


@pytest.mark.gpu
def test_refused_and_usable_afterwards():
    """Check that an argument that cannot be captured raises an error, and that later calls work."""
    x = values(0)
    given = {
        "cu_seqlens": x["cu_seqlens"],
        "completion_mask": torch.ones(T, dtype=torch.bool, device="cuda"),
    }
    said = "completion_mask: expected None while a CUDA graph is recorded"
    with pytest.raises(ValueError, match=said), torch.cuda.graph(torch.cuda.CUDAGraph()):
        grpo_loss(x["logps"], x["advantages"], LossConfig(), **given)
    torch.cuda.synchronize()
    assert torch.isfinite(STEPS["grpo_loss"](x)[0])


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
def recording(monkeypatch):
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
    x = values(0, 24, "meta")
    return {name: y.to(dtype) if y.dtype == torch.bfloat16 else y for name, y in x.items()}


@pairs(name=STEPS, dtype=[torch.bfloat16, torch.float32], workspace=["1024", "0"])
def test_no_value_is_read(recording, monkeypatch, name, dtype, workspace):
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", workspace)
    # With these limits, the small sizes of this test use the code path of large sizes, in which a
    # single product writes dW in 16 bits.
    monkeypatch.setattr(sources, "TARGET_SHARE", 1)
    monkeypatch.setattr(products, "NARROW_FROM", 1)
    monkeypatch.setattr("grpo_fast.kernels.head.terms.READ_FROM", 0)
    results = STEPS[name](on_meta(dtype), gradients)
    assert all(x.shape.numel() for x in results[:2] + results[-1:] if x.dim())
