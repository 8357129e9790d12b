"""What the kernels must give, in fp64, written from the papers' formulas: no code of the package is
used here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def final(
    raw: Tensor, scale: float = 1.0, softcap: float | None = None, temperature: float | Tensor = 1.0
):
    """z and dz/draw, fp64 (C, V)."""
    z, slope = raw.double() * scale, torch.full_like(raw, scale, dtype=torch.float64)
    if softcap is not None:
        t = torch.tanh(z / softcap)
        z, slope = softcap * t, slope * (1 - t * t)
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[:, None]
    return z / temperature, slope / temperature


def statistics(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lse, lp, entropy of fp64 logits."""
    lse = torch.logsumexp(z, -1)
    logp = z - lse[:, None]
    entropy = -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1)
    return lse, logp.gather(-1, target[:, None])[:, 0], entropy


def gradient(
    z: Tensor, slope: Tensor, target: Tensor, g: Tensor, g_entropy: Tensor | None = None
) -> Tensor:
    """d (Σ g·lp + g_entropy·H) / d raw."""
    logp = torch.log_softmax(z, -1)
    p = logp.exp()
    d = g.double()[:, None] * (torch.nn.functional.one_hot(target, z.shape[1]) - p)
    if g_entropy is not None:
        _, _, entropy = statistics(z, target)
        d = d - torch.where(p > 0, g_entropy.double()[:, None] * p * (logp + entropy[:, None]), 0.0)
    return d * slope


def _ppo(lp, lr, a, c):
    r = lr.exp()
    bounded = r if c.delta is None else r.clamp(max=c.delta)
    return -torch.minimum(bounded * a, r.clamp(1 - c.epsilon_low, 1 + c.epsilon_high) * a)


def _dual_clip(lp, lr, a, c):
    r = lr.exp()
    loss = -torch.minimum(r * a, r.clamp(1 - c.epsilon_low, 1 + c.epsilon_high) * a)
    return torch.where(a < 0, torch.minimum(loss, -a * c.dual_clip_c), loss)


def _cispo(lp, lr, a, c):
    low, high = (
        (1 - c.epsilon_low, 1 + c.epsilon_high)
        if c.cispo_bound == "offset"
        else (0.0, c.epsilon_high)
    )
    return -lr.exp().clamp(low, high).detach() * a * lp


def _sapo(lp, lr, a, c):
    tau = torch.where(a > 0, c.sapo_temperature_pos, c.sapo_temperature_neg)
    return -a * torch.sigmoid(tau * (lr.exp() - 1)) * 4 / tau


def _dppo_tv(lp, lr, a, c):
    moved = lp.exp() - (lp - lr).exp()
    keep = torch.where(a > 0, moved <= c.epsilon_high, moved >= -c.epsilon_low)
    return -a * (lr.exp().clamp(max=20) * keep).detach() * lp


def _dppo_kl(lp, lr, a, c):
    p, q = lp.exp(), (lp - lr).exp()
    distance = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    leaves = torch.where(
        a > 0, (distance > c.epsilon_high) & (p > q), (distance > c.epsilon_low) & (p < q)
    )
    return -a * (lr.exp().clamp(max=20) * ~leaves).detach() * lp


LOSSES = {
    "reinforce": lambda lp, lr, a, c: -a * lp,
    "unclipped": lambda lp, lr, a, c: -lr.exp() * a,
    **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), _ppo),
    "dual_clip": _dual_clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    **dict.fromkeys(("kimi", "dro"), lambda lp, lr, a, c: -(lp * a - 0.5 * c.beta * lr**2)),
}


def _straight_through(value: Tensor, carrier: Tensor) -> Tensor:
    return carrier + (value - carrier).detach()


KLS = {
    "k1": lambda d: -d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: d.exp() - d - 1,
}


def loss_and_slope(
    lp, old, ref, advantages, policy_weights, kl_weights, config
) -> tuple[Tensor, Tensor]:
    """policy_weights·ℓ + kl_weights·KL of every row in fp64, and its d/d lp by differentiating the
    formulas above.
    """
    lp = lp.detach().double().requires_grad_()
    lr = lp - (lp.detach() if old is None else old.double())
    losses = policy_weights.double() * LOSSES[config.loss_type](lp, lr, advantages.double(), config)
    if kl_weights is not None:
        most, reach = config.kl_limits
        d, name = ref.double() - lp, config.kl_estimator
        kl = KLS[name.rstrip("+")](d.clamp(-reach, reach)).clamp(-most, most)
        kl = _straight_through(kl, d**2 / 2) if name.endswith("+") else kl
        losses = losses + kl_weights.double() * kl * (lr.exp() if config.kl_times_ratio else 1)
    return losses.detach(), torch.autograd.grad(losses.sum(), lp)[0]
