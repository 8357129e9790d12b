"""Autograd functions of the losses and logps.

A loss computes its gradients in the forward pass. The first backward multiplies these gradients by
the upstream scalar and returns the same tensors, so that autograd stores them as `.grad` without a
copy. A second backward (`retain_graph=True`) computes the gradients again.

The forward pass of logps caches the logits, or their exponentials, for as many rows as fit into the
workspace. The first backward uses the cache and recomputes the logits of the remaining rows.
Forward and backward of `linear_logps` together then cost 6·N·V·H flops if all logits are cached,
and 8·N·V·H if none are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_fast.kernels.head.driver import Driver, linear_driver, logits_driver
from grpo_fast.kernels.head.terms import Known
from grpo_fast.kernels.route import head_route, rows_route, unavailable
from grpo_fast.kernels.types import ActiveRows, Context, HeadTensors, RowStats, Wanted
from grpo_fast.loss import values
from grpo_fast.loss.arguments import RowOptions, RowTensors
from grpo_fast.loss.batch import active_target_rows
from grpo_fast.loss.passes import LossResult, kernel_precision
from grpo_fast.loss.value_checks import ValueChecks

NO_DOUBLE_BACKWARD = "grpo_fast: its losses and logps have no double backward (create_graph=True)"
OVERWRITTEN = "grpo_fast: inplace=True has overwritten the logits; it allows one backward only"


def needs_gradient(*tensors: Tensor | None) -> list[bool]:
    """Return, for each tensor of a call, whether autograd needs its gradient."""
    on = torch.is_grad_enabled()
    return [on and x is not None and x.requires_grad for x in tensors]


Tensors = Sequence[Tensor | None]
Gradients = list[tuple[Tensor | None, Tensor | None]]
# Type of the five outputs of a loss: loss, logps, entropies, metrics of grad_filter, divergences.
LossValues = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

# ---- Losses: gradients are computed in the forward pass


class LossFunction(torch.autograd.Function):
    """Autograd function of a loss, which computes the gradients in its forward pass.

    Args:
        run: computes the loss and its gradients, `run(*tensors) -> LossResult`.
        overwrites: True if `run` writes the gradient over its only tensor. A second backward pass
            is then impossible, because the input has been overwritten.
        inputs: the differentiable tensors.
    """

    @staticmethod
    def forward(
        ctx: Context, run: Callable[..., LossResult], overwrites: bool, *inputs: Tensor | None
    ) -> LossValues:
        tensors = tuple(None if x is None else x.detach() for x in inputs)
        result = run(*tensors)
        if not overwrites:
            ctx.save_for_backward(*tensors)
        elif result.gradients[0].numel():
            # Increment the version counter of the logits, because autograd does not see that the
            # kernels overwrite them. A backward that needs the old logits then raises an error
            # instead of using the gradient in their place.
            torch.autograd.graph.increment_version([x for x in inputs if x is not None])
        ctx.set_materialize_grads(False)
        ctx.run = run
        ctx.overwrites = overwrites
        # Store the gradients as an attribute. With save_for_backward, autograd would keep a second
        # reference and copy the gradients when they become .grad.
        ctx.gradients = with_units(tensors, result.gradients, result.units)
        outputs = result.loss, result.logps, result.entropy, result.filtered, result.divergence
        ctx.mark_non_differentiable(*(x for x in outputs[1:] if x is not None))
        return outputs

    @staticmethod
    def backward(
        ctx: Context, grad_loss: Tensor | None, *unused: None
    ) -> tuple[Tensor | None, ...]:
        def recompute() -> Gradients:
            if ctx.overwrites:
                raise RuntimeError(OVERWRITTEN)
            result = ctx.run(*ctx.saved_tensors)
            return with_units(ctx.saved_tensors, result.gradients, result.units)

        return None, None, *scaled_gradients(ctx, grad_loss, ctx.needs_input_grad[2:], recompute)


apply_loss: Callable[..., LossValues] = LossFunction.apply


def with_units(tensors: Tensors, gradients: Tensors, units: Tensor | None) -> Gradients:
    """Return one pair (gradient, unit) for each tensor of a call.

    The unit is a power of two by which the backward pass must multiply the gradient. None means
    that the unit is 1. A gradient that is not needed, which is an empty tensor in `gradients`, is
    None in the result.
    """
    factors: Tensors = [None] * len(gradients)
    if units is not None and units.numel():
        factors = units.detach().unbind()
    return [
        (x.detach() if like is not None and x is not None and x.shape == like.shape else None, unit)
        for like, x, unit in zip(tensors, gradients, factors, strict=True)
    ]


def scaled_gradients(
    ctx: Context,
    grad_loss: Tensor | None,
    needs_grad: tuple[bool, ...],
    recompute: Callable[[], Gradients],
) -> list[Tensor | None]:
    """Return the gradients of a loss, multiplied by the upstream gradient.

    Args:
        ctx: the autograd context. `ctx.gradients` holds the gradients of the forward pass until the
            first call.
        grad_loss: 0-d, the upstream gradient. None if autograd needs no gradient of the loss.
        needs_grad: for each tensor, whether autograd needs its gradient.
        recompute: computes the gradients again for a second backward.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(NO_DOUBLE_BACKWARD)
    if grad_loss is None:
        return [None] * len(needs_grad)
    # Use the stored gradients only once. Autograd stores these tensors as `.grad`, so multiplying
    # them in place in a second backward would change `.grad`. Compute the gradients again instead.
    gradients = ctx.gradients
    ctx.gradients = None
    gradients = recompute() if gradients is None else gradients
    return [
        scale_(x, grad_loss if unit is None else grad_loss * unit)
        if need and x is not None
        else None
        for (x, unit), need in zip(gradients, needs_grad, strict=True)
    ]


def scale_(gradient: Tensor, upstream: Tensor) -> Tensor:
    """Multiply a gradient by the upstream scalar in place, without a GPU sync.

    The multiplication is skipped if the upstream scalar is a CPU tensor with the value 1.
    """
    # Call item() only on plain CPU tensors. On a GPU tensor, it would wait for the GPU. A subclass
    # of Tensor, as autograd passes it while it is traced, has no value.
    if type(upstream) is Tensor and upstream.device.type == "cpu" and upstream.item() == 1.0:
        return gradient
    on_gpu = gradient.is_cuda and gradient.is_contiguous() and gradient.dtype != torch.float64
    if on_gpu and unavailable("triton", "cuda") is None:
        from grpo_fast.kernels.gpu import scale

        return scale.scale_(gradient, upstream)
    return gradient.mul_(upstream)


# ---- Logps: gradients are computed in the backward pass


TargetRows = tuple[ActiveRows, Tensor | None, ValueChecks]  # the result of `active_target_rows`


class LogpsPass:
    """Forward and backward pass of one call of `linear_logps` or `logits_logps`.

    Only rows with a target, the active rows, are computed.

    Args:
        tensors: (hidden, weight, bias) or (logits,), flattened to N rows.
        options: options of the call, such as targets, temperature and backend.
        places: the result of `active_target_rows`. None: compute it.
        entropy_gradient: True if the backward pass receives a gradient for the entropies.
        wanted: for each tensor, True if it needs a gradient.
    """

    def __init__(
        self,
        tensors: RowTensors,
        options: RowOptions,
        places: TargetRows | None = None,
        *,
        entropy_gradient: bool = False,
        wanted: Sequence[bool] = (),
    ) -> None:
        self.options = options
        self.device = tensors[0].device
        self.rows, self.left_out, self.checks = places or active_target_rows(
            tensors, options, wanted
        )
        self.driver: Driver
        full_entropy = options.entropy_over_vocabulary and self.rows.support is not None
        # A call from given logits has one tensor. A call from hidden states has three: the hidden
        # states, the weight and the bias.
        if len(tensors) == 1:
            route = rows_route(options.backend, tensors[0])
            self.driver = logits_driver(
                tensors[0], None, self.rows, route, full_entropy=full_entropy
            )
            return
        head = HeadTensors(*tensors)
        route = head_route(options.backend, head.weight, is_shard=options.shard is not None)
        # fp32 exponentials and logits take the same memory, but only logits can give the gradient
        # of the entropies. Store logits if entropies are returned.
        stores_logits = (
            options.return_entropy
            and route.exponentials == torch.float32
            and self.rows.support is None
        )
        self.driver = linear_driver(
            head, self.rows, route, shard=options.shard, full_entropy=full_entropy,
            entropy_gradient=entropy_gradient or stores_logits,
            needs_d_weight=len(wanted) > 1 and wanted[1],
        )  # fmt: skip

    def outputs(self, keep: bool) -> tuple[tuple[Tensor, Tensor, Tensor], RowStats]:
        """Compute the logps of all rows, and their entropies if requested.

        Args:
            keep: whether to cache logits for the backward pass.

        Returns:
            (logps, entropy, lse) of all N rows, and the statistics of the T active rows.
        """
        with kernel_precision(self.device):
            stats = self.driver.logps(return_entropy=self.options.return_entropy, stores=keep)
        lse, logps, entropy = stats
        logps = self._selected(logps)
        # Check the logps, because an infinite logp is the only sign of a target whose logit is
        # -inf.
        values.check_logps(logps, self.checks)
        spread = self.rows.to_rows
        flat = lse.new_empty(0) if entropy is None else spread(self._selected(entropy))
        return (spread(logps), flat, spread(lse)), stats

    def gradients(
        self,
        stats: RowStats,
        d_logps: Tensor | None,
        d_entropy: Tensor | None,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of the call's tensors from the gradients of its outputs.

        Args:
            stats: the statistics of the active rows from the forward pass.
            d_logps: (N,), gradient of the loss with respect to the logps, or None.
            d_entropy: (N,), gradient of the loss with respect to the entropies, or None.
            wanted: for each tensor, whether it needs a gradient.
        """
        g, g_entropy = (
            None if d is None else self._selected(self.rows.active(d).float())
            for d in (d_logps, d_entropy)
        )
        if g is None:
            assert g_entropy is not None
            g = torch.zeros_like(g_entropy)
        of_head = Wanted(*wanted, *[False] * (3 - len(wanted)))
        with kernel_precision(self.device):
            return self.driver.gradients(Known(g, g_entropy, stats), of_head)

    def saved_stats(self, logps: Tensor, entropy: Tensor, lse: Tensor) -> RowStats:
        """Return the statistics of the active rows, from the outputs of the forward pass."""
        active = self.rows.active
        return active(lse), active(logps), active(entropy) if self.options.return_entropy else None

    def _selected(self, x: Tensor) -> Tensor:
        """Set the rows of x that have no target to 0.

        Such rows exist only if `active_target_rows` has kept them.
        """
        return x if self.left_out is None else torch.where(self.left_out, 0.0, x)


class LogpsFunction(torch.autograd.Function):
    """Autograd function of logps.

    The first backward pass uses the logits that the forward pass has cached. Later backward passes
    compute all logits again.
    """

    @staticmethod
    def forward(
        ctx: Context,
        options: RowOptions,
        places: TargetRows,
        wanted: Sequence[bool],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = tuple(None if x is None else x.detach() for x in tensors)
        work = LogpsPass(tensors, options, places, wanted=wanted)
        outputs, stats = work.outputs(keep=any(wanted))
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.places = places
        ctx.cached = (work, stats) if any(wanted) and work.driver.num_rows else None
        ctx.save_for_backward(*tensors, *outputs)
        ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    def backward(
        ctx: Context, d_logps: Tensor | None, d_entropy: Tensor | None, unused: None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        needs = ctx.needs_input_grad[3:]
        if d_logps is None and d_entropy is None:
            return (None,) * (3 + len(needs))
        # Read the saved tensors even if the cache makes them unnecessary. Autograd then raises an
        # error if one of them was modified after the forward pass.
        saved = ctx.saved_tensors
        cached = ctx.cached
        ctx.cached = None
        if (
            cached is not None
            and d_entropy is not None
            and not cached[0].driver.has_entropy_gradient
        ):
            # The cache holds exponentials, but the gradient of the entropies needs the logits.
            # Compute the logits again.
            cached = None
        if cached is None:
            tensors = saved[:-3]
            outputs = saved[-3:]
            work = LogpsPass(
                tensors, ctx.options, ctx.places, entropy_gradient=d_entropy is not None,
                wanted=needs,
            )  # fmt: skip
            cached = work, work.saved_stats(*outputs)
        work, stats = cached
        gradients = work.gradients(stats, d_logps, d_entropy, needs)
        # Autograd expects None for a gradient that is not needed, but `gradients` then contains an
        # empty tensor.
        needed = (x if need else None for x, need in zip(gradients, needs, strict=True))
        return None, None, None, *needed


apply_logps: Callable[..., tuple[Tensor, Tensor, Tensor]] = LogpsFunction.apply
