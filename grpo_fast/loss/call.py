"""From checked arguments to what the public functions return, outside of torch.compile or in it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from grpo_fast.errors import argument_error
from grpo_fast.kernels.types import detached
from grpo_fast.loss import autograd, checks, operators
from grpo_fast.loss.arguments import BatchInputs, Options, RowOptions
from grpo_fast.loss.ranks import NO_GROUP, Agreement, local_rows
from grpo_fast.objective.config import LossConfig

P = ParamSpec("P")
R = TypeVar("R")
FILTER_METRICS = ("grad_filter/dropped_mass", "grad_filter/columns")


def outside_of_graphs(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep calls with one of these keywords (none: all) out of graphs of torch.compile."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def wrapper(*args: P.args, **keywords: P.kwargs) -> R:
            name = next((x for x in names if keywords.get(x)), None)
            if name or not names:
                if (
                    torch.compiler.is_compiling()
                ):  # without fullgraph the wrapper runs again, untraced
                    if name is None:
                        raise argument_error(
                            function.__name__, "a call outside of a graph", "one in"
                        )
                    expected = f"{parameters[name].default} in a graph of torch.compile"
                    raise argument_error(name, expected, type(keywords[name]).__name__)
                if "torch._dynamo" in sys.modules:  # its import takes seconds
                    outside: Callable[P, R] = untraced(function)
                    return outside(*args, **keywords)
            return function(*args, **keywords)

        return wrapper

    return decorate


@functools.cache
def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function as torch.compile leaves it alone; made once."""
    disabled: Callable[P, R] = torch.compiler.disable(function)
    return disabled


@dataclasses.dataclass(frozen=True)
class LossOutput:
    """The result of a loss.

    Attributes:
        loss: 0-d fp32, with a gradient to hidden, weight and bias (or logits, or logps and
            entropy).
        logps: fp32, detached, in the layout of `target_ids`; 0 where masked.
        entropy: fp32, detached, same layout; None unless the config asks for it.
        divergence: fp32, detached, same layout; None without `divergence=`. Its mean is a metric.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    divergence: Tensor | None
    _metrics_of: Callable[..., dict[str, Tensor]] = dataclasses.field(repr=False)
    _more: dict[str, Tensor] = dataclasses.field(repr=False)
    _metrics: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d fp32 tensors by TRL's names on the loss's device; computed when first read."""
        if not self._metrics:
            entropy = None if self.entropy is None else self.entropy.reshape(-1)
            self._metrics.update(self._metrics_of(self.logps.reshape(-1), entropy) | self._more)
        return self._metrics


def head_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ranks: Agreement
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(N, H) rows of hidden, and the weight and bias that this process works with, checked."""
    weight = local_rows("lm_head_weight", weight, ranks.group)
    bias = local_rows("bias", bias, ranks.group)
    checks.head(hidden, weight, bias, is_shard=ranks.group is not None)
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias


def loss(
    name: str,
    tensors: tuple[Tensor | None, ...],
    options: Options,
    config: LossConfig,
    inputs: BatchInputs,
    ranks: Agreement = NO_GROUP,
) -> LossOutput:
    """Run a loss of `operators.LOSSES` with autograd; with the other ranks, when all are ready."""
    # 1. Check the arguments.
    checks.tokens(config, inputs, has_logits=name != "given_logps")
    # 2. Run the pass: as a node of a graph, or with autograd.
    if torch.compiler.is_compiling():
        outputs, metrics = operators.compiled_loss(name, tensors, options, config, inputs)
        count = 0  # a graph has no divergences
    else:
        known = operators.LOSSES[name]
        batch = operators.build_batch(known, tensors, options, config, inputs)
        numbers = config.key if options.shard else ""
        if options.shard and (term := options.divergence):
            shared = (term.kind, term.coef, term.beta), getattr(term.teacher, "rule", None)
            numbers += repr(shared)
        ranks.check_agreement(
            tensors, batch.rows.target_ids, options.wanted, options.backend, numbers
        )
        run = partial(known.run, batch=batch, options=options)
        outputs = autograd.apply_loss(run, options.inplace, *tensors)
        metrics = batch.metrics
        count = len(batch.rows.target_ids)
    # 3. Give the outputs the layout of the call.
    value, logps, entropy, filtered, divergence = outputs
    like = inputs.like
    more: dict[str, Tensor] = {}
    if filtered is not None:
        more = dict(zip(FILTER_METRICS, filtered.unbind(), strict=True))
    if divergence is not None:
        total = divergence.detach().sum(dtype=torch.float64).float()
        more["divergence"] = total / max(count, 1)
    shaped = _shaped(detached(logps), like)
    entropy, divergence = (
        None if x is None else _shaped(detached(x), like) for x in (entropy, divergence)
    )
    return LossOutput(value, shaped, entropy, divergence, metrics, more)


def logps(
    tensors: tuple[Tensor | None, ...],  # (hidden, weight, bias), or (logits,)
    options: RowOptions,
    ranks: Agreement = NO_GROUP,
) -> Tensor | tuple[Tensor, Tensor]:  # logps, or (logps, entropy)
    if torch.compiler.is_compiling():
        flat, entropy = operators.compiled_logps(tensors, options)
    else:
        wanted = autograd.needs_gradient(*tensors)
        rows = autograd.active_rows(tensors, options)
        shared = (
            options.temperature, options.softcap, options.logit_scale, options.return_entropy,
        )  # fmt: skip
        numbers = repr(shared) if options.shard else ""
        ranks.check_agreement(tensors, rows[0].target_ids, wanted, options.backend, numbers)
        flat, entropy, _ = autograd.apply_logps(options, rows, wanted, *tensors)
    like = options.target_ids
    shaped = _shaped(flat, like)
    return (shaped, _shaped(entropy, like)) if options.return_entropy else shaped


def _shaped(x: Tensor, like: Tensor) -> Tensor:
    return x if like.dim() == 1 else x.reshape(like.shape)
