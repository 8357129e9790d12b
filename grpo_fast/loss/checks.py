"""Every refusal: a ValueError that names the argument, what was expected and what came, before any launch.

The first half looks at shapes, dtypes and devices, on the host, always; the second at values (pending.py says when).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_fast.kernels.route import BACKENDS
from grpo_fast.loss.pending import Check, check_values, elements
from grpo_fast.loss.sharded import is_sharded
from grpo_fast.objective.aggregation import Total
from grpo_fast.objective.config import LossConfig, choice, number
from grpo_fast.objective.losses import OBJECTIVES

VALIDATE = ("auto", "full")
IGNORED_TARGET = -100
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NO_FINITE_LOSS = "target_ids: expected targets of finite probability, got one whose logit is -inf"
NO_FINITE_LOGP = "logps: expected finite numbers at the active tokens, got -inf"


# ---- shapes, dtypes, devices ----


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
    _same_device("lm_head_weight", weight, hidden, "hidden")
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"lm_head_weight: expected the dtype of hidden, {hidden.dtype}, got {weight.dtype}; cast one of them"
        )
    if bias is not None:
        floating("bias", bias)
        _shape_is("bias", bias, (weight.shape[0],), "(V,)")
        _same_device("bias", bias, hidden, "hidden")


def hidden_layout(hidden: Tensor, target_ids: Tensor, hidden_rows: Tensor | None) -> None:
    """hidden in the layout of target_ids; or (R, H) and the row that predicts each target."""
    if hidden_rows is None:
        _layout("hidden", hidden, target_ids)
        return
    _token_ids("target_ids", target_ids)
    _token_ids("hidden_rows", hidden_rows)
    if hidden.dim() != 2:
        raise ValueError(f"hidden: expected shape (R, H) beside hidden_rows, got {tuple(hidden.shape)}")
    if target_ids.dim() not in (1, 2):
        raise ValueError(f"target_ids: expected shape (B, L) or (T,), got {tuple(target_ids.shape)}")
    _shape_is("hidden_rows", hidden_rows, tuple(target_ids.shape), "that of target_ids")
    for name, x in (("target_ids", target_ids), ("hidden_rows", hidden_rows)):
        _same_device(name, x, hidden, "hidden")


def logits(x: Tensor, target_ids: Tensor) -> None:
    """Logits (B, L, V) or (T, V) in the layout of target_ids."""
    floating("logits", x)
    _layout("logits", x, target_ids)
    if x.shape[-1] == 0:
        raise ValueError(f"logits: expected at least one vocabulary column, got {tuple(x.shape)}")


def given_logps(logps: Tensor, entropy: Tensor | None, config: LossConfig) -> None:
    """logps (B, L) or (T,), and the entropy that the config reads."""
    floating("logps", logps)
    if logps.dim() not in (1, 2):
        raise ValueError(f"logps: expected shape (B, L) or (T,), got {tuple(logps.shape)}")
    per_token("entropy", entropy, logps)
    is_config(config)
    if entropy is None and (config.entropy_coef != 0 or config.top_entropy_quantile < 1):
        raise ValueError("entropy: entropy_coef != 0 or top_entropy_quantile < 1 expects a tensor like logps, got None")


def rule(
    target_ids: Tensor, temperature: float | Tensor, softcap: float | None, logit_scale: float, backend: str
) -> None:
    """The options of `linear_logps` and `logits_logps`."""
    choice("backend", backend, BACKENDS)
    number("logit_scale", logit_scale, "a finite number, not 0", lambda x: x != 0)
    if softcap is not None:
        number("softcap", softcap, "None or a finite number > 0", lambda x: x > 0)
    if isinstance(temperature, Tensor):
        per_token("temperature", temperature, target_ids)
    else:
        number("temperature", temperature, "a finite number > 0", lambda x: x > 0)


def tokens(
    like: Tensor,  # (B, L) or (T,)
    advantages: Tensor,
    config: LossConfig,
    completion_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    num_items_in_batch: Total | None,
    num_completions_in_batch: Total | None,
    **per_token_logps: Tensor | None,
) -> None:
    """What the three losses are given per token and per completion, in the layout of `like`."""
    is_config(config)
    _mask_and_segments(completion_mask, cu_seqlens, like)
    count = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    floating("advantages", advantages)
    if tuple(advantages.shape) not in ((count,), tuple(like.shape)):
        raise ValueError(
            f"advantages: expected shape (B,) = ({count},) or one per token {tuple(like.shape)}, "
            f"got {tuple(advantages.shape)}"
        )
    _same_device("advantages", advantages, like, "the logps")
    for name, x in per_token_logps.items():
        per_token(name, x, like)
    ref_logps = per_token_logps["ref_logps"]
    if config.uses_reference and ref_logps is None:
        raise ValueError(f"ref_logps: beta = {config.beta} expects the reference's logps, got None")
    if ref_logps is not None and not OBJECTIVES[config.loss_type].reference:
        raise ValueError(
            f"ref_logps: loss_type {config.loss_type!r} expects None (its beta weighs the step from old_logps), "
            "got a tensor"
        )
    _normaliser("num_items_in_batch", num_items_in_batch)
    _normaliser("num_completions_in_batch", num_completions_in_batch)


def options(backend: str, validate: str, grad_filter: float | None = None) -> None:
    choice("backend", backend, BACKENDS)
    choice("validate", validate, VALIDATE)
    if grad_filter is not None:
        number("grad_filter", grad_filter, "None or a number in (0, 1)", lambda x: 0 < x < 1)


def inplace(given: Tensor, flat: Tensor) -> None:
    """Logits that may be written over: flat is a view of them, and its rows share no memory."""
    if torch.compiler.is_compiling():
        raise ValueError("inplace: expected False under torch.compile, got True")
    shares = flat.shape[0] > 1 and flat.stride(0) < flat.shape[1]  # an expanded or overlapping view
    if flat.data_ptr() != given.data_ptr() or shares:
        raise ValueError(
            "logits: inplace=True expects rows that flatten without a copy and share no memory, "
            f"got strides {given.stride()}"
        )


def floating(name: str, x: Tensor) -> None:
    if is_sharded(x):
        raise ValueError(f"{name}: expected a plain tensor, got a {type(x).__name__}")
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        raise ValueError(f"{name}: expected a floating-point tensor (16, 32 or 64 bits), got {_kind(x)}")


def per_token(name: str, x: Tensor | None, like: Tensor) -> None:
    """An optional float tensor of the layout of `like` (B, L) or (T,)."""
    if x is None:
        return
    floating(name, x)
    _shape_is(name, x, tuple(like.shape), "(B, L)" if like.dim() == 2 else "(T,)")
    _same_device(name, x, like, "the logps")


def is_config(config: object) -> None:
    if not isinstance(config, LossConfig):
        raise ValueError(f"config: expected a LossConfig, got {type(config).__name__}")


def _layout(name: str, x: Tensor, target_ids: Tensor) -> None:
    """x (B, L, ·) with target_ids (B, L), or x (T, ·) with target_ids (T,)."""
    _token_ids("target_ids", target_ids)
    if x.dim() not in (2, 3):
        raise ValueError(f"{name}: expected shape (B, L, ·) or (T, ·), got {tuple(x.shape)}")
    if target_ids.shape != x.shape[:-1]:
        raise ValueError(
            f"target_ids: expected shape {tuple(x.shape[:-1])} as in {name} {tuple(x.shape)}, "
            f"got {tuple(target_ids.shape)}"
        )
    _same_device("target_ids", target_ids, x, name)


def _mask_and_segments(mask: Tensor | None, cu_seqlens: Tensor | None, like: Tensor) -> None:
    """completion_mask of the tokens' shape; cu_seqlens exactly for the packed layout."""
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.is_complex():
            raise ValueError(f"completion_mask: expected a tensor of 0 and 1, got {_kind(mask)}")
        _shape_is("completion_mask", mask, tuple(like.shape), "(B, L)" if like.dim() == 2 else "(T,)")
        _same_device("completion_mask", mask, like, "the logps")
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
        _same_device("cu_seqlens", cu_seqlens, like, "the logps")


def _normaliser(name: str, value: Total | None) -> None:
    """A positive number or 0-d tensor; a tensor's value is checked by `total`."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: expected a number > 0, got a tensor of shape {tuple(value.shape)}")
    elif value is not None:
        number(name, value, "a number > 0", lambda x: x > 0)


def _token_ids(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: expected an int64 or int32 tensor, got {_kind(x)}")


def _shape_is(name: str, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {meaning} = {shape}, got {tuple(x.shape)}")


def _same_device(name: str, x: Tensor, other: Tensor, other_name: str) -> None:
    if x.device != other.device:
        raise ValueError(f"{name}: expected the device of {other_name}, {other.device}, got {x.device}")


def _kind(x: object) -> str:
    return f"dtype {x.dtype}" if isinstance(x, Tensor) else repr(x)


# ---- values ----


def total(name: str, value: Total | None, validate: str) -> Total | None:
    """A number > 0; on the host wherever it can be read there without a sync."""
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu:
        found = float(value)
        if not 0 < found < math.inf:
            raise ValueError(f"{name}: expected a number > 0, got {found}")
        return found
    check_values([(~((value > 0) & torch.isfinite(value)), f"{name}: expected a number > 0")], validate)
    return value.double()


def mask(x: Tensor, kept: Tensor, validate: str) -> None:
    """0 or 1 everywhere; kept: x != 0."""
    if x.dtype != torch.bool:
        check_values([elements(x, x != kept, "completion_mask: expected only 0 and 1", "other values")], validate)


def offsets(cu: Tensor, lengths: Tensor, num_rows: int, validate: str) -> None:
    """cu_seqlens (B+1,), its differences, and the T rows that it must end at."""
    message = f"cu_seqlens: expected non-decreasing offsets from 0 to T = {num_rows}"
    if cu.device.type == "cpu":
        message += f", got {cu.tolist() if cu.numel() <= 16 else [cu[0].item(), '...', cu[-1].item()]}"
    check_values([((cu[0] != 0) | (cu[-1] != num_rows) | (lengths < 0).any(), message)], validate)


def ids(name: str, x: Tensor, end: int, validate: str, *, expected: str, kind: str = "ids") -> Tensor:
    """x inside [0, end); on a device clamped, as the flag may come late."""
    if not x.numel():
        return x
    low, high = x.aminmax()
    message = f"{name}: expected {expected}"
    if x.device.type == "cpu":
        message += f", got {kind} from {low.item()} to {high.item()}"
    check_values([((low < 0) | (high >= end), message)], validate)
    return x if x.device.type == "cpu" else x.clamp(0, end - 1)


def finite(name: str, x: Tensor, expected: str, odd: str) -> list[Check]:
    """No NaN or inf (odd = "NaN or inf"), or no NaN. A sum finds one in one operation, only then each is looked at."""
    if x.device.type == "cpu" and math.isfinite(x.sum().item()):
        return []
    return [elements(x, x.isnan() if odd == "NaN" else ~torch.isfinite(x), f"{name}: expected {expected}", odd)]


def temperatures(x: Tensor, where: str) -> list[Check]:
    bad = ~((x > 0) & torch.isfinite(x))
    return [elements(x, bad, f"temperature: expected finite numbers > 0{where}", "others")]


def logps(x: Tensor, validate: str, message: str = NO_FINITE_LOSS) -> None:
    """Refuse a target whose logit is -inf: it has no finite loss."""
    if x.numel():
        check_values([(x.amin() == -torch.inf, message)], validate)
