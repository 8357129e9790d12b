"""Expected results of the kernels in fp64, computed without package code.

In Triton's interpreter, `only_memory_of` checks memory accesses, and `reversed_programs` reverses
the order of the programs (see triton_tools). Outside the interpreter, both do nothing.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.loss_cases import IS_INTERPRETER

if IS_INTERPRETER:
    from tests.kernels.triton_tools.interpreter import only_memory_of, reversed_programs
else:

    def only_memory_of(*tensors: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    reversed_programs = only_memory_of
__all__ = ["only_memory_of", "reversed_programs"]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed random numbers, drawn with a fixed seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the block with `count` torch threads, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def final(raw: Tensor, scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0):
    """Apply the scale, the soft cap and the temperature to raw logits in fp64.

    Returns:
        The transformed logits z, and their derivative with respect to the raw logits, each (C, V)
        fp64.
    """
    z, slope = raw.double() * scale, torch.full_like(raw, scale, dtype=torch.float64)
    if softcap is not None:
        bent = z / softcap
        z, slope = softcap * bent.tanh(), slope * bent.cosh().square().reciprocal()
    return z / temperature, slope / temperature


def statistics(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the statistics of each row of fp64 logits.

    The logp of the target is computed from the other columns. If the target's probability p is
    close to 1, z_y − lse would lose all digits of 1 − p, even in fp64. A row with +inf has no
    distribution, so its results are NaN.

    Returns:
        lse, logp of the target and entropy, each (C,) fp64.
    """
    lse, picked = torch.logsumexp(z, -1), z.gather(-1, target[:, None])[:, 0]
    lse = torch.where(lse == torch.inf, torch.nan, lse)
    others = z.scatter(1, target[:, None], -torch.inf).logsumexp(1)
    lp = torch.where(others < picked, -torch.log1p((others - picked).exp()), picked - lse)
    logp = z - lse[:, None]
    return lse, lp, -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1)


def gradient(
    z: Tensor, slope: Tensor, target: Tensor, g: Tensor, g_entropy: Tensor | None = None
) -> Tensor:
    """Compute the gradient of Σ g·logp + g_entropy·H with respect to the raw logits.

    Args:
        z: Transformed logits, (C, V) fp64.
        slope: Derivative of `z` with respect to the raw logits, (C, V).
        target: Target ids, (C,).
        g: Gradient with respect to logp, (C,).
        g_entropy: Gradient with respect to the entropy H, (C,). None means 0.

    Returns:
        The gradient, (C, V) fp64.
    """
    lse, lp, entropy = statistics(z, target)
    logp = z - lse[:, None]
    p = logp.exp()
    d = g.double()[:, None] * (-p).scatter(1, target[:, None], -torch.expm1(lp)[:, None])
    if g_entropy is not None:
        d = d - torch.where(p > 0, g_entropy.double()[:, None] * p * (logp + entropy[:, None]), 0.0)
    return d * slope
