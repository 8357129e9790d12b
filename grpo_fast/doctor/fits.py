"""What an engine was told, from the log-probabilities that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.rows import BIAS, NO_EOS
from grpo_fast.doctor.view import Truncation, View

FINEST = 1e-4  # relative step of a number that is fitted
SLACK = 2e-5  # nats within which a kept mass is one of a row's


def fitted(
    recomputed: Recomputed, view_of: Callable[[float], View], grid: Sequence[float]
) -> View | None:
    """The view with the number that fits best; None at the grid's edge, which is no finding."""
    values, is_first = list(grid), True
    while True:
        views = [view_of(x) for x in values]
        recomputed.compute(views)
        best = min(range(len(views)), key=lambda i: recomputed.difference(views[i]))
        if is_first and best in (0, len(values) - 1):
            return None
        low, high = values[max(best - 1, 0)], values[min(best + 1, len(values) - 1)]
        if high / low < 1 + FINEST:
            break
        values, is_first = spread(low, high, len(grid)), False
    # People write 0.9, not 0.90004.
    near = [views[best], *(view_of(float(f"{values[best]:.{n}g}")) for n in (1, 2, 3))]
    return min(near, key=recomputed.difference)


def spread(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from low to high with equal ratios."""
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def truncations(recomputed: Recomputed, view: View) -> list[View]:
    """top_k, top_p and min_p that fit most tokens, from the mass that each token's row lost."""
    plain = view._replace(truncation=None)
    lost = recomputed.logps(plain) - recomputed.engine_logps  # log of the kept mass
    bounds = []
    start = 0
    for rows in recomputed.rows(plain):
        p = rows.scaled(plain).softmax(-1).sort(-1, descending=True).values
        mass = p.cumsum(-1)
        wanted = lost[start : start + len(p), None].to(p.device)
        start += len(p)
        fits = (mass.log() - wanted).abs() <= SLACK
        found = fits.any(-1)
        first = fits.int().argmax(-1)[found, None]
        last = first + fits[found].sum(-1, keepdim=True) - 1
        p, mass = p[found], mass[found]
        before, after = first - 1, (last + 1).clamp(max=p.shape[-1] - 1)
        none = torch.zeros_like(first, dtype=p.dtype)
        bounds.append(torch.cat([
            first.float(), last + 1.0,
            torch.where(first > 0, mass.gather(-1, before.clamp(min=0)), none),
            mass.gather(-1, last),
            torch.where(after > last, p.gather(-1, after) / p[:, :1], none),
            p.gather(-1, first) / p[:, :1],
        ], -1).cpu())  # fmt: skip
    low, high = torch.cat(bounds).double().view(-1, 3, 2).unbind(-1)
    if not len(low):
        return []
    top_k, top_p, min_p = (covered(low[:, i], high[:, i]) for i in range(3))
    cuts = (Truncation(top_k=int(top_k + 0.5)), Truncation(top_p=top_p), Truncation(min_p=min_p))
    return [view._replace(truncation=cut) for cut in cuts if cut.is_on]


def covered(low: Tensor, high: Tensor) -> float:  # (N,) each
    """The middle of where most of the intervals (low, high] meet."""
    inside = (low[:, None] < high) & (high <= high[:, None])  # interval, point
    most = int(inside.sum(0).argmax())
    return float(low[inside[:, most]].max() + high[inside[:, most]].min()) / 2


def biased(recomputed: Recomputed, view: View) -> View | None:
    """The view with one token's logit raised or lowered, by what it takes from all others.

    A token with probability p whose odds grow by the factor 1 + c takes log(1 + c·p) from others.
    """
    grown = (recomputed.logps(view) - recomputed.engine_logps).double().expm1()  # c·p
    sums = torch.zeros(3, 1, dtype=torch.float64)
    start = 0
    for rows in recomputed.rows(view):
        p = rows.scaled(view).double().softmax(-1).cpu()
        p.scatter_(-1, rows.targets.cpu(), 0)  # the biased token's own rows say something else
        y = grown[start : start + len(p), None]
        start += len(p)
        own = torch.zeros_like(p).scatter_(-1, rows.targets.cpu(), y.square())
        sums = sums + torch.stack([(p * y).sum(0), p.square().sum(0), (y.square() - own).sum(0)])
    product, square, total = sums
    c = product / square.clamp(min=1e-30)
    share = (total - c * product) / total.clamp(min=1e-30)  # of the gap that is left
    token = int(share.argmin())
    value = view.temperature * float(torch.log1p(c[token].clamp(min=-1 + 1e-9)))
    return view._replace(edit=(BIAS, (token, round(value, 4))))


def min_tokens(recomputed: Recomputed, view: View) -> View:
    """The view in which no completion could end within its first tokens."""
    places = recomputed.drawn.place.cpu()
    longest = int(places.max()) + 1
    banned = view._replace(edit=(NO_EOS, longest))
    with_, without = (
        torch.zeros(longest, dtype=torch.float64).index_add_(
            0, places, (recomputed.engine_logps - recomputed.logps(v)).abs().double().nan_to_num(99.0, 99.0)
        )
        for v in (banned, view)
    )
    zero = torch.zeros(1, dtype=torch.float64)
    totals = torch.cat([zero, with_.cumsum(0)]) + torch.cat([without.flip(0).cumsum(0).flip(0), zero])
    return view._replace(edit=(NO_EOS, int(totals.argmin())))
