"""Compare an engine's log-probabilities with the trainer's, and look for the cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.data import Prompt
from grpo_fast.doctor.attempts import Case, attempts
from grpo_fast.doctor.causes import DTYPE, EOS, STALE, Cause
from grpo_fast.doctor.recompute import Noise, own_logps, own_noise, trainer_logps
from grpo_fast.errors import require
from grpo_fast.rollout import Engine, Samples, Sampling, awake, generate
from grpo_fast.rollout.engine import Seed
from grpo_fast.train.models.policy import Policy

# Mean difference in nats per token between two correct forward passes, by dtype.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MARGIN = 1.5  # times the trainer's distance from the model's own forward pass is still noise
UNEXPLAINED = 0.1  # of the difference that the right cause may leave
KNOWN = 0.95  # of the tokens that an attempt must give a probability above 0
SIMILAR = 0.5  # cosine similarity of a difference with the one that a different dtype makes
SCALE = 1.5  # factor of the LM head's weight in an update that an engine has to notice


@dataclass(frozen=True)
class Diagnosis:
    """The difference between engine and trainer in nats per token, and its cause."""

    tokens: int  # that were compared
    mean: float  # of the absolute difference
    largest: float
    own: float  # mean difference between the trainer and the model's own forward pass
    noise: float  # mean up to which the difference is rounding of the kernels
    threshold: float  # mean up to which it is ok
    causes: list[Cause]  # that were found
    tried: list[Cause]  # the best attempt of each cause, the one that leaves least first
    own_noise: list[Noise]  # the trainer against itself
    ok: bool  # the mean is at most the threshold, and no version or end is wrong


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
    threshold: float | None = None,
) -> Diagnosis:
    """Let an engine sample, recompute its log-probabilities, and explain the difference.

    Args:
        policy: the trainer's policy. The engine is given its weights as this `version`.
        engine: any `grpo_fast.rollout.Engine`.
        prompts: texts or chat messages.
        sampling: what the engine is asked for.
        group_size: completions of each prompt.
        seed: seed of the rollout.
        version: weight version of the policy.
        temperature: temperature of the loss; None: the sampling's.
        uses_kept: the loss is over the tokens that the engine names, if it names them.
        threshold: allowed mean in nats per token; None: the noise of the policy's dtype.

    Raises:
        ValueError: for prompts that the tokenizer or the model does not take, or greedy sampling.
        RuntimeError: for completions without tokens or without a finite logp for each.
    """
    require(sampling.temperature > 0, "temperature", "a number above 0", "0 (greedy)")

    def sample(number: int) -> Samples:
        with awake(engine, policy, number):
            samples = generate(
                policy, prompts, sampling, group_size=group_size, seed=seed, engine=engine
            )
        fits = all(samples.lengths) and bool(samples.logps.isfinite().all())
        expected = "tokens and a finite log-probability for each"
        require(fits, "engine", expected, samples.logps[:4].tolist(), RuntimeError)
        return samples

    # 1. Sample, and recompute the same tokens twice.
    samples = sample(version)
    temperature = sampling.temperature if temperature is None else temperature
    uses_kept = uses_kept and samples.support is not None
    case = Case(policy, samples, prompts, sampling, temperature, uses_kept)
    table = samples if uses_kept else dataclasses.replace(samples, support=None)
    trainers = trainer_logps(policy, table, temperature)
    own = float((own_logps(policy, samples, case.logps) - trainers).abs().mean())
    gap = (samples.logps - trainers).abs()
    mean = float(gap.mean())
    # 2. A model with large logits has more noise; a wrong one far more.
    noise = min(max(noise_of(policy), MARGIN * own), 2 * noise_of(policy))
    threshold = noise if threshold is None else threshold
    # 3. Try the causes one at a time, and count what needs no attempt.
    found: list[Cause] = []
    tried: list[Cause] = []
    if mean > noise:
        found, tried = explain(case, trainers, MARGIN * own)
        if not found and ignores_update(sample, samples, policy, version, noise):
            found = [Cause(STALE, "the engine's answers do not change with the weights")]
    counted = wrong_versions_and_ends(samples, policy, version, sampling.max_new_tokens)
    return Diagnosis(
        len(gap), mean, float(gap.max()), own, noise, threshold, found + counted, tried,
        own_noise(policy, samples, temperature), mean <= threshold and not counted,
    )  # fmt: skip


def noise_of(policy: Policy) -> float:
    """Return the mean difference that is rounding in the policy's dtype."""
    return NOISE.get(policy.autocast or policy.head.weight.dtype, NOISE[torch.bfloat16])


def explain(case: Case, trainers: Tensor, rounding: float) -> tuple[list[Cause], list[Cause]]:
    """Return the cause, if one explains the difference, and the best attempt of each cause.

    Args:
        case: what is to be explained.
        trainers: (R,) the trainer's logps.
        rounding: nats per token that the right cause may leave in any case.
    """
    gap = case.samples.logps - trainers
    mean = float(gap.abs().mean())
    # 1. What each attempt leaves. The best attempt of each cause comes last in `ranked`.
    ranked: list[tuple[float, Cause]] = []
    rounded: list[tuple[float, Cause]] = []
    for attempt, logps in attempts(case):
        left = mean_difference(case.samples.logps, logps)
        ranked.append((left, Cause(attempt.cause, attempt.what, left)))
        if attempt.cause == DTYPE:
            similarity = torch.cosine_similarity(gap, logps - trainers, 0)
            rounded.append((float(similarity), ranked[-1][1]))
    ranked.sort(key=lambda pair: -pair[0])
    best = {cause.name: cause for _, cause in ranked}
    tried = sorted(best.values(), key=lambda cause: cause.left)
    # 2. The cause that explains the difference.
    if tried and tried[0].left <= min(max(UNEXPLAINED * mean, rounding), mean / 2):
        return tried[:1], tried
    # 3. A dtype leaves about as much as it explains, because two kernels round differently.
    rounded = sorted((pair for pair in rounded if pair[0] > SIMILAR), key=lambda pair: pair[0])
    return [cause for _, cause in rounded[-1:]], tried


def mean_difference(engine_logps: Tensor, logps: Tensor) -> float:
    """Return the mean absolute difference; inf if many of the tokens have probability 0."""
    gap = (engine_logps - logps).abs()
    known = gap[gap.isfinite()]
    return float(known.mean()) if len(known) >= KNOWN * len(gap) else float("inf")


def wrong_versions_and_ends(
    samples: Samples, policy: Policy, version: int, longest: int
) -> list[Cause]:
    """Count completions with a different weight version, and with a wrong end."""
    stale = int((samples.weight_version != version).sum())
    wrong = 0
    for ids in samples.completion_ids:
        ends = [token in policy.eos_ids for token in ids]
        wrong += any(ends[:-1]) or not (ends[-1] or len(ids) == longest)
    found = []
    if stale:
        found.append(Cause(STALE, f"{stale} completions have a different weight version"))
    if wrong:
        found.append(Cause(EOS, f"{wrong} completions stop without EOS or continue after one"))
    return found


def ignores_update(
    sample: Callable[[int], Samples], first: Samples, policy: Policy, version: int, noise: float
) -> bool:
    """Send weights with a scaled LM head; return whether most answers stay the same."""
    weight = policy.lm.get_output_embeddings().weight.data
    saved = weight.clone()
    try:
        weight.mul_(SCALE)
        second = sample(version + 1)
    finally:
        weight.copy_(saved)  # bit for bit
        sample(version + 2)  # the engine has the policy's weights again
    same = 0
    for i in range(len(first)):
        if first.completion(i).equal(second.completion(i)):
            change = (first.sampling_logps[i] - second.sampling_logps[i]).abs().max()
            same += bool(change <= noise)
    return 2 * same > len(first)
