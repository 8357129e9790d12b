"""Diagnose why an engine's log-probabilities are not the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_fast.data import Prompt
from grpo_fast.doctor import causes
from grpo_fast.doctor.causes import ADVICE, Cause
from grpo_fast.doctor.prompts import AS_SENT, readings
from grpo_fast.doctor.recompute import Noise, Recomputed
from grpo_fast.doctor.search import Change, Search, noise_of
from grpo_fast.doctor.view import KEPT, OWN, View
from grpo_fast.errors import require
from grpo_fast.rollout import Engine, Samples, Sampling, awake, generate
from grpo_fast.rollout.engine import Seed
from grpo_fast.train.models.policy import Policy

LEAST = 1e-6  # nats per token; below it two passes agree
MARGIN = 1.5  # times the trainer's distance from the model's own forward pass that is noise
OTHER = 1.5  # factor of the head's weight in an update that an engine has to notice
SURE = 3.0  # log-likelihood ratio from which tokens were drawn at one temperature, not another
NOT_FOUND = "not found: other weights (previous=FOLDER tries some), prompts or logits, or tokens " \
            "that are not drawn from what it reports"  # fmt: skip


class Diagnosis(NamedTuple):
    """Differences in nats per token, engine against trainer, and their causes."""

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
    cut_off: int  # completions that end without an EOS before their time, or go on behind one
    own_noise: list[Noise]  # of the trainer alone

    @property
    def ok(self) -> bool:
        return self.mean <= self.threshold and not self.stale and not self.cut_off


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
    require(sampling.temperature > 0, "temperature", "a number above 0", "0 (greedy)")

    def sample(policy: Policy, version: int) -> Samples:
        with awake(engine, policy, version):
            rollout = generate(
                policy, prompts, sampling, group_size=group_size, seed=seed, engine=engine
            )
        check(rollout)
        return rollout

    rollout = sample(policy, version)
    sent = rollout.prompt_ids[::group_size]
    known = readings(policy.tokenizer, prompts, sent, policy.pad_id)
    recomputed = Recomputed(policy, rollout, known, previous=previous)
    base = View(
        sampling.temperature if temperature is None else temperature,
        KEPT if uses_kept and recomputed.drawn.kept is not None else None,
    )
    diagnosis = _compare(recomputed, base, sampling, version, threshold)
    if diagnosis.causes or diagnosis.left <= diagnosis.noise:
        return diagnosis
    words = _ignored_update(sample, rollout, base, policy, version, diagnosis.noise)
    stale = [Cause(causes.STALE, words, diagnosis.left, diagnosis.left)] if words else []
    return diagnosis._replace(causes=stale)


def _compare(
    recomputed: Recomputed, base: View, sampling: Sampling, version: int, threshold: float | None
) -> Diagnosis:
    rollout, policy, trainers = recomputed.rollout, recomputed.policy, recomputed.logps(base)
    gap = (recomputed.engine_logps - trainers).abs()
    own = float((recomputed.logps(base._replace(model=OWN)) - trainers).abs().mean())
    noise = noise_of(policy)  # a model with large logits has more; a wrong one far more
    noise = min(max(noise, MARGIN * own), 2 * noise)
    packs = recomputed.noise(base.temperature)
    changes = Search(recomputed, base, sampling, max(packs[0].mean, LEAST), noise).explain()
    left, named = recomputed.difference(base), []
    for change in changes:
        before, left = left, recomputed.difference(change.view)
        name, advice = _advice(recomputed, base, change, changes[-1].view, sampling)
        named.append(Cause(name, advice, before, left))
    stale = int((rollout.weight_version != version).sum())
    ends = [[t in policy.eos_ids for t in ids] for ids in rollout.completion_ids]
    longest = sampling.max_new_tokens
    cut_off = sum(any(x[:-1]) or not (x[-1] or len(x) == longest) for x in ends)
    for count, name, words in (
        (stale, causes.STALE, causes.VERSIONS), (cut_off, causes.ENDS, causes.CUT_OFF),
    ):  # fmt: skip
        if count:
            named.append(Cause(name, words.format(count, len(ends)), left, left))
    return Diagnosis(
        len(gap), float(gap.mean()), float(gap.max()), own, noise,
        noise if threshold is None else threshold, named, left,
        "noise of the kernels" if left <= noise else NOT_FOUND, stale, cut_off, packs,
    )  # fmt: skip


def check(rollout: Samples) -> None:
    """Raise a RuntimeError unless every completion has tokens and a finite logp for each."""
    for ids, logps in zip(rollout.completion_ids, rollout.sampling_logps, strict=True):
        fits = ids and logps.shape == (len(ids),) and bool(logps.isfinite().all())
        came = f"{len(ids)} and {logps.flatten()[:4].tolist()} …"
        expected = "tokens and a finite log-probability for each"
        require(fits, "engine", expected, came, RuntimeError)


def _advice(
    recomputed: Recomputed, base: View, change: Change, engines: View, sampling: Sampling
) -> tuple[str, str]:
    if change.cause == causes.TEMPERATURE:
        return _about_temperature(recomputed, base, engines, sampling.temperature)
    if change.cause == causes.TRUNCATION and sampling.truncates:
        known = "" if recomputed.drawn.kept is None else ", which the engine names"
        return change.cause, causes.ASKED.format(sampling.top_k, sampling.top_p, known)
    return change.cause, ADVICE[change.cause].format(*change.fields.values())


def _about_temperature(
    recomputed: Recomputed, base: View, view: View, asked: float
) -> tuple[str, str]:
    """Whether tokens were drawn at another temperature, or only reported at it."""
    came = view.temperature
    if came == asked:
        return causes.TEMPERATURE, causes.LOSS.format(base.temperature, asked)
    gain = recomputed.logps(view._replace(temperature=asked)) - recomputed.logps(view)
    ratio = float(gain.nansum())  # log-likelihood of the drawn tokens, as asked over as told
    if came == 1 and ratio > SURE:
        return causes.RAW, ADVICE[causes.RAW]
    does = "reports log-probabilities of" if ratio > SURE else "samples at"
    if abs(ratio) <= SURE:
        does = "samples at, or only reports (more tokens would tell),"
    return causes.TEMPERATURE, ADVICE[causes.TEMPERATURE].format(does, came, asked)


def _ignored_update(
    sample: Callable[[Policy, int], Samples],
    first: Samples,
    base: View,
    policy: Policy,
    version: int,
    noise: float,
) -> str | None:
    """Send other weights; returns what to say where the answers show that they did not arrive."""
    weight = policy.lm.get_output_embeddings().weight.data
    saved = weight.clone()
    try:
        weight.mul_(OTHER)
        second = sample(policy, version + 1)
    finally:
        weight.copy_(saved)  # bit for bit
        sample(policy, version + 2)  # the engine is left with the policy's weights
    pairs = zip(first.sampling_logps, second.sampling_logps, strict=True)
    same = [a == b for a, b in zip(first.completion_ids, second.completion_ids, strict=True)]
    gaps = [(a - b).abs().max() <= noise for (a, b), x in zip(pairs, same, strict=True) if x]
    if 2 * sum(map(bool, gaps)) > len(same):
        return causes.IGNORES
    again = Recomputed(policy, second, {AS_SENT: second.prompt_ids})
    return causes.BEHIND if again.difference(base._replace(truncation=None)) <= noise else None
