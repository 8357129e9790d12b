"""Seconds and device memory of the parts of a step."""

from __future__ import annotations

import time

import torch


class Clock:
    """`lap(name)` after each part of a step; `metrics` at its end."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}  # bytes allocated on the GPU at most, by part

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.peaks[name] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now

    def metrics(self, generated: int, trained: int) -> dict[str, float]:
        """step_time and perf/…, for so many tokens sampled and so many sent through the trunk in training."""
        peak = {"perf/peak_memory_gib": max(self.peaks.values()) / 2**30} if self.peaks else {}
        return {
            "step_time": self.last - self.start,
            "perf/rollout_tok_s": generated / self.seconds["rollout"],
            "perf/train_tok_s": trained / self.seconds["train"],
            **{f"perf/{name}_time": seconds for name, seconds in self.seconds.items()},
            **peak,
        }
