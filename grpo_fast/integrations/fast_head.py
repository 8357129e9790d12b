"""Helpers for replacing an LM head, shared by the TRL and verl integrations."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class FastHead(ExitStack):
    """Handle that restores the original LM head, or verl's original losses.

    Call `undo()`, or use the handle in a `with` statement.
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

    It is autocast's dtype if autocast is enabled, and the dtype of `hidden` otherwise.
    """
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def run_inside(module: nn.Module) -> None:
    """Make `module(x, run=f)` return `f(module, x)`, with the hooks of the module around `f`.

    Calls without `run` still use the original forward. With FSDP2, the hooks gather the weights
    before `f`, and reduce the gradients after the backward pass. The hooks may also cast every
    float argument of the call. To keep the dtype of a tensor, bind the tensor to `f` with
    `functools.partial`.

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
        # Look up the original forward in the class of `self`, not in `module`. A deep copy of
        # `module` shares this wrapper, and must not run the forward of `module`.
        theirs = functools.partial(type(self).forward, self) if before is None else before
        return theirs(*args, **kwargs)

    forward.runs_inside = True  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)


def reshard(model: nn.Module) -> None:
    """Shard the parameters of an FSDP2 model again.

    A forward pass without a backward pass leaves the parameters unsharded. If an optimizer is then
    built, it updates the unsharded parameters. FSDP2 frees these parameters at the next step, so
    the updates are lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
