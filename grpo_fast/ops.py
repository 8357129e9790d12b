"""The loss passes as custom operators with their own backward: what autograd and torch.compile see.

Each operator forms its gradients in the forward; backward multiplies them by the upstream scalar and hands them over.
They are handed over once, so that they can become `.grad` without a copy; a second backward through a retained graph
computes them again. A double backward is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import unavailable
from grpo_fast.kernels.half_range import needs_range
from grpo_fast.kernels.linear import Wanted
from grpo_fast.kernels.metrics import metric_names
from grpo_fast.passes import LossResult, kernel_precision, linear_loss, logits_loss, logps_loss, logps_metrics
from grpo_fast.prepare import TokenInputs

TOKEN_ARGS = (
    "Tensor? target_ids, Tensor advantages, Tensor? cu_seqlens, int num_completions, Tensor? completion_mask, "
    "Tensor? old_logps, Tensor? ref_logps, Tensor? sampling_logps, Tensor? temperature, Tensor? num_items_in_batch, "
    "Tensor? num_completions_in_batch, str config"
)
LOSS = "Tensor loss, Tensor logps, Tensor entropy, Tensor filtered, Tensor units"  # the gradients follow

# How many of its first inputs an operator has a gradient for.
DIFFERENTIABLE = {"linear_grpo": 3, "logits_grpo": 1, "logps_grpo": 2}

library = torch.library.Library("grpo_fast", "DEF")
library.define(
    "linear_grpo(Tensor hidden, Tensor weight, Tensor? bias, Tensor? hidden_rows, float? grad_filter, "
    f"bool[] wanted, str backend, str validate, {TOKEN_ARGS})"
    f" -> ({LOSS}, Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)
library.define(
    f"logits_grpo(Tensor logits, bool wanted, str backend, str validate, {TOKEN_ARGS}) -> ({LOSS}, Tensor d_logits)"
)
library.define(f"logps_grpo(Tensor logps, Tensor? entropy, {TOKEN_ARGS}) -> ({LOSS}, Tensor d_logps, Tensor d_entropy)")
library.define(f"metrics(Tensor logps, Tensor? entropy, {TOKEN_ARGS}) -> Tensor")


def linear_grpo(hidden, weight, bias, hidden_rows, grad_filter, wanted, backend, validate, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    with kernel_precision(hidden.device):
        return flat(
            linear_loss(
                hidden, weight, bias, hidden_rows, inputs, config, backend, validate, Wanted(*wanted), grad_filter
            )
        )


def logits_grpo(logits, wanted, backend, validate, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    out = torch.empty_like(logits, memory_format=torch.contiguous_format) if wanted else None
    with kernel_precision(logits.device):
        return flat(logits_loss(logits, out, inputs, config, backend, validate))


def logps_grpo(logps, entropy, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    with kernel_precision(logps.device):
        return flat(logps_loss(logps, entropy, inputs, config))


def metrics(logps, entropy, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    return logps_metrics(logps, entropy, inputs, config)


def metrics_fake(logps, entropy, *token_args):
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    return logps.new_empty(len(metric_names(config, inputs.sampling_logps is not None, entropy is not None)))


def flat(result: LossResult) -> tuple[Tensor, ...]:
    """What an operator returns; what there is not is empty."""
    extras = (result.loss.new_empty(0) if x is None else x for x in (result.filtered, result.units))
    return (result.loss, result.logps, result.entropy, *extras, *result.gradients)


def fake_loss(like: Tensor, num_rows: Any, has_entropy: bool, filtered: int = 0, units: int = 0) -> tuple[Tensor, ...]:
    """Shapes and dtypes of what comes before the gradients."""

    def fp32(*shape: Any) -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    return fp32(), fp32(num_rows), fp32(num_rows if has_entropy else 0), fp32(filtered), fp32(units)


def linear_grpo_fake(hidden, weight, bias, hidden_rows, grad_filter, wanted, backend, validate, *token_args):
    has_entropy = LossConfig.from_key(token_args[-1]).needs_entropy
    filtered, units = 0 if grad_filter is None else 2, 3 if any(wanted) and needs_range(hidden.dtype) else 0
    results = fake_loss(hidden, token_args[0].shape[0], has_entropy, filtered, units)
    tensors = zip((hidden, weight, weight if bias is None else bias), wanted, strict=True)
    return (*results, *(fake_gradient(x, is_wanted) for x, is_wanted in tensors))


def logits_grpo_fake(logits, wanted, backend, validate, *token_args):
    has_entropy = LossConfig.from_key(token_args[-1]).needs_entropy
    units = 1 if wanted and needs_range(logits.dtype) else 0
    return (*fake_loss(logits, logits.shape[0], has_entropy, units=units), fake_gradient(logits, wanted))


def logps_grpo_fake(logps, entropy, *token_args):
    results = fake_loss(logps, logps.shape[0], entropy is not None)
    has_bonus = entropy is not None and LossConfig.from_key(token_args[-1]).entropy_coef != 0
    return (*results, fake_gradient(logps.float(), True), fake_gradient(logps.float(), has_bonus))


def fake_gradient(x: Tensor, is_wanted: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format) if is_wanted else x.new_empty(0)


def wants_gradient(*tensors: Tensor | None) -> list[bool]:
    """Which of a call's tensors somebody will ask a gradient of."""
    on = torch.is_grad_enabled()
    return [on and x is not None and x.requires_grad for x in tensors]


def remember(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Keep the gradients once, and the inputs for a second backward."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]
    ctx.gradients = gradients_of(inputs, output)


def gradients_of(inputs: tuple, output: tuple) -> list[tuple[Tensor | None, Tensor | None]]:
    """The gradients that an operator formed, and their units, where they have one (kernels/half_range.py).

    None for those nobody wanted: they have not their input's shape.
    """
    found = [x.detach() for x in output[5:]]
    units = output[4].detach().unbind() if output[4].numel() else [None] * len(found)
    pairs = zip(inputs, found, units, strict=False)
    return [(x if like is not None and x.shape == like.shape else None, unit) for like, x, unit in pairs]


def hand_over(
    ctx: Any, grad_loss: Tensor | None, needs_grad: tuple[bool, ...], operator: Callable
) -> list[Tensor | None]:
    """The gradients of an operator's inputs; its first inputs are the differentiable ones, in the same order."""
    if torch.is_grad_enabled():
        raise RuntimeError("grpo_fast: the fused losses have no double backward (create_graph=True)")
    if grad_loss is None:
        return [None] * len(ctx.others)
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        saved = iter(ctx.saved_tensors)
        inputs = tuple(next(saved) if other is None else other[0] for other in ctx.others)
        gradients = gradients_of(inputs, operator(*inputs))
    pairs = zip(gradients, needs_grad, strict=False)
    scaled = [scale_(x, times(grad_loss, unit)) if need and x is not None else None for (x, unit), need in pairs]
    return scaled + [None] * (len(ctx.others) - len(scaled))


def times(upstream: Tensor, unit: Tensor | None) -> Tensor:
    return upstream if unit is None else upstream * unit


def scale_(gradient: Tensor, upstream: Tensor) -> Tensor:
    """gradient · upstream in place; an upstream of 1 costs nothing, and no sync."""
    if type(upstream) is Tensor and upstream.device.type == "cpu" and upstream.item() == 1.0:
        return gradient
    if (
        gradient.is_cuda
        and gradient.is_contiguous()
        and gradient.dtype != torch.float64
        and unavailable("triton", "cuda") is None
    ):
        from grpo_fast.kernels import scale_triton

        return scale_triton.scale_(gradient, upstream)
    return gradient.mul_(upstream)


class Eager(torch.autograd.Function):
    """A loss operator outside of torch.compile: the same functions without the dispatcher (0.2 ms of schemas)."""

    @staticmethod
    def forward(ctx, operator, others, *differentiable):
        inputs = (*(None if x is None else x.detach() for x in differentiable), *others)
        output = operator(*inputs)
        remember(ctx, inputs, output)
        ctx.operator = operator
        results = output[:4]
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx, grad_loss, *unused):
        needs_grad = ctx.needs_input_grad[2:]
        return (None, None, *hand_over(ctx, grad_loss, needs_grad, ctx.operator)[: len(needs_grad)])


def call(operator: Callable, *inputs: Any) -> tuple[Tensor, ...]:
    """What a loss operator returns beside gradients, with autograd; under torch.compile as one node of the graph."""
    if torch.compiler.is_compiling():
        output = getattr(torch.ops.grpo_fast, operator.__name__)(*inputs)
        return output[:4]
    count = DIFFERENTIABLE[operator.__name__]  # autograd looks at every input it is given: it gets no others
    return Eager.apply(operator, inputs[count:], *inputs[:count])


def logits_grpo_(logits, wanted, backend, validate, *token_args):
    """`logits_grpo` with the d-logits written over the logits; outside of torch.compile, and one backward only."""
    inputs, config = TokenInputs(*token_args[:-1]), LossConfig.from_key(token_args[-1])
    with kernel_precision(logits.device):
        return flat(logits_loss(logits, logits if wanted else None, inputs, config, backend, validate))


class Inplace(torch.autograd.Function):
    """`logits_grpo_` keeps nothing but the overwritten logits."""

    @staticmethod
    def forward(ctx, *inputs):
        output = logits_grpo_(*inputs)
        if inputs[1]:  # autograd does not see the kernels write: an operator that saved the logits must hear of it
            torch.autograd.graph.increment_version(inputs[0])
        ctx.set_materialize_grads(False)
        ctx.others, ctx.gradients = [(None,)] * (len(inputs) - 1), gradients_of(inputs, output)
        ctx.mark_non_differentiable(*output[1:4])
        return output[:4]

    @staticmethod
    def backward(ctx, grad_loss, *unused):
        def gone(*inputs):
            raise RuntimeError("grpo_fast: inplace=True has overwritten the logits; it allows one backward only")

        return (*hand_over(ctx, grad_loss, ctx.needs_input_grad[:1], gone), None)


def register(function: Callable, fake: Callable) -> None:
    """Define an operator's kernel, shapes and autograd formula for torch.compile."""
    name = function.__name__
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"grpo_fast::{name}", fake, lib=library)
    operator = getattr(torch.ops.grpo_fast, name)

    def backward(ctx, grad_loss, *unused):
        return tuple(hand_over(ctx, grad_loss, ctx.needs_input_grad, operator))

    def setup(ctx, inputs, output):
        remember(ctx, inputs, output)

    torch.library.register_autograd(f"grpo_fast::{name}", backward, setup_context=setup, lib=library)


register(linear_grpo, linear_grpo_fake)
register(logits_grpo, logits_grpo_fake)
register(logps_grpo, logps_grpo_fake)
library.impl("metrics", metrics, "CompositeExplicitAutograd")
torch.library.register_fake("grpo_fast::metrics", metrics_fake, lib=library)
