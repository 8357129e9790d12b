"""Parts of the fused heads of all trainers: the handle that undoes one, its dtype, its hooks."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


class FastHead(ExitStack):
    """The handle of a `use_fast_head`: `undo()`, or leave its `with` block, to end it."""

    def __init__(self) -> None:
        super().__init__()
        self.active = True
        self.callback(setattr, self, "active", False)

    undo = ExitStack.close


def is_partitioned(model: Any) -> bool:
    """Whether ZeRO-3 or tensor parallelism shards the model's head, which is logged."""
    by = "DeepSpeed ZeRO-3" if hasattr(model.get_output_embeddings().weight, "ds_id") else None
    by = "tensor parallelism" if (getattr(model, "tp_size", None) or 1) > 1 else by
    if by is not None:
        _warn_partitioned(by)
    return by is not None


@functools.cache
def _warn_partitioned(by: str) -> None:
    log.warning("use_fast_head: the head is sharded by %s; TRL's own function computes it", by)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def run_inside(module: nn.Module) -> None:
    """Let this module (and no other) run a function: `module(x, run=f)` then gives `f(module, x)`.

    Its hooks fire around it: FSDP2's gather the weights before, and reduce their gradients after
    the backward. They also cast every float argument: bind to the function what shall stay.
    """
    before = vars(module).get("forward")
    if getattr(before, "runs_inside", False):
        return

    @functools.wraps(type(module).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, run: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        if run is not None:
            return run(self, *args)
        # Looked up on `self`: a copy of the module must not run the original's forward.
        theirs = functools.partial(type(self).forward, self) if before is None else before
        return theirs(*args, **kwargs)

    forward.runs_inside = True  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)


def reshard(model: nn.Module) -> None:
    """Let FSDP2 shard the parameters again that a forward without a backward has left whole.

    An optimizer that is made afterwards would hold the whole ones, which the next step drops.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
