"""Loss L and its derivatives dL/dlogp and dL/dentropy, from per-token logps, without autograd.

`token_loss` computes the loss of all active tokens from their importance ratios and corrections.
For token-level losses, `row_inputs` collects the inputs that are known before the forward pass, and
`row_coefficients` computes the loss of single rows. The fused kernels compute the same.

Log ratios are clamped, so the exponentials of importance ratios and corrections are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.objective.aggregation import Tokens
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import LOG_RATIO_MAX, MEAN_LOG_RATIO_MAX, OBJECTIVES

LOG_TINY = math.log(1e-8)
# The levels that have one ratio per completion. Each has a function that pools (averages or sums)
# the log ratios of the tokens of a completion. Gradients with respect to the log ratios are pooled
# in the same way.
POOLS = {"sequence": Tokens.completion_mean, "sequence_sum": Tokens.completion_sum}


# --------------------------------------------------------------------------- Ratios and corrections
class Ratio(NamedTuple):
    """Importance ratios of the tokens, and how they are pooled over completions."""

    raw: Tensor  # (T,) logp - old_logp
    log: Tensor  # (T,) log ratio that the loss function receives
    # Function that pools the log ratios of each completion, (T,) → (B,). None: one ratio per token.
    pool: Callable[[Tokens, Tensor], Tensor] | None = None

    def slope_to_logps(self, slope: Tensor, tokens: Tokens) -> Tensor:
        """Convert the slope dL/d(log ratio) into dL/dlogp, each (T,).

        If the log ratios of a completion are pooled, their slopes are pooled in the same way.
        """
        return slope if self.pool is None else tokens.to_tokens(self.pool(tokens, slope))


def importance_ratio(
    logps: Tensor, old_logps: Tensor, sampling: Tensor | None, tokens: Tokens, config: LossConfig
) -> Ratio:
    """Compute the ratio of the current to the old policy, as the loss function needs it.

    Args:
        logps: (T,), current policy.
        old_logps: (T,), old policy.
        sampling: (T,), importance weights from the corrections, or None. Only "vespo" reads them,
            and multiplies its ratio by them.
        tokens: the other per-token inputs.
        config: the objective.
    """
    raw = logps - old_logps
    kind = OBJECTIVES[config.loss_type].ratio_kind
    if kind == "sum":
        # Use the bounds and the order of operations of TRL's get_gamma_weights.
        log_weight = tokens.completion_sum(raw.clamp(-20.0, 20.0))
        if sampling is not None:
            log_sampling = sampling.log().clamp(LOG_TINY, 20.0)
            per_token = any(x.weighs and x.level == "token" for x in config.corrections)
            pooled = tokens.completion_sum if per_token else tokens.completion_mean
            log_weight = log_weight + pooled(log_sampling)
        return Ratio(raw, tokens.to_tokens(log_weight.clamp(LOG_TINY, 20.0)))
    if kind == "detached_mean":
        # The mean is detached, so `pool` is None. The gradient flows through the logp of the token
        # instead.
        mean = tokens.completion_mean(raw).clamp(max=MEAN_LOG_RATIO_MAX)
        return Ratio(raw, tokens.to_tokens(mean))
    if kind == "geometric":
        # Do not clamp here. `token_loss` clamps the mean of the log ratios, and a clamp of each log
        # ratio would change this mean.
        return Ratio(raw, raw)
    pool = POOLS.get(config.importance_sampling_level)
    if pool is not None:
        return Ratio(raw, tokens.to_tokens(pool(tokens, raw).clamp(max=LOG_RATIO_MAX)), pool)
    return Ratio(raw, raw.clamp(max=LOG_RATIO_MAX))


class Corrected(NamedTuple):
    """Weights and masks with which the corrections change the policy term."""

    weights: Tensor | None = None  # (T,); None: 1
    kept: Tensor | None = None  # (T,) bool; None: all
    clipped: Tensor | None = None  # (T,) bool: ratios that "truncate" clamped

    def apply(self, weights: Tensor, *, weigh: bool = True) -> Tensor:
        """Multiply weights (T,) by the corrections. With `weigh=False`, apply only the masks."""
        if self.kept is not None:
            weights = torch.where(self.kept, weights, 0.0)
        return weights * self.weights if weigh and self.weights is not None else weights


def corrected(logps: Tensor, old_logps: Tensor, tokens: Tokens, config: LossConfig) -> Corrected:
    """Compute the weights and masks of all corrections of the config, without gradient."""
    result = Corrected()
    for correction in config.corrections:
        if not correction.is_active(tokens):
            continue
        log_ratio = correction.log_ratio(logps, old_logps, tokens)
        inside = correction.inside(log_ratio, tokens)
        if correction.weighs:
            clipped = ~inside if correction.kind == "truncate" else None
            result = result._replace(weights=correction.weights(log_ratio, inside), clipped=clipped)
        else:
            result = result._replace(kept=inside if result.kept is None else inside & result.kept)
    return result


# ---------------------------------------------------------------- Loss from the logps of all tokens
class TokenLoss(NamedTuple):
    """Loss of the active tokens, its derivatives, and the terms that the metrics report."""

    loss: Tensor  # 0-d fp32
    grad_logps: Tensor  # (T,) dL/dlogp
    grad_entropy: Tensor | None  # (T,) dL/dentropy; None without an entropy bonus
    policy: Tensor  # (T,) weighted policy term of the loss
    kl: Tensor | None  # (T,) unweighted KL; None if the loss has no KL
    ratio: Ratio
    correction: Corrected


def token_loss(
    logps: Tensor,  # (T,) fp32
    entropy: Tensor | None,  # (T,) fp32
    tokens: Tokens,
    config: LossConfig,
) -> TokenLoss:
    """Compute the loss of T active tokens and its derivatives, without autograd."""
    # 1. Compute the ratio, and the weights and masks of the corrections.
    objective = OBJECTIVES[config.loss_type]
    old_logps = logps if tokens.old_logps is None else tokens.old_logps
    correction = corrected(logps, old_logps, tokens, config)
    ratio = importance_ratio(logps, old_logps, correction.weights, tokens, config)

    # 2. Compute the loss of every token and its slope, which is the derivative of the loss with
    # respect to the log ratio or the logp (`objective.slope_of`).
    loss, slope = objective.function(logps, ratio.log, tokens.advantages, *config.params)
    if objective.ratio_kind == "geometric":
        mean = tokens.completion_mean(loss)
        completion_ratio = tokens.to_tokens(torch.exp(mean.clamp(max=LOG_RATIO_MAX)))
        loss = -tokens.advantages * completion_ratio
    elif objective.ratio_kind == "detached_mean":
        # Set the slope to 0 where the mean log ratio was clamped, because a clamped ratio does not
        # depend on the logps.
        slope = torch.where(ratio.log < MEAN_LOG_RATIO_MAX, slope, 0.0)

    # 3. Multiply the loss by the token weights, which include the entropy mask and the corrections,
    # and compute dL/dlogp from the slope.
    keep_entropy = high_entropy_mask(entropy, config)
    weights = tokens.token_weights
    if keep_entropy is not None:
        weights = torch.where(keep_entropy, weights, 0.0)
    weights = correction.apply(weights, weigh=objective.ratio_kind != "sum")
    if objective.ratio_kind == "geometric":
        # The slope is the derivative of the clipped log ratio, which is 0 for a clipped token.
        grad = tokens.to_tokens(tokens.completion_mean(weights * loss)) * slope
    elif objective.slope_of == "log_ratio":
        grad = ratio.slope_to_logps(weights * slope, tokens)
    else:
        grad = weights * slope
    # Restore NaN in the result. Comparisons and masks turn a NaN into a finite value, which would
    # hide that the model computed NaN.
    is_nan = logps.isnan() | ratio.log.isnan()
    grad, policy = (torch.where(is_nan, torch.nan, x) for x in (grad, weights * loss))

    # 4. Add the KL to the reference.
    total = policy
    kl = None
    if config.uses_reference and tokens.ref_logps is not None:
        kl, kl_grad = weighted_kl(logps, ratio, tokens, config)
        total = torch.add(total, tokens.token_weights * kl, alpha=config.beta)
        grad = torch.add(grad, kl_grad, alpha=config.beta)

    # 5. Sum over tokens, and add the entropy bonus.
    loss = total.sum(dtype=torch.float64)
    grad_entropy = None
    if config.entropy_coef and entropy is not None:
        grad_entropy = -config.entropy_coef * entropy_share(keep_entropy, tokens)
        loss = loss + (grad_entropy * entropy).sum(dtype=torch.float64)
    return TokenLoss(loss.float(), grad, grad_entropy, policy, kl, ratio, correction)


def high_entropy_mask(entropy: Tensor | None, config: LossConfig) -> Tensor | None:
    """Return a (T,) mask of the tokens with the highest entropies, or None to keep all tokens."""
    if config.top_entropy_quantile >= 1 or entropy is None or entropy.numel() == 0:
        return None
    return entropy >= quantile(entropy, 1 - config.top_entropy_quantile)


def quantile(x: Tensor, q: float) -> Tensor:
    """Return the interpolated quantile of x (T,).

    torch.quantile computes the same, but is limited to 16M elements.
    """
    ordered = x.sort().values
    position = q * (x.numel() - 1)
    low = math.floor(position)
    return torch.lerp(ordered[low], ordered[min(low + 1, x.numel() - 1)], position - low)


def weighted_kl(
    logps: Tensor, ratio: Ratio, tokens: Tokens, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Compute the KL of each token, and its derivative with respect to the logp.

    Returns:
        (kl, grad), each (T,). `grad` is multiplied by the token weights, but `kl` is not.
    """
    assert tokens.ref_logps is not None
    kl, slope = KL_ESTIMATORS[config.kl_estimator](tokens.ref_logps - logps, *config.kl_limits)
    if not config.kl_times_ratio:
        return kl, tokens.token_weights * slope
    # Multiply by the ratio of the loss if the loss passes a gradient through its ratio. Otherwise,
    # use the importance ratio of the token.
    has_ratio = OBJECTIVES[config.loss_type].ratio_kind == "ratio"
    r = torch.exp(ratio.log if has_ratio else ratio.raw.clamp(max=LOG_RATIO_MAX))
    kl = kl * r
    through_ratio = ratio.slope_to_logps(tokens.token_weights * kl, tokens)
    return kl, tokens.token_weights * r * slope + through_ratio


def entropy_share(keep: Tensor | None, tokens: Tokens) -> Tensor:
    """Return the weight of each token's entropy in the entropy bonus, (T,).

    Tokens that the mask `keep` excludes have weight 0.
    """
    kept = torch.ones_like(tokens.token_weights) if keep is None else keep.float()
    share = tokens.entropy_weight
    if share is None:
        share = 1.0 / kept.sum().clamp(min=1)
    if tokens.unit is not None:
        share = share * tokens.unit
    return kept * share


def active_rows(g: Tensor, g_entropy: Tensor | None) -> Tensor:
    """Return a mask of the rows with a nonzero coefficient, (T,) bool."""
    return g != 0 if g_entropy is None else (g != 0) | (g_entropy != 0)


# ------------------------------------------------------- Loss of single rows, for the fused kernels
class RowInputs(NamedTuple):
    """Per-row inputs of a token-level loss that are known before the forward pass."""

    advantages: Tensor  # (T,)
    policy_weights: Tensor  # (T,)
    kl_weights: Tensor | None = None  # (T,); None: no KL
    old_logps: Tensor | None = None  # (T,); None: the ratio is 1
    ref_logps: Tensor | None = None  # (T,); None: no KL
    grad_entropy: Tensor | None = None  # (T,)

    def map(self, function: Callable[[Tensor], Tensor]) -> RowInputs:
        """Return new terms with `function` applied to every tensor."""
        values: list[Any] = [None if x is None else function(x) for x in self]
        return RowInputs(*values)


def row_inputs(tokens: Tokens, config: LossConfig) -> RowInputs | None:
    """Return the inputs of a token-level loss for every row.

    The result is None if one pass cannot compute the loss and its gradient. This is the case if the
    gradient of a row depends on other rows. It is also the case if old_logps is missing and the
    loss has corrections, because they then need the logps of the forward pass.
    """
    is_corrected = any(x.is_active(tokens) for x in config.corrections)
    if not config.is_token_local or (is_corrected and tokens.old_logps is None):
        return None
    weights = tokens.token_weights
    if is_corrected and tokens.old_logps is not None:
        # Pass old_logps in place of the logps, which are not known yet. In a token-level loss, all
        # corrections use the ratio "old/sampling", which does not depend on the logps.
        weights = corrected(tokens.old_logps, tokens.old_logps, tokens, config).apply(weights)
    terms = RowInputs(tokens.advantages, weights, old_logps=tokens.old_logps)
    if config.uses_reference:
        kl_weights = tokens.token_weights * config.beta
        terms = terms._replace(kl_weights=kl_weights, ref_logps=tokens.ref_logps)
    if config.entropy_coef:
        grad_entropy = -config.entropy_coef * entropy_share(None, tokens)
        terms = terms._replace(grad_entropy=grad_entropy)
    return terms


def row_coefficients(logps: Tensor, terms: RowInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Compute the loss policy_weights·ℓ + kl_weights·KL of every row, and its derivative.

    Args:
        logps: (T,), fp32.
        terms: the inputs of these rows.
        config: the objective.

    Returns:
        (losses, grad_logps), each (T,). Both are NaN where the logp is NaN.
    """
    advantages, weights, kl_weights, old_logps, ref_logps, _ = terms
    log_ratio = torch.zeros_like(logps) if old_logps is None else logps - old_logps
    log_ratio = log_ratio.clamp(max=LOG_RATIO_MAX)
    function = OBJECTIVES[config.loss_type].function
    loss, slope = function(logps, log_ratio, advantages, *config.params)
    # Use where() instead of a product, because an infinite loss times a weight of 0 would be NaN.
    losses = torch.where(weights == 0, 0.0, weights * loss)
    grad = torch.where(weights == 0, 0.0, weights * slope)
    if kl_weights is not None and ref_logps is not None:
        kl, kl_slope = KL_ESTIMATORS[config.kl_estimator](ref_logps - logps, *config.kl_limits)
        if config.kl_times_ratio:
            ratio = torch.exp(log_ratio)
            kl_slope = (kl_slope + kl) * ratio
            kl = kl * ratio
        losses = losses + torch.where(kl_weights == 0, 0.0, kl_weights * kl)
        grad = grad + torch.where(kl_weights == 0, 0.0, kl_weights * kl_slope)
    # Restore NaN where the logp is NaN. Comparisons and zero weights turn it into a finite value,
    # which would hide that the model computed NaN.
    return torch.where(logps.isnan(), logps, losses), torch.where(logps.isnan(), logps, grad)
