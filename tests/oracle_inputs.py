"""Functions that compute the oracle's loss and gradients from the package's input tensors.

The functions convert padded logps, logits or hidden states to the list of completions that the
oracle in `oracles.py` expects.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from tests.oracles import Completion, batch_loss, resolve


def scaled_logits(raw: Tensor, *, temperature=1.0, softcap=None, logit_scale=1.0) -> Tensor:
    """Return the raw logits (n, V) after logit scale, softcap and temperature."""
    z = logit_scale * raw
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def logps_and_entropy(
    raw: Tensor, ids: Tensor, *, kept: Tensor | None = None, **rule
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of `ids` and the entropies in fp64, each of shape (n,).

    A token id has probability 0 if its logit is −inf or its element of `kept` is False. `raw` and
    `kept` have shape (n, V). `rule` contains keyword arguments for `scaled_logits`.
    """
    z = scaled_logits(raw, **rule)
    log_p = torch.log_softmax(z if kept is None else z.masked_fill(~kept, -torch.inf), dim=-1)
    p = log_p.exp()
    entropy = -(p * torch.where(torch.isinf(log_p), torch.zeros_like(log_p), log_p)).sum(-1)
    return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy


def split(tensor: Tensor | None, mask: Tensor) -> list[Tensor | None]:
    """Split a tensor of shape (B, L, …) into the active rows of each completion."""
    return [None if tensor is None else tensor[b][mask[b]] for b in range(len(mask))]


def as_double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float64)


def completions_of(
    logp: Tensor, advantages: Tensor, mask: Tensor, *, old=None, ref=None, sampling=None,
    entropy=None,
) -> list[Completion]:  # fmt: skip
    """Convert padded tensors to a list of completions with the active tokens only.

    All tensors have shape (B, L). The advantages may also have shape (B,).
    """
    A = as_double(advantages)
    A = A.unsqueeze(1).expand(mask.shape) if A.dim() == 1 else A
    old = logp if old is None else old
    given = logp, *map(as_double, (old, ref, sampling)), A, entropy
    return [Completion(*rows) for rows in zip(*(split(x, mask) for x in given), strict=True)]


def oracle_from_logps(
    logps, advantages, options, *, mask, entropy=None, num_items=None, num_completions=None, **given
) -> SimpleNamespace:
    """Compute the oracle's loss and gradients from logps of shape (B, L).

    Returns:
        The result of `batch_loss` with the additional attributes `logps_grad` and `entropy_grad`.
        `entropy_grad` is None if no entropy is given.
    """
    lp = as_double(logps).requires_grad_()
    H = None if entropy is None else as_double(entropy).requires_grad_()
    completions = completions_of(lp, advantages, mask, entropy=H, **given)
    out = batch_loss(completions, options, num_items=num_items, num_completions=num_completions)
    out.logps_grad = grad_or_zero(out.loss, lp)
    out.entropy_grad = None if H is None else grad_or_zero(out.loss, H)
    return out


def oracle_from_logits(logits, ids, advantages, options, *, mask, **given) -> SimpleNamespace:
    """Compute the oracle's loss and gradients from raw logits of shape (B, L, V).

    Returns:
        The result of `batch_loss` with the additional attributes `logits_grad`, `logps` and
        `entropy`.
    """
    raw = as_double(logits).requires_grad_()
    out = _from_rows(raw[mask], ids, advantages, options, mask, **given)
    out.logits_grad = grad_or_zero(out.loss, raw)
    return out


def oracle_from_hidden(
    hidden, weight, ids, advantages, options, *, mask, bias=None, **given
) -> SimpleNamespace:
    """Compute the oracle's loss and gradients from hidden states and an LM head.

    Args:
        hidden: Hidden states (B, L, H).
        weight: Weight of the LM head (V, H).
        bias: Bias of the LM head (V,), or None.

    Returns:
        The result of `batch_loss` with the additional attributes `logps`, `entropy`, `hidden_grad`,
        `weight_grad` and `bias_grad`.
    """
    h, W = as_double(hidden).requires_grad_(), as_double(weight).requires_grad_()
    b = None if bias is None else as_double(bias).requires_grad_()
    rows = h[mask] @ W.T
    rows = rows if b is None else rows + b
    out = _from_rows(rows, ids, advantages, options, mask, **given)
    out.hidden_grad, out.weight_grad = grad_or_zero(out.loss, h), grad_or_zero(out.loss, W)
    out.bias_grad = None if b is None else grad_or_zero(out.loss, b)
    return out


def _from_rows(
    rows, ids, advantages, options, mask, *, kept=None, num_items=None, num_completions=None,
    **given,
):  # fmt: skip
    o = resolve(options)
    rule = {"temperature": o.temperature, "softcap": o.softcap, "logit_scale": o.logit_scale}
    kept = None if kept is None else kept[mask]
    lp, H = logps_and_entropy(rows, ids[mask], kept=kept, **rule)
    lp, H = (torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, x) for x in (lp, H))
    completions = completions_of(lp, advantages, mask, entropy=H, **given)
    out = batch_loss(completions, options, num_items=num_items, num_completions=num_completions)
    out.logps, out.entropy = lp.detach(), H.detach()
    return out


def grad_or_zero(loss: Tensor, x: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(x)
    (g,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if g is None else g
