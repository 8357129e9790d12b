"""Time, device memory and FLOP/s of the parts of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

# Peak FLOP/s of dense bf16 matrix products from data sheets. The first line is used whose words are
# all in the name of the GPU.
PEAK_FLOPS: tuple[tuple[set[str], float], ...] = (
    ({"H200", "NVL"}, 835e12),
    ({"H200"}, 989e12),
    ({"H100", "NVL"}, 835e12),
    ({"H100", "PCIe"}, 756e12),
    ({"H100", "HBM3"}, 989e12),
    ({"A100"}, 312e12),
)


@dataclass
class Clock:
    """Time, tokens and device memory of the parts of a step. Call `lap` after each part."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # sampled, or trunk tokens of training
    peaks: dict[str, int] = field(default_factory=dict)  # the most bytes on the GPU, by part
    start: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str, tokens: int = 0) -> None:
        """Add the time since the previous call, and some tokens, to a part of the step."""
        if torch.cuda.is_available():
            # Kernels run after their launch. Without a sync the next part would pay for them.
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            self.peaks[name] = max(peak, self.peaks.get(name, 0))
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        self.last = now

    def metrics(self) -> dict[str, float]:
        """Return `step_time`, and `perf/…` with the times, rates and peak memory of the parts."""
        peak = {"perf/peak_memory_gib": max(self.peaks.values()) / 2**30} if self.peaks else {}
        rates = {
            f"perf/{name}_tok_s": self.tokens[name] / self.seconds[name]
            for name in ("rollout", "train")
        }
        return {
            "step_time": self.last - self.start,
            **rates,
            **{f"perf/{name}_time": seconds for name, seconds in self.seconds.items()},
            **peak,
        }


class Work:
    """Number of FLOPs of a model's matrix products, for `perf/mfu`.

    For each weight and row there are 2 FLOPs in the forward pass, 2 for the gradient of the input,
    and 2 for the gradient of a trained weight. Attention scores and recomputation are not counted.
    """

    def __init__(self, lm: Any) -> None:
        head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
        trunk = [p for p in lm.parameters() if p.dim() > 1 and p is not head and p is not embedding]
        self.trunk = sum(p.numel() for p in trunk)
        self.trained_trunk = sum(p.numel() for p in trunk if p.requires_grad)
        self.head = head.numel()
        self.trained_head = head.numel() * head.requires_grad
        # A token of a mixture of experts uses a part of the weights, which is not known here.
        is_dense = not any("experts" in name for name, _ in lm.named_parameters())
        self.peak = peak_flops(head.device) if is_dense else None

    def forward(self, tokens: int, rows: int) -> int:
        """Return the FLOPs of a forward pass of trunk tokens and of rows of the head."""
        return 2 * (self.trunk * tokens + self.head * rows)

    def update(self, tokens: int, rows: int) -> int:
        """Return the FLOPs of a forward and backward pass."""
        weights = self.trained_trunk * tokens + self.trained_head * rows
        return 2 * self.forward(tokens, rows) + 2 * weights

    def metrics(
        self, tokens: int, rows: int, *, forwards: int, updates: float, seconds: float
    ) -> dict[str, float]:
        """Return `perf/mfu`, the fraction of the GPU's bf16 peak, or {} if the peak is not known.

        Args:
            tokens: Trunk tokens of a pass.
            rows: Rows of the head in a pass.
            forwards: Number of forward passes without a backward pass.
            updates: Number of forward and backward passes.
            seconds: Time of all passes.
        """
        if self.peak is None:
            return {}
        flops = forwards * self.forward(tokens, rows) + updates * self.update(tokens, rows)
        return {"perf/mfu": flops / seconds / self.peak}


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a GPU, or None for a CPU, an unknown GPU and a MIG slice."""
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    peaks = (peak for name, peak in PEAK_FLOPS if name <= words)
    return None if "MIG" in words else next(peaks, None)
