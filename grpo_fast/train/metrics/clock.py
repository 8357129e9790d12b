"""Clock of the parts of a step, which measures time and device memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


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
