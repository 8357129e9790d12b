"""The measured operations, each with its exact result and its minimum amount of work."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.kernels.shapes import Shape


class Operation(NamedTuple):
    """One measured operation.

    Attributes:
        title: title of its table.
        truth: argument of `Problem.truth` that selects the exact result of the operation.
        flops: flops of the necessary matrix products, divided by N·V·H. 0 for an operation that is
            limited by the memory bandwidth.
        passes: number of necessary reads and writes of all N·V logits, if `flops` is 0.
    """

    title: str
    truth: str
    flops: int = 0
    passes: int = 0

    def rate(self, shape: Shape, itemsize: int, milliseconds: float) -> tuple[float, str]:
        """Return the minimum work divided by the time, and the unit: TFLOP/s or GB/s."""
        n, h, v = shape
        if self.flops:
            return self.flops * n * v * h / milliseconds / 1e9, "TFLOP/s"
        return self.passes * n * v * itemsize / milliseconds / 1e6, "GB/s"


OPERATIONS: dict[str, Operation] = {
    "linear_grpo_loss": Operation("hidden -> GRPO loss, forward + backward", "loss", flops=6),
    "linear_grpo_loss_frozen": Operation(
        "hidden -> GRPO loss, frozen LM head (LoRA)", "frozen", flops=4),
    "linear_cross_entropy": Operation(
        "hidden -> mean cross entropy, forward + backward (no GRPO loss)", "cross_entropy",
        flops=6),
    "linear_logps": Operation("hidden -> logps, no gradient", "logps", flops=2),
    "linear_logps_backward": Operation(
        "hidden -> logps, forward + backward", "logps_backward", flops=6),
    "logits_grpo_loss": Operation(
        "logits -> GRPO loss, forward + backward", "logits_loss", passes=2),
    "logits_grpo_loss_inplace": Operation(
        "logits -> GRPO loss, gradient over the logits", "logits_loss", passes=2),
}  # fmt: skip
