"""Bad input gets a ValueError that names the argument, what was expected and what came, before any launch.

Shapes, dtypes and devices are checked on the host, always. Values that live on a device are checked at once on the
CPU or under `validate="full"`; on a GPU under "auto" a flag is computed there, and the next call that finds it ready
raises. Kernels never read out of bounds meanwhile: target ids are clamped.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.capture import is_capturing
from grpo_fast.objectives import OBJECTIVES
from grpo_fast.sharded import is_sharded

VALIDATE = ("auto", "full")
IGNORED_TARGET = -100
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Pending(NamedTuple):
    flags: Tensor  # (K,) bool on the host, valid once `ready`
    ready: torch.cuda.Event
    messages: tuple[str, ...]


_pending: list[_Pending] = []
_lock = threading.Lock()


def raise_pending() -> None:
    """Raise what an earlier call on a GPU found wrong, as soon as its flags have arrived."""
    if not _pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        arrived = [check for check in _pending if check.ready.query()]
        _pending[:] = [check for check in _pending if not check.ready.query()]
    for check in arrived:
        for flag, message in zip(check.flags.tolist(), check.messages, strict=True):
            if flag:
                raise ValueError(f"{message} (in an earlier call; validate='full' checks at once)")


def check_values(checks: list[tuple[Tensor, str]], validate: str) -> None:
    """Raise a ValueError for the first 0-d bool flag that is set: at once, or when it has reached the host."""
    if not checks or is_capturing(checks[0][0]):
        return
    device = checks[0][0].device
    if device.type == "cuda" and validate == "auto":
        flags = torch.stack([flag for flag, _ in checks])
        host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        with _lock:
            _pending.append(_Pending(host, ready, tuple(message for _, message in checks)))
        return
    for flag, message in checks:
        if flag:
            raise ValueError(message)


def elements(x: Tensor, odd: Tensor, expected: str, on_device: str) -> tuple[Tensor, str]:
    """A check for `check_values` of the elements of x: where some are `odd`, the first of them and how many.

    Args:
        expected: the beginning of the sentence, up to ", got".
        on_device: what came, where saying more would cost a sync.
    """
    flag = odd.any()
    if x.device.type != "cpu" or not flag:
        return flag, f"{expected}, got {on_device}"
    return flag, f"{expected}, got {x[odd][0].item():g} ({int(odd.sum())} of {x.numel()} values)"


def shape_is(name: str, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {meaning} = {shape}, got {tuple(x.shape)}")


def floating(name: str, x: Tensor) -> None:
    if is_sharded(x):
        raise ValueError(f"{name}: expected a plain tensor, got a {type(x).__name__}")
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        raise ValueError(f"{name}: expected a floating-point tensor (16, 32 or 64 bits), got {_kind(x)}")


def same_device(name: str, x: Tensor, other: Tensor, other_name: str) -> None:
    if x.device != other.device:
        raise ValueError(f"{name}: expected the device of {other_name}, {other.device}, got {x.device}")


def token_ids(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: expected an int64 or int32 tensor, got {_kind(x)}")


def is_config(config: object) -> None:
    if not isinstance(config, LossConfig):
        raise ValueError(f"config: expected a LossConfig, got {type(config).__name__}")


def head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden (..., H), lm_head_weight (V, H) and bias (V,) fit each other."""
    floating("hidden", hidden)
    floating("lm_head_weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"lm_head_weight: expected shape (V, H), got {tuple(weight.shape)}")
    if hidden.dim() == 0:
        raise ValueError("hidden: expected shape (B, L, H) or (T, H), got ()")
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"lm_head_weight: expected (V, H) with H = {hidden.shape[-1]} as in hidden {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("lm_head_weight: expected at least one vocabulary row, got 0")
    same_device("lm_head_weight", weight, hidden, "hidden")
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"lm_head_weight: expected the dtype of hidden, {hidden.dtype}, got {weight.dtype}; cast one of them"
        )
    if bias is not None:
        floating("bias", bias)
        shape_is("bias", bias, (weight.shape[0],), "(V,)")
        same_device("bias", bias, hidden, "hidden")


def layout(name: str, x: Tensor, target_ids: Tensor) -> None:
    """x (B, L, ·) with target_ids (B, L), or x (T, ·) with target_ids (T,)."""
    token_ids("target_ids", target_ids)
    if x.dim() not in (2, 3):
        raise ValueError(f"{name}: expected shape (B, L, ·) or (T, ·), got {tuple(x.shape)}")
    if target_ids.shape != x.shape[:-1]:
        raise ValueError(
            f"target_ids: expected shape {tuple(x.shape[:-1])} as in {name} {tuple(x.shape)}, "
            f"got {tuple(target_ids.shape)}"
        )
    same_device("target_ids", target_ids, x, name)


def logits(x: Tensor, target_ids: Tensor) -> None:
    """Logits (B, L, V) or (T, V) in the layout of target_ids."""
    floating("logits", x)
    layout("logits", x, target_ids)
    if x.shape[-1] == 0:
        raise ValueError(f"logits: expected at least one vocabulary column, got {tuple(x.shape)}")


def hidden_layout(hidden: Tensor, target_ids: Tensor, hidden_rows: Tensor | None) -> Tensor | None:
    """hidden in the layout of target_ids; or (R, H) and the row that predicts each target, returned flat in int64."""
    if hidden_rows is None:
        layout("hidden", hidden, target_ids)
        return None
    token_ids("target_ids", target_ids)
    token_ids("hidden_rows", hidden_rows)
    if hidden.dim() != 2:
        raise ValueError(f"hidden: expected shape (R, H) beside hidden_rows, got {tuple(hidden.shape)}")
    if target_ids.dim() not in (1, 2):
        raise ValueError(f"target_ids: expected shape (B, L) or (T,), got {tuple(target_ids.shape)}")
    shape_is("hidden_rows", hidden_rows, tuple(target_ids.shape), "that of target_ids")
    for name, x in (("target_ids", target_ids), ("hidden_rows", hidden_rows)):
        same_device(name, x, hidden, "hidden")
    return hidden_rows.reshape(-1).long()


def per_token(name: str, x: Tensor | None, like: Tensor) -> None:
    """An optional float tensor of the layout of `like` (B, L) or (T,)."""
    if x is None:
        return
    floating(name, x)
    shape_is(name, x, tuple(like.shape), "(B, L)" if like.dim() == 2 else "(T,)")
    same_device(name, x, like, "the logps")


def mask_and_segments(mask: Tensor | None, cu_seqlens: Tensor | None, like: Tensor) -> None:
    """completion_mask of the tokens' shape; cu_seqlens exactly for the packed layout."""
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.is_complex():
            raise ValueError(f"completion_mask: expected a tensor of 0 and 1, got {_kind(mask)}")
        shape_is("completion_mask", mask, tuple(like.shape), "(B, L)" if like.dim() == 2 else "(T,)")
        same_device("completion_mask", mask, like, "the logps")
    if like.dim() == 2 and cu_seqlens is not None:
        came = f"shape {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else _kind(cu_seqlens)
        raise ValueError(f"cu_seqlens: expected None for the padded layout (B, L), got {came}")
    if like.dim() == 1:
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cu_seqlens: expected an int32 tensor (B+1,) for the packed layout, got {_kind(cu_seqlens)}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
            raise ValueError(f"cu_seqlens: expected shape (B+1,), got {tuple(cu_seqlens.shape)}")
        same_device("cu_seqlens", cu_seqlens, like, "the logps")


def advantages_of(advantages: Tensor, num_completions: int, like: Tensor) -> None:
    """(B,), or one per token."""
    floating("advantages", advantages)
    if tuple(advantages.shape) not in ((num_completions,), tuple(like.shape)):
        raise ValueError(
            f"advantages: expected shape (B,) = ({num_completions},) or one per token {tuple(like.shape)}, "
            f"got {tuple(advantages.shape)}"
        )
    same_device("advantages", advantages, like, "the logps")


def reference(config: LossConfig, ref_logps: Tensor | None) -> None:
    """ref_logps exactly where the loss reads it."""
    if config.uses_reference and ref_logps is None:
        raise ValueError(f"ref_logps: beta = {config.beta} expects the reference's logps, got None")
    if ref_logps is not None and not OBJECTIVES[config.loss_type].reference:
        raise ValueError(
            f"ref_logps: loss_type {config.loss_type!r} expects None (its beta weighs the step from old_logps), "
            "got a tensor"
        )


def normaliser(name: str, value: float | Tensor | None) -> None:
    """A positive number or 0-d tensor; a device tensor's value is checked with the other values."""
    if value is None:
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: expected a number > 0, got a tensor of shape {tuple(value.shape)}")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a number > 0, got {value!r}")


def _kind(x: object) -> str:
    return f"dtype {x.dtype}" if isinstance(x, Tensor) else repr(x)
