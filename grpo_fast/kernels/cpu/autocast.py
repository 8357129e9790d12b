"""bf16 autocast of the fast CPU layers: when it applies, and bf16 copies of fp32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm

BF16 = torch.bfloat16

# Cached bf16 copies. The dict maps id(weight) to (weight, (version, address), copy). Outside
# `shared_copies`, the variable is None and no copies are cached.
_copies: ContextVar[dict[int, tuple[Tensor, tuple[int, int], Tensor]] | None]
_copies = ContextVar("_copies", default=None)


@contextmanager
def shared_copies() -> Iterator[None]:
    """Convert each weight to bf16 only once while this context is open.

    The copies take 2 bytes per element until the context ends. Do not write to `weight.data` while
    the context is open, because the layers would still use the old copies.
    """
    token = _copies.set({})
    try:
        yield
    finally:
        _copies.reset(token)


def in_bf16() -> bool:
    """Return whether the fast layers of fp32 models multiply in bf16.

    They do so under autocast to bf16, if our bf16 matrix product runs on this CPU and is enabled.
    Otherwise, a model under autocast uses its original layers.
    """
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == BF16
        and route.gemm_choice() != "vendor"
        and gemm.unavailable(BF16) is None
    )


def narrow_copy(weight: Tensor) -> Tensor:
    """Return a bf16 copy of a weight. Inside `shared_copies`, the copy is cached and reused."""
    stored = _copies.get()
    state = weight._version, weight.data_ptr()
    if stored is not None and id(weight) in stored:
        _, stored_state, copy = stored[id(weight)]
        if stored_state == state:
            return copy
    # Copy outside of inference mode, because autograd cannot save tensors that were created in it.
    with torch.inference_mode(False):
        copy = weight.detach().to(BF16)
    if stored is not None:
        stored[id(weight)] = weight, state, copy
    return copy
