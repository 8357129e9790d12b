"""Numbers that an engine was told, from the log-probabilities that it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.view import Edit, Truncation, View

FINEST = 1e-4  # relative step of a number that is fitted
WORTH = 0.5  # of the difference at most, after two looks, for a number to be fitted further
POINTS = 17  # numbers that are tried at a time
TEMPERATURES = 0.25, 4.0  # times the trainer's
LENGTHS = 64  # min_tokens up to this are told apart
RANGES: tuple[tuple[str, Callable[[float], Any], float, float], ...] = (
    ("edit", lambda x: (Edit.REPETITION, x), 0.5, 2.0),
    ("edit", lambda x: (Edit.PRESENCE, x), 0.01, 4.0),
    ("edit", lambda x: (Edit.FREQUENCY, x), 0.01, 4.0),
    ("edit", lambda x: (Edit.SOFTCAP, x), 0.5, 200.0),
    ("truncation", lambda x: Truncation(top_k=int(x)), 0.9, 1e5),
    ("truncation", lambda x: Truncation(top_p=1 - x), 1e-4, 0.98),
    ("truncation", lambda x: Truncation(min_p=x), 1e-4, 0.95),
)  # a field of the view, its value of a number, and where the number lies


def fits(recomputed: Recomputed, view: View, fields: Collection[str]) -> Iterator[View]:
    """The views whose number, in one of these fields, fits what the engine says best."""
    if "edit" in fields:
        longest = min(max(recomputed.rollout.lengths), LENGTHS)
        banned = [view._replace(edit=(Edit.NO_EOS, n)) for n in range(1, longest + 1)]
        recomputed.compute(banned)
        yield min(banned, key=recomputed.difference)
        yield biased(recomputed, view)
    low, high = (x * view.temperature for x in TEMPERATURES)
    most = WORTH * recomputed.difference(view)
    for field, made, start, end in (("temperature", float, low, high), *RANGES):
        if field in fields:  # the trainer's temperature lies inside: 0.701 begins as no gain
            worth = math.inf if field == "temperature" else most
            best = fitted(recomputed, view, field, made, start, end, worth)
            if best is not None:
                yield best


def fitted(
    recomputed: Recomputed, view: View, field: str, made: Callable[[float], Any],
    low: float, high: float, most: float = math.inf,
) -> View | None:  # fmt: skip
    """The view with the number that fits best; None at an end of the range, which is no finding,
    and where it leaves more than `most` after the second look.
    """

    def view_of(number: float) -> View:
        return view._replace(**{field: made(number)})

    ends, looks = (low, high), 0
    while high / low > 1 + FINEST:
        values = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
        views = [view_of(x) for x in values]
        recomputed.compute(views)
        best = min(range(POINTS), key=lambda i: recomputed.difference(views[i]))
        looks += 1
        if looks == 2 and recomputed.difference(views[best]) > most:
            return None
        low, high = values[max(best - 1, 0)], values[min(best + 1, POINTS - 1)]
    # People write 0.9, not 0.90004: the roundest number that fits as well.
    near = [*(float(f"{values[best]:.{n}g}") for n in (1, 2, 3)), values[best]]
    left = [recomputed.difference(view_of(x)) for x in near]
    value = next(x for x, gap in zip(near, left, strict=True) if gap <= 2 * min(left))
    return view_of(value) if ends[0] * (1 + FINEST) < value < ends[1] / (1 + FINEST) else None


def biased(recomputed: Recomputed, view: View) -> View:
    """The view with one token's logit raised or lowered, by the mass that it takes from others.

    Where a token of probability p has its odds multiplied by 1 + c, others lose log(1 + c·p).
    """
    grown = (recomputed.logps(view) - recomputed.engine_logps).double().expm1()  # c·p
    product = square = total = torch.zeros(1, dtype=torch.float64)
    for rows in recomputed.rows(view):
        targets = rows.targets.cpu()
        p = rows.scaled(view).double().softmax(-1).cpu().scatter_(-1, targets, 0)
        y = grown[rows.first : rows.first + len(p), None].expand(p.shape).clone()
        y.scatter_(-1, targets, 0)  # the biased token's own rows say something else
        product, square = product + (p * y).sum(0), square + p.square().sum(0)
        total = total + y.square().sum(0)
    c = product / square.clamp(min=1e-30)
    token = int(((total - c * product) / total.clamp(min=1e-30)).argmin())
    value = view.temperature * float(c[token].clamp(min=-1 + 1e-9).log1p())
    return view._replace(edit=(Edit.BIAS, (token, round(value, 4))))
