"""Search for the view that an engine has: the trainer's, with one field changed after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from grpo_fast.doctor import causes
from grpo_fast.doctor.prompts import AS_SENT, LEFT, REORDERED, RIGHT, TEMPLATES
from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.view import EMBEDDING, KEPT, Edit, Truncation, View
from grpo_fast.rollout import Sampling

# Nats per token on average within which two good forward passes lie, by the dtype they run in.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ONE, TWO = 0.1, 0.05  # of the difference that a cause, or several, may leave unexplained
RIVAL = 3.0  # times as much as the best has to be left by the best of another name
ALIKE = 2.0  # times as much as the best that a known number may leave to be taken before it
SIMILAR, APART = 0.5, 0.1  # correlation of a rounded model's difference; ahead of the next one's
ROUNDED = {causes.MODEL, causes.QUANTIZED, causes.HEAD}
FINEST = 1e-4  # relative step of a number that is fitted
WORTH = 0.5  # of the difference at most, after two looks, for a number to be fitted further
POINTS = 17  # numbers that are tried at a time
TEMPERATURES = 0.25, 4.0  # times the trainer's
LENGTHS = 64  # min_tokens up to this are told apart
READINGS = {  # the cause of a reading; others are the tokens'
    LEFT: causes.PADDING, RIGHT: causes.PADDING, REORDERED: causes.ORDER,
    **dict.fromkeys(TEMPLATES, causes.TEMPLATE),
}  # fmt: skip
RANGES: tuple[tuple[str, str, Callable[[float], Any], float, float], ...] = (
    (causes.PENALTY, "edit", lambda x: (Edit.REPETITION, x), 0.5, 2.0),
    (causes.PENALTY, "edit", lambda x: (Edit.PRESENCE, x), 0.01, 4.0),
    (causes.PENALTY, "edit", lambda x: (Edit.FREQUENCY, x), 0.01, 4.0),
    (causes.CAP, "edit", lambda x: (Edit.SOFTCAP, x), 0.5, 200.0),
    (causes.TRUNCATION, "truncation", lambda x: Truncation(top_k=int(x)), 0.9, 1e5),
    (causes.TRUNCATION, "truncation", lambda x: Truncation(top_p=1 - x), 1e-4, 0.98),
    (causes.TRUNCATION, "truncation", lambda x: Truncation(min_p=x), 1e-4, 0.95),
)  # a cause, its field of the view, the field's value of a number, and where the number lies


def noise_of(policy: Any) -> float:
    return NOISE.get(policy.autocast or policy.head.weight.dtype, NOISE[torch.bfloat16])


class Change(NamedTuple):
    """A cause, as fields of a view that have other values than in the view before."""

    cause: str
    fields: dict[str, Any]
    view: View  # with these fields
    is_fitted: bool = False


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

    @torch.no_grad()
    def explain(self) -> list[Change]:
        """The changes from the trainer's view to the engine's; none where they explain too little.

        The change that leaves least comes first; others follow while each halves the difference.
        """
        path: list[Change] = []
        sure, view, gap = 0, self.base, self.left(self.base)
        while self.left(view) > self.noise and not any(x.cause in ROUNDED for x in path[:sure]):
            changes = self.neighbours(view, {name for x in path for name in x.fields})
            limit = self.noise if sure else (TWO if path else ONE) * gap
            last = self.winner(changes, limit) or self.rounded(view, changes)
            if last is not None:
                sure = len(path) + 1
            elif changes and 2 * self.left(changes[0].view) <= self.left(view):
                last = changes[0]
            else:
                break
            path.append(last)
            view = last.view
        return path[:sure]

    def winner(self, changes: Sequence[Change], limit: float) -> Change | None:
        """The first of these sorted changes if it leaves at most `limit` and has no rival."""
        gap, left = self.left(self.base), [self.left(x.view) for x in changes]
        if not left or left[0] > min(max(limit, 1.5 * self.own), gap / 2):
            return None
        best, logps = changes[0], self.recomputed.logps(changes[0].view)
        enough = min(RIVAL * max(left[0], self.own), gap / 2)
        for other, remaining in zip(changes, left, strict=True):
            # Two causes that give the same numbers are one by two names, not rivals.
            if remaining <= enough and other.cause != best.cause:
                if (self.recomputed.logps(other.view) - logps).abs().nanmean() > 1e-5:
                    return None
        alike = max(ALIKE * left[0], self.own)
        same = (x for x, n in zip(changes, left, strict=True) if n <= alike and not x.is_fitted)
        return next((x for x in same if x.cause == best.cause), best)

    def rounded(self, view: View, changes: Sequence[Change]) -> Change | None:
        """The model in another precision whose differences correlate with the engine's."""
        plain = self.recomputed.logps(view)
        gap = self.recomputed.engine_logps - plain
        ranked = []
        for change in changes:
            if change.cause in ROUNDED:
                moved = self.recomputed.logps(change.view) - plain
                alike = float(torch.cosine_similarity(gap, moved, 0).nan_to_num())
                ranked.append((alike, float(moved.norm() / gap.norm()), change))
        ranked.sort(key=lambda x: -x[0])
        if not ranked or ranked[0][0] < SIMILAR or not 0.5 <= ranked[0][1] <= 2:
            return None
        alike, _, best = ranked[0]
        is_apart = all(x <= alike - APART for x, _, change in ranked if change.cause != best.cause)
        return best if is_apart else None

    def neighbours(self, view: View, changed: Collection[str]) -> list[Change]:
        """The changes of fields that are not `changed` yet, the one that leaves least first."""
        fixed = {*changed}
        # Two changes of the hidden states would cost a forward pass for every pair.
        fixed |= {"reading", "model"} if fixed & {"reading", "model"} else set()
        changes: dict[View, Change] = {}  # the first of those that give one view
        for cause, fields in self.known():
            if not fixed & fields.keys():
                change = Change(cause, fields, view._replace(**fields))
                changes.setdefault(change.view, change)
        if view.shift == 0 and view.reading != REORDERED:  # the logits of each token are known
            for change in fits(self.recomputed, view, {*View._fields} - fixed):
                changes.setdefault(change.view, change)
        possible = [x for x in changes.values() if x.view != view and self._is_possible(x.view)]
        return sorted(possible, key=lambda x: self.left(x.view))

    def known(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Causes that are known to happen, and the fields of a view that has them."""
        recomputed, asked = self.recomputed, self.sampling
        shipped = recomputed.policy.lm.generation_config
        off = Truncation()._asdict()
        cut = Truncation(*(getattr(shipped, name, None) or off[name] for name in off))
        own_temperature = getattr(shipped, "temperature", None) or 1.0
        for temperature in (1.0, asked.temperature, own_temperature):
            yield causes.TEMPERATURE, {"temperature": temperature}
        for truncation in (KEPT, Truncation(asked.top_k, asked.top_p), cut):
            yield causes.TRUNCATION, {"truncation": truncation}
        yield causes.DEFAULTS, {"temperature": own_temperature, "truncation": cut}
        yield causes.RAW, {"truncation": None}
        yield causes.RAW, {"temperature": 1.0, "truncation": None}
        yield causes.CAP, {"edit": (Edit.SOFTCAP, None)}
        for shift in (1, -1):
            yield causes.SHIFTED, {"shift": shift}
        for dtype in (torch.bfloat16, torch.float16):
            yield causes.HEAD, {"head": dtype}
        yield causes.TIED, {"head": EMBEDDING}
        for reading in (*recomputed.readings, REORDERED):
            yield READINGS.get(reading, causes.TOKENS), {"reading": reading}
        for name, variant in recomputed.models.items():
            yield variant.cause, {"model": name}

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


def fits(recomputed: Recomputed, view: View, fields: Collection[str]) -> Iterator[Change]:
    """For each field the change whose number fits the engine's log-probabilities best."""

    def fit(cause: str, field: str, best: View) -> Change:
        return Change(cause, {field: getattr(best, field)}, best, is_fitted=True)

    if "edit" in fields:
        longest = min(max(recomputed.rollout.lengths), LENGTHS)
        banned = [view._replace(edit=(Edit.NO_EOS, n)) for n in range(1, longest + 1)]
        recomputed.compute(banned)
        yield fit(causes.ENDS, "edit", min(banned, key=recomputed.difference))
        yield fit(causes.LOGIT_BIAS, "edit", biased(recomputed, view))
    if "temperature" in fields:  # the trainer's own lies inside: 0.701 begins as no gain
        low, high = (x * view.temperature for x in TEMPERATURES)
        best = fitted(recomputed, view, "temperature", float, low, high)
        if best is not None:
            yield fit(causes.TEMPERATURE, "temperature", best)
    most = WORTH * recomputed.difference(view)
    for cause, field, made, start, end in RANGES:
        best = fitted(recomputed, view, field, made, start, end, most) if field in fields else None
        if best is not None:
            yield fit(cause, field, best)


def fitted(
    recomputed: Recomputed, view: View, field: str, made: Callable[[float], Any],
    low: float, high: float, most: float = math.inf,
) -> View | None:  # fmt: skip
    """The view with the number that fits best.

    None where that is an end of the range, or where two looks leave more than `most`.
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
