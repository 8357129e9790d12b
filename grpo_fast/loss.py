"""The public functions: validation, layout, and the operators behind them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from grpo_fast import ops, ops_logps, validation
from grpo_fast.arguments import logit_rows, row_arguments, token_arguments
from grpo_fast.config import LossConfig, choice, number
from grpo_fast.kernels.backends import BACKENDS
from grpo_fast.kernels.gemm_cpu import detached
from grpo_fast.kernels.metrics import metric_names
from grpo_fast.prepare import TokenInputs
from grpo_fast.sharded import gathered

FILTER_METRICS = ("grad_filter/dropped_mass", "grad_filter/columns")


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
    _config: LossConfig = dataclasses.field(repr=False)
    _inputs: list = dataclasses.field(repr=False)
    _filtered: Tensor | None = dataclasses.field(default=None, repr=False)
    _metrics: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d fp32 tensors by TRL's names, on the loss's device; computed when first read, no copy to the host."""
        if self._metrics:
            return self._metrics
        names = metric_names(
            self._config, TokenInputs(*self._inputs[:-1]).sampling_logps is not None, self.entropy is not None
        )
        entropy = None if self.entropy is None else self.entropy.reshape(-1)
        values = _metrics(self.logps.reshape(-1), entropy, *self._inputs)
        self._metrics.update(zip(names, values.unbind(), strict=True))
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
    validation.raise_pending()
    lm_head_weight, bias = gathered("lm_head_weight", lm_head_weight), gathered("bias", bias)
    validation.head(hidden, lm_head_weight, bias)
    chosen = validation.hidden_layout(hidden, target_ids, hidden_rows)
    rows = row_arguments(target_ids, temperature, softcap, logit_scale, return_entropy, backend)
    flat = hidden.reshape(-1, hidden.shape[-1])
    if torch.compiler.is_compiling():
        logps, entropy, _ = torch.ops.grpo_fast.linear_logps(flat, lm_head_weight, bias, chosen, *rows)
    else:
        wanted = ops.wants_gradient(hidden, lm_head_weight, bias)
        logps, entropy, _ = ops_logps.EagerLinearLogps.apply(any(wanted), flat, lm_head_weight, bias, chosen, *rows)
    return _shaped(logps, entropy, target_ids, return_entropy)


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
    validation.raise_pending()
    validation.logits(logits, target_ids)
    rows = row_arguments(target_ids, temperature, softcap, logit_scale, return_entropy, backend)
    logps, entropy, _ = torch.ops.grpo_fast.logits_logps(logit_rows(logits), *rows)
    return _shaped(logps, entropy, target_ids, return_entropy)


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
    validation.raise_pending()
    validation.floating("logps", logps)
    if logps.dim() not in (1, 2):
        raise ValueError(f"logps: expected shape (B, L) or (T,), got {tuple(logps.shape)}")
    validation.per_token("entropy", entropy, logps)
    validation.is_config(config)
    if entropy is None and (config.entropy_coef != 0 or config.top_entropy_quantile < 1):
        raise ValueError("entropy: entropy_coef != 0 or top_entropy_quantile < 1 expects a tensor like logps, got None")
    tokens = token_arguments(
        logps, None, advantages, config, completion_mask, cu_seqlens, old_logps, ref_logps, sampling_logps,
        num_items_in_batch, num_completions_in_batch,
    )  # fmt: skip
    flat_entropy = None if entropy is None else entropy.reshape(-1)
    results = ops.call(ops.logps_grpo, logps.reshape(-1), flat_entropy, *tokens)
    return _output(results, logps, config, tokens, entropy is not None)


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
    by `config.kl_estimator` and w by `config.aggregation` (README, "Losses"). Gradients are formed in the forward
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
    validation.raise_pending()
    lm_head_weight, bias = gathered("lm_head_weight", lm_head_weight), gathered("bias", bias)
    validation.head(hidden, lm_head_weight, bias)
    chosen = validation.hidden_layout(hidden, target_ids, hidden_rows)
    choice("backend", backend, BACKENDS)
    choice("validate", validate, validation.VALIDATE)
    tokens = token_arguments(
        target_ids, target_ids, advantages, config, completion_mask, cu_seqlens, old_logps, ref_logps, sampling_logps,
        num_items_in_batch, num_completions_in_batch,
    )  # fmt: skip
    if grad_filter is not None:
        number("grad_filter", grad_filter, "None or a number in (0, 1)", lambda x: 0 < x < 1)
    wanted = ops.wants_gradient(hidden, lm_head_weight, bias)
    flat = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    results = ops.call(
        ops.linear_grpo, flat, lm_head_weight, bias, chosen, grad_filter, wanted, backend, validate, *tokens
    )
    return _output(results, target_ids, config, tokens, config.needs_entropy)


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
    validation.raise_pending()
    validation.logits(logits, target_ids)
    choice("backend", backend, BACKENDS)
    choice("validate", validate, validation.VALIDATE)
    tokens = token_arguments(
        target_ids, target_ids, advantages, config, completion_mask, cu_seqlens, old_logps, ref_logps, sampling_logps,
        num_items_in_batch, num_completions_in_batch,
    )  # fmt: skip
    wanted = torch.is_grad_enabled() and logits.requires_grad
    flat = logit_rows(logits)
    if inplace:
        _check_inplace(logits, flat)
        results = ops.Inplace.apply(flat, wanted, backend, validate, *tokens)
    else:
        results = ops.call(ops.logits_grpo, flat, wanted, backend, validate, *tokens)
    return _output(results, target_ids, config, tokens, config.needs_entropy)


def _metrics(*inputs: object) -> Tensor:
    operator = torch.ops.grpo_fast.metrics if torch.compiler.is_compiling() else ops.metrics
    return operator(*inputs)


def _check_inplace(logits: Tensor, flat: Tensor) -> None:
    if torch.compiler.is_compiling():
        raise ValueError("inplace: expected False under torch.compile, got True")
    shares = flat.shape[0] > 1 and flat.stride(0) < flat.shape[1]  # an expanded or overlapping view
    if flat.data_ptr() != logits.data_ptr() or shares:
        raise ValueError(
            "logits: inplace=True expects rows that flatten without a copy and share no memory, "
            f"got strides {logits.stride()}"
        )


def _shaped(logps: Tensor, entropy: Tensor, target_ids: Tensor, return_entropy: bool):
    shape = target_ids.shape
    if len(shape) == 1:  # as they are: FSDP2's hooks warn of views
        return (logps, entropy) if return_entropy else logps
    return (logps.reshape(shape), entropy.reshape(shape)) if return_entropy else logps.reshape(shape)


def _output(
    results: tuple[Tensor, ...], like: Tensor, config: LossConfig, tokens: tuple, has_entropy: bool
) -> LossOutput:
    loss, logps, entropy, filtered = results
    kept = filtered if filtered.numel() else None
    logps, entropy = _like(logps, like), _like(entropy, like) if has_entropy else None
    # Copies: the caller may reuse its buffers before the metrics are read. They do not depend on the targets.
    inputs = [None, *[detached(x).clone() if isinstance(x, Tensor) else x for x in tokens[1:]]]
    return LossOutput(loss, logps, entropy, config, inputs, kept)


def _like(x: Tensor, like: Tensor) -> Tensor:
    x = detached(x)
    return x if like.dim() == 1 else x.reshape(like.shape)


__all__ = ["LossOutput", "grpo_loss", "linear_grpo_loss", "linear_logps", "logits_grpo_loss", "logits_logps"]
