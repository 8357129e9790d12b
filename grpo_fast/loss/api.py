"""The public functions: signatures, documents, one call each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.types import detached
from grpo_fast.loss import autograd, checks, operators
from grpo_fast.loss.passes import Options
from grpo_fast.loss.pending import raise_pending
from grpo_fast.loss.sharded import gathered
from grpo_fast.objective.config import LossConfig

FILTER_METRICS = ("grad_filter/dropped_mass", "grad_filter/columns")

__all__ = ["LossOutput", "grpo_loss", "linear_grpo_loss", "linear_logps", "logits_grpo_loss", "logits_logps"]


@dataclasses.dataclass(frozen=True)
class LossOutput:
    """What a loss returns.

    Attributes:
        loss: 0-d fp32, with a gradient to hidden, weight and bias (or logits, or logps and entropy).
        logps: fp32, detached, in the layout of `target_ids`; 0 where masked.
        entropy: fp32, detached, same layout; None unless the config asks for it.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    _metrics_of: Callable[..., dict[str, Tensor]] = dataclasses.field(repr=False)
    _filtered: Tensor | None = dataclasses.field(default=None, repr=False)
    _metrics: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d fp32 tensors by TRL's names, on the loss's device; computed when first read, no copy to the host."""
        if not self._metrics:
            entropy = None if self.entropy is None else self.entropy.reshape(-1)
            self._metrics.update(self._metrics_of(self.logps.reshape(-1), entropy))
            if self._filtered is not None:
                self._metrics.update(zip(FILTER_METRICS, self._filtered.unbind(), strict=True))
        return self._metrics


def linear_logps(
    hidden: Tensor,  # (B, L, H) or (T, H)
    lm_head_weight: Tensor,  # (V, H)
    target_ids: Tensor,  # (B, L) or (T,)
    *,
    bias: Tensor | None = None,  # (V,)
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    hidden_rows: Tensor | None = None,  # the shape of target_ids
    backend: str = "auto",
) -> Any:  # logps, or (logps, entropy)
    """Log-probabilities of the targets, and entropies, from hidden states; the logits never exist as a whole.

    Equals, in exact arithmetic::

        z = logit_scale * (hidden @ lm_head_weight.T + bias)
        z = softcap * tanh(z / softcap)            # when softcap is set
        logp_all = log_softmax(z / temperature, -1)
        logps = logp_all.gather(-1, target_ids)    # entropy = -(logp_all.exp() * logp_all).sum(-1)

    Row t holds the prediction of `target_ids[t]`: the shift is the caller's. Differentiable in hidden, weight and bias
    (once; no double backward). Sums are fp32 or better, whatever the inputs' dtype. Where a gradient is wanted, the
    logits of as many rows as the workspace holds (GRPO_FAST_WORKSPACE_MIB) are kept until the backward pass.

    Args:
        hidden: fp32, bf16, fp16 (or fp64, on the torch backend).
        lm_head_weight, bias: of hidden's device, the weight in its dtype. A parameter that FSDP2
            shards (a DTensor over one mesh dimension) is gathered, on all ranks together, and its
            gradient averaged over them; inside the forward of the FSDP2 module it is whole anyway.
        target_ids: int64 or int32 in [0, V); -100 marks a row without a target: logp 0 and no gradient.
        temperature: a number > 0, or a float tensor of the shape of target_ids.
        hidden_rows: int64 or int32, the row of a (R, H) hidden that predicts each target; a row may predict several
            (the last row of a shared prompt predicts the first token of every completion). None: row t, target t.
        backend: "auto", "torch", "cpu" (C++) or "triton"; an explicit one never falls back.

    Returns:
        logps, fp32 of the shape of target_ids; with `return_entropy` the pair (logps, entropy).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    raise_pending()
    lm_head_weight, bias = gathered("lm_head_weight", lm_head_weight), gathered("bias", bias)
    checks.head(hidden, lm_head_weight, bias)
    checks.hidden_layout(hidden, target_ids, hidden_rows)
    checks.rule(target_ids, temperature, softcap, logit_scale, backend)
    tensors = hidden.reshape(-1, hidden.shape[-1]), lm_head_weight, bias
    return _logps(tensors, hidden_rows, target_ids, temperature, softcap, logit_scale, return_entropy, backend)


def logits_logps(
    logits: Tensor,  # (B, L, V) or (T, V)
    target_ids: Tensor,  # (B, L) or (T,)
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    backend: str = "auto",
) -> Any:  # logps, or (logps, entropy)
    """`linear_logps` from raw logits. Differentiable in logits (once); see there for arguments and errors."""
    raise_pending()
    checks.logits(logits, target_ids)
    checks.rule(target_ids, temperature, softcap, logit_scale, backend)
    return _logps((_logit_rows(logits),), None, target_ids, temperature, softcap, logit_scale, return_entropy, backend)


def grpo_loss(
    logps: Tensor,  # (B, L) or (T,)
    advantages: Tensor,  # (B,) or the shape of logps
    config: LossConfig,
    *,
    completion_mask: Tensor | None = None,  # the shape of logps
    cu_seqlens: Tensor | None = None,  # (B+1,) for the packed layout
    old_logps: Tensor | None = None,  # the shape of logps
    ref_logps: Tensor | None = None,  # the shape of logps
    sampling_logps: Tensor | None = None,  # the shape of logps
    entropy: Tensor | None = None,  # the shape of logps
    num_items_in_batch: float | Tensor | None = None,
    num_completions_in_batch: float | Tensor | None = None,
) -> LossOutput:
    """The objective from per-token logps, for any trainer that has them; differentiable in logps and entropy.

    The formulas are those of `linear_grpo_loss`. Here `config.temperature`, `softcap` and `logit_scale` are not used:
    they belong to the logps. `entropy` is required by `entropy_coef != 0` and by `top_entropy_quantile < 1`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    raise_pending()
    checks.given_logps(logps, entropy, config)
    tensors = logps.reshape(-1), None if entropy is None else entropy.reshape(-1)
    return _loss(
        "given_logps", tensors, Options([True, True]), logps, advantages, config, completion_mask=completion_mask,
        cu_seqlens=cu_seqlens, old_logps=old_logps, ref_logps=ref_logps, sampling_logps=sampling_logps,
        num_items_in_batch=num_items_in_batch, num_completions_in_batch=num_completions_in_batch,
    )  # fmt: skip


def linear_grpo_loss(
    hidden: Tensor,  # (B, L, H) or (T, H)
    lm_head_weight: Tensor,  # (V, H)
    target_ids: Tensor,  # (B, L) or (T,)
    advantages: Tensor,  # (B,) or the shape of target_ids
    config: LossConfig,
    *,
    bias: Tensor | None = None,  # (V,)
    completion_mask: Tensor | None = None,  # the shape of target_ids
    cu_seqlens: Tensor | None = None,  # (B+1,) for the packed layout
    old_logps: Tensor | None = None,  # the shape of target_ids
    ref_logps: Tensor | None = None,  # the shape of target_ids
    sampling_logps: Tensor | None = None,  # the shape of target_ids
    num_items_in_batch: float | Tensor | None = None,
    num_completions_in_batch: float | Tensor | None = None,
    hidden_rows: Tensor | None = None,  # the shape of target_ids
    grad_filter: float | None = None,
    backend: str = "auto",
    validate: str = "auto",
) -> LossOutput:
    """The loss and its gradients in one pass from hidden states: no (N, V) tensor exists, whatever N is.

    Equals, with `logps, entropy = linear_logps(hidden, lm_head_weight, target_ids, ...)`::

        loss = grpo_loss(logps, advantages, config, entropy=entropy, ...).loss

    that is Σ_t w_t·(ℓ_t·masks·sampling_ratio + beta·KL_t) - entropy_coef·Σ_t H_t/N, with ℓ by `config.loss_type`, KL
    by `config.kl_estimator` and w by `config.aggregation` (objective/README.md). Gradients are formed in the forward
    pass, for those of hidden, weight and bias that require one; rows whose coefficient is zero are left out of the
    GEMMs. In a CUDA graph nothing is left out, and values are not checked (kernels/capture.py).

    Args:
        hidden: padded (B, L, H) with target_ids (B, L), or packed (T, H) with target_ids (T,) and cu_seqlens.
            Row t holds the prediction of target_ids[t]; the shift is the caller's.
        lm_head_weight, bias: also as FSDP2 shards them; see `linear_logps`.
        target_ids: int64 or int32; anything (for example -100) where masked.
        advantages: one per completion, or one per token (where T = B both shapes are (B,): one per completion).
        completion_mask: bool or 0/1; a masked slot is inert, whatever it holds. None: every token counts.
        cu_seqlens: int32 or int64 offsets of the completions in the packed layout, from 0 to T.
        old_logps: of the policy that generated the data; None: on-policy (ratio exactly 1, gradient of -A·logp).
        ref_logps: required when config.beta != 0.
        sampling_logps: of the sampler, for `config.sampling_correction` and `config.off_policy_threshold`.
        num_items_in_batch: active tokens of the whole optimizer step, all micro-batches and ranks.
        num_completions_in_batch: completions of the whole optimizer step.
        hidden_rows: int64 or int32, the row of a (R, H) hidden that predicts each target; a row may predict several
            (the last row of a shared prompt predicts the first token of every completion). None: row t, target t.
        grad_filter: opt-in, in (0, 1): vocabulary columns may be left out of the gradient GEMMs as long as they hold at
            most this share of Σ|d-logits| of a chunk. The metrics report the share that was left out,
            `grad_filter/dropped_mass`, and that of the columns that stayed; kernels/grad_filter.py gives the bounds on
            dH and dW. The loss and the logps stay exact; the gradient is no longer bitwise invariant to batching.
        backend: "auto", "torch", "cpu" (C++) or "triton"; an explicit one never falls back.
        validate: "auto", or "full" to check device values at once (a sync on a GPU).

    Returns:
        LossOutput; `loss` is 0 with zero gradients when no token is active.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    raise_pending()
    lm_head_weight, bias = gathered("lm_head_weight", lm_head_weight), gathered("bias", bias)
    checks.head(hidden, lm_head_weight, bias)
    checks.hidden_layout(hidden, target_ids, hidden_rows)
    checks.options(backend, validate, grad_filter)
    tensors = hidden.reshape(-1, hidden.shape[-1]), lm_head_weight, bias
    options = Options(autograd.wants_gradient(*tensors), backend, validate, hidden_rows, grad_filter)
    return _loss(
        "linear", tensors, options, target_ids, advantages, config, completion_mask=completion_mask,
        cu_seqlens=cu_seqlens, old_logps=old_logps, ref_logps=ref_logps, sampling_logps=sampling_logps,
        num_items_in_batch=num_items_in_batch, num_completions_in_batch=num_completions_in_batch,
    )  # fmt: skip


def logits_grpo_loss(
    logits: Tensor,  # (B, L, V) or (T, V)
    target_ids: Tensor,  # (B, L) or (T,)
    advantages: Tensor,  # (B,) or the shape of target_ids
    config: LossConfig,
    *,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    num_completions_in_batch: float | Tensor | None = None,
    backend: str = "auto",
    validate: str = "auto",
    inplace: bool = False,
) -> LossOutput:
    """`linear_grpo_loss` from raw logits (before scale, softcap and temperature); differentiable in logits.

    With `inplace=True` the gradient is written over the logits, which must then not be read again (and allow one
    backward); otherwise they are untouched. Arguments, formulas and errors: see `linear_grpo_loss`.
    """
    raise_pending()
    checks.logits(logits, target_ids)
    checks.options(backend, validate)
    tensors = (_logit_rows(logits),)
    if inplace:
        checks.inplace(logits, *tensors)
    options = Options(autograd.wants_gradient(logits), backend, validate)
    return _loss(
        "logits", tensors, options, target_ids, advantages, config, inplace=inplace, completion_mask=completion_mask,
        cu_seqlens=cu_seqlens, old_logps=old_logps, ref_logps=ref_logps, sampling_logps=sampling_logps,
        num_items_in_batch=num_items_in_batch, num_completions_in_batch=num_completions_in_batch,
    )  # fmt: skip


def _logit_rows(logits: Tensor) -> Tensor:
    """(N, V) rows that lie contiguous, as the kernels read them; a copy only where the view does not."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _logps(
    tensors: tuple[Tensor | None, ...],  # (hidden, weight, bias), or (logits,)
    hidden_rows: Tensor | None,
    target_ids: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    return_entropy: bool,
    backend: str,
) -> Any:
    by_row, number = (temperature, 1.0) if isinstance(temperature, Tensor) else (None, float(temperature))
    softcap = None if softcap is None else float(softcap)
    options = autograd.RowOptions(
        hidden_rows, target_ids, by_row, number, softcap, float(logit_scale), return_entropy, backend
    )
    if torch.compiler.is_compiling():
        logps, entropy = operators.compiled_logps(tensors, options)
    else:
        is_wanted = any(autograd.wants_gradient(*tensors))
        logps, entropy, _ = autograd.Recalled.apply(options, is_wanted, *tensors)
    logps = _shaped(logps, target_ids)
    return (logps, _shaped(entropy, target_ids)) if return_entropy else logps


def _loss(
    name: str,
    tensors: tuple[Tensor | None, ...],
    options: Options,
    like: Tensor,  # (B, L) or (T,)
    advantages: Tensor,
    config: LossConfig,
    *,
    inplace: bool = False,
    **tokens: Any,
) -> LossOutput:
    """Run a loss of `operators.LOSSES`, with autograd, outside of torch.compile or in it."""
    by_row = config.temperature if isinstance(config, LossConfig) and name != "given_logps" else None
    checks.tokens(like, advantages, config, **tokens, temperature=by_row if isinstance(by_row, Tensor) else None)
    if torch.compiler.is_compiling():
        outputs, metrics = operators.compiled_loss(name, tensors, options, like, advantages, config, tokens)
    else:
        loss = operators.LOSSES[name]
        batch = operators.build(loss, tensors, options, like, advantages, config, tokens)
        run = partial(loss.run, batch=batch, options=options)
        if inplace:
            outputs = autograd.Overwriting.apply(partial(run, inplace=True), *tensors)
        else:
            outputs = autograd.Formed.apply(run, *tensors)
        metrics = batch.metrics
    value, logps, entropy, filtered = outputs
    entropy = None if entropy is None else _shaped(detached(entropy), like)
    return LossOutput(value, _shaped(detached(logps), like), entropy, metrics, filtered)


def _shaped(x: Tensor, like: Tensor) -> Tensor:
    return x if like.dim() == 1 else x.reshape(like.shape)
