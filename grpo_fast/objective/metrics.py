"""Metrics of a loss call under the names that TRL uses.

A call computes its metrics from its logps, but only when the caller reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective.aggregation import Tokens
from grpo_fast.objective.coefficients import Corrected, active_rows, token_loss
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import K3_GUARD
from grpo_fast.objective.losses import LOG_RATIO_MAX, OBJECTIVES


def token_metrics(
    logps: Tensor,  # (T,)
    entropy: Tensor | None,  # (T,)
    tokens: Tokens,
    config: LossConfig,
    num_rows: int,
) -> dict[str, Tensor]:
    """Compute the metrics of a call.

    Means are taken over the active tokens. Minima and maxima of clip ratios are taken over
    completions. The metric "skipped_rows" counts the rows that receive no gradient.

    Args:
        logps: (T,), logps of the active tokens.
        entropy: (T,), entropies of the active tokens, or None.
        tokens: the other inputs of the active tokens.
        config: the objective.
        num_rows: N, the number of all rows of the call.
    """
    # 1. Recompute the terms of the loss from the logps. The loss call does not store these terms,
    # so metrics that are never read cost nothing.
    objective = OBJECTIVES[config.loss_type]
    old_logps = logps if tokens.old_logps is None else tokens.old_logps
    result = token_loss(logps, entropy, tokens, config)
    ratio = result.ratio
    correction = result.correction
    active = active_rows(result.grad_logps, result.grad_entropy)

    # 2. Compute the metrics that all losses have.
    is_pooled = objective.ratio_kind in ("sum", "geometric")
    r = torch.exp(ratio.raw.clamp(max=LOG_RATIO_MAX) if is_pooled else ratio.log)
    metrics = {
        "policy_loss": result.policy.sum(dtype=torch.float64).float(),
        **extents("ratio", r),
        "approx_kl": mean(ratio.raw * ratio.raw) / 2,
        "active_tokens": logps.new_full((), float(logps.numel())),
        "skipped_rows": num_rows - active.sum().float(),
    }
    # 3. Add the metrics of the entropy, the KL, the clipping and the corrections.
    if entropy is not None:
        metrics["entropy"] = mean(entropy)
    if result.kl is not None and tokens.ref_logps is not None:
        metrics["kl"] = mean(result.kl)
        metrics["kl_guarded"] = (tokens.ref_logps - logps > K3_GUARD).sum().float()
    if objective.clips == "ppo":
        metrics |= clip_metrics(r, tokens, config)
    elif objective.clips == "cispo":
        _, ratio_max = config.params
        metrics["cispo_clip_ratio"] = mean(((r > ratio_max) & (tokens.advantages > 0)).float())
    elif objective.clips == "vespo":
        signs = torch.where(tokens.advantages < 0, -1.0, 1.0)
        _, slope = objective.function(logps, ratio.log, signs, *config.params)
        metrics["vespo/phi_seq_mean"] = mean(slope.abs())
    if tokens.sampling_logps is not None:
        gap = torch.nan_to_num(old_logps - tokens.sampling_logps, nan=0.0).abs()
        metrics |= extents("sampling/sampling_logp_difference", gap)
        del metrics["sampling/sampling_logp_difference/min"]
        if correction.weights is not None:
            metrics |= extents("sampling/importance_sampling_ratio", correction.weights)
    if any(x.is_active(tokens) for x in config.corrections):
        metrics |= correction_metrics(correction, logps)
    return metrics


CORRECTION_METRICS = ("sampling/masked", "sampling/clipped", "sampling/effective_sample_size")


def correction_metrics(correction: Corrected, logps: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the corrections, keyed by name.

    They are the share of dropped tokens, the share of clamped ratios, and the effective sample size
    divided by the number of tokens, (Σw)²/(n·Σw²).
    """
    weights = correction.apply(torch.ones_like(logps))
    clipped = torch.zeros_like(logps) if correction.clipped is None else correction.clipped.float()
    # Scale by a power of two, so that the squares of tiny weights do not underflow.
    largest = weights.amax() if weights.numel() else weights.new_zeros(())
    scaled = torch.ldexp(weights, -torch.frexp(largest).exponent.clamp(-100, 100))
    spread = mean(scaled * scaled)
    size = torch.where(spread > 0, mean(scaled).square() / spread, 0.0)
    values = mean((weights == 0).float()), mean(clipped), size
    return dict(zip(CORRECTION_METRICS, values, strict=True))


def mean(x: Tensor) -> Tensor:
    """Return the mean in fp32, computed from an fp64 sum. An empty tensor has mean 0."""
    return x.sum(dtype=torch.float64).float() / max(x.numel(), 1)


def extents(name: str, x: Tensor) -> dict[str, Tensor]:
    """Return the mean, minimum and maximum of x (T,), keyed by name. For an empty x, they are 0."""
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()),) * 2
    return {f"{name}/mean": mean(x), f"{name}/min": low, f"{name}/max": high}


def clip_metrics(r: Tensor, tokens: Tokens, config: LossConfig) -> dict[str, Tensor]:
    """Return the fractions of tokens whose ratio is clipped from below, from above, or at all.

    A token counts only if its advantage pushes the ratio further out of the clip range. For each of
    the three fractions, the mean, the minimum and the maximum are returned, keyed by name.
    """
    epsilon_low, epsilon_high = config.params[:2]  # the first two of every loss with `clips="ppo"`
    low = (r < 1 - epsilon_low) & (tokens.advantages < 0)
    high = (r > 1 + epsilon_high) & (tokens.advantages > 0)
    metrics = {}
    for name, clipped in (("low", low), ("high", high), ("region", low | high)):
        fraction = clipped.float()
        metrics[f"clip_ratio/{name}_mean"] = fraction.sum() / max(r.numel(), 1)
        if r.numel() == 0:
            metrics[f"clip_ratio/{name}_min"] = metrics[f"clip_ratio/{name}_max"] = r.new_zeros(())
            continue
        per_completion = tokens.completion_mean(fraction).float()
        # The mean of an empty completion is 0. Replace it by 1, so that it is not the minimum.
        filled = torch.where(tokens.lengths() > 0, per_completion, 1.0)
        metrics[f"clip_ratio/{name}_min"] = filled.amin()
        metrics[f"clip_ratio/{name}_max"] = per_completion.amax()
    return metrics
