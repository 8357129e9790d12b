"""Helpers for replacing an LM head, which the modules for TRL and verl share."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class FastHead(ExitStack):
    """Handle that `use_fast_head` returns, with which the original LM head can be restored.

    Call `undo()` or leave the `with` block to restore the head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = True
        self.callback(setattr, self, "active", False)

    undo = ExitStack.close


def is_partitioned(model: PreTrainedModel) -> bool:
    """Return True if ZeRO-3 or tensor parallelism shards the LM head. Log a warning once."""
    by = "DeepSpeed ZeRO-3" if hasattr(model.get_output_embeddings().weight, "ds_id") else None
    by = "tensor parallelism" if (getattr(model, "tp_size", None) or 1) > 1 else by
    if by is not None:
        _warn_partitioned(by)
    return by is not None


@functools.cache
def _warn_partitioned(by: str) -> None:
    log.warning("use_fast_head: the head is sharded by %s; TRL's own function computes it", by)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which the LM head is computed.

    It is autocast's dtype if autocast is enabled, and otherwise the dtype of `hidden`.
    """
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def run_inside(module: nn.Module) -> None:
    """Add the keyword argument `run` to this module's forward.

    Afterwards, `module(x, run=f)` returns `f(module, x)` instead of the result of the original
    forward.

    The module's hooks fire around `f`. With FSDP2, the hooks gather the weights before `f` and
    reduce the gradients after the backward. FSDP2's hooks may also cast every float argument of the
    call. To keep the dtype of a tensor, bind the tensor to `f` with `functools.partial`.

    Args:
        module: The module to change. Other modules of the same class are not changed.
    """
    before = vars(module).get("forward")
    if getattr(before, "runs_inside", False):
        return

    @functools.wraps(type(module).forward)  # transformers' `generate` reads the signature
    def forward(
        self: nn.Module, *args: object, run: Callable[..., object] | None = None, **kwargs: object
    ) -> object:
        if run is not None:
            return run(self, *args)
        # Look up the original forward on `self`. A deep copy of the module also copies this
        # function, and must not run the forward of the module from which it was copied.
        theirs = functools.partial(type(self).forward, self) if before is None else before
        return theirs(*args, **kwargs)

    forward.runs_inside = True  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)


def reshard(model: nn.Module) -> None:
    """Shard the parameters of an FSDP2 model again.

    Call this function after a forward pass without a backward pass, because such a pass leaves the
    parameters unsharded. If an optimizer is built on unsharded parameters, FSDP2 frees them at the
    next step, and the optimizer's updates are lost.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
