"""The loss passes as custom operators with their own backward: how autograd and `torch.compile(fullgraph=True)` see them.

Each operator forms its gradients in the forward; backward multiplies them by the upstream scalar and hands them over. They
are handed over once, so that they can become `.grad` without a copy; a second backward through a retained graph computes
them again. A double backward is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.linear import Wanted
from grpo_fast.kernels.tokens import metric_names
from grpo_fast.passes import LossResult, kernel_precision, linear_loss, logits_loss, logps_loss
from grpo_fast.prepare import TokenInputs

TOKEN_ARGS = (
    "Tensor? target_ids, Tensor advantages, Tensor cu_seqlens, Tensor? completion_mask, Tensor? old_logps, "
    "Tensor? ref_logps, Tensor? sampling_logps, Tensor? temperature, Tensor? num_items_in_batch, "
    "Tensor? num_completions_in_batch, str config"
)
LOSS = "Tensor loss, Tensor metrics, Tensor logps, Tensor entropy"

library = torch.library.Library("grpo_fast", "DEF")
library.define(
    f"linear_grpo(Tensor hidden, Tensor weight, Tensor? bias, bool[] wanted, str backend, str validate, {TOKEN_ARGS})"
    f" -> ({LOSS}, Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)
library.define(
    f"logits_grpo(Tensor logits, bool wanted, str backend, str validate, {TOKEN_ARGS}) -> ({LOSS}, Tensor d_logits)"
)
library.define(
    f"logps_grpo(Tensor logps, Tensor? entropy, {TOKEN_ARGS}) -> ({LOSS}, Tensor d_logps, Tensor d_entropy)"
)


def linear_grpo(hidden, weight, bias, wanted, backend, validate, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    with kernel_precision(hidden.device):
        result = linear_loss(hidden, weight, bias, inputs, config, backend, validate, Wanted(*wanted))
    return flat(result)


def logits_grpo(logits, wanted, backend, validate, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    out = torch.empty_like(logits, memory_format=torch.contiguous_format) if wanted else None
    with kernel_precision(logits.device):
        result = logits_loss(logits, out, inputs, config, backend, validate)
    return (*flat(result), logits.new_empty(0) if out is None else out)


def logps_grpo(logps, entropy, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    with kernel_precision(logps.device):
        return flat(logps_loss(logps, entropy, inputs, config))


def flat(result: LossResult) -> tuple[Tensor, ...]:
    return (result.loss, result.metrics, result.logps, result.entropy, *result.gradients)


def fake_loss(like: Tensor, num_rows: Any, has_entropy: bool, token_args: tuple) -> tuple[Tensor, ...]:
    """Shapes and dtypes of (loss, metrics, logps, entropy)."""
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    names = metric_names(config, inputs.sampling_logps is not None, has_entropy)

    def fp32(*shape: Any) -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    return fp32(), fp32(len(names)), fp32(num_rows), fp32(num_rows if has_entropy else 0)


def linear_grpo_fake(hidden, weight, bias, wanted, backend, validate, *token_args):
    has_entropy = LossConfig.from_key(token_args[-1]).needs_entropy
    results = fake_loss(hidden, hidden.shape[0], has_entropy, token_args)
    tensors = zip((hidden, weight, weight if bias is None else bias), wanted, strict=True)
    return (*results, *(fake_gradient(x, is_wanted) for x, is_wanted in tensors))


def logits_grpo_fake(logits, wanted, backend, validate, *token_args):
    has_entropy = LossConfig.from_key(token_args[-1]).needs_entropy
    return (*fake_loss(logits, logits.shape[0], has_entropy, token_args), fake_gradient(logits, wanted))


def logps_grpo_fake(logps, entropy, *token_args):
    results = fake_loss(logps, logps.shape[0], entropy is not None, token_args)
    has_bonus = entropy is not None and LossConfig.from_key(token_args[-1]).entropy_coef != 0
    return (*results, fake_gradient(logps.float(), True), fake_gradient(logps.float(), has_bonus))


def fake_gradient(x: Tensor, is_wanted: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format) if is_wanted else x.new_empty(0)


def remember(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Keep the gradients once, and the inputs for a second backward."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]
    ctx.gradients = [x.detach() for x in output[4:]]


def hand_over(operator: Callable, num_inputs: int) -> Callable:
    """The backward of a loss operator whose first inputs are the differentiable ones, in the order of its gradients."""

    def backward(ctx: Any, grad_loss: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("grpo_fast: the fused losses have no double backward (create_graph=True)")
        if grad_loss is None:
            return (None,) * num_inputs
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            saved = iter(ctx.saved_tensors)
            inputs = (next(saved) if other is None else other[0] for other in ctx.others)
            gradients = operator(*inputs)[4:]
        wanted = ctx.needs_input_grad[: len(gradients)]
        scaled = [scale_(x, grad_loss) if need else None for x, need in zip(gradients, wanted, strict=True)]
        return (*scaled, *[None] * (num_inputs - len(scaled)))

    return backward


def scale_(gradient: Tensor, upstream: Tensor) -> Tensor:
    """gradient · upstream in place; nothing to do for the usual upstream of 1, where that can be seen without a sync."""
    if type(upstream) is Tensor and upstream.device.type == "cpu" and upstream.item() == 1.0:
        return gradient
    return gradient.mul_(upstream)


NUM_TOKEN_ARGS = TOKEN_ARGS.count(",") + 1

for name, function, fake, own_args in (
    ("linear_grpo", linear_grpo, linear_grpo_fake, 6),
    ("logits_grpo", logits_grpo, logits_grpo_fake, 4),
    ("logps_grpo", logps_grpo, logps_grpo_fake, 2),
):
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"grpo_fast::{name}", fake, lib=library)
    operator = getattr(torch.ops.grpo_fast, name)
    torch.library.register_autograd(
        f"grpo_fast::{name}", hand_over(operator, own_args + NUM_TOKEN_ARGS), setup_context=remember, lib=library
    )


class InplaceLogitsLoss(torch.autograd.Function):
    """`logits_grpo` with the d-logits written over the logits. Outside of torch.compile only."""

    @staticmethod
    def forward(ctx, logits, wanted, backend, validate, *token_args):
        inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
        with kernel_precision(logits.device):
            result = logits_loss(logits, logits if wanted else None, inputs, config, backend, validate)
        ctx.set_materialize_grads(False)
        ctx.d_logits, ctx.num_inputs = logits.detach() if wanted else None, 4 + len(token_args)
        return flat(result)

    @staticmethod
    def backward(ctx, grad_loss, *unused):
        if torch.is_grad_enabled():
            raise RuntimeError("grpo_fast: the fused losses have no double backward (create_graph=True)")
        if ctx.d_logits is None:
            raise RuntimeError("grpo_fast: inplace=True has overwritten the logits; it allows one backward only")
        d_logits, ctx.d_logits = ctx.d_logits, None
        gradient = None if grad_loss is None else scale_(d_logits, grad_loss)
        return (gradient, *[None] * (ctx.num_inputs - 1))
