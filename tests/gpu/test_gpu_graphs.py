"""Tests of CUDA graphs on a real GPU.

A replay with new input values must give the same bits as a normal call with these values.
`benchmarks/gpu_session.sh --part tests` runs the tests. grpo_fast/kernels/gpu/launch.py documents
what can be captured. tests/gpu/test_cuda_graphs.py checks without a GPU that captured code reads no
values on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpo_fast import (
    LossConfig,
    grpo_loss,
    linear_grpo_loss,
    linear_logps,
    logits_grpo_loss,
    logits_logps,
)

pytestmark = pytest.mark.gpu
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
