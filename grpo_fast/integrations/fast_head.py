"""What the fused heads of other trainers share: the handle that gives a head back, and the dtype a head projects in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class FastHead:
    """The handle of a `use_fast_head`: `undo()`, or leave its `with` block, to give the head back to its trainer."""

    def __init__(self, give_back: Callable[[], object] | None = None) -> None:
        self.active = True
        self._give_back = give_back

    def undo(self) -> None:
        if self.active and self._give_back is not None:
            self._give_back()
        self.active = False

    def __enter__(self) -> FastHead:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
