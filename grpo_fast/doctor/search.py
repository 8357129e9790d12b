"""Which view an engine has: the trainer's with one field changed after another, to a value that is
known to happen or to a number that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from grpo_fast.doctor.causes import HEAD, MODEL, QUANTIZED
from grpo_fast.doctor.prompts import AS_SENT, REORDERED
from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.view import EMBEDDING, KEPT, Edit, Truncation, View
from grpo_fast.rollout import Sampling

# Nats per token on average within which two good forward passes lie, by the dtype they run in.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ONE, TWO = 0.1, 0.05  # of the difference that a cause, or several, may leave unexplained
RIVAL = 3.0  # times as much as the best has to be left by the best of another name
ALIKE = 2.0  # times as much as the best that a known number may leave to be taken before it
SIMILAR, APART = 0.5, 0.1  # correlation of a rounded model's difference; ahead of the next one's
ROUNDED = {MODEL, QUANTIZED, HEAD}
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


def noise_of(policy: Any) -> float:
    """NOISE of the dtype that a policy computes in."""
    return NOISE.get(policy.autocast or policy.head.weight.dtype, NOISE[torch.bfloat16])


class Search:
    """Looks for the view that explains an engine's log-probabilities.

    own: nats per token by which the trainer differs from itself; what leaves less is as good.
    noise: nats per token that need no second cause.
    """

    def __init__(
        self, recomputed: Recomputed, base: View, sampling: Sampling, own: float, noise: float
    ) -> None:
        self.recomputed, self.base, self.sampling = recomputed, base, sampling
        self.own, self.noise = own, noise
        self.left = recomputed.difference
        self._order: list[View] = []  # as they were found: known values before fitted ones

    @torch.no_grad()
    def explain(self) -> View:
        """The engine's view; the trainer's own where no causes explain most of the difference.

        One field changes at a time, the one that leaves least. Where it is not the whole cause, the
        next is looked for behind it as long as each at least halves the difference.
        """
        view = sure = self.base
        gap = self.left(self.base)
        limit = ONE * gap
        while True:
            views = self.neighbours(view)
            last = self.winner(views, limit) or self.rounded(view, views)
            if last is not None:
                view = sure = last
                if self.left(view) <= self.noise or self.names(view) & ROUNDED:
                    return sure
            elif views and 2 * self.left(views[0]) <= self.left(view):
                view = views[0]
            else:
                return sure
            limit = TWO * gap if sure == self.base else self.noise

    def winner(self, views: Sequence[View], limit: float) -> View | None:
        """The first of these sorted views, where it leaves no more than that and no other does."""
        gap = self.left(self.base)
        if not views or self.left(views[0]) > min(max(limit, 1.5 * self.own), gap / 2):
            return None
        best, logps = views[0], self.recomputed.logps(views[0])
        alike = max(ALIKE * self.left(best), self.own)
        enough = min(RIVAL * max(self.left(best), self.own), gap / 2)
        others = (x for x in views if self.left(x) <= enough and self.names(x) != self.names(best))
        if any((self.recomputed.logps(x) - logps).abs().nanmean() > 1e-5 for x in others):
            return None
        known = [x for x in views if self.left(x) <= alike and self.names(x) == self.names(best)]
        return min(known, key=self._order.index)  # a number that is known before one that is fitted

    def rounded(self, view: View, views: Sequence[View]) -> View | None:
        """The model in another precision whose differences are those of the engine.

        Two kernels round otherwise, so it leaves about as much as it explains: it is told by
        the correlation, and where the engine's differences have its size.
        """
        plain = self.recomputed.logps(view)
        gap = self.recomputed.engine_logps - plain
        ranked = []
        for other in views:
            names = self.names(other) - self.names(view)
            if names and names <= ROUNDED:
                change = self.recomputed.logps(other) - plain
                alike = float(torch.cosine_similarity(gap, change, 0).nan_to_num())
                ranked.append((alike, float(change.norm() / gap.norm()), other))
        ranked.sort(key=lambda x: -x[0])
        if not ranked or ranked[0][0] < SIMILAR or not 0.5 <= ranked[0][1] <= 2:
            return None
        best = self.names(ranked[0][2])
        others = [alike for alike, _, other in ranked if self.names(other) != best]
        return None if others and others[0] > ranked[0][0] - APART else ranked[0][2]

    def names(self, view: View) -> set[str]:
        """The causes that a view stands for."""
        return {self.recomputed.cause_of(view, x) for x in self.base.differences(view)}

    def neighbours(self, view: View) -> list[View]:
        """The views with one more field changed, what leaves least first."""
        changed = dict.fromkeys(x for x in self._changed(view) if x != view)
        possible = [x for x in changed if self._is_possible(x)]
        self._order += possible
        return sorted(possible, key=self.left)

    def _changed(self, view: View) -> Iterator[View]:
        """Views that may be the engine's: what is known to happen, and numbers that fit."""
        recomputed, asked = self.recomputed, self.sampling
        shipped = recomputed.policy.lm.generation_config
        off = Truncation()._asdict()
        cut = Truncation(*(getattr(shipped, name, None) or off[name] for name in off))
        warmth = getattr(shipped, "temperature", None) or 1.0
        known: dict[str, list[Any]] = {
            "temperature": [1.0, asked.temperature, warmth],
            "truncation": [None, KEPT, Truncation(asked.top_k, asked.top_p), cut],
            "edit": [(Edit.SOFTCAP, None)],
            "shift": [1, -1],
            "head": [torch.bfloat16, torch.float16, EMBEDDING],
            "reading": [*recomputed.readings, REORDERED],
            "model": list(recomputed.models),
        }
        fixed = self.base.differences(view)
        # Two changes of the hidden states would cost a forward pass for every pair.
        fixed |= {"reading", "model"} if fixed & {"reading", "model"} else set()
        for field in known.keys() - fixed:
            yield from (view._replace(**{field: x}) for x in known[field])
        if not fixed & {"temperature", "truncation"}:  # raw ones, and defaults, change both at once
            yield view._replace(temperature=1.0, truncation=None)
            yield view._replace(temperature=warmth, truncation=cut)
        if view.shift == 0 and view.reading != REORDERED:  # the logits of each token are known
            yield from fits(recomputed, view, known.keys() - fixed)

    def _is_possible(self, view: View) -> bool:
        """Whether a view is another than the trainer's, and the model can compute it."""
        recomputed = self.recomputed
        if view == self.base or view.truncation == Truncation():
            return False
        if view.truncation == KEPT and recomputed.drawn.kept is None:
            return False
        longest = max(map(len, recomputed.readings.get(view.reading, [[]])))
        room = recomputed.policy.positions
        if view.reading != AS_SENT and longest + max(recomputed.rollout.lengths) - 1 > room:
            return False
        try:
            recomputed.logps(view)
        except Exception:  # transformers raises anything for a configuration that it does not know
            return False
        return True


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
