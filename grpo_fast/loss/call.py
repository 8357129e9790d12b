"""The steps that the public loss and logps functions have in common."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from grpo_fast.errors import unknown_keyword
from grpo_fast.kernels.types import detached
from grpo_fast.loss import autograd, checks
from grpo_fast.loss.arguments import BatchInputs, Options, RowOptions
from grpo_fast.loss.batch import TokenBatch, active_target_rows
from grpo_fast.loss.passes import LossResult, linear_loss, logits_loss, logps_loss
from grpo_fast.loss.ranks import NO_GROUP, Agreement, local_rows
from grpo_fast.objective.config import LossConfig

P = ParamSpec("P")
R = TypeVar("R")
untraced: Callable[[Callable[P, R]], Callable[P, R]] = functools.cache(torch.compiler.disable)
LOSSES: dict[str, Callable[..., LossResult]] = {
    "linear": linear_loss, "logits": logits_loss, "given_logps": logps_loss,
}  # fmt: skip
FILTER_METRICS = ("grad_filter/dropped_mass", "grad_filter/columns")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that torch.compile calls it outside of its graphs.

    If a call has an unknown keyword, the decorated function raises an error that suggests the
    nearest known keyword.
    """
    name = function.__name__
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def wrapper(*args: P.args, **keywords: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Raise an error to break the graph. With fullgraph=True, the user sees the error.
            # Otherwise, dynamo runs this wrapper again without tracing.
            raise RuntimeError(
                f"{name}() cannot be in a graph of torch.compile; compile without fullgraph=True"
            )
        unknown = next((x for x in keywords if x not in parameters), None)
        if unknown is not None:
            raise _unknown_keyword(name, unknown, parameters)
        # Disable tracing of the function only if torch._dynamo has been imported. If it has not,
        # nothing is being compiled, and importing torch._dynamo here would take seconds.
        call = untraced(function) if "torch._dynamo" in sys.modules else function
        return call(*args, **keywords)

    return wrapper


def _unknown_keyword(name: str, word: str, known: Collection[str]) -> TypeError:
    """Return the error for a keyword that a public function does not have."""
    if word in LossConfig.__dataclass_fields__ and "config" in known:
        return TypeError(
            f"{name}() got an unexpected keyword argument {word!r}; it is an option of the "
            f"config: pass LossConfig({word}=...)"
        )
    return unknown_keyword(name, word, known)


@dataclasses.dataclass(frozen=True)
class LossOutput:
    """Result of a loss function.

    Attributes:
        loss: 0-d, fp32. The loss. Its gradients flow to `hidden`, `weight` and `bias`, to logits,
            or to logps and entropy, depending on the function.
        logps: the shape of target_ids, fp32, detached. Log-probabilities of the targets; 0 at
            masked tokens.
        entropy: the shape of target_ids, fp32, detached. Entropy of each row. None if the config
            does not need entropies.
        divergence: the shape of target_ids, fp32, detached. Divergence of each row from the
            teacher. None if the call has no `divergence`. The metric "divergence" is its mean.

    Example:
        >>> import torch
        >>> from grpo_fast import LossConfig, grpo_loss
        >>> out = grpo_loss(torch.rand(2, 5).log(), torch.ones(2), LossConfig())
        >>> float(out.metrics["ratio/mean"])
        1.0
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
        """Return the metrics of the call under the names that TRL uses.

        The values are 0-d fp32 tensors on the device of the loss. They are computed on first
        access.
        """
        if not self._metrics:
            entropy = None if self.entropy is None else self.entropy.reshape(-1)
            self._metrics.update(self._metrics_of(self.logps.reshape(-1), entropy) | self._more)
        return self._metrics


def head_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ranks: Agreement
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the shapes of an LM head, and return the tensors that this rank uses.

    A weight that FSDP2 has sharded is gathered, which is a collective call.

    Returns:
        hidden (N, H), weight (V, H) and bias (V,) or None. With a tensor-parallel group, weight and
        bias have only the vocabulary rows of this rank.
    """
    # Gather the tensors before the shape checks, because a DTensor fails these checks.
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
    """Compute one of the losses in `LOSSES`.

    Args:
        name: the loss: "linear", "logits" or "given_logps".
        tensors: the differentiable tensors, flattened to N rows. They are (hidden, weight, bias),
            (logits,) or (logps, entropy), depending on the loss.
        options: options of the call that are not part of the config, such as the backend.
        config: the options of the loss.
        inputs: tensors per token and per completion, in the caller's layout.
        ranks: the tensor-parallel ranks that make the same call.
    """
    # 1. Check the arguments.
    checks.options(options, inputs.like)
    checks.tokens(config, inputs, has_logits=name != "given_logps")
    # 2. Compute the loss.
    batch = TokenBatch.build(tensors, options, config, inputs)
    # Ranks that share a head must make the same call. Compare their calls before the first
    # collective operation of the head, which would otherwise deadlock or mix different batches.
    numbers: tuple[object, ...] = (config.key,)
    if (term := options.divergence) is not None:
        numbers += (*term[1:], *getattr(term.teacher, "transform", ()))
    ranks.check_agreement(tensors, batch.rows.target_ids, options.wanted, options.backend, numbers)
    run = partial(LOSSES[name], batch=batch, options=options)
    outputs = autograd.apply_loss(run, options.inplace, *tensors)
    # 3. Add the metrics of grad_filter and of the divergence, and reshape the outputs to the layout
    # of the call.
    value, logps, entropy, filtered, divergence = outputs
    like = inputs.like
    more: dict[str, Tensor] = {}
    if filtered is not None:
        more = dict(zip(FILTER_METRICS, filtered.unbind(), strict=True))
    if divergence is not None:
        # Inactive tokens have a divergence of 0, so the sum over all tokens is also the sum over
        # the active tokens.
        total = divergence.detach().sum(dtype=torch.float64).float()
        more["divergence"] = total / max(len(batch.rows.target_ids), 1)
    shaped = _shaped(detached(logps), like)
    entropy, divergence = (
        None if x is None else _shaped(detached(x), like) for x in (entropy, divergence)
    )
    return LossOutput(value, shaped, entropy, divergence, batch.metrics, more)


def logps(
    tensors: tuple[Tensor | None, ...],  # (hidden, weight, bias), or (logits,)
    options: RowOptions,
    ranks: Agreement = NO_GROUP,
) -> Tensor | tuple[Tensor, Tensor]:  # logps, or (logps, entropy)
    """Compute logps and, if requested, entropies, in the layout of the targets."""
    checks.row_options(options)
    wanted = autograd.needs_gradient(*tensors)
    rows = active_target_rows(tensors, options, wanted)
    numbers = (*options.transform, options.return_entropy)
    ranks.check_agreement(tensors, rows[0].target_ids, wanted, options.backend, numbers)
    flat, entropy, _ = autograd.apply_logps(options, rows, wanted, *tensors)
    like = options.target_ids
    shaped = _shaped(flat, like)
    return (shaped, _shaped(entropy, like)) if options.return_entropy else shaped


def _shaped(x: Tensor, like: Tensor) -> Tensor:
    return x if like.dim() == 1 else x.reshape(like.shape)
