"""Where the difference between an engine's log-probabilities and the trainer's comes from.

The engine's are recomputed under views other than the trainer's until one brings the difference
down to the noise of the kernels: what is different in that view is what the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from grpo_fast.data import Prompt
from grpo_fast.doctor import causes
from grpo_fast.doctor.causes import Cause, Found
from grpo_fast.doctor.prompts import readings
from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.search import explain, limit, noise_of, options, shares
from grpo_fast.doctor.view import KEPT, OWN, View
from grpo_fast.rollout import Engine, Rollout, Sampling, awake, generate
from grpo_fast.rollout.engine import Seed
from grpo_fast.train.models.policy import Policy


class Diagnosis(NamedTuple):
    """What was found. All differences are nats per token, engine against trainer."""

    tokens: int
    mean: float  # of the absolute difference
    largest: float
    own: float  # the mean between the trainer's forward pass and the model's own
    noise: float  # a mean up to which it is the kernels'
    threshold: float  # a mean up to which it is taken for good
    causes: list[Cause]
    left: float  # the mean without the causes
    rest: str  # what that is
    stale: int  # completions with another version of the weights than the engine was given

    @property
    def ok(self) -> bool:
        return self.mean <= self.threshold and not self.stale


def diagnose(
    policy: Policy,
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    group_size: int = 2,
    seed: Seed = 0,
    version: int = 1,
    temperature: float | None = None,
    uses_kept: bool = False,
    previous: Policy | None = None,
    threshold: float | None = None,
) -> Diagnosis:
    """Let an engine sample, recompute what it says, and explain the difference.

    Args:
        policy: the trainer's; the engine is given its weights as this `version`.
        prompts: texts or chat messages.
        temperature: the loss's; None: the sampling's.
        uses_kept: the loss is over the tokens that the engine names, where it names them.
        previous: weights that the engine may still have.
        threshold: nats per token; None: the noise of the policy's dtype.

    Raises:
        ValueError: prompts that the tokenizer or the model does not take; greedy sampling.
        RuntimeError: completions that are none.
    """
    if sampling.temperature == 0:
        raise ValueError("temperature: expected a number above 0, came 0 (greedy)")
    with awake(engine, policy, version):
        rollout = generate(
            policy, prompts, sampling, group_size=group_size, seed=seed, engine=engine
        )
    check(rollout)
    sent = rollout.prompt_ids[::group_size]
    known = readings(policy.tokenizer, prompts, sent)
    recomputed = Recomputed(policy, rollout, known, previous=previous)
    base = View(
        sampling.temperature if temperature is None else temperature,
        KEPT if uses_kept and recomputed.kept is not None else None,
    )
    noise, view = noise_of(policy), base
    if recomputed.difference(base) > noise:
        view = explain(recomputed, base, options(recomputed, base, sampling), noise)
    return _told(Found(recomputed, base, view, sampling), noise, threshold, version)


def check(rollout: Rollout) -> None:
    """Raise a RuntimeError unless every completion has tokens and a finite logp for each."""
    for ids, logps in zip(rollout.completion_ids, rollout.sampling_logps, strict=True):
        if not ids or logps.shape != (len(ids),) or not bool(logps.isfinite().all()):
            came = f"{len(ids)} and {logps.flatten()[:4].tolist()} …"
            expected = "expected tokens and a finite log-probability for each"
            raise RuntimeError(f"engine: {expected}, got {came}")


def _told(found: Found, noise: float, threshold: float | None, version: int) -> Diagnosis:
    recomputed, base = found.recomputed, found.base
    trainers = recomputed.logps(base)
    gap = (recomputed.engine_logps - trainers).abs()
    own = (recomputed.logps(base._replace(forward=OWN)) - trainers).abs()
    named = [
        Cause(causes.name_of(found, field), causes.advice(found, field), before, after)
        for field, before, after in shares(recomputed, base, found.view)
    ]
    left = recomputed.difference(found.view)
    is_noise = left <= limit(found.view, noise)
    versions = recomputed.rollout.weight_versions
    stale = sum(v != version for v in versions)
    if stale:
        named.append(Cause(causes.STALE, causes.about_versions(stale, len(versions)), left, left))
    elif not is_noise and found.only_raises(noise):
        named.append(Cause(causes.TRUNCATION, causes.UNNAMED_ADVICE, left, left))
    elif not is_noise and found.is_own_distribution():
        named.append(Cause(causes.OTHER, causes.OTHER_ADVICE, left, left))
    return Diagnosis(
        len(gap), float(gap.mean()), float(gap.max()), float(own.mean()), noise,
        noise if threshold is None else threshold, named, left,
        causes.rest_of(found, is_noise=is_noise), stale,
    )  # fmt: skip
