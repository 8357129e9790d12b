"""The bf16 path on CPUs with AMX, with the emulated tile product in its place."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import LossConfig, linear_grpo_loss
from grpo_fast.kernels import csrc_loader, gemm_bf16

REASON = csrc_loader.load("gemm_bf16")


@pytest.mark.skipif(REASON is not None, reason=f"no C++ kernels here: {(REASON or '').splitlines()[:1]}")
def test_the_bf16_gemm_gives_the_loss_of_the_widened_product(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 20, 32).bfloat16(), torch.randn(300, 32).bfloat16().requires_grad_()
    ids, advantages, calls = torch.randint(0, 300, (3, 20)), torch.randn(3), []

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        weight.grad = None
        result = linear_grpo_loss(hidden, weight, ids, advantages, LossConfig(loss_type="grpo"), backend="cpu")
        result.loss.backward()
        return result.logps, weight.grad

    def emulated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(a.shape)
        return torch.ops.grpo_fast_gemm_bf16.mm_bf16_fp32(a, b, True)

    gemm_bf16.is_trusted.cache_clear()
    widened = run()
    monkeypatch.setattr(gemm_bf16, "is_trusted", lambda: True)
    monkeypatch.setattr(gemm_bf16, "mm_bf16_fp32", emulated)
    fused = run()
    assert calls
    torch.testing.assert_close(fused[0], widened[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused[1], widened[1], rtol=1e-2, atol=1e-4)
