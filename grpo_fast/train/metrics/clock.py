"""Measurement of the time and the GPU memory of each part of a training step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """Clock for one training step. Call `lap` at the end of each part of the step."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # sampled or trunk tokens of each part
    peaks: dict[str, int] = field(default_factory=dict)  # peak GPU memory of each part in bytes
    start: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str, tokens: int = 0) -> None:
        """Mark the end of a part of the step, and add the time since the previous lap to it.

        Args:
            name: name of the part. A name may occur several times in a step.
            tokens: number of tokens that this part processed.
        """
        if torch.cuda.is_available():
            # Wait for the GPU. CUDA kernels run asynchronously, and their time would otherwise be
            # attributed to the next part.
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            self.peaks[name] = max(peak, self.peaks.get(name, 0))
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        self.last = now

    def metrics(self) -> dict[str, float]:
        """Return the total time, the time and token rate of each part, and the peak GPU memory."""
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
