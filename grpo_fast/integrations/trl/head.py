"""Replacement of TRL's fused LM head by our kernels, for all TRL trainers that use this head.

    handle = use_fast_head(trainer)      # or: with use_fast_head(model): ...
    trainer.train()
    handle.undo()

TRL (>= 1.16) gives a model a `forward` with a fused LM head (`add_fused_lm_head`). This forward
calls the global name `_ChunkedLogProbFunction`. We run a copy of the forward in which three global
names have other values:

- `_ChunkedLogProbFunction` calls our kernels.
- `_use_triton` always returns True, so that TRL removes the masked rows before it calls the head.
- `DTensor` is an empty tuple, so that TRL does not gather a sharded weight. TRL would not reduce
  the gradient of the gathered weight over the ranks. Our kernels run inside the forward of the
  head, where FSDP2 gathers the weight and reduces its gradient.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_fast import linear_logps
from grpo_fast.attention import Head
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import FastHead, compute_dtype, is_partitioned, run_inside

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, Trainer

KERNEL = "_ChunkedLogProbFunction"
COMPACTS = "_use_triton"
GATHERED = "DTensor"
# TRL trainers whose loss calls the fused head. GKDTrainer and GOLDTrainer inherit the head from
# SFTTrainer, but they are not in this list, because their loss needs full logits. The distillation
# trainers have losses of two heads.
SERVED = (
    "GRPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "GMPOTrainer",
    "AsyncGRPOTrainer",
)  # fmt: skip
BLOCK_ELEMENTS = 1 << 24  # fp32 elements of one block of logits in `row_statistics`: 64 MiB
METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_sum_sq_probs": lambda z, ids: (2 * z.log_softmax(-1)).logsumexp(-1),
    "mean_logits": lambda z, ids: z.mean(-1),
    "is_top1": lambda z, ids: z.argmax(-1) == ids,
}

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def use_fast_head(trainer_or_model: Trainer | PreTrainedModel | PeftModel) -> FastHead:
    """Replace the fused LM head of a TRL trainer or model with our kernels.

    Outputs and gradients stay the same up to rounding. FSDP2 may shard the head. If ZeRO-3 or
    tensor parallelism shards it, TRL's code computes the head, and a warning is logged.

    Args:
        trainer_or_model: A TRL trainer, or a model with TRL's fused LM head. In a trainer, the
            heads of the policy and of the reference model are replaced.

    Returns:
        A handle. Call its `undo()`, or use it in a `with` statement, to restore TRL's head.

    Raises:
        ValueError: The model has no fused LM head, or the trainer's loss does not use it.

    Example:
        >>> handle = use_fast_head(trainer)
        >>> trainer.train()
        >>> handle.undo()
    """
    trainer = trainer_or_model
    handle = FastHead()
    theirs = next((c for c in type(trainer).__mro__ if c.__module__.split(".")[0] == "trl"), None)
    expected = f"one whose loss calls TRL's fused LM head, as {', '.join(SERVED)} and derived ones"
    came = f"{type(trainer).__name__}, whose loss would not change"
    require(theirs is None or theirs.__name__ in SERVED, "trainer", expected, came)
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is None:
        _swap(base_model(trainer), handle, nullcontext)
        return handle
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        lm = None if model is None else base_model(accelerator.unwrap_model(model))
        if lm is not None and (model is trainer.model or _fused_function(lm)):
            _swap(lm, handle, accelerator.autocast)
    return handle


def _swap(
    model: PreTrainedModel, handle: FastHead, autocast: Callable[[], AbstractContextManager[object]]
) -> None:
    """Replace the model's forward by one that uses our kernels while `handle` is active."""
    theirs = _require_fused(model)
    before = model.forward
    run_inside(model.get_output_embeddings())
    # accelerate wraps the forward of a prepared model in autocast. Our forward does not call the
    # wrapped forward, so it must apply the same autocast.
    context = nullcontext if getattr(before, "__func__", None) is theirs else autocast

    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel, *args: object, fused_lm_head: bool = False, **kwargs: object
    ) -> object:
        if not (fused_lm_head and handle.active) or is_partitioned(self):
            return before(*args, **({**kwargs, "fused_lm_head": True} if fused_lm_head else kwargs))
        with context():
            # Build the function now. A deep copy of the model shares `forward`, but must use the
            # head of the copy.
            ours = _with_our_head(theirs, self)
            return ours(self, *args, fused_lm_head=True, **kwargs)

    model.forward = types.MethodType(forward, model)
    model.forward.__func__.trl_fused = theirs


def _with_our_head(theirs: types.FunctionType, model: PreTrainedModel) -> types.FunctionType:
    """Return a copy of TRL's forward that calls our kernels inside the LM head of this model."""
    head = model.get_output_embeddings()

    def apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Outputs:
        dtype = compute_dtype(hidden)  # read it now, because hooks of the head may cast `hidden`
        return head(hidden, run=lambda layer, h: fast_log_probs(
            h.to(dtype), layer.weight, layer.bias, *rest
        ))  # fmt: skip

    kernel = types.SimpleNamespace(apply=apply)
    # With `GATHERED: ()`, TRL's test isinstance(weight, DTensor) is always False.
    scope = {**theirs.__globals__, KERNEL: kernel, COMPACTS: lambda device: True, GATHERED: ()}
    rest = theirs.__name__, theirs.__defaults__, theirs.__closure__
    ours = types.FunctionType(theirs.__code__, scope, *rest)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


def fast_log_probs(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,)
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = (),
) -> Outputs:
    """Compute the results of TRL's function `_ChunkedLogProbFunction.apply` from its arguments.

    Returns:
        logps, entropy, log_sum_sq_probs, mean_logits and is_top1, each of shape (N,). Outputs other
        than logps are None unless `outputs` names them.
    """
    cap = final_logit_softcapping
    rule: dict[str, Any] = {"temperature": temperature, "softcap": cap, "logit_scale": logit_scale}
    dtype = compute_dtype(hidden)
    h = hidden.to(dtype)
    w = weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    # Disable autocast. The tensors already have the dtype that TRL uses for the head, and autocast
    # would cast fp32 tensors to 16 bits.
    with torch.autocast(hidden.device.type, enabled=False):
        logps = linear_logps(h, w, targets, bias=b, return_entropy="entropy" in outputs, **rule)
        logps, entropy = logps if isinstance(logps, tuple) else (logps, None)
        statistics = row_statistics(h, w, b, targets, outputs, **rule)
    return logps, entropy, *statistics


@torch.no_grad()
def row_statistics(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,)
    wanted: tuple[str, ...],
    *,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
) -> list[Tensor | None]:
    """Compute the metrics of TRL's head from blocks of logits, without gradient.

    Returns:
        For each name in `METRICS`: a tensor of shape (N,), or None if `wanted` does not name it.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in METRICS if name in wanted}
    head = Head(weight, bias, softcap, logit_scale)
    size = max(BLOCK_ELEMENTS // weight.shape[0], 1)
    for h, ids in zip(hidden.split(size), targets.split(size), strict=True) if found else ():
        z = head.logits_of(nn.functional.linear(h, weight, bias)) / temperature
        for name, values in found.items():
            values.append(METRICS[name](z, ids))
    return [torch.cat(found[name]) if name in found else None for name in METRICS]


class FusedHead(NamedTuple):
    """Settings of TRL's fused LM head.

    The head computes the logits softcap·tanh(logit_scale·(h·Wᵀ + bias)/softcap)/temperature, in
    fp32 if `cast_to_fp32` is True.
    """

    rule: dict[str, Any]  # temperature, softcap and logit_scale
    cast_to_fp32: bool

    def operands(self, layer: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `hidden`, the weight and the bias in the dtype in which TRL computes the head."""
        dtype = torch.float32 if self.cast_to_fp32 else compute_dtype(hidden)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return hidden.to(dtype), layer.weight.to(dtype), bias


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model. Return any other model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def fused_head(model: PreTrainedModel) -> FusedHead:
    """Return the settings of a model's fused head, which TRL stores in the closure of the forward.

    Raises:
        ValueError: The model has no fused head.
    """
    known = inspect.getclosurevars(_require_fused(model)).nonlocals
    rule = {name: known[name] for name in ("temperature", "logit_scale")}
    rule |= {"softcap": known["final_logit_softcapping"]}
    return FusedHead(rule, known["cast_lm_head_to_fp32"])


def _fused_function(model: PreTrainedModel) -> types.FunctionType | None:
    """Return TRL's forward with the fused head, or None if the model has no such forward.

    The forward is also found if accelerate or `use_fast_head` has wrapped it.
    """
    for forward in (getattr(model, "forward", None), getattr(model, "_original_forward", None)):
        function = getattr(forward, "__func__", forward)
        function = getattr(function, "trl_fused", function)
        if "fused_lm_head" in (getattr(function, "__kwdefaults__", None) or {}):
            return function
    return None


def _require_fused(model: PreTrainedModel) -> types.FunctionType:
    """Return TRL's forward with the fused head. Raise a ValueError if it is not as in TRL 1.16."""
    function = _fused_function(model)
    if function is None:
        expected = "one with TRL's fused LM head (trl.trainer.utils.add_fused_lm_head, trl >= 1.16)"
        came = f"{type(model).__name__} with trl {version('trl')}"
        raise ValueError(f"model: expected {expected}, got {came}")
    missing = {KERNEL, COMPACTS} - {*function.__code__.co_names}
    expected = f"{sorted(missing)} in the fused LM head, as in trl 1.16"
    require(not missing, "trl", expected, version("trl"))
    return function
