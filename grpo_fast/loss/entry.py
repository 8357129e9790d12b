"""The steps that the public loss and logps functions have in common."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from grpo_fast.errors import unknown_keyword
from grpo_fast.kernels.types import detached
from grpo_fast.loss import checks
from grpo_fast.loss.autograd import Run, apply_logps, apply_loss
from grpo_fast.loss.call import Call
from grpo_fast.loss.ranks import NO_GROUP, Agreement, local_rows
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.metrics import token_metrics

P = ParamSpec("P")
R = TypeVar("R")
untraced: Callable[[Callable[P, R]], Callable[P, R]] = functools.cache(torch.compiler.disable)
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


def loss(run: Run, call: Call, ranks: Agreement = NO_GROUP) -> LossOutput:
    """Compute a loss.

    Args:
        run: computes the loss and its gradients from the call's tensors.
        call: the call. Its tensors are dropped, so that an output does not keep them in memory.
        ranks: the tensor-parallel ranks that make the same call.
    """
    # 1. Check the arguments, and find the active tokens.
    checks.loss(call)
    config = call.config
    assert config is not None
    call.find_tokens()
    # 2. Ranks that share a head must make the same call. Compare their calls before the first
    # collective operation of the head, which would otherwise deadlock or mix different batches.
    rows = call.rows
    if ranks.group is not None:
        numbers: tuple[object, ...] = (config.key,)
        if (term := call.divergence) is not None:
            numbers += (*term[1:], *getattr(term.teacher, "transform", ()))
        ranks.check_agreement(call.tensors, rows.target_ids, call.wanted, call.backend, numbers)
    # 3. Compute the loss.
    tensors = call.tensors
    call.tensors = ()
    value, logps, entropy, filtered, divergence = apply_loss(run, call, *tensors)
    # 4. Add the metrics of grad_filter and of the divergence, and reshape the outputs to the layout
    # of the call.
    tokens = call.tokens
    more: dict[str, Tensor] = {}
    if filtered is not None:
        more = dict(zip(FILTER_METRICS, filtered.unbind(), strict=True))
    if divergence is not None:
        # Inactive tokens have a divergence of 0, so the sum over all tokens is also the sum over
        # the active tokens.
        total = divergence.detach().sum(dtype=torch.float64).float()
        more["divergence"] = total / max(len(rows.target_ids), 1)

    def metrics(logps: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
        active = rows.active
        return token_metrics(active(logps), active(entropy), tokens, config, rows.num_rows)

    shaped = call.shaped(detached(logps))
    entropy, divergence = (
        None if x is None else call.shaped(detached(x)) for x in (entropy, divergence)
    )
    return LossOutput(value, shaped, entropy, divergence, metrics, more)


def logps(
    call: Call, ranks: Agreement = NO_GROUP
) -> Tensor | tuple[Tensor, Tensor]:  # logps, or (logps, entropy)
    """Compute logps and, if requested, entropies, in the layout of the targets."""
    checks.logps(call)
    call.find_targets()
    if ranks.group is not None:
        numbers = (*call.transform, call.return_entropy)
        ids = call.rows.target_ids
        ranks.check_agreement(call.tensors, ids, call.wanted, call.backend, numbers)
    tensors = call.tensors
    call.tensors = ()
    flat, entropy, _ = apply_logps(call, *tensors)
    shaped = call.shaped(flat)
    return (shaped, call.shaped(entropy)) if call.return_entropy else shaped
