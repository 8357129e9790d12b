"""TRL's fused LM head on our kernels: for any TRL trainer that uses it (GRPO, RLOO, SFT, DPO, KTO),
without a subclass.

    handle = use_fast_head(trainer)      # or: with use_fast_head(model): ...
    trainer.train()
    handle.undo()

TRL's fused forward (trl_fused.py) is a closure that ends in `_ChunkedLogProbFunction.apply`. Here
the same closure runs over a copy of its module's globals in which three names differ: that
function; the test for compaction (TRL scores every position, padding included, where there is no
Triton); and the class of the weights that TRL gathers itself, which leaves their gradient unreduced
(ours runs inside the head's own forward).
Nothing that another model or trainer reads is touched.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo_fast import linear_logps
from grpo_fast.integrations.fast_head import FastHead, compute_dtype, run_inside
from grpo_fast.integrations.trl_fused import base_model, fused_function, require_fused, trl_version

log = logging.getLogger(__name__)

KERNEL, COMPACTS, GATHERED = "_ChunkedLogProbFunction", "_use_triton", "DTensor"
# TRL's trainers whose loss calls the fused head. GKD and GOLD derive from SFTTrainer, and compute
# logits of their own.
SERVED = (
    "GRPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "GMPOTrainer",
    "AsyncGRPOTrainer",
)  # fmt: skip
# fp32 elements of one block of logits in `row_statistics`: 64 MiB.
BLOCK_ELEMENTS = 1 << 24
# Above this, a probability is the largest whatever rounding says; below 1/V it is not.
CERTAINLY_FIRST = 0.501

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def use_fast_head(trainer_or_model: Any) -> FastHead:
    """Let our kernels compute the fused LM head of this trainer's models (policy and reference), or
    of this model.

    The outputs are TRL's `(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1)`, those that
    the trainer asks for; gradients reach hidden, weight and bias. Ours runs inside the head's own
    forward, so that FSDP2 gathers its weight and reduces the gradient, whichever group the head is
    in. A head sharded by ZeRO-3 (whose backward gathers the weight again) or by tensor parallelism
    stays with TRL's own function, which is logged.

    Raises ValueError when there is no fused head of TRL's on the model, or when the trainer is one
    of TRL's whose loss does not call it.
    """
    _require_served(trainer_or_model)
    handle = FastHead()
    accelerator = getattr(trainer_or_model, "accelerator", None)
    if accelerator is None:
        _swap(base_model(trainer_or_model), handle, nullcontext)
        return handle
    for name in ("model", "ref_model"):
        model = getattr(trainer_or_model, name, None)
        if model is not None and (
            name == "model" or fused_function(base_model(accelerator.unwrap_model(model)))
        ):
            _swap(base_model(accelerator.unwrap_model(model)), handle, accelerator.autocast)
    return handle


def _swap(
    model: Any, handle: FastHead, autocast: Callable[[], AbstractContextManager[Any]]
) -> None:
    theirs, before = require_fused(model), model.forward
    missing = {KERNEL, COMPACTS} - set(theirs.__code__.co_names)
    if missing:
        raise ValueError(
            f"trl {trl_version()}: expected {sorted(missing)} in the fused LM head, as in trl 1.16"
        )
    ours = _over(theirs, model)
    run_inside(model.get_output_embeddings())
    # A prepared model carries accelerate's autocast around TRL's forward; ours then needs the same.
    context = nullcontext if getattr(before, "__func__", None) is theirs else autocast

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not (fused_lm_head and handle.active) or _is_partitioned(self):
            return before(*args, **({**kwargs, "fused_lm_head": True} if fused_lm_head else kwargs))
        with context():
            # A copy of the model has a head of its own.
            function = ours if self is model else _over(theirs, self)
            return function(self, *args, fused_lm_head=True, **kwargs)

    model.forward = types.MethodType(forward, model)
    model.forward.__func__.trl_fused = theirs


def _over(theirs: types.FunctionType, model: Any) -> types.FunctionType:
    """TRL's closure with our kernels, inside the head of this model."""
    head = model.get_output_embeddings()
    kernel = types.SimpleNamespace(apply=functools.partial(_apply_inside, head))
    scope = {**theirs.__globals__, KERNEL: kernel, COMPACTS: lambda device: True, GATHERED: ()}
    ours = types.FunctionType(
        theirs.__code__, scope, theirs.__name__, theirs.__defaults__, theirs.__closure__
    )  # fmt: skip
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


def _apply_inside(head: Any, hidden: Tensor, weight: Any, bias: Any, *rest: Any) -> Outputs:
    """`FastLogProbs.apply` with the weight and the bias that the head has inside its forward."""
    dtype = compute_dtype(hidden)  # the head's hooks may cast hidden

    def apply(layer: Any, hidden: Tensor) -> Outputs:
        return FastLogProbs.apply(hidden.to(dtype), layer.weight, layer.bias, *rest)

    return head(hidden, run=apply)


def _is_partitioned(model: Any) -> bool:
    by = "DeepSpeed ZeRO-3" if hasattr(model.get_output_embeddings().weight, "ds_id") else None
    by = "tensor parallelism" if (getattr(model, "tp_size", None) or 1) > 1 else by
    if by is not None:
        _warn_partitioned(by)
    return by is not None


@functools.cache
def _warn_partitioned(by: str) -> None:
    log.warning("use_fast_head: the head is sharded by %s; TRL's own function computes it", by)


def _require_served(trainer: Any) -> None:
    """Refuse a trainer of TRL's that inherits a fused head and computes its loss without it."""
    theirs = next((c for c in type(trainer).__mro__ if c.__module__.split(".")[0] == "trl"), None)
    if theirs is not None and theirs.__name__ not in SERVED:
        raise ValueError(
            f"trainer: expected one whose loss calls TRL's fused LM head ({', '.join(SERVED)}, or "
            f"derived from one), came {type(trainer).__name__}, whose loss would not change"
        )


class FastLogProbs:
    """Stands where TRL's `ChunkedLogProbFunction` stands."""

    @staticmethod
    def apply(
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
        """(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1), each (N,); None where not
        asked for.
        """
        # Nothing is scored: a row without a target keeps weight and trunk in the graph.
        if hidden.shape[0] == 0:
            nothing = FastLogProbs.apply(
                torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])]), weight, bias,
                targets.new_full((1,), -100), temperature, chunk_size, final_logit_softcapping,
                logit_scale, outputs,
            )  # fmt: skip
            return tuple(None if x is None else x[:0] for x in nothing)  # type: ignore[return-value]
        dtype = compute_dtype(hidden)
        h, w, b = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        rule: dict[str, Any] = {
            "temperature": temperature,
            "softcap": final_logit_softcapping,
            "logit_scale": logit_scale,
        }
        # The operands have their dtype; sums stay fp32.
        with torch.autocast(hidden.device.type, enabled=False):
            result = linear_logps(
                h, w, targets, bias=b, return_entropy="entropy" in outputs, **rule
            )
            logps, entropy = result if isinstance(result, tuple) else (result, None)
            extras = row_statistics(h, w, b, targets, logps, outputs, **rule)
        return (
            logps,
            entropy,
            *(extras.get(name) for name in ("log_sum_sq_probs", "mean_logits", "is_top1")),
        )


@torch.no_grad()
def row_statistics(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,)
    logps: Tensor,  # (N,) fp32
    wanted: tuple[str, ...],
    *,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
) -> dict[str, Tensor]:
    """The metrics of TRL's head that have no gradient, each from as little work as it takes.

    The mean logit is linear in the logits, so without a softcap it is one product with the mean row
    of W. Σp² is the ratio of two partition functions: log Σp² = 2·logp(T) - logp(T/2). Whether the
    target is the first maximum needs the logits, but only of the rows whose probability, between
    1/V and a half, leaves it open.
    """
    found: dict[str, Tensor] = {}
    rule: dict[str, Any] = {
        "temperature": temperature,
        "softcap": softcap,
        "logit_scale": logit_scale,
    }
    if "log_sum_sq_probs" in wanted:
        colder = linear_logps(
            hidden, weight, targets, bias=bias, **{**rule, "temperature": temperature / 2}
        )
        found["log_sum_sq_probs"] = 2 * logps.detach() - colder
    if "mean_logits" in wanted and softcap is None:
        mean_row = weight.mean(0, dtype=torch.float32)
        offset = 0.0 if bias is None else bias.mean(dtype=torch.float32)
        found["mean_logits"] = (hidden.float() @ mean_row + offset) * (logit_scale / temperature)
    top1 = logps.detach().exp() > CERTAINLY_FIRST
    open_rows = (~top1 & (logps.detach().exp() >= 0.999 / weight.shape[0])).nonzero()[:, 0]
    means = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    needs_means = "mean_logits" in wanted and softcap is not None
    rows = torch.arange(hidden.shape[0], device=hidden.device) if needs_means else open_rows
    for block in (
        rows.split(max(BLOCK_ELEMENTS // weight.shape[0], 1))
        if needs_means or "is_top1" in wanted
        else ()
    ):
        logits = torch.nn.functional.linear(hidden[block], weight, bias).float() * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        top1[block] = logits.argmax(-1) == targets[block]
        means[block] = logits.mean(-1) / temperature
    if needs_means:
        found["mean_logits"] = means
    if "is_top1" in wanted:
        found["is_top1"] = top1
    return found
