"""Which view an engine has: those with one field changed, then with two, from the best few on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo_fast.doctor.prompts import AS_SENT, LEFT, RIGHT, UNPADDED, padded
from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.rows import Truncation
from grpo_fast.doctor.view import BF16, FITTED, KEPT, OWN, PREVIOUS, View
from grpo_fast.rollout import Sampling

# Nats per token on average within which two good forward passes lie, by the dtype they run in.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MOST, WIDTH = 3, 6  # causes at once; views that are followed further
REAL = 0.5  # what is named leaves at most this share of the difference
ALIKE = 2.0  # of views as good as the best up to this factor the first is taken

Option = tuple[str, Any]  # a field of a view, and what it may be


def noise_of(policy: Any) -> float:
    """NOISE of the dtype that a policy computes in."""
    dtype = policy.autocast or policy.head.weight.dtype
    return NOISE.get(dtype, NOISE[torch.bfloat16])


def options(recomputed: Recomputed, base: View, sampling: Sampling) -> list[Option]:
    """What may be different, the likeliest first; nothing that changes no number."""
    policy = recomputed.policy
    shipped = policy.lm.generation_config
    temperatures = [1.0, sampling.temperature, getattr(shipped, "temperature", None) or 1.0]
    truncations = [
        Truncation(sampling.top_k, sampling.top_p),
        Truncation(getattr(shipped, "top_k", None) or 0, getattr(shipped, "top_p", None) or 1.0),
    ]
    found: list[Option] = [("temperature", t) for t in (*dict.fromkeys(temperatures), FITTED)]
    found += [("truncation", None)]
    found += [("truncation", KEPT)] if recomputed.kept is not None else []
    found += [("truncation", t) for t in dict.fromkeys(truncations) if t.is_on]
    found += [("reading", name) for name in recomputed.readings]
    found += [("padding", side) for side in (LEFT, RIGHT)]
    found += [("model", PREVIOUS)] if PREVIOUS in recomputed.policies else []
    found += [("head", dtype) for dtype in (torch.bfloat16, torch.float16)]
    found += [("model", BF16)] if noise_of(policy) < NOISE[torch.float16] else []
    found += [("forward", OWN)]
    return [(field, value) for field, value in found if value != getattr(base, field)]


def explain(recomputed: Recomputed, base: View, choices: Sequence[Option], noise: float) -> View:
    """The view with the fewest changes that leaves no more than noise.

    Where there is none, the one in which every change takes away its share (REAL); else `base`.
    """
    beam, best, most = [base], base, recomputed.difference(base)
    for _ in range(MOST):
        grown = dict.fromkeys(x for view in beam for x in _extended(view, base, choices))
        ranked = sorted((v for v in grown if fits(recomputed, v)), key=recomputed.difference)
        good = [v for v in ranked if recomputed.difference(v) <= min(limit(v, noise), REAL * most)]
        if good:
            enough = max(ALIKE * recomputed.difference(good[0]), noise / 10)
            alike = [v for v in good if recomputed.difference(v) <= enough]
            return recomputed.fitted(min(alike, key=lambda v: _order(v, choices)))
        if ranked and recomputed.difference(ranked[0]) <= REAL * recomputed.difference(best):
            best = ranked[0]
        beam = ranked[:WIDTH]
    return recomputed.fitted(best)


def limit(view: View, noise: float) -> float:
    """Nats per token that are noise under a view."""
    return max(noise, NOISE[torch.bfloat16]) if view.model == BF16 else noise


def fits(recomputed: Recomputed, view: View) -> bool:
    """Whether a view's prompts leave the model room for the completions, and padding pads."""
    plain = recomputed.readings[view.reading]
    ids = padded(plain, view.padding, 0)
    if view.padding != UNPADDED and ids == plain:
        return False
    longest = max(map(len, recomputed.rollout.completion_ids))
    is_longer = view.reading != AS_SENT or view.padding != UNPADDED
    return not is_longer or max(map(len, ids)) + longest - 1 <= recomputed.policy.positions


def shares(recomputed: Recomputed, base: View, found: View) -> Iterator[tuple[str, float, float]]:
    """(field, difference before, difference after) of each change, what helps most first."""
    view = base
    while changes := view.differences(found):
        before = recomputed.difference(view)
        field = min(changes, key=lambda name: recomputed.difference(changes[name]))  # noqa: B023
        view = changes[field]
        yield field, before, recomputed.difference(view)


def _extended(view: View, base: View, choices: Sequence[Option]) -> Iterator[View]:
    for field, value in choices:
        if getattr(view, field) == getattr(base, field):
            yield view._replace(**{field: value})


def _order(view: View, choices: Sequence[Option]) -> int:
    """How far down in `choices` the changes of a view stand."""
    return sum(i for i, (field, value) in enumerate(choices) if getattr(view, field) == value)
