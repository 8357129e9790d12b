"""Reference implementation ("oracle") of every loss in fp64, in the notation of the papers.

The oracle imports nothing from grpo_fast and is not optimized. Each objective is a function of ONE
completion, whose 1-D tensors contain only active tokens. The oracle does not use padding, packing,
masking, broadcasting or chunking, because the package may have bugs there. Autograd computes the
gradients, and `.detach()` is used where a paper writes a stop-gradient. The functions at the end
convert padded logps, logits or hidden states to completions.

The formulas come from these papers: DeepSeekMath 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476,
INTELLECT-2, PPO dual clip 1912.09729, MiniMax-M1 2506.13585, SAPO 2511.20347, GMPO 2507.20673, GSPO
2507.18071 and Kimi k1.5. Some details follow the source code of TRL 1.16 `GRPOTrainer`:
`_compute_loss` (order of the terms, KL times ratio), `get_gamma_weights` (VESPO),
`get_off_policy_mask` and `get_high_entropy_mask`. DPPO follows verl's `core_algos`.
"""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The importance ratio is exp(min(log ratio, 20)), to avoid overflow. Its derivative ignores the
# minimum. Otherwise a token with a log ratio above 20 would get no gradient, and training could not
# reduce the ratio again.
LOG_RATIO_MAX = 20.0

DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": None, "delta": None, "beta": 0.0,
    "kl_estimator": "k3", "kl_times_ratio": False, "temperature": 1.0, "softcap": None,
    "logit_scale": 1.0, "importance_sampling_level": "token", "aggregation": None,
    "max_completion_length": None, "entropy_coef": 0.0, "top_entropy_quantile": 1.0,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "cispo_bound": "raw", "dual_clip_c": 3.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "kl_clamp": None, "kl_input_clamp": None,
    "corrections": [{"kind": "truncate", "high": 3.0}],
}  # fmt: skip

AGGREGATED_BY = {  # maps each aggregation to the losses that use it by default
    "sequence_mean": "grpo sapo gspo gspo_token dual_clip gmpo",
    "token_mean_local": "bnpo",
    "fixed_length": "dr_grpo",
    "token_mean_global": "dapo cispo vespo reinforce unclipped dppo_tv dppo_kl kimi dro",
    "sequence_sum": "luspo",
}
DEFAULT_AGGREGATION = {x: name for name, losses in AGGREGATED_BY.items() for x in losses.split()}


class Completion(NamedTuple):
    """Active tokens of one completion. Every field has shape (n,)."""

    logp: Tensor
    old: Tensor  # logp.detach() if the caller passed no old logps
    ref: Tensor | None
    sampling: Tensor | None
    advantage: Tensor
    entropy: Tensor | None


def resolve(options: dict[str, Any]) -> SimpleNamespace:
    """Return all options as a namespace, with the documented default for each missing option."""
    unknown = set(options) - set(DEFAULTS) - {"compute_entropy"}
    assert not unknown, unknown
    o = SimpleNamespace(**{**DEFAULTS, **options})
    o.corrections = [o.corrections] if isinstance(o.corrections, dict) else o.corrections
    if o.epsilon_high is None:
        o.epsilon_high = 5.0 if o.loss_type == "cispo" else o.epsilon_low
    if o.loss_type == "gspo":
        o.importance_sampling_level = "sequence"
    if o.aggregation is None:
        o.aggregation = DEFAULT_AGGREGATION[o.loss_type]
    return o


# ----------------------------------------------------------
# Log ratios and importance ratios
def guarded(log_ratio: Tensor) -> Tensor:
    """Return min(log ratio, 20) with a derivative of 1 everywhere, even above 20."""
    return torch.where(
        log_ratio > LOG_RATIO_MAX, LOG_RATIO_MAX + (log_ratio - log_ratio.detach()), log_ratio
    )


def log_ratio(c: Completion, o: SimpleNamespace) -> Tensor:
    """Compute the log ratio at the requested importance sampling level, repeated to shape (n,)."""
    lr = c.logp - c.old
    if o.importance_sampling_level == "sequence":
        # The mean is not detached, because the gradient must flow through it to every token.
        lr = (lr.sum() / max(len(lr), 1)).expand(len(lr))
    elif o.importance_sampling_level == "sequence_sum":
        # The sum is the log of π(completion) / π_old(completion).
        lr = lr.sum().expand(len(lr))
    return lr


def ratio(c: Completion, o: SimpleNamespace) -> Tensor:
    return torch.exp(guarded(log_ratio(c, o)))


# ----------------------------------------------------------
# Objectives: the loss of each token of a completion
def ppo_clip(r: Tensor, A: Tensor, o: SimpleNamespace, *, delta: float | None = None) -> Tensor:
    r1 = r if delta is None else torch.clamp(r, max=delta)
    r2 = torch.clamp(r, 1 - o.epsilon_low, 1 + o.epsilon_high)
    return -torch.minimum(r1 * A, r2 * A)


def reinforce(c, o):
    return -c.advantage * c.logp


def unclipped(c, o):
    return -ratio(c, o) * c.advantage


def grpo(c, o):
    return ppo_clip(ratio(c, o), c.advantage, o, delta=o.delta)


def dual_clip(c, o):
    loss = ppo_clip(ratio(c, o), c.advantage, o)
    return torch.where(c.advantage < 0, torch.minimum(loss, -c.advantage * o.dual_clip_c), loss)


def cispo(c, o):
    r = ratio(c, o)
    if o.cispo_bound == "raw":
        weight = torch.clamp(r, max=o.epsilon_high)
    else:
        weight = torch.clamp(r, 1 - o.epsilon_low, 1 + o.epsilon_high)
    return -weight.detach() * c.advantage * c.logp


def by_sign(positive: Tensor, above: Any, below: Any) -> Tensor:
    return torch.where(positive, *(torch.as_tensor(x, dtype=torch.float64) for x in (above, below)))


def sapo(c, o):
    r, A = ratio(c, o), c.advantage
    tau = by_sign(A > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
    return -A * torch.sigmoid(tau * (r - 1)) * 4 / tau


def vespo_phi(c: Completion, o: SimpleNamespace) -> Tensor:
    """Compute the weight φ of the VESPO loss exactly like `get_gamma_weights` in TRL 1.16.

    As in TRL, λ is at least 1e-4, and the clamps are applied in the same order.
    """
    lower = math.log(1e-8)
    w = torch.clamp(c.logp - c.old, -20.0, 20.0).sum()
    weight = correction_weight(c, o)
    if weight is not None:
        w = w + torch.clamp(torch.log(weight), lower, 20.0).sum()
    w = torch.clamp(w, lower, 20.0)
    positive = c.advantage >= 0
    k = by_sign(positive, o.vespo_k_pos, o.vespo_k_neg)
    lam = by_sign(positive, o.vespo_lambda_pos, o.vespo_lambda_neg).clamp(min=1e-4)
    phi = torch.exp(lam + k * w - lam * torch.exp(w))
    return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).detach()


def vespo(c, o):
    return -vespo_phi(c, o) * c.advantage * c.logp


def gmpo(c, o):
    lr, A = c.logp - c.old, c.advantage
    clipped = torch.where(
        A >= 0, torch.clamp(lr, max=o.epsilon_high), torch.clamp(lr, min=-o.epsilon_low)
    )
    mean = clipped.sum() / max(len(lr), 1)
    return -A * torch.exp(guarded(mean))


def gspo_token(c, o):
    s = c.logp - c.logp.detach() + (c.logp - c.old).mean().detach()
    return ppo_clip(torch.exp(torch.clamp(s, max=10.0)), c.advantage, o, delta=o.delta)


def dppo_tv(c, o):
    r = torch.exp(torch.clamp(c.logp - c.old, -20.0, 20.0)).clamp(max=20.0).detach()
    moved = (torch.exp(c.logp) - torch.exp(c.old)).detach()
    keep = torch.where(c.advantage > 0, moved <= o.epsilon_high, moved >= -o.epsilon_low)
    return -c.advantage * r * c.logp * keep


def dppo_kl(c, o):
    r = torch.exp(torch.clamp(c.logp - c.old, -20.0, 20.0)).clamp(max=20.0).detach()
    p, q = torch.exp(c.logp).detach(), torch.exp(c.old)
    divergence = binary_kl(q, p)
    keep = torch.where(
        c.advantage > 0,
        (divergence <= o.epsilon_high) | (p <= q),  # a step towards the old policy is never masked
        (divergence <= o.epsilon_low) | (p >= q),
    )
    return -c.advantage * r * c.logp * keep


def binary_kl(q: Tensor, p: Tensor) -> Tensor:
    """Compute the KL divergence KL(Bernoulli(q) ‖ Bernoulli(p)).

    The two outcomes of the distributions are "this token" and "any other token".
    """
    return q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))


def kimi(c, o):
    lr = c.logp - c.old
    return -(c.logp * c.advantage - 0.5 * o.beta * lr**2)


ORACLES = {
    "reinforce": reinforce, "unclipped": unclipped, "grpo": grpo, "bnpo": grpo, "dr_grpo": grpo,
    "dapo": grpo, "luspo": grpo, "dual_clip": dual_clip, "cispo": cispo, "sapo": sapo,
    "vespo": vespo, "gmpo": gmpo, "gspo": grpo, "gspo_token": gspo_token, "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl, "kimi": kimi, "dro": kimi,
}  # fmt: skip


# ----------------------------------------------------------
# KL estimators
def k3_value(d: Tensor) -> Tensor:
    """Compute the k3 estimator of the KL divergence, e^d − d − 1.

    For d > 20, return the tangent at d = 20 instead, to avoid overflow. For small |d|, use a power
    series, to avoid cancellation.
    """
    top = torch.clamp(d, max=20.0)
    series = d**2 / 2 + d**3 / 6 + d**4 / 24 + d**5 / 120 + d**6 / 720
    exact = torch.expm1(top) - top + math.expm1(20.0) * (d - top)
    return torch.where(d.abs() < 1e-2, series, exact)


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    return value.detach() + gradient_of - gradient_of.detach()


def kl_of(d: Tensor, o: SimpleNamespace) -> Tensor:
    """Compute the selected KL estimator of the log ratio `d`, with the configured clamps.

    `kl_input_clamp` bounds `d`, and `kl_clamp` bounds the estimator's value. The gradients of the
    straight-through estimators (`k1+` and `k3+`) ignore both clamps.
    """
    most, reach = (math.inf if x is None else x for x in (o.kl_clamp, o.kl_input_clamp))

    def clamped(name: str) -> Tensor:
        return torch.clamp(KL_ORACLES[name](torch.clamp(d, -reach, reach)), -most, most)

    if o.kl_estimator.endswith("+"):
        return straight_through(clamped(o.kl_estimator[:-1]), d**2 / 2)
    return clamped(o.kl_estimator)


KL_ORACLES = {
    "k1": lambda d: -d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: d**2 / 2,
    "k3": k3_value,
    "k3+": lambda d: straight_through(k3_value(d), d**2 / 2),
    "k1+": lambda d: straight_through(-d, d**2 / 2),
}


# Maps the names of TRL's importance sampling corrections to the package's `corrections` option that
# has the same effect. The threshold is 3 in both.
WORDS: dict[str | None, list[dict[str, Any]]] = {
    None: [],
    "token_truncate": [{"kind": "truncate", "high": 3.0}],
    "token_mask": [{"kind": "mask", "high": 3.0}],
    "sequence_truncate": [{"kind": "truncate", "high": 3.0, "level": "product"}],
    "sequence_mask": [{"kind": "mask", "high": 3.0, "level": "product"}],
}


def off_policy(threshold: float) -> dict[str, Any]:
    """Return the correction that equals TRL's `off_policy_mask_threshold` (from DeepSeek-V3.2).

    The correction keeps a completion if its advantage is at least 0, or if the mean over its tokens
    of (behaviour logp − current logp) is at most `threshold`.
    """
    return {
        "kind": "reject", "low": math.exp(-threshold), "level": "geometric",
        "ratio": "current/behaviour", "advantages": "negative",
    }  # fmt: skip


def correction_ratio(c: Completion, x: dict[str, Any]) -> Tensor | None:
    """Return the importance ratio that the correction `x` compares with its bounds.

    Returns:
        The ratio of each token (n,) or of the completion (1,). None if the ratio needs sampling
        logps and the completion has none.
    """
    read = x.get("ratio", "old/sampling")
    if c.sampling is None and read != "current/behaviour":
        return None
    above = (c.old if read == "old/sampling" else c.logp).detach()
    log_ratio = above - (c.old if c.sampling is None else c.sampling).detach()
    if x.get("level") == "product":
        return torch.exp(log_ratio.sum().reshape(1))
    if x.get("level") == "geometric":
        return torch.exp(log_ratio.mean().reshape(1))
    return torch.exp(log_ratio)


def correction_weight(c: Completion, o: SimpleNamespace) -> Tensor | None:
    """Return the importance weight of the corrections.

    It comes from the first correction of kind "truncate" or "mask".

    Returns:
        The weight of each token (n,) or of the completion (1,). None if no correction has a weight.
    """
    for x in o.corrections:
        r = correction_ratio(c, x)
        if r is None or x.get("kind", "truncate") == "reject":
            continue
        low, high = x.get("low") or 0.0, x.get("high") or math.inf
        if x.get("kind") == "mask":
            return torch.where((r >= low) & (r <= high), r, 0.0)
        return torch.clamp(r, low, high)
    return None


def correction_keep(c: Completion, o: SimpleNamespace) -> Tensor:
    """Return a mask (n,) that is False at the tokens that a correction rejects."""
    keep = torch.ones(len(c.logp), dtype=torch.bool)
    for x in o.corrections:
        r = correction_ratio(c, x)
        if r is None or x.get("kind") != "reject":
            continue
        inside = (r >= (x.get("low") or 0.0)) & (r <= (x.get("high") or math.inf))
        if x.get("level") == "worst_token":
            inside = inside.all().reshape(1)
        if x.get("advantages") == "negative":
            inside = inside | (c.advantage >= 0)
        keep = keep & inside
    return keep


def completion_loss(
    c: Completion, o: SimpleNamespace, entropy_floor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of each token of one completion.

    The corrections, the entropy filter and the KL term are applied in the documented order. The
    entropy filter sets the loss of tokens with an entropy below `entropy_floor` to 0.

    Returns:
        The loss (n,), and the KL divergence (n,) or None if the loss has no KL term.
    """
    loss = ORACLES[o.loss_type](c, o)
    loss = torch.where(correction_keep(c, o), loss, 0.0)
    if entropy_floor is not None:
        loss = loss * (c.entropy.detach() >= entropy_floor)
    weight = correction_weight(c, o)
    if weight is not None and o.loss_type != "vespo":
        loss = loss * weight
    kl = None
    if o.beta != 0 and o.loss_type not in ("kimi", "dro"):
        kl = kl_of(c.ref - c.logp, o)
        if o.kl_times_ratio:
            kl = kl * ratio(c, o)  # the ratio without the bound δ; both factors have gradients
        loss = loss + o.beta * kl
    return loss, kl


def token_weights(
    lengths: list[int], o: SimpleNamespace, num_items, num_completions
) -> list[float]:
    """Return, for each completion, the factor by which the loss of each token is multiplied."""
    B = max(len(lengths), 1) if num_completions is None else float(num_completions)
    tokens = float(sum(lengths))
    if o.aggregation == "sequence_mean":
        return [1 / (B * n) if n else 0.0 for n in lengths]
    if o.aggregation == "token_mean_local":
        return [1 / max(tokens, 1.0)] * len(lengths)
    if o.aggregation == "fixed_length":
        return [1 / (B * o.max_completion_length)] * len(lengths)
    if o.aggregation == "token_mean_global":
        return [1 / (max(tokens, 1.0) if num_items is None else float(num_items))] * len(lengths)
    if o.aggregation == "sequence_sum":
        return [1 / B] * len(lengths)
    raise AssertionError(o.aggregation)


def batch_loss(
    completions: list[Completion], options: dict[str, Any], *, num_items=None, num_completions=None
) -> SimpleNamespace:
    """Compute the loss of a batch.

    Returns:
        A namespace with the differentiable `loss`, the `policy_loss` without KL and entropy terms,
        the lists `losses` and `kls` with one tensor (n,) per non-empty completion, the
        `entropy_floor` and the resolved `options`.
    """
    o = resolve(options)
    zero = torch.zeros((), dtype=torch.float64)
    floor = None
    if o.top_entropy_quantile < 1.0:
        entropies = torch.cat([zero[None][:0], *(c.entropy.detach() for c in completions)])
        floor = torch.quantile(entropies, 1.0 - o.top_entropy_quantile) if len(entropies) else zero
    weights = token_weights([len(c.logp) for c in completions], o, num_items, num_completions)
    loss, policy_loss, losses, kls = zero, zero, [], []
    for c, w in zip(completions, weights, strict=True):
        if len(c.logp) == 0:
            continue
        per_token, kl = completion_loss(c, o, floor)
        loss = loss + w * per_token.sum()
        policy = per_token if kl is None else per_token - o.beta * kl
        policy_loss = policy_loss + w * policy.sum()
        losses.append(per_token)
        kls.append(kl)
    if o.entropy_coef != 0:
        loss = loss - o.entropy_coef * entropy_bonus(completions, floor, num_items)
    return SimpleNamespace(
        loss=loss, policy_loss=policy_loss, losses=losses, kls=kls, entropy_floor=floor, options=o
    )


def entropy_bonus(completions: list[Completion], floor: Tensor | None, num_items) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for c in completions:
        kept = c.entropy if floor is None else c.entropy[c.entropy.detach() >= floor]
        total = total + kept.sum()
        count += len(kept)
    return total / (max(count, 1) if num_items is None else float(num_items))


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
