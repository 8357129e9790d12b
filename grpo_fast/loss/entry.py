"""The steps that the public loss and logps functions have in common."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from grpo_fast.errors import argument_error, conflict
from grpo_fast.kernels.gpu.launch import refuse
from grpo_fast.kernels.types import Support
from grpo_fast.loss import checks
from grpo_fast.loss.autograd import Run, apply_logps, apply_loss
from grpo_fast.loss.call import Call
from grpo_fast.loss.ranks import NO_GROUP, Agreement, local_rows
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.corrections import DEFAULT
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.objective.metrics import token_metrics

P = ParamSpec("P")
R = TypeVar("R")
untraced: Callable[[Callable[P, R]], Callable[P, R]] = functools.cache(torch.compiler.disable)
FILTER_METRICS = ("grad_filter/dropped_mass", "grad_filter/columns")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that torch.compile calls it outside of its graphs."""
    name = function.__name__

    @functools.wraps(function)
    def wrapper(*args: P.args, **keywords: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Raise an error to break the graph. With fullgraph=True, the user sees the error.
            # Otherwise, dynamo runs this wrapper again without tracing.
            raise RuntimeError(
                f"{name}() cannot be in a graph of torch.compile; compile without fullgraph=True"
            )
        # Disable tracing of the function only if torch._dynamo has been imported. If it has not,
        # nothing is being compiled, and importing torch._dynamo here would take seconds.
        call = untraced(function) if "torch._dynamo" in sys.modules else function
        return call(*args, **keywords)

    return wrapper


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
    _metrics_of: Callable[[], dict[str, Tensor]] = dataclasses.field(repr=False)

    @functools.cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Return the metrics of the call under the names that TRL uses.

        The values are 0-d fp32 tensors on the device of the loss. They are computed on first
        access.
        """
        return self._metrics_of()


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
    # Do not call reshape() without need, because autograd would record a view.
    flat = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    return flat, weight, bias


# ---- Checks of a call

# The arguments of a loss whose gradients are never computed.
CONSTANT = (
    "advantages", "completion_mask", "cu_seqlens", "old_logps", "ref_logps", "sampling_logps",
    "num_items_in_batch", "num_completions_in_batch",
)  # fmt: skip


def check_given_logps(logps: Tensor, entropy: Tensor | None, config: LossConfig) -> None:
    """Check the logps and the entropy. The entropy must not be None if the config needs it."""
    checks.tensor("logps", logps)
    if logps.dim() not in (1, 2):
        raise argument_error("logps", "shape (B, L) or (T,)", tuple(logps.shape))
    checks.like_logps("entropy", entropy, logps)
    checks.is_config(config)
    if entropy is None and (config.entropy_coef != 0 or config.top_entropy_quantile < 1):
        option = "entropy_coef" if config.entropy_coef != 0 else "top_entropy_quantile"
        why = "logps alone have no entropy; pass a tensor like logps"
        raise conflict("entropy=None", f"{option}={getattr(config, option)}", why)


def check_logps(call: Call) -> None:
    """Check the arguments of `linear_logps` and `logits_logps`."""
    checks.options(
        logit_scale=call.logit_scale, softcap=call.softcap, temperature=call.temperature,
        backend=call.backend,
    )  # fmt: skip
    _check_support(call.support, call.like, is_shard=call.shard is not None)


def check_loss(call: Call) -> None:
    """Check the arguments of a loss.

    The shapes of the tensors must fit the padded or packed layout of `call.like`.
    """
    check_options(call)
    config = call.config
    checks.is_config(config)
    assert config is not None
    # 1. Reject an exact KL, which only trainers support.
    if config.kl_estimator in EXACT:
        expected = f"one of {list(KL_ESTIMATORS)}"
        kind = EXACT[config.kl_estimator]
        came = f"{config.kl_estimator!r}; add linear_divergence(..., kind={kind!r}) to the loss"
        raise argument_error("kl_estimator", expected, came)
    like = call.like
    advantages = call.advantages
    cu_seqlens = call.cu_seqlens
    # 2. Check the shapes of mask, offsets, advantages and logps.
    checks.like_logps("completion_mask", call.completion_mask, like, checks.MASK)
    _offsets(cu_seqlens, like)
    count = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.tensor("advantages", advantages, same_device=("the logps", like))
    assert advantages is not None
    if tuple(advantages.shape) not in ((count,), tuple(like.shape)):
        expected = f"shape (B,) = ({count},) or one per token {tuple(like.shape)}"
        raise argument_error("advantages", expected, tuple(advantages.shape))
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        checks.like_logps(name, getattr(call, name), like)
    # 3. Check that no input requires grad. Its gradient is not computed, so the caller probably
    # forgot .detach() and expects a gradient.
    for name in CONSTANT:
        checks.constant(name, getattr(call, name))
    # 4. Check the arguments that the config requires or forbids.
    reading = [x for x in config.corrections if x.ratio != "current/behaviour"]
    if call.sampling_logps is None and reading and config.corrections != DEFAULT:
        why = "these corrections read the sampler's logps; pass sampling_logps"
        raise conflict("sampling_logps=None", f"corrections of kind {reading[0].kind!r}", why)
    if config.uses_reference and call.ref_logps is None:
        why = "the KL needs the reference's logps; pass ref_logps"
        raise conflict("ref_logps=None", f"beta={config.beta}", why)
    if call.ref_logps is not None and not OBJECTIVES[config.loss_type].reference:
        why = "its beta weighs the step from old_logps; pass ref_logps=None"
        raise conflict("ref_logps", f"loss_type={config.loss_type!r}", why)
    # 5. Check the totals of the optimizer step.
    for name in ("num_items_in_batch", "num_completions_in_batch"):
        value = getattr(call, name)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise argument_error(name, checks.TOTALS, f"a tensor of shape {tuple(value.shape)}")
        elif value is not None and not isinstance(value, Tensor):
            checks.options(**{name: value})


def check_options(x: Call) -> None:
    """Check the options of a loss call that are not part of the config."""
    checks.options(backend=x.backend, validate=x.validate, grad_filter=x.grad_filter)
    _check_support(x.support, x.like, is_shard=x.shard is not None)
    if x.support is not None and x.divergence is not None:
        why = "a divergence is a sum over the full vocabulary; pass one of them"
        raise conflict("support", "divergence", why)
    if x.grad_filter is None:
        return
    for name, other, why in (
        ("group", x.shard, "the filter sees the columns of one rank only"),
        ("support", x.support, "rows of a support have no columns to leave out"),
        ("divergence", x.divergence, "its gradient has no columns to leave out"),
    ):
        if other is not None:
            raise conflict(f"grad_filter={x.grad_filter}", name, f"{why}; pass grad_filter=None")


def _check_support(support: object, target_ids: Tensor, *, is_shard: bool) -> None:
    """Check that a `Support` fits the targets, and that the head is not split over ranks."""
    if support is None:
        return
    if not isinstance(support, Support):
        raise argument_error("support", "None or a Support(ids, offsets)", type(support).__name__)
    refuse("support", target_ids, support.ids)
    if is_shard:
        raise conflict("support", "group", "a sharded head computes whole rows; pass one of them")
    same_device = ("target_ids", target_ids)
    checks.tensor("support.ids", support.ids, checks.IDS, same_device=same_device)
    if support.ids.dim() != 1:
        raise argument_error("support.ids", "shape (nnz,)", tuple(support.ids.shape))
    meaning = "(T+1,), one set for each target,"
    shape = (target_ids.numel() + 1,)
    checks.tensor("support.offsets", support.offsets, checks.OFFSETS, shape, meaning, same_device)


def _offsets(cu_seqlens: Tensor | None, like: Tensor) -> None:
    if like.dim() == 2 and cu_seqlens is not None:
        shape = getattr(cu_seqlens, "shape", None)
        came = repr(cu_seqlens) if shape is None else f"shape {tuple(shape)}"
        why = "the offsets belong to the packed layout (T,); pass cu_seqlens=None"
        raise conflict(f"cu_seqlens, {came},", "the padded layout (B, L)", why)
    if like.dim() == 1:
        checks.tensor("cu_seqlens", cu_seqlens, checks.PACKED, same_device=("the logps", like))
        assert cu_seqlens is not None
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
            raise argument_error("cu_seqlens", "shape (B+1,)", tuple(cu_seqlens.shape))
        if cu_seqlens.numel() == 1 and like.numel():
            raise argument_error("cu_seqlens", f"offsets from 0 to T = {like.numel()}", "only one")


# ---- Computation


def loss(run: Run, call: Call, ranks: Agreement = NO_GROUP) -> LossOutput:
    """Compute a loss.

    Args:
        run: computes the loss and its gradients from the call's tensors.
        call: the call. Its tensors are dropped, so that an output does not keep them in memory.
        ranks: the tensor-parallel ranks that make the same call.
    """
    # 1. Check the arguments, and find the active tokens.
    check_loss(call)
    config = call.config
    assert config is not None
    call.find_tokens()
    # 2. Ranks that share a head must make the same call. Compare their calls before the first
    # collective operation of the head, which would otherwise deadlock or mix different batches.
    rows = call.rows
    ranks.check_agreement(call)
    # 3. Compute the loss.
    tensors = call.tensors
    call.tensors = ()
    value = apply_loss(run, call, *tensors)
    logps, entropy, filtered, divergence = call.outputs
    tokens = call.tokens
    assert tokens is not None

    # 4. Define the metrics, and reshape the outputs to the layout of the call.
    def metrics() -> dict[str, Tensor]:
        active = rows.active
        named = token_metrics(active(logps), active(entropy), tokens, config, rows.num_rows)
        if filtered is not None:
            named |= zip(FILTER_METRICS, filtered.unbind(), strict=True)
        if divergence is not None:
            # Inactive tokens have a divergence of 0, so the sum over all tokens is also the sum
            # over the active tokens.
            total = divergence.sum(dtype=torch.float64).float()
            named["divergence"] = total / max(len(rows.target_ids), 1)
        return named

    shaped = call.shaped
    return LossOutput(value, shaped(logps), shaped(entropy), shaped(divergence), metrics)


def logps(
    call: Call, ranks: Agreement = NO_GROUP
) -> Tensor | tuple[Tensor, Tensor]:  # logps, or (logps, entropy)
    """Compute logps and, if requested, entropies, in the layout of the targets."""
    check_logps(call)
    call.find_targets()
    ranks.check_agreement(call)
    tensors = call.tensors
    call.tensors = ()
    flat, entropy = apply_logps(call, *tensors)
    return call.shaped(flat) if entropy is None else (call.shaped(flat), call.shaped(entropy))
