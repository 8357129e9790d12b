"""The measured operations, each with its minimum amount of work, and the shapes of the problems."""

from __future__ import annotations

from typing import NamedTuple

# ---- shapes ----
COMPLETIONS = 8


class Shape(NamedTuple):
    """Number of token rows N, hidden size H and vocabulary size V."""

    n: int
    h: int
    v: int


# Hidden size and vocabulary size from the config.json of each model. The vocabulary size includes
# the padding rows of the head.
MODELS: dict[str, tuple[int, int]] = {
    "qwen2.5-0.5b": (896, 151936),
    "qwen2.5-1.5b": (1536, 151936),
    "qwen2.5-7b": (3584, 152064),
    "qwen3-1.7b": (2048, 151936),
    "qwen3-8b": (4096, 151936),
    "llama-3-8b": (4096, 128256),
    "gemma-3-1b": (1152, 262144),
    "gemma-3-4b": (2560, 262144),
    "cpu-toy": (64, 512),
    "cpu-s": (256, 8192),
    "cpu-m": (896, 32000),
}

QUICK: list[Shape] = [Shape(64, 64, 512), Shape(512, 256, 8192)]
CPU = [Shape(64, 64, 512), Shape(1024, 256, 8192), Shape(512, 896, 32000), Shape(512, 896, 151936)]
# The first three shapes have the hidden sizes for which benchmarks/gpu/report.py has thresholds.
# The last one has a smaller vocabulary.
GPU: list[Shape] = [
    Shape(8192, *MODELS[name]) for name in ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-8b", "llama-3-8b")
]


def shape_of(text: str) -> Shape:
    """Parse a shape from the text `N,H,V`, or from `N,MODEL` with a name in MODELS.

    Raises:
        ValueError: the text has a different form, a size is not positive, or N is not a multiple of
            COMPLETIONS.
    """
    tokens, _, head = text.partition(",")
    try:
        h, v = MODELS.get(head) or map(int, head.split(","))
        shape = Shape(int(tokens), h, v)
    except ValueError:
        expected = f"N,H,V such as 512,896,32000, or N,MODEL with a model of {list(MODELS)}"
        raise ValueError(f"shapes: expected {expected}, got {text!r}") from None
    if min(shape) < 1 or shape.n % COMPLETIONS:
        expected = f"positive sizes, and N a multiple of {COMPLETIONS} (completions of a batch)"
        raise ValueError(f"shapes: expected {expected}, got {text}")
    return shape


# ---- operations ----
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


OURS = "grpo_fast (auto)"  # name of the provider that runs grpo_fast with its default backend
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
