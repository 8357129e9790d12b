"""Shapes of the benchmarks: the LM heads of well-known models, and smaller shapes for a CPU."""

from __future__ import annotations

from typing import NamedTuple

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
CPU = [
    Shape(n, h, v)
    for n, h, v in ((64, 64, 512), (1024, 256, 8192), (512, 896, 32000), (512, 896, 151936))
]
# The first three shapes have the hidden sizes for which benchmarks/gpu/bars.py has thresholds. The
# last one has a smaller vocabulary.
GPU: list[Shape] = [
    Shape(8192, *MODELS[name]) for name in ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-8b", "llama-3-8b")
]


def shape_of(text: str) -> Shape:
    """Parse a shape from the text `N,H,V`.

    Raises:
        ValueError: the text is not three positive integers, or N is not a multiple of COMPLETIONS.
    """
    try:
        shape = Shape(*(int(part) for part in text.split(",")))
    except (ValueError, TypeError):
        raise ValueError(f"shapes: expected N,H,V such as 512,896,32000, got {text!r}") from None
    return checked(shape)


def checked(shape: Shape) -> Shape:
    if min(shape) < 1:
        raise ValueError(f"shapes: expected positive sizes, got {','.join(map(str, shape))}")
    if shape.n % COMPLETIONS:
        expected = f"a multiple of {COMPLETIONS} (completions of a batch)"
        raise ValueError(f"tokens: expected {expected}, got {shape.n}")
    return shape


def model_shapes(models: list[str], tokens: list[int]) -> list[Shape]:
    """Return one shape for each combination of a model and a number of tokens."""
    for name in models:
        if name not in MODELS:
            raise ValueError(f"model: expected one of {list(MODELS)}, got {name!r}")
    return [checked(Shape(n, *MODELS[name])) for name in models for n in tokens]


def name_of(shape: Shape) -> str:
    """Return the comma-separated names of all models with this LM head, or an empty string."""
    return ", ".join(name for name, head in MODELS.items() if head == shape[1:])
