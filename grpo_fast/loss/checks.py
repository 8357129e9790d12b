"""Checks of shapes, dtypes, devices and options, which raise a ValueError.

`values.py` checks the values of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.errors import argument_error, choice, conflict, number, require
from grpo_fast.kernels.gpu.capture import refuse
from grpo_fast.kernels.route import BACKENDS
from grpo_fast.kernels.support import Support
from grpo_fast.kernels.types import LogitTransform
from grpo_fast.loss.call import Call
from grpo_fast.loss.ranks import is_sharded
from grpo_fast.loss.values import TOTALS
from grpo_fast.objective.aggregation import LEAST_TOTAL
from grpo_fast.objective.config import CHOICES, LossConfig
from grpo_fast.objective.corrections import DEFAULT
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES

VALIDATE = ("auto", "full")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATING = "a floating-point tensor (16, 32 or 64 bits)"
KINDS = {  # the allowed dtypes for each description in a message
    FLOATING: FLOATS,
    "an int64 or int32 tensor": (torch.int64, torch.int32),
    "an int64 tensor": (torch.int64,),
    "an int32 tensor (B+1,) for the packed layout": (torch.int32, torch.int64),
    "a tensor of 0 and 1": tuple(
        x for x in vars(torch).values() if isinstance(x, torch.dtype) and not x.is_complex
    ),
}
IDS, OFFSETS, PACKED, MASK = list(KINDS)[1:]
# The arguments of a loss whose gradients are never computed.
CONSTANT = (
    "advantages", "completion_mask", "cu_seqlens", "old_logps", "ref_logps", "sampling_logps",
    "num_items_in_batch", "num_completions_in_batch",
)  # fmt: skip


def tensor(
    name: str,
    x: object,
    kind: str = FLOATING,
    shape: tuple[int, ...] | None = None,
    meaning: str = "",
    same_device: tuple[str, Tensor] | None = None,
) -> None:
    """Raise a ValueError unless x is a dense, unsharded tensor of the given kind.

    Args:
        name: name of the argument.
        x: the argument.
        kind: a key of KINDS.
        shape: the required shape. None allows any shape.
        meaning: the required shape in symbols such as "(V,)", for the message.
        same_device: the name and the tensor of another argument. x must be on its device.
    """
    if is_sharded(x):
        raise argument_error(name, "a plain tensor", f"a {type(x).__name__}")
    if not isinstance(x, Tensor) or x.dtype not in KINDS[kind]:
        raise argument_error(name, kind, f"dtype {x.dtype}" if isinstance(x, Tensor) else repr(x))
    if x.layout != torch.strided or x.is_nested:
        raise argument_error(name, "a dense tensor", "a nested one" if x.is_nested else x.layout)
    if shape is not None and tuple(x.shape) != shape:
        raise argument_error(name, f"shape {meaning} = {shape}", tuple(x.shape))
    if same_device is not None and x.device != same_device[1].device:
        raise argument_error(
            name, f"the device of {same_device[0]}, {same_device[1].device}", x.device
        )
    if x.is_meta:
        raise argument_error(name, "a tensor with values", "one on the meta device")


def like_logps(name: str, x: Tensor | None, like: Tensor, kind: str = FLOATING) -> None:
    """Check that an optional tensor has the shape and device of the logps."""
    if x is not None:
        meaning = "(B, L)" if like.dim() == 2 else "(T,)"
        tensor(name, x, kind, tuple(like.shape), meaning, ("the logps", like))


def constant(name: str, x: object) -> None:
    """Raise a ValueError if x requires grad, because its gradient is never computed."""
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        came = f"one that requires grad; pass {name}.detach()"
        raise argument_error(name, "a tensor without a gradient", came)


def head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, str, str] = ("hidden", "lm_head_weight", "bias"),
    *,
    is_shard: bool = False,
) -> None:
    """Check that hidden, weight and bias have matching shapes, dtypes and devices.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        names: names of the three arguments in the messages.
        is_shard: True if the weight has only the vocabulary rows of one rank, which may be empty.
    """
    # 1. Check the shapes. Each message names the argument that the caller must change.
    like, name, bias_name = names
    tensor(like, hidden)
    tensor(name, weight)
    width = tuple(hidden.shape)[-1:]
    shape = tuple(weight.shape)
    if len(shape) != 2:
        raise argument_error(name, "shape (V, H)", shape)
    if not width:
        raise argument_error(like, "shape (B, L, H) or (T, H)", ())
    if width != shape[1:]:
        expected = f"(V, H) with H = {width[0]} as in {like} {tuple(hidden.shape)}"
        raise argument_error(name, expected, shape)
    if 0 in shape[1 if is_shard else 0 :]:
        raise argument_error(name, "at least one vocabulary row and one column", shape)
    # 2. Check devices and dtypes.
    tensor(name, weight, same_device=(like, hidden))
    if hidden.dtype != weight.dtype:
        came = f"{weight.dtype}; cast one of them"
        raise argument_error(name, f"the dtype of {like}, {hidden.dtype}", came)
    if bias is not None:
        tensor(bias_name, bias, FLOATING, shape[:1], "(V,)", (like, hidden))


def hidden_layout(hidden: Tensor, target_ids: Tensor, hidden_rows: Tensor | None) -> None:
    """Check the shapes of hidden, target_ids and hidden_rows.

    `hidden` must have the layout of target_ids. With `hidden_rows`, it must have shape (R, H).
    """
    if hidden_rows is None:
        _layout("hidden", hidden, target_ids)
        return
    same_device = ("hidden", hidden)
    if hidden.dim() != 2:
        why = "its rows index the first of two dimensions; pass (R, H)"
        raise conflict(f"hidden of shape {tuple(hidden.shape)}", "hidden_rows", why)
    tensor("target_ids", target_ids, IDS, same_device=same_device)
    if target_ids.dim() not in (1, 2):
        raise argument_error("target_ids", "shape (B, L) or (T,)", tuple(target_ids.shape))
    shape = tuple(target_ids.shape)
    tensor("hidden_rows", hidden_rows, IDS, shape, "that of target_ids", same_device)


def logits(x: Tensor, target_ids: Tensor) -> None:
    """Check that logits are (B, L, V) or (T, V), and that target_ids are (B, L) or (T,)."""
    tensor("logits", x)
    _layout("logits", x, target_ids)
    if x.shape[-1] == 0:
        raise argument_error("logits", "at least one vocabulary column", tuple(x.shape))


def given_logps(logps: Tensor, entropy: Tensor | None, config: LossConfig) -> None:
    """Check the logps and the entropy. The entropy must not be None if the config needs it."""
    tensor("logps", logps)
    if logps.dim() not in (1, 2):
        raise argument_error("logps", "shape (B, L) or (T,)", tuple(logps.shape))
    like_logps("entropy", entropy, logps)
    is_config(config)
    if entropy is None and (config.entropy_coef != 0 or config.top_entropy_quantile < 1):
        option = "entropy_coef" if config.entropy_coef != 0 else "top_entropy_quantile"
        why = "logps alone have no entropy; pass a tensor like logps"
        raise conflict("entropy=None", f"{option}={getattr(config, option)}", why)


def transform(x: LogitTransform, like: Tensor | None = None) -> None:
    """Check a logit transform.

    The temperature must be a number, or a tensor of the shape of `like`. If `like` is None, it must
    be a number.
    """
    number("logit_scale", x.logit_scale, "a finite number, not 0", lambda x: x != 0)
    if x.softcap is not None:
        number("softcap", x.softcap, "None or a finite number > 0", lambda x: x > 0)
    temperature(x.temperature, like)


def temperature(x: float | Tensor, like: Tensor | None) -> None:
    """Check a temperature, as described in `transform`."""
    if isinstance(x, Tensor) and like is not None:
        like_logps("temperature", x, like)
        constant("temperature", x)
    else:
        number("temperature", x, "a finite number > 0", lambda x: x > 0)


def logps(call: Call) -> None:
    """Check the arguments of `linear_logps` and `logits_logps`."""
    transform(call.transform, call.like)
    choice("entropy_over", call.entropy_over, CHOICES["entropy_over"])
    choice("backend", call.backend, BACKENDS)
    support(call.support, call.like, is_shard=call.shard is not None)


def loss(call: Call) -> None:
    """Check the arguments of a loss.

    The shapes of the tensors must fit the padded or packed layout of `call.like`.
    """
    options(call)
    config = call.config
    is_config(config)
    assert config is not None
    # 1. Reject an exact KL, which only trainers support.
    if config.kl_estimator in EXACT:
        expected = f"one of {list(KL_ESTIMATORS)}"
        kind = EXACT[config.kl_estimator]
        came = f"{config.kl_estimator!r}; add linear_divergence(..., kind={kind!r}) to the loss"
        raise argument_error("kl_estimator", expected, came)
    like = call.like
    advantages = call.advantages
    cu_seqlens = call.cu_seqlens
    # 2. Check the shapes of mask, offsets, advantages and logps.
    like_logps("completion_mask", call.completion_mask, like, MASK)
    _offsets(cu_seqlens, like)
    count = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tensor("advantages", advantages, same_device=("the logps", like))
    assert advantages is not None
    if tuple(advantages.shape) not in ((count,), tuple(like.shape)):
        expected = f"shape (B,) = ({count},) or one per token {tuple(like.shape)}"
        raise argument_error("advantages", expected, tuple(advantages.shape))
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        like_logps(name, getattr(call, name), like)
    # 3. Check that no input requires grad. Its gradient is not computed, so the caller probably
    # forgot .detach() and expects a gradient.
    for name in CONSTANT:
        constant(name, getattr(call, name))
    # 4. Check the arguments that the config requires or forbids.
    reading = [x for x in config.corrections if x.ratio != "current/behaviour"]
    if call.sampling_logps is None and reading and config.corrections != DEFAULT:
        why = "these corrections read the sampler's logps; pass sampling_logps"
        raise conflict("sampling_logps=None", f"corrections of kind {reading[0].kind!r}", why)
    if call.has_logits:
        temperature(config.temperature, like)
    if config.uses_reference and call.ref_logps is None:
        why = "the KL needs the reference's logps; pass ref_logps"
        raise conflict("ref_logps=None", f"beta={config.beta}", why)
    if call.ref_logps is not None and not OBJECTIVES[config.loss_type].reference:
        why = "its beta weighs the step from old_logps; pass ref_logps=None"
        raise conflict("ref_logps", f"loss_type={config.loss_type!r}", why)
    # 5. Check the totals of the optimizer step.
    for name in ("num_items_in_batch", "num_completions_in_batch"):
        value = getattr(call, name)
        if name == "num_items_in_batch" and config.aggregation == "prompt_mean":
            _prompt_items(value, count, config)
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise argument_error(name, TOTALS, f"a tensor of shape {tuple(value.shape)}")
        elif value is not None and not isinstance(value, Tensor):
            number(name, value, TOTALS, lambda x: x >= LEAST_TOTAL)


def options(x: Call) -> None:
    """Check the options of a loss call that are not part of the config."""
    choice("backend", x.backend, BACKENDS)
    choice("validate", x.validate, VALIDATE)
    support(x.support, x.like, is_shard=x.shard is not None)
    if x.grad_filter is None:
        return
    number("grad_filter", x.grad_filter, "None or a number in (0, 1)", lambda x: 0 < x < 1)
    for name, other, why in (
        ("group", x.shard, "the filter sees the columns of one rank only"),
        ("support", x.support, "rows of a support have no columns to leave out"),
        ("divergence", x.divergence, "its gradient has no columns to leave out"),
    ):
        if other is not None:
            raise conflict(f"grad_filter={x.grad_filter}", name, f"{why}; pass grad_filter=None")


def support(support: object, target_ids: Tensor, *, is_shard: bool) -> None:
    """Check that a `Support` fits the targets, and that the head is not split over ranks."""
    if support is None:
        return
    if not isinstance(support, Support):
        raise argument_error("support", "None or a Support(ids, offsets)", type(support).__name__)
    refuse("support", target_ids, support.ids)
    if is_shard:
        raise conflict("support", "group", "a sharded head computes whole rows; pass one of them")
    same_device = ("target_ids", target_ids)
    tensor("support.ids", support.ids, IDS, same_device=same_device)
    if support.ids.dim() != 1:
        raise argument_error("support.ids", "shape (nnz,)", tuple(support.ids.shape))
    meaning = "(T+1,), one set for each target,"
    shape = (target_ids.numel() + 1,)
    tensor("support.offsets", support.offsets, OFFSETS, shape, meaning, same_device)


def inplace(x: Tensor, flat: Tensor) -> None:
    """Check that the logits x can be overwritten with their gradient.

    This requires that `flat` is a view of x, and that the rows of `flat` do not overlap.
    """
    shares = flat.shape[0] > 1 and flat.stride(0) < flat.shape[1]  # expanded or overlapping view
    if flat.data_ptr() != x.data_ptr() or shares:
        expected = "inplace=True expects rows that flatten without a copy and share no memory"
        raise ValueError(f"logits: {expected}, got strides {x.stride()}")


def is_config(config: object) -> None:
    require(isinstance(config, LossConfig), "config", "a LossConfig", type(config).__name__)


def _prompt_items(value: object, count: int, config: LossConfig) -> None:
    """Check `num_items_in_batch` for the aggregation "prompt_mean"."""
    meaning = f"(B,) = ({count},), the tokens of each completion's prompt"
    name = "num_items_in_batch"
    if value is None and count % (config.group_size or 1):
        raise argument_error(
            name, f"{meaning}, where groups of {config.group_size} are not whole", None
        )
    if value is not None and (not isinstance(value, Tensor) or tuple(value.shape) != (count,)):
        came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise argument_error(name, f"None or {meaning},", came)


def _layout(name: str, x: Tensor, target_ids: Tensor) -> None:
    """Check that x is (B, L, K) with target_ids (B, L), or (T, K) with target_ids (T,)."""
    if x.dim() not in (2, 3):
        raise argument_error(name, "shape (B, L, ·) or (T, ·)", tuple(x.shape))
    tensor("target_ids", target_ids, IDS, same_device=(name, x))
    if target_ids.shape != x.shape[:-1]:
        expected = f"shape {tuple(x.shape[:-1])} as in {name} {tuple(x.shape)}"
        raise argument_error("target_ids", expected, tuple(target_ids.shape))


def _offsets(cu_seqlens: Tensor | None, like: Tensor) -> None:
    if like.dim() == 2 and cu_seqlens is not None:
        shape = getattr(cu_seqlens, "shape", None)
        came = repr(cu_seqlens) if shape is None else f"shape {tuple(shape)}"
        why = "the offsets belong to the packed layout (T,); pass cu_seqlens=None"
        raise conflict(f"cu_seqlens, {came},", "the padded layout (B, L)", why)
    if like.dim() == 1:
        tensor("cu_seqlens", cu_seqlens, PACKED, same_device=("the logps", like))
        assert cu_seqlens is not None
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
            raise argument_error("cu_seqlens", "shape (B+1,)", tuple(cu_seqlens.shape))
        if cu_seqlens.numel() == 1 and like.numel():
            raise argument_error("cu_seqlens", f"offsets from 0 to T = {like.numel()}", "only one")
