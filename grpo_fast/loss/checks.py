"""Every refusal of a shape, dtype, device or option: a ValueError that names the argument, what was
expected and what came. On the host, always; values.py looks at values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import refuse
from grpo_fast.kernels.route import BACKENDS
from grpo_fast.kernels.support import Support
from grpo_fast.loss.arguments import Given
from grpo_fast.loss.sharded import is_sharded
from grpo_fast.objective.config import LossConfig, choice, number
from grpo_fast.objective.corrections import DEFAULT
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES

VALIDATE = ("auto", "full")
IGNORED_TARGET = -100
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def wrong(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got}")


def head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "", *, is_shard: bool = False
) -> None:
    """hidden (..., H), lm_head_weight (V, H) and bias (V,) fit each other; `prefix` of their
    names. A shard may be empty.
    """
    like, name = f"{prefix}hidden", f"{prefix}lm_head_weight"
    floating(like, hidden)
    floating(name, weight)
    if weight.dim() != 2:
        raise wrong(name, "shape (V, H)", _shape(weight))
    if hidden.dim() == 0:
        raise wrong(like, "shape (B, L, H) or (T, H)", ())
    if hidden.shape[-1] != weight.shape[1]:
        expected = f"(V, H) with H = {hidden.shape[-1]} as in {like} {_shape(hidden)}"
        raise wrong(name, expected, _shape(weight))
    if 0 in weight.shape[1 if is_shard else 0 :]:
        raise wrong(name, "at least one vocabulary row and one column", _shape(weight))
    _same_device(name, weight, hidden, like)
    if hidden.dtype != weight.dtype:
        got = f"{weight.dtype}; cast one of them"
        raise wrong(name, f"the dtype of {like}, {hidden.dtype}", got)
    if bias is not None:
        floating(f"{prefix}bias", bias)
        _shape_is(f"{prefix}bias", bias, (weight.shape[0],), "(V,)")
        _same_device(f"{prefix}bias", bias, hidden, like)


def hidden_layout(hidden: Tensor, target_ids: Tensor, hidden_rows: Tensor | None) -> None:
    """hidden in the layout of target_ids; or (R, H) and the row that predicts each target."""
    if hidden_rows is None:
        _layout("hidden", hidden, target_ids)
        return
    _token_ids("target_ids", target_ids)
    _token_ids("hidden_rows", hidden_rows)
    if hidden.dim() != 2:
        raise wrong("hidden", "shape (R, H) beside hidden_rows", _shape(hidden))
    if target_ids.dim() not in (1, 2):
        raise wrong("target_ids", "shape (B, L) or (T,)", _shape(target_ids))
    _shape_is("hidden_rows", hidden_rows, _shape(target_ids), "that of target_ids")
    for name, x in (("target_ids", target_ids), ("hidden_rows", hidden_rows)):
        _same_device(name, x, hidden, "hidden")


def logits(x: Tensor, target_ids: Tensor) -> None:
    """Logits (B, L, V) or (T, V) in the layout of target_ids."""
    floating("logits", x)
    _layout("logits", x, target_ids)
    if x.shape[-1] == 0:
        raise wrong("logits", "at least one vocabulary column", _shape(x))


def given_logps(logps: Tensor, entropy: Tensor | None, config: LossConfig) -> None:
    """logps (B, L) or (T,), and the entropy that the config reads."""
    floating("logps", logps)
    if logps.dim() not in (1, 2):
        raise wrong("logps", "shape (B, L) or (T,)", _shape(logps))
    per_token("entropy", entropy, logps)
    is_config(config)
    if entropy is None and (config.entropy_coef != 0 or config.top_entropy_quantile < 1):
        raise ValueError(
            "entropy: entropy_coef != 0 or top_entropy_quantile < 1 expects a tensor like logps, "
            "got None"
        )


def rule(
    target_ids: Tensor, temperature: Any, softcap: Any, logit_scale: Any, backend: str
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


def tokens(config: LossConfig, given: Given, *, has_logits: bool) -> None:
    """What a loss is given per token and per completion, in the layout of `given.like`.

    Args:
        has_logits: the config's temperature is read.
    """
    is_config(config)
    if config.kl_estimator == EXACT:
        expected = f"one of {list(KL_ESTIMATORS)}"
        raise wrong("kl_estimator", expected, f"{EXACT!r}, which linear_exact_kl computes")
    like, advantages, cu_seqlens = given.like, given.advantages, given.cu_seqlens
    _mask_and_segments(given.completion_mask, cu_seqlens, like)
    count = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    floating("advantages", advantages)
    if _shape(advantages) not in ((count,), _shape(like)):
        expected = f"shape (B,) = ({count},) or one per token {_shape(like)}"
        raise wrong("advantages", expected, _shape(advantages))
    _same_device("advantages", advantages, like, "the logps")
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        per_token(name, getattr(given, name), like)
    of_sampler = [x for x in config.corrections if x.ratio != "current/behaviour"]
    if given.sampling_logps is None and of_sampler and config.corrections != DEFAULT:
        expected = f"the sampler's logps beside corrections of kind {of_sampler[0].kind!r}"
        raise wrong("sampling_logps", expected, None)
    if has_logits and isinstance(config.temperature, Tensor):
        per_token("temperature", config.temperature, like)
    if config.uses_reference and given.ref_logps is None:
        raise ValueError(f"ref_logps: beta = {config.beta} expects the reference's logps, got None")
    if given.ref_logps is not None and not OBJECTIVES[config.loss_type].reference:
        raise ValueError(
            f"ref_logps: loss_type {config.loss_type!r} expects None (its beta weighs the step "
            "from old_logps), got a tensor"
        )
    for name in ("num_items_in_batch", "num_completions_in_batch"):
        value = getattr(given, name)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise wrong(name, "a number > 0", f"a tensor of shape {_shape(value)}")
        if value is not None and not isinstance(value, Tensor):
            number(name, value, "a number > 0", lambda x: x > 0)


def options(
    backend: str, validate: str, grad_filter: float | None = None, *, is_shard: bool = False
) -> None:
    choice("backend", backend, BACKENDS)
    choice("validate", validate, VALIDATE)
    if grad_filter is not None:
        number("grad_filter", grad_filter, "None or a number in (0, 1)", lambda x: 0 < x < 1)
        if is_shard:
            raise wrong("grad_filter", "None beside group, which it does not know", grad_filter)


def support(
    given: Any, target_ids: Tensor, *, is_shard: bool = False, grad_filter: float | None = None
) -> None:
    """A `Support` with a set for each target, or None; what it cannot stand beside."""
    if given is None:
        return
    if not isinstance(given, Support):
        raise wrong("support", "None or a Support(ids, offsets)", type(given).__name__)
    refuse("support", target_ids, given.ids)
    if is_shard:
        raise wrong("support", "None beside group, which does not know it", "a Support")
    if grad_filter is not None:
        raise wrong("grad_filter", "None beside support", grad_filter)
    ids, offsets = given
    _token_ids("support.ids", ids)
    if ids.dim() != 1:
        raise wrong("support.ids", "shape (nnz,)", _shape(ids))
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64:
        raise wrong("support.offsets", "an int64 tensor", _kind(offsets))
    _dense("support.offsets", offsets)
    expected = (target_ids.numel() + 1,)
    _shape_is("support.offsets", offsets, expected, "(T+1,), one set for each target,")
    for name, x in (("support.ids", ids), ("support.offsets", offsets)):
        _same_device(name, x, target_ids, "target_ids")


def inplace(given: Tensor, flat: Tensor) -> None:
    """Logits that may be written over: flat is a view of them, and its rows share no memory."""
    shares = flat.shape[0] > 1 and flat.stride(0) < flat.shape[1]  # an expanded or overlapping view
    if flat.data_ptr() != given.data_ptr() or shares:
        raise ValueError(
            "logits: inplace=True expects rows that flatten without a copy and share no memory, "
            f"got strides {given.stride()}"
        )


def floating(name: str, x: Tensor) -> None:
    if is_sharded(x):
        raise wrong(name, "a plain tensor", f"a {type(x).__name__}")
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        raise wrong(name, "a floating-point tensor (16, 32 or 64 bits)", _kind(x))
    _dense(name, x)


def _dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        raise wrong(name, "a dense tensor", "a nested one" if x.is_nested else x.layout)


def per_token(name: str, x: Tensor | None, like: Tensor) -> None:
    """An optional float tensor of the layout of `like` (B, L) or (T,)."""
    if x is not None:
        floating(name, x)
        _is_like(name, x, like)


def is_config(config: object) -> None:
    if not isinstance(config, LossConfig):
        raise wrong("config", "a LossConfig", type(config).__name__)


def _layout(name: str, x: Tensor, target_ids: Tensor) -> None:
    """x (B, L, ·) with target_ids (B, L), or x (T, ·) with target_ids (T,)."""
    _token_ids("target_ids", target_ids)
    if x.dim() not in (2, 3):
        raise wrong(name, "shape (B, L, ·) or (T, ·)", _shape(x))
    if target_ids.shape != x.shape[:-1]:
        expected = f"shape {tuple(x.shape[:-1])} as in {name} {_shape(x)}"
        raise wrong("target_ids", expected, _shape(target_ids))
    _same_device("target_ids", target_ids, x, name)


def _mask_and_segments(mask: Tensor | None, cu: Tensor | None, like: Tensor) -> None:
    """completion_mask of the tokens' shape; cu_seqlens exactly for the packed layout."""
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.is_complex():
            raise wrong("completion_mask", "a tensor of 0 and 1", _kind(mask))
        _dense("completion_mask", mask)
        _is_like("completion_mask", mask, like)
    if like.dim() == 2 and cu is not None:
        got = f"shape {_shape(cu)}" if isinstance(cu, Tensor) else _kind(cu)
        raise wrong("cu_seqlens", "None for the padded layout (B, L)", got)
    if like.dim() == 1:
        if not isinstance(cu, Tensor) or cu.dtype not in (torch.int32, torch.int64):
            raise wrong("cu_seqlens", "an int32 tensor (B+1,) for the packed layout", _kind(cu))
        if cu.dim() != 1 or cu.numel() == 0:
            raise wrong("cu_seqlens", "shape (B+1,)", _shape(cu))
        if cu.numel() == 1 and like.numel():
            raise wrong("cu_seqlens", f"offsets from 0 to T = {like.numel()}", "only one")
        _same_device("cu_seqlens", cu, like, "the logps")


def _token_ids(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
        raise wrong(name, "an int64 or int32 tensor", _kind(x))
    _dense(name, x)


def _is_like(name: str, x: Tensor, like: Tensor) -> None:
    _shape_is(name, x, _shape(like), "(B, L)" if like.dim() == 2 else "(T,)")
    _same_device(name, x, like, "the logps")


def _shape_is(name: str, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if _shape(x) != shape:
        raise wrong(name, f"shape {meaning} = {shape}", _shape(x))


def _same_device(name: str, x: Tensor, other: Tensor, other_name: str) -> None:
    if x.device != other.device:
        raise wrong(name, f"the device of {other_name}, {other.device}", x.device)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _kind(x: object) -> str:
    return f"dtype {x.dtype}" if isinstance(x, Tensor) else repr(x)
