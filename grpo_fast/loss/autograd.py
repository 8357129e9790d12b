"""Losses and logps with their gradients, and the two autograd functions.

A loss computes its gradients in the forward pass, for an upstream gradient of 1. The first backward
multiplies these gradients by the upstream scalar and returns the same tensors, so that autograd
stores them as `.grad` without a copy. A second backward (`retain_graph=True`) computes the
gradients again.

The forward pass of logps stores the logits, or their exponentials, for as many rows as fit into the
workspace. The first backward uses them and recomputes the logits of the remaining rows. Forward and
backward of `linear_logps` together then cost 6·N·V·H flops if all logits are stored, and 8·N·V·H if
none are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.launch import refuse
from grpo_fast.kernels.head.driver import Driver
from grpo_fast.kernels.head.sums import narrowed, weight_unit
from grpo_fast.kernels.head.terms import Divergences, Known, TokenLevel, sum_of, weighted_sum
from grpo_fast.kernels.route import Route, uses_triton
from grpo_fast.kernels.types import Context
from grpo_fast.loss import checks
from grpo_fast.loss.call import Call, RowTensors
from grpo_fast.objective.aggregation import Tokens
from grpo_fast.objective.coefficients import row_inputs, token_loss

NO_DOUBLE_BACKWARD = "grpo_fast: its losses and logps have no double backward (create_graph=True)"
OVERWRITTEN = "grpo_fast: inplace=True has overwritten the logits; it allows one backward only"
UNCHANGED = nullcontext()


class LossResult(NamedTuple):
    """Loss, logps and gradients of a call, for all N rows."""

    loss: Tensor  # 0-d
    gradients: tuple[Tensor, ...]  # (0,) if not needed
    logps: Tensor  # (N,). A call of `linear_divergence` has the divergences here.
    entropy: Tensor | None = None  # (N,)
    # (2,) metrics of grad_filter: the dropped share of Σ|d-logits|, and the share of the vocabulary
    # columns that were kept
    filtered: Tensor | None = None
    divergence: Tensor | None = None  # (N,) divergence from the teacher
    # For each gradient, the factor by which it must be multiplied; None: all factors are 1.
    units: tuple[Tensor, ...] | None = None


def kernel_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast, so that kernels compute in the input dtypes."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return UNCHANGED


# ---- Losses


def loss_from_logits(call: Call, tensors: RowTensors) -> LossResult:
    """Compute a loss or a divergence from hidden states or logits.

    The gradients are (d-hidden, d-weight, d-bias), or (d-logits,). With `inplace`, the gradient
    overwrites the logits.
    """
    first = tensors[0]
    refuse("grad_filter", first, call.grad_filter)
    refuse("validate", first, call.validate, "auto")
    wanted = call.wanted
    tokens = call.tokens
    weights = call.weights if tokens is None else tokens.token_weights
    # 1. In fp16, scale the weights by a power of two, so that the gradients do not underflow. The
    # gradients of an LM head are summed in fp32, and `rescaled` rounds them once.
    is_half = any(wanted) and first.dtype == torch.float16
    unit = weight_unit(weights) if is_half else None
    if unit is not None:
        weights = weights * unit
        tokens = tokens and tokens._replace(token_weights=weights, unit=unit)
    # 2. Create the driver, and the divergence from a teacher if there is one.
    route = call.route(tensors)
    term = call.divergence
    divergences = None
    if term is not None:
        divergences = Divergences(term, term.coef * weights, route, has_gradient=any(wanted))
    driver = call.driver(
        tensors, route, entropy_gradient=call.config is not None and call.config.entropy_coef != 0,
        keep_fp32=is_half,
    )  # fmt: skip
    # 3. Compute the loss and its gradients.
    with kernel_precision(first.device):
        result = driven(call, driver, tokens, divergences)
    if unit is None:
        return result
    if len(tensors) == 1:
        return result._replace(loss=result.loss / unit, units=(1 / unit,))
    return rescaled(result, unit, first.dtype)


def driven(
    call: Call, driver: Driver, tokens: Tokens | None, divergences: Divergences | None
) -> LossResult:
    """Compute a loss and its gradients with a driver. Without `tokens`, it is the divergence.

    A token-level loss needs one pass, because each row's gradient depends only on that row. Other
    losses first compute the logps of all rows, and then the gradients in a second pass.
    """
    config = call.config
    wanted = call.wanted
    if config is None or tokens is None:
        assert divergences is not None
        gradients = driver.gradients(divergences, wanted)
        loss = weighted_sum(divergences.weights, divergences.values).to(divergences.weights.dtype)
        return LossResult(loss, gradients, divergences.values)
    terms = row_inputs(tokens, config)
    if any(wanted) and terms is not None and driver.num_rows:
        # 1. Compute losses and gradients of a token-level loss in one pass.
        rows, gradients = driver.token_level(TokenLevel(terms, config), divergences, wanted)
        logps = rows.logps
        entropy = rows.entropy
        checks.check_logps(logps, call.checks)
        loss = rows.losses.sum(dtype=torch.float64)
        if terms.grad_entropy is not None and entropy is not None:
            loss = loss + (terms.grad_entropy * entropy).sum(dtype=torch.float64)
        loss = loss.float()
    else:
        # 2. Other losses need the logps of all rows before they can compute a gradient. A call
        # without gradients also uses this path.
        stats = driver.logps(return_entropy=config.needs_entropy, stores=any(wanted))
        _, logps, entropy = stats
        checks.check_logps(logps, call.checks)
        result = token_loss(logps, entropy, tokens, config)
        loss = result.loss
        # A GPU has no other work while the host would wait for the number of rows without gradient.
        known = Known(result.grad_logps, result.grad_entropy, stats, counts_on_gpu=False)
        term = sum_of(divergences, known) if any(wanted) else divergences or known
        gradients = driver.gradients(term, wanted)
    # 3. Add the divergence, and expand the results from the active rows to all rows.
    spread = call.rows.to_rows
    each = None
    if divergences is not None:
        loss = loss + weighted_sum(divergences.weights, divergences.values).to(loss.dtype)
        each = spread(divergences.values)
    return LossResult(loss, gradients, spread(logps), spread(entropy), driver.filtered, each)


def loss_from_logps(call: Call, tensors: RowTensors) -> LossResult:
    """Compute the loss from given logps. The gradients are (dL/dlogp, dL/dentropy)."""
    rows = call.rows
    config = call.config
    tokens = call.tokens
    assert config is not None and tokens is not None
    logps, entropy = tensors
    # Compute in fp32. Copy the inputs, because an output must not share memory with an input.
    # Otherwise, an in-place change of the input would change the output.
    lp = rows.active(logps).to(torch.float32, copy=True)
    h = None if entropy is None else rows.active(entropy).to(torch.float32, copy=True)
    checks.check_logps(lp, call.checks, checks.NO_FINITE_LOGP)
    result = token_loss(lp, h, tokens, config)
    d_entropy = result.grad_entropy
    d_entropy = lp.new_empty(0) if d_entropy is None else rows.to_rows(d_entropy)
    gradients = rows.to_rows(result.grad_logps), d_entropy
    return LossResult(result.loss, gradients, rows.to_rows(lp), rows.to_rows(h))


def rescaled(result: LossResult, unit: Tensor, dtype: torch.dtype) -> LossResult:
    """Divide the loss by `unit`, and round each gradient to `dtype`.

    The token weights of the call were multiplied by `unit`, so loss and gradients contain this
    factor. Each gradient is also scaled by a power of two, so that its largest element fits the
    range of `dtype`. The `units` of the result undo both scales in the backward pass.
    """
    pairs = [narrowed(x, dtype) if x.numel() else (x, unit) for x in result.gradients]
    gradients = tuple(x for x, _ in pairs)
    units = tuple(x / unit for _, x in pairs)
    return result._replace(loss=result.loss / unit, gradients=gradients, units=units)


Run = Callable[[Call, RowTensors], LossResult]


class LossFunction(torch.autograd.Function):
    """Autograd function of a loss, which computes the gradients in its forward pass.

    The results without a gradient are stored in `call.outputs`.
    """

    @staticmethod
    def forward(ctx: Context, run: Run, call: Call, *inputs: Tensor | None) -> Tensor:
        tensors: RowTensors = tuple(None if x is None else x.detach() for x in inputs)
        result = run(call, tensors)
        if not call.inplace:
            ctx.save_for_backward(*tensors)
        elif result.gradients[0].numel():
            # Increment the version counter of the logits, because autograd does not see that the
            # kernels overwrite them. A backward that needs the old logits then raises an error
            # instead of using the gradient in their place.
            torch.autograd.graph.increment_version([x for x in inputs if x is not None])
        ctx.run = run
        ctx.call = call
        ctx.shapes = [None if x is None else x.shape for x in inputs]
        # Store the gradients as an attribute. With save_for_backward, autograd would keep a second
        # reference and copy the gradients when they become .grad.
        ctx.result = result.gradients, result.units
        # Do not store the loss in the call. The call would then keep the autograd graph in memory.
        call.outputs = result.logps, result.entropy, result.filtered, result.divergence
        return result.loss

    @staticmethod
    def backward(ctx: Context, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        needs = ctx.needs_input_grad[2:]
        # Use the stored gradients only once. Autograd stores these tensors as `.grad`, so
        # multiplying them in place in a second backward would change `.grad`. Compute the gradients
        # again instead.
        stored = ctx.result
        ctx.result = None
        if stored is None:
            if ctx.call.inplace:
                raise RuntimeError(OVERWRITTEN)
            again = ctx.run(ctx.call, ctx.saved_tensors)
            stored = again.gradients, again.units
        gradients, units = stored
        results: list[Tensor | None] = [None] * len(needs)
        factors = []
        for i, (x, shape) in enumerate(zip(gradients, ctx.shapes, strict=True)):
            # A gradient that is not needed is an empty tensor.
            if needs[i] and x.shape == shape:
                results[i] = x.detach()
                factors.append(grad_loss if units is None else grad_loss * units[i])
        scale_([x for x in results if x is not None], factors)
        return None, None, *results


apply_loss: Callable[..., Tensor] = LossFunction.apply


def scale_(gradients: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply gradients by their scalar factors in place, without a GPU sync.

    The multiplication is skipped if all factors are CPU tensors with the value 1.
    """
    # Call item() only on plain CPU tensors. On a GPU tensor, it would wait for the GPU. A subclass
    # of Tensor, as autograd passes it while it is traced, has no value.
    if all(type(x) is Tensor and x.is_cpu and x.item() == 1.0 for x in factors):
        return
    on_gpu = all(x.is_cuda and x.is_contiguous() and x.dtype.itemsize <= 4 for x in gradients)
    if on_gpu and uses_triton(factors[0]):
        from grpo_fast.kernels.gpu import gradients as kernels

        kernels.scale_(gradients, factors)
        return
    for gradient, factor in zip(gradients, factors, strict=True):
        gradient.mul_(factor)


# ---- Logps

LogpsValues = tuple[Tensor, Tensor | None]  # logps, and entropies if they were requested


class LogpsFunction(torch.autograd.Function):
    """Autograd function of logps, which computes the gradients in its backward pass.

    The first backward pass uses the logits that the forward pass has stored. Later backward passes
    compute all logits again.
    """

    @staticmethod
    def forward(ctx: Context, call: Call, *inputs: Tensor | None) -> LogpsValues:
        tensors: RowTensors = tuple(None if x is None else x.detach() for x in inputs)
        outputs, lse, driver = computed_logps(call, tensors)
        ctx.set_materialize_grads(False)
        if any(call.wanted):
            ctx.call = call
            ctx.driver = driver if driver.num_rows else None
            ctx.save_for_backward(*tensors, *outputs, lse)
        return outputs

    @staticmethod
    def backward(
        ctx: Context, d_logps: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        call = ctx.call
        needs = ctx.needs_input_grad[1:]
        if d_logps is None and d_entropy is None:
            return (None,) * (1 + len(needs))
        # 1. Read the saved tensors even if the stored logits make them unnecessary. Autograd then
        # raises an error if one of them was modified after the forward pass.
        saved = ctx.saved_tensors
        tensors = saved[:-3]
        logps, entropy, lse = saved[-3:]
        driver = ctx.driver
        ctx.driver = None
        has_entropy = d_entropy is not None
        if driver is None or (has_entropy and not driver.has_entropy_gradient):
            # Form the logits again. The stored exponentials cannot give the gradient of the
            # entropies.
            route = call.route(tensors)
            needs_logits = has_entropy or stores_logits(call, route)
            driver = call.driver(tensors, route, entropy_gradient=needs_logits)
        # 2. Compute the gradients from the statistics of the active rows.
        active = call.rows.active
        stats = active(lse), active(logps), active(entropy)
        g, g_entropy = (
            None if d is None else with_targets(call, active(d).float())
            for d in (d_logps, d_entropy)
        )
        if g is None:
            assert g_entropy is not None
            g = torch.zeros_like(g_entropy)
        with kernel_precision(lse.device):
            gradients = driver.gradients(Known(g, g_entropy, stats), call.wanted)
        # Autograd expects None for a gradient that is not needed, but `gradients` then contains an
        # empty tensor.
        needed = (x if need else None for x, need in zip(gradients, needs, strict=True))
        return None, *needed


_logps_with_autograd: Callable[..., LogpsValues] = LogpsFunction.apply


def apply_logps(call: Call, *inputs: Tensor | None) -> LogpsValues:
    """Compute logps and entropies of all rows, with autograd if a gradient is needed.

    In forward mode and under the transforms of torch.func, `LogpsFunction` is called, too, because
    it raises the error that these are not supported.
    """
    is_forward_mode = torch.autograd.forward_ad._current_level >= 0
    if any(call.wanted) or is_forward_mode or torch._C._are_functorch_transforms_active():
        return _logps_with_autograd(call, *inputs)
    return computed_logps(call, inputs)[0]


def computed_logps(call: Call, tensors: RowTensors) -> tuple[LogpsValues, Tensor, Driver]:
    """Compute logps and entropies of all rows, and return them with the lse and the driver.

    If a gradient is needed, the driver keeps the logits of the last chunk for the backward pass.
    """
    stores = any(call.wanted)
    route = call.route(tensors)
    driver = call.driver(tensors, route, entropy_gradient=stores_logits(call, route))
    with kernel_precision(tensors[0].device):
        lse, logps, entropy = driver.logps(return_entropy=call.return_entropy, stores=stores)
    logps = with_targets(call, logps)
    # Check the logps, because an infinite logp is the only sign of a target whose logit is -inf.
    checks.check_logps(logps, call.checks)
    spread = call.rows.to_rows
    entropy = None if entropy is None else spread(with_targets(call, entropy))
    return (spread(logps), entropy), spread(lse), driver


def stores_logits(call: Call, route: Route) -> bool:
    """Return True if a dense head stores logits in place of exponentials.

    fp32 exponentials and logits take the same memory, but only logits can give the gradient of the
    entropies. All passes of a call must store the same, so that they have the same bits.
    """
    is_wide = route.exponentials == torch.float32
    return call.return_entropy and is_wide and call.rows.support is None


def with_targets(call: Call, x: Tensor) -> Tensor:
    """Set the rows of x that have no target to 0.

    Such rows exist only if `Call.find_targets` has kept them.
    """
    return x if call.left_out is None else x.masked_fill(call.left_out, 0.0)
