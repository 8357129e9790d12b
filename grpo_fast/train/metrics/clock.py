"""Clock of the parts of a step, which measures time, device memory and FLOP/s."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

# Peak FLOP/s of dense bf16 matrix products, from data sheets. The first entry whose words all
# appear in the GPU's name is used.
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
    """Measures time, tokens and memory of each part of a step. Call `lap` after each part."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # by part: sampled or trunk tokens
    peaks: dict[str, int] = field(default_factory=dict)  # peak bytes on the GPU, by part
    start: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str, tokens: int = 0) -> None:
        """Add the time since the previous call, and a number of tokens, to a part of the step."""
        if torch.cuda.is_available():
            # CUDA kernels run asynchronously. Without a sync their time would be counted for the
            # next part.
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            self.peaks[name] = max(peak, self.peaks.get(name, 0))
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        self.last = now

    def metrics(self) -> dict[str, float]:
        """Return `step_time`, and the times, token rates and peak memory as `perf/…`."""
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
    """Number of FLOPs of a model's matrix products, for the metric `perf/mfu`.

    For each row, a weight needs 2 FLOPs in the forward pass and 2 for the gradient of the input. A
    trained weight needs 2 more for its gradient. Attention scores and recomputation are not
    counted.
    """

    def __init__(self, lm: Any) -> None:
        head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
        trunk = [p for p in lm.parameters() if p.dim() > 1 and p is not head and p is not embedding]
        self.trunk = sum(p.numel() for p in trunk)
        self.trained_trunk = sum(p.numel() for p in trunk if p.requires_grad)
        self.head = head.numel()
        self.trained_head = head.numel() * head.requires_grad
        # Report no MFU for a mixture of experts. It applies only some of its weights to each token,
        # so the count of FLOPs would be too high.
        is_dense = not any("experts" in name for name, _ in lm.named_parameters())
        self.peak = peak_flops(head.device) if is_dense else None

    def forward(self, tokens: int, rows: int) -> int:
        """Return the FLOPs of a forward pass.

        Args:
            tokens: tokens that pass through the trunk.
            rows: rows that pass through the LM head.
        """
        return 2 * (self.trunk * tokens + self.head * rows)

    def update(self, tokens: int, rows: int) -> int:
        """Return the FLOPs of a forward and backward pass. The arguments are those of `forward`."""
        weights = self.trained_trunk * tokens + self.trained_head * rows
        return 2 * self.forward(tokens, rows) + 2 * weights

    def metrics(
        self, tokens: int, rows: int, *, forwards: int, updates: float, seconds: float
    ) -> dict[str, float]:
        """Return `perf/mfu`, the fraction of the GPU's bf16 peak, or {} if the peak is unknown.

        Args:
            tokens: tokens that pass through the trunk in one pass.
            rows: rows that pass through the LM head in one pass.
            forwards: number of forward passes without a backward pass.
            updates: number of forward passes with a backward pass.
            seconds: time of all passes.
        """
        if self.peak is None:
            return {}
        flops = forwards * self.forward(tokens, rows) + updates * self.update(tokens, rows)
        return {"perf/mfu": flops / seconds / self.peak}


def peak_flops(device: torch.device) -> float | None:
    """Return the bf16 peak FLOP/s of a GPU, or None for a CPU, an unknown GPU or a MIG slice."""
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    peaks = (peak for name, peak in PEAK_FLOPS if name <= words)
    return None if "MIG" in words else next(peaks, None)
