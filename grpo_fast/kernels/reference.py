"""Reference implementation of the row kernels, in plain torch.

Each function processes a chunk of raw logits, (C, V).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_fast.kernels.types import LogitRows, LogitTransform, RowLoss, RowStats, pick
from grpo_fast.objective.coefficients import RowInputs, row_coefficients
from grpo_fast.objective.config import LossConfig


def final_logits(logits: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor | float]:
    """Apply the logit transform to raw logits.

    Returns:
        The final logits z, (C, V) fp32 (fp64 for fp64 inputs), and the derivative of z with respect
        to the raw logits, which is a float or a tensor of shape (C, V).
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope: Tensor | float = transform.logit_scale
    if transform.logit_scale != 1:
        z = z * transform.logit_scale
    if transform.softcap is not None:
        tanh = torch.tanh(z / transform.softcap)
        z = tanh * transform.softcap
        slope = (1 - tanh * tanh) * slope
    if transform.temperature != 1:
        return z / transform.temperature, slope / transform.temperature
    return z, slope


def row_logps(rows: LogitRows, *, return_entropy: bool) -> RowStats:
    """Compute the lse, the target's log-probability and the entropy of every row.

    The log-probability is computed as -log(1 + Σ_{j≠target} e^z_j / e^z_target), which is accurate
    even if the target's probability is close to 1. Columns at -inf contribute exactly 0. If a row
    contains NaN or +inf, its lse and logp are NaN.

    Args:
        rows: the logits and the targets.
        return_entropy: also compute the entropy.

    Returns:
        lse, logps and entropy (or None), fp32 (C,) each.
    """
    if rows.offsets is not None:
        sums = [rows.logits.new_empty(len(rows.target_ids), dtype=torch.float32) for _ in range(3)]
        for here, at in rows_by_length(rows.offsets):
            part = LogitRows(rows.logits[0, at], rows.target_ids[here], rows.transform)
            stats = row_logps(part, return_entropy=return_entropy)
            for to, x in zip(sums, stats, strict=True):
                if x is not None:
                    to[here] = x
        return sums[0], sums[1], sums[2] if return_entropy else None
    z, _ = final_logits(rows.logits, rows.transform)
    lse, logps, entropy = row_statistics(z, rows.target_ids, return_entropy=return_entropy)
    return lse.float(), logps.float(), None if entropy is None else entropy.float()


def row_statistics(z: Tensor, target_ids: Tensor, *, return_entropy: bool) -> RowStats:
    """Compute the statistics of `row_logps` from final logits z, (C, V), in the dtype of z.

    If a target is out of range, the lse and entropy of its row are still correct.
    """
    columns = target_columns(target_ids, z)[:, None]
    z_target = z.gather(-1, columns)
    # Leave the target out of this sum. The formula for logp adds it without cancellation.
    others = z.scatter(-1, columns, -torch.inf).logsumexp(-1)
    x = others - z_target.squeeze(-1)
    # logp is -softplus(x). Do not use torch's softplus, because its bits depend on an element's
    # position in the tensor. Above `limit`, log(1 + e^x) rounds to x.
    limit = 40 if x.dtype == torch.float64 else 20
    logps = -torch.where(x > limit, x, torch.log1p(torch.exp(x)))
    # If the target's logit is -inf, z_target - logp would be NaN. Use the logsumexp of the other
    # columns instead, because the target has probability 0.
    lse = torch.where(logps == -torch.inf, others, z_target.squeeze(-1) - logps)
    # A row with a logit of +inf has no softmax. Return NaN instead of a misleading number.
    is_sound = lse < torch.inf
    lse = torch.where(is_sound, lse, torch.nan)
    logps = torch.where(is_sound, logps, torch.nan)
    entropy = None
    if return_entropy:
        logp_all = z - lse[:, None]
        # Set p·log p to its limit 0 where p is 0, because 0·(-inf) is NaN.
        entropy = -torch.where(logp_all == -torch.inf, 0.0, logp_all.exp() * logp_all).sum(-1)
    return lse, logps, entropy


def target_columns(target_ids: Tensor, logits: Tensor) -> Tensor:
    """Return the column of each target, (C,). Ids outside [0, V) are clamped to this range."""
    return target_ids.clamp(0, logits.shape[-1] - 1)


def rows_by_length(offsets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Group rows of unequal length by their length, so that each group forms a matrix.

    Yields:
        Pairs (row numbers, element positions) of shapes (n,) and (n, k), for n rows of length k.
    """
    lengths = offsets.diff()
    for k in lengths.unique().tolist():
        here = (lengths == k).nonzero().squeeze(1)
        yield here, offsets[here, None] + torch.arange(k, device=here.device)


def row_grad_(
    rows: LogitRows, stats: RowStats, g: Tensor, g_entropy: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Write the gradient with respect to the raw logits to `out`, or in place.

    It is the gradient of Σ g·logp + g_entropy·entropy. If both coefficients of a row are 0, its
    gradient is exactly 0, even if the row contains NaN. In the target column, 1 - p is computed as
    -expm1(logp), which is accurate even if p is close to 1. If a target id is outside [0, V), no
    column of its row is treated as the target.

    Args:
        rows: the logits and the targets. With `offsets`, the gradient overwrites the logits.
        stats: the result of `row_logps`.
        g: (C,) coefficients of the logps.
        g_entropy: (C,) coefficients of the entropies, or None.
        out: (C, V) destination; None: in place.

    Returns:
        The tensor that contains the gradient.
    """
    # 1. Process rows of unequal length in groups of equal length.
    logits, target_ids, transform, offsets = rows
    if offsets is not None:
        for here, at in rows_by_length(offsets):
            own = pick(here, *stats)
            part = LogitRows(logits[0, at], target_ids[here], transform)
            logits[0, at] = row_grad_(part, own, *pick(here, g, g_entropy))
        return logits
    # 2. Compute the gradient of g·logp, which is g·(1 - p) in the target column and -g·p elsewhere.
    out = logits if out is None else out
    lse, logps, entropy = stats
    z, slope = final_logits(logits, transform)
    logp_all = z - lse.to(z.dtype)[:, None]
    probs = logp_all.exp()
    factor = g.to(z.dtype)[:, None]
    dz = -factor * probs
    columns = target_columns(target_ids, logits)[:, None]
    # Compute 1 - p as -expm1(logp), which is accurate even if p is close to 1.
    at_target = -factor * torch.expm1(logps.to(z.dtype))[:, None]
    # A target id outside [0, V) was clamped to another id's column. That column is not the target,
    # so its gradient stays -g·p.
    is_here = target_ids[:, None] == columns
    dz.scatter_(-1, columns, torch.where(is_here, at_target, dz.gather(-1, columns)))
    # 3. Add the gradient of the entropy, which is -g_H·p·(log p + H).
    active = g != 0
    if g_entropy is not None and entropy is not None:
        # Set p·(log p + H) to its limit 0 where p is 0, because 0·log 0 is NaN.
        surplus = torch.where(probs == 0, 0.0, logp_all + entropy.to(z.dtype)[:, None])
        dz = dz - g_entropy.to(z.dtype)[:, None] * probs * surplus
        active = active | (g_entropy != 0)
    # 4. Write exact zeros in rows whose coefficients are 0, because their logits may be NaN.
    out.copy_(torch.where(active[:, None], dz * slope, 0.0))
    return out


def row_loss_(
    rows: LogitRows, out: Tensor, terms: RowInputs, config: LossConfig, *, return_entropy: bool
) -> RowLoss:
    """Compute a token-level loss and its gradient with respect to the raw logits.

    The steps are `row_logps`, the loss function and `row_grad_`. A row whose target is outside [0,
    V) is excluded: its loss and gradient are 0, even if its logits or terms contain NaN.

    Args:
        rows: the logits and the targets, without `offsets`.
        out: (C, V) destination of the gradient of Σ_t (losses_t + grad_entropy_t·entropy_t). It may
            be the tensor `rows.logits`.
        terms: the per-row inputs of the loss.
        config: the loss.
        return_entropy: also return the entropy.

    Returns:
        The statistics, losses and coefficients of every row, (C,) fp32 each.
    """
    stats = row_logps(rows, return_entropy=return_entropy)
    losses, grad = row_coefficients(stats[1], terms, config)
    # Exclude rows whose target was clamped. Set their results to 0 with torch.where, because they
    # may be NaN, and 0·NaN is NaN.
    counts = rows.target_ids == target_columns(rows.target_ids, rows.logits)
    losses = torch.where(counts, losses, 0.0)
    grad = torch.where(counts, grad, 0.0)
    grad_entropy = (
        None if terms.grad_entropy is None else torch.where(counts, terms.grad_entropy, 0.0)
    )
    row_grad_(rows, stats, grad, grad_entropy, out)
    return RowLoss(*stats, losses, grad)
