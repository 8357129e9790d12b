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
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import FastHead, compute_dtype, is_partitioned, run_inside
from grpo_fast.integrations.trl.divergence import LOSS, swap_divergence

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, Trainer

KERNEL = "_ChunkedLogProbFunction"
COMPACTS = "_use_triton"
GATHERED = "DTensor"
# Variables in the closure of the forward with TRL's fused head.
CLOSURE = ("temperature", "final_logit_softcapping", "logit_scale", "cast_lm_head_to_fp32")
# TRL trainers whose loss calls the fused head. GKDTrainer and GOLDTrainer inherit the head from
# SFTTrainer, but they are not in this list, because their loss needs full logits.
SERVED = (
    "GRPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "GMPOTrainer",
    "AsyncGRPOTrainer", "DistillationTrainer",
)  # fmt: skip
BLOCK_ELEMENTS = 1 << 24  # fp32 elements of one block of logits in `row_statistics`: 64 MiB
# A token with a larger probability is the most probable token of its row. The bound is slightly
# above 1/2, because probabilities have rounding errors.
CERTAINLY_FIRST = 0.501

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def use_fast_head(trainer_or_model: Trainer | PreTrainedModel | PeftModel) -> FastHead:
    """Replace the fused LM head of a TRL trainer or model with our kernels.

    Outputs and gradients stay the same up to rounding. For a `DistillationTrainer`, our kernels
    compute the divergence from the teacher. FSDP2 may shard the head. If ZeRO-3 or tensor
    parallelism shards it, TRL's code computes the head, and a warning is logged.

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
    if theirs is not None and theirs.__name__ == "DistillationTrainer":
        loss = theirs._compute_loss  # type: ignore[attr-defined]
        if LOSS not in loss.__code__.co_names or type(trainer)._compute_loss is not loss:
            raise _not_1_16(f"{LOSS} in the _compute_loss of {type(trainer).__name__}")
        swap_divergence(trainer, handle)
        return handle
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is None:
        _swap(base_model(trainer), handle, nullcontext)
        return handle
    _swap(base_model(accelerator.unwrap_model(trainer.model)), handle, accelerator.autocast)
    if getattr(trainer, "ref_model", None) is not None:
        reference = base_model(accelerator.unwrap_model(trainer.ref_model))
        if _fused_function(reference):
            _swap(reference, handle, accelerator.autocast)
    return handle


def _swap(
    model: PreTrainedModel, handle: FastHead, autocast: Callable[[], AbstractContextManager[object]]
) -> None:
    """Replace the model's forward by one that uses our kernels while `handle` is active."""
    theirs = _require_fused(model)
    before = model.forward
    ours = _with_our_head(theirs, model)
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
            # A deep copy of the model shares this function, but must use the head of the copy.
            function = ours if self is model else _with_our_head(theirs, self)
            return function(self, *args, fused_lm_head=True, **kwargs)

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
    rule = Rule(temperature, final_logit_softcapping, logit_scale)
    dtype = compute_dtype(hidden)
    h = hidden.to(dtype)
    w = weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    # Disable autocast. The tensors already have the dtype that TRL uses for the head, and autocast
    # would cast fp32 tensors to 16 bits.
    with torch.autocast(hidden.device.type, enabled=False):
        logps = linear_logps(
            h, w, targets, bias=b, return_entropy="entropy" in outputs, **rule._asdict()
        )
        logps, entropy = logps if isinstance(logps, tuple) else (logps, None)
        stats = row_statistics(h, w, b, targets, logps, outputs, rule)
    extras = map(stats.get, ("log_sum_sq_probs", "mean_logits", "is_top1"))
    return logps, entropy, *extras


class Rule(NamedTuple):
    """Logit transform of an LM head: temperature, softcap and logit scale."""

    temperature: float
    softcap: float | None
    logit_scale: float


@torch.no_grad()
def row_statistics(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,)
    logps: Tensor,  # (N,) fp32
    wanted: tuple[str, ...],
    rule: Rule,
) -> dict[str, Tensor]:
    """Compute metrics of TRL's head without gradient, and without the logits of most rows.

    - mean_logits is the product of `hidden` and the mean row of the weight. Only with a softcap are
      the logits of all rows computed.
    - log_sum_sq_probs is log Σp² = 2·logp(T) - logp(T/2), where T is the temperature and logp(T)
      the log-probability of the target.
    - is_top1 tells whether the target is the most probable token. A target with a probability above
      1/2 always is, and a target below 1/V never is. The other rows need logits.

    Args:
        hidden: Hidden states, shape (N, H).
        weight: Weight of the LM head, shape (V, H).
        bias: Bias of the LM head, shape (V,), or None.
        targets: Ids of the targets, shape (N,).
        logps: Log-probabilities of the targets, shape (N,), fp32.
        wanted: Names of the metrics to compute.
        rule: Logit transform of the head.

    Returns:
        Dictionary with the metrics in `wanted`, each of shape (N,).
    """
    temperature, softcap, scale = rule
    stats = {}
    p = logps.detach().exp()
    if "log_sum_sq_probs" in wanted:
        half = rule._replace(temperature=temperature / 2)._asdict()
        at_half = linear_logps(hidden, weight, targets, bias=bias, **half)
        stats["log_sum_sq_probs"] = 2 * logps.detach() - at_half
    top1 = p > CERTAINLY_FIRST
    means = torch.zeros_like(p)
    rows = (~top1 & (p >= 0.999 / weight.shape[0])).nonzero()[:, 0]
    rows = rows if "is_top1" in wanted else rows[:0]
    if "mean_logits" in wanted and softcap is None:
        offset = 0.0 if bias is None else bias.mean(dtype=torch.float32)
        mean_row = weight.mean(0, dtype=torch.float32)
        means = (hidden.float() @ mean_row + offset) * (scale / temperature)
    elif "mean_logits" in wanted:
        rows = torch.arange(len(p), device=p.device)
    for block in rows.split(max(BLOCK_ELEMENTS // weight.shape[0], 1)) if len(rows) else ():
        logits = torch.nn.functional.linear(hidden[block], weight, bias).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
            means[block] = logits.mean(-1) / temperature
        top1[block] = logits.argmax(-1) == targets[block]
    stats |= {"mean_logits": means, "is_top1": top1}
    return {name: x for name, x in stats.items() if name in wanted}


class FusedHead(NamedTuple):
    """Settings of TRL's fused LM head.

    The head computes the logits softcap·tanh(logit_scale·(h·Wᵀ + bias)/softcap)/temperature, in
    fp32 if `cast_to_fp32` is True.
    """

    rule: Rule
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
        ValueError: The model has no fused head, or the head lacks a variable that TRL 1.16 has.
    """
    known = inspect.getclosurevars(_require_fused(model)).nonlocals
    temperature, softcap, scale, cast_to_fp32 = (known[name] for name in CLOSURE)
    return FusedHead(Rule(float(temperature), softcap, float(scale)), bool(cast_to_fp32))


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
    code = function.__code__
    missing = {KERNEL, COMPACTS, *CLOSURE} - {*code.co_names, *code.co_freevars}
    if missing:
        raise _not_1_16(f"{sorted(missing)} in the fused LM head")
    return function


def _not_1_16(missing: str) -> ValueError:
    return ValueError(f"trl {version('trl')}: expected {missing}, as in trl 1.16")
