"""Comparison of two computations of the same result.

`Pair` decides at run time whether one of our computations may replace a different one. The table
in attention/README.md lists all pairs that it compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
# Texts of errors that mean "out of memory" although the error is no torch.OutOfMemoryError.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class Pair(NamedTuple):
    """Two computations of the same result, and the largest difference at which they agree.

    Attributes:
        ours: a function of the inputs that returns one tensor or several.
        theirs: the function that `ours` replaces, or the reference.
        inputs: tensors that both functions get.
        bar: largest allowed difference.
        gradients: also compare the gradients with respect to the inputs.
        in_nats: measure absolute differences, for log-probabilities. Otherwise, the differences of
            a row (the last dimension) are divided by the largest element of the row in `theirs`,
            because rows may have different scales. A gradient counts as one row, because its rows
            may cancel to almost 0.
        by_norm: divide the L2 norm of a row's differences by the norm of the row.
        floor: smallest number by which differences are divided.
    """

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    inputs: Sequence[Tensor]
    bar: float
    gradients: bool = False
    in_nats: bool = False
    by_norm: bool = False
    floor: float = 1e-300  # avoids a division by 0; 0 agrees only with 0

    def gap(self) -> float:
        """Return the largest difference. It is NaN if a result is NaN."""
        ours = self._results(self.ours)
        theirs = self._results(self.theirs)
        errors = []
        for a, b in zip(ours, theirs, strict=True):
            if a.shape != b.shape:
                raise ValueError(f"it returns shape {tuple(a.shape)}, not {tuple(b.shape)}")
            error = (a - b).abs()
            size = b.abs()
            if self.by_norm:
                error = error.norm(dim=-1, keepdim=True)
                size = size.norm(dim=-1, keepdim=True)
            if not self.in_nats:
                error /= size.amax(-1, keepdim=True).clamp(min=self.floor)
            errors.append(error.max())
        return float(torch.stack(errors).max())  # torch's max propagates NaN

    def difference(self) -> str | None:
        """Return how the two computations differ, or None if they agree.

        If a computation raises an error, this counts as a difference. A lack of memory is raised.
        """
        return exceeds(self.gap, self.bar, "nats" if self.in_nats else "of its size")

    def _results(self, function: Callable[..., Any]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_(self.gradients) for x in self.inputs]
        out = function(*leaves)
        outputs = [out] if isinstance(out, Tensor) else [*out]
        found = [x.detach() for x in outputs]
        if self.gradients:
            # Use a random upstream gradient, so that every output element influences the gradients.
            # It is representable in 16 bits, so that it is equal in all dtypes.
            ups = [draw(*x.shape, seed=7).bfloat16().to(x) if x.dim() else None for x in outputs]
            gradients = torch.autograd.grad(outputs, leaves, ups, materialize_grads=True)
            found += [x.flatten() for x in gradients]
        return [x.cpu().double() for x in found]


def exceeds(gap: Callable[[], float], bar: float, unit: str) -> str | None:
    """Return a sentence if a measured gap exceeds `bar`, is NaN or cannot be measured."""
    try:
        found = gap()
    except ValueError as error:
        return first_line(error)
    except Exception as error:  # code of other projects may raise anything
        if is_out_of_memory(error):
            raise
        return f"it fails: {first_line(error)}"
    return None if found <= bar else f"it differs by {found:.2g} {unit} (expected ≤ {bar:g})"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is lacking, on a GPU or on the host."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(text in str(error) for text in OUT_OF_MEMORY)


def in_fresh_thread(test: Callable[[], R], gpu: int | None = None) -> R:
    """Run a test function in a new thread and return its result.

    Autocast, inference mode, the default device, dispatch modes and the hooks of activation
    checkpointing are thread-local. In a new thread, they have torch's default values.

    Args:
        test: the function.
        gpu: the GPU that is current in the thread. None: GPU 0, or no GPU.
    """

    def run() -> R:
        with nullcontext() if gpu is None else torch.cuda.device(gpu):
            return test()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def draw(*shape: int, seed: int) -> Tensor:
    """Return normal random numbers in fp32 without changing the state of torch's generators."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]
