"""Tests of losses over token sets on a real GPU against fp64.

They also check that repeated runs, and runs without gradient, give the same bits.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.exact import logps_bar
from grpo_fast import LossConfig, Support, linear_grpo_loss, linear_logps
from tests.loss_cases import relative_l2

pytestmark = pytest.mark.gpu
DEVICE, BACKEND = "cuda", "triton"
T, V, K = 512, 32000, 50
CONFIGS = {
    "plain": LossConfig(epsilon_low=0.9, epsilon_high=9.0),
    "entropy": LossConfig(
        epsilon_low=0.9, epsilon_high=9.0, softcap=20.0, entropy_coef=0.05, temperature=0.8
    ),
}


def bar(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the maximum relative L2 error of a gradient in `dtype`.

    In 16 bits, the limit is based on the rounding error of the exact gradient, which depends on the
    values. Many gradients are below 6e-5, where the spacing of fp16 is constant.
    """
    if dtype == torch.float32:
        return 2e-5
    return 1e-4 + 1.5 * relative_l2(exact.to(dtype), exact)


def problem(width: int, dtype: torch.dtype, *, some_dense: bool = False) -> tuple:
    """Return hidden, weight, the other arguments of the loss, and a support of K ids per row.

    Id 7 is in the support of every row. Half of the other ids are among the first hundred ids, so
    they occur often. With `some_dense`, the support of every fifth row is empty, which means
    unrestricted.
    """
    g = torch.Generator().manual_seed(width)
    hidden, weight = torch.randn(T, width, generator=g), torch.randn(V, width, generator=g)
    few = torch.stack([torch.randperm(100, generator=g)[: K // 2] for _ in range(T)])
    many = torch.stack([100 + torch.randperm(V - 100, generator=g)[: K // 2] for _ in range(T)])
    ids = torch.cat([few, many], 1)
    ids[:, 0] = torch.where((ids == 7).any(1), ids[:, 0], 7)
    lengths = torch.full((T,), K)
    if some_dense:
        lengths[::5] = 0
    kept = torch.arange(K) < lengths[:, None]
    support = Support(
        ids[kept].int().to(DEVICE), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(DEVICE)
    )
    tokens = {
        "target_ids": ids[torch.arange(T), torch.randint(K, (T,), generator=g)].to(DEVICE),
        "advantages": torch.tensor([1.0, -0.7]).to(DEVICE),
        "cu_seqlens": torch.tensor([0, 200, T], dtype=torch.int32).to(DEVICE),
    }
    weight = weight * (2 / width**0.5)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), tokens, support


def call(tensors, tokens, support, config, old, backend):
    """Compute a loss with `support=`. Return the logps and the gradients of (hidden, weight)."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    given = dict(tokens)
    targets, advantages = given.pop("target_ids"), given.pop("advantages")
    out = linear_grpo_loss(
        *leaves, targets, advantages, config, old_logps=old, support=support, backend=backend,
        validate="full", **given,
    )  # fmt: skip
    out.loss.backward()
    return [out.logps.detach(), *(x.grad for x in leaves)]


def old_logps(tensors, tokens, support, config) -> torch.Tensor:
    transform = {"temperature": config.temperature, "softcap": config.softcap}
    with torch.no_grad():
        return linear_logps(*tensors, tokens["target_ids"], support=support, **transform)


# The hidden sizes are chosen so that the kernel runs with 4, 8 and 16 warps. 897 gives unaligned
# rows. 9000 exceeds SUPPORT_COLUMNS, so torch computes this case.
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (896, torch.bfloat16), (897, torch.bfloat16), (4096, torch.float16), (8192, torch.bfloat16),
        (9000, torch.bfloat16), (2048, torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_against_fp64(width, dtype, name):
    hidden, weight, tokens, support = problem(width, dtype, some_dense=True)
    old = old_logps((hidden, weight), tokens, support, CONFIGS[name]) + 0.1
    found = call((hidden, weight), tokens, support, CONFIGS[name], old, BACKEND)
    wide = (hidden.double(), weight.double())
    expected = call(wide, tokens, support, CONFIGS[name], old, "torch")
    assert (found[0] - expected[0]).abs().max() < 1e-5 + logps_bar(width, DEVICE)
    for actual, exact in zip(found[1:], expected[1:], strict=True):
        assert relative_l2(actual, exact) < bar(exact, dtype)


def test_the_same_bits():
    """Check that repeated runs give the same bits, and so do logps without gradients."""
    hidden, weight, tokens, support = problem(4096, torch.bfloat16)
    old = old_logps((hidden, weight), tokens, support, CONFIGS["plain"])
    runs = [
        call((hidden, weight), tokens, support, CONFIGS["plain"], old, BACKEND) for _ in range(20)
    ]
    assert torch.equal(runs[0][0], old)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))
