"""Row kernels in plain torch: the readable reference, for every device and dtype.

Each door treats a chunk of rows of raw logits (C, V), raw = hidden·Wᵀ + bias, under a `LogitRule`:

    z = softcap · tanh(logit_scale · raw / softcap) / temperature

`rows_cpu.py` (C++) and `rows_triton.py` have the same doors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kl import KL_ESTIMATORS
from grpo_fast.objectives import LOG_RATIO_MAX, OBJECTIVES, objective_params

if TYPE_CHECKING:
    from grpo_fast.config import LossConfig


class LogitRule(NamedTuple):
    """How raw logits become the distribution's. `temperature` is a float, or (C,) fp32 with one value per row."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def rows(self, index: slice | Tensor) -> LogitRule:
        """The rule of a subset of the rows."""
        if isinstance(self.temperature, Tensor):
            return self._replace(temperature=self.temperature[index])
        return self


class RowSums(NamedTuple):
    """What a kernel on the host knows of all its rows without another look at them."""

    loss: float  # Σ losses + grad_entropy·entropy
    least_logp: float
    active: int  # rows with a coefficient that is not 0

    def add(self, other: RowSums) -> RowSums:
        return RowSums(self.loss + other.loss, min(self.least_logp, other.least_logp), self.active + other.active)


class RowLoss(NamedTuple):
    """What `row_loss_` says of every row, (C,) fp32, beside the d-logits it writes."""

    lse: Tensor
    logps: Tensor
    entropy: Tensor | None
    losses: Tensor  # policy_weights·ℓ + kl_weights·KL
    grad_logps: Tensor  # its derivative
    sums: RowSums | None = None  # where they cost nothing


def final_logits(logits: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor | float]:
    """z (C, V) in fp32 (fp64 stays fp64) and dz/draw, a float or (C, 1) or (C, V)."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope: Tensor | float = rule.logit_scale
    if rule.logit_scale != 1:
        z = z * rule.logit_scale
    if rule.softcap is not None:
        bent = torch.tanh(z / rule.softcap)
        z = bent * rule.softcap
        slope = (1 - bent * bent) * slope
    if isinstance(rule.temperature, Tensor):
        temperature = rule.temperature.to(z.dtype)[:, None]
        return z / temperature, slope / temperature
    if rule.temperature != 1:
        return z / rule.temperature, slope / rule.temperature
    return z, slope


def row_logps(
    logits: Tensor,  # (C, V)
    target_ids: Tensor,  # (C,) int64
    rule: LogitRule,
    *,
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(lse, logps, entropy) of every row, fp32 (C,). Columns at -inf contribute exactly 0.

    logp = -log(1 + Σ_{others} e^z / e^(z_target)): nothing cancels when the model is certain. A row with a NaN or +inf
    among its logits has lse and logp NaN.
    """
    z, _ = final_logits(logits, rule)
    columns = columns_of(target_ids, logits)[:, None]
    z_target = z.gather(-1, columns)
    others = z.scatter(-1, columns, -torch.inf).logsumexp(-1)
    x = others - z_target.squeeze(-1)
    # -softplus(x), by functions whose bits do not depend on a value's place in the vector (torch's softplus does).
    logps = -torch.where(x > 20, x, torch.log1p(torch.exp(x)))
    lse = z_target.squeeze(-1) - logps
    is_sound = lse < torch.inf
    lse, logps = torch.where(is_sound, lse, torch.nan), torch.where(is_sound, logps, torch.nan)
    entropy = None
    if return_entropy:
        logp_all = z - lse[:, None]
        entropy = -torch.where(logp_all == -torch.inf, 0.0, logp_all.exp() * logp_all).sum(-1)
    return lse.float(), logps.float(), None if entropy is None else entropy.float()


def columns_of(target_ids: Tensor, logits: Tensor) -> Tensor:
    """(C,) the targets' columns; where there is none, any."""
    return target_ids.clamp(0, logits.shape[-1] - 1)


def row_grad_(
    logits: Tensor,  # (C, V)
    target_ids: Tensor,  # (C,) int64
    lse: Tensor,  # (C,)
    logps: Tensor,  # (C,)
    entropy: Tensor | None,  # (C,)
    grad_logps: Tensor,  # (C,)
    grad_entropy: Tensor | None,  # (C,)
    rule: LogitRule,
    *,
    out: Tensor | None = None,  # (C, V)
) -> Tensor:  # (C, V)
    """Overwrite the logits (or `out`) by the gradient of Σ grad_logps·logp + grad_entropy·entropy.

    A row whose two coefficients are zero becomes exact zeros, whatever it held. The target column's 1 - p is
    -expm1(logp), so nothing cancels when the model is certain.
    """
    out = logits if out is None else out
    z, slope = final_logits(logits, rule)
    logp_all = z - lse.to(z.dtype)[:, None]
    p = logp_all.exp()
    g = grad_logps.to(z.dtype)[:, None]
    dz = -g * p
    columns = columns_of(target_ids, logits)[:, None]
    dz.scatter_(-1, columns, -g * torch.expm1(logps.to(z.dtype))[:, None])
    active = grad_logps != 0
    if grad_entropy is not None and entropy is not None:
        surplus = torch.where(p == 0, 0.0, logp_all + entropy.to(z.dtype)[:, None])
        dz = dz - grad_entropy.to(z.dtype)[:, None] * p * surplus
        active = active | (grad_entropy != 0)
    out.copy_(torch.where(active[:, None], dz * slope, 0.0))
    return out


def row_coefficients(
    logps: Tensor,  # (C,)
    advantages: Tensor,  # (C,)
    policy_weights: Tensor,  # (C,)
    kl_weights: Tensor | None,  # (C,)
    old_logps: Tensor | None,  # (C,)
    ref_logps: Tensor | None,  # (C,)
    config: LossConfig,
) -> tuple[Tensor, Tensor]:
    """(losses, grad_logps) of a token-level loss from the logps of its rows (see `row_loss_`).

    Both are NaN where the logp is: a leaf's comparisons and a weight of 0 would hide it.
    """
    log_ratio = torch.zeros_like(logps) if old_logps is None else (logps - old_logps).clamp(max=LOG_RATIO_MAX)
    loss, slope = OBJECTIVES[config.loss_type].leaf(logps, log_ratio, advantages, *objective_params(config))
    losses = torch.where(policy_weights == 0, 0.0, policy_weights * loss)
    grad = torch.where(policy_weights == 0, 0.0, policy_weights * slope)
    if kl_weights is not None and ref_logps is not None:
        kl, kl_slope = KL_ESTIMATORS[config.kl_estimator](ref_logps - logps)
        if config.kl_times_ratio:
            ratio = torch.exp(log_ratio)
            kl, kl_slope = kl * ratio, (kl_slope + kl) * ratio
        losses = losses + torch.where(kl_weights == 0, 0.0, kl_weights * kl)
        grad = grad + torch.where(kl_weights == 0, 0.0, kl_weights * kl_slope)
    return torch.where(logps.isnan(), logps, losses), torch.where(logps.isnan(), logps, grad)


def row_loss_(
    logits: Tensor,  # (C, V)
    out: Tensor,  # (C, V)
    target_ids: Tensor,  # (C,)
    advantages: Tensor,  # (C,)
    policy_weights: Tensor,  # (C,)
    kl_weights: Tensor | None,  # (C,)
    old_logps: Tensor | None,  # (C,)
    ref_logps: Tensor | None,  # (C,)
    grad_entropy: Tensor | None,  # (C,)
    config: LossConfig,
    rule: LogitRule,
    *,
    return_entropy: bool,
) -> RowLoss:
    """Logits to the gradient of a token-level loss: `row_logps`, the leaf of `config.loss_type`, `row_grad_`.

    `out` (which may be `logits`) receives d raw-logits of Σ_t policy_weights·ℓ + kl_weights·KL +
    grad_entropy·entropy. `old_logps` None: the ratio is 1; `kl_weights` or `ref_logps` None: no KL. A row whose target
    lies outside [0, V) does not count: it is written as zeros and has loss 0, whatever it and its weights hold.
    """
    lse, logps, entropy = row_logps(logits, target_ids, rule, return_entropy=return_entropy)
    losses, grad = row_coefficients(logps, advantages, policy_weights, kl_weights, old_logps, ref_logps, config)
    counts = target_ids == columns_of(target_ids, logits)
    losses, grad = torch.where(counts, losses, 0.0), torch.where(counts, grad, 0.0)
    grad_entropy = None if grad_entropy is None else torch.where(counts, grad_entropy, 0.0)
    row_grad_(logits, target_ids, lse, logps, entropy, grad, grad_entropy, rule, out=out)
    return RowLoss(lse, logps, entropy, losses, grad)
