"""Which view an engine has: the trainer's with one field changed after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo_fast.doctor.causes import HEAD, MODEL, QUANTIZED
from grpo_fast.doctor.fits import fits
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
        for other in views[1:]:
            if self.left(other) > enough:
                break
            is_same = (self.recomputed.logps(other) - logps).abs().nanmean() <= 1e-5
            if not is_same and self.names(other) != self.names(best):
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
