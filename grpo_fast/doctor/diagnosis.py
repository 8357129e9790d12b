"""Comparison of an engine's log-probabilities with the trainer's, and a search for the cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.data import Prompt
from grpo_fast.doctor.attempts import Case, attempts
from grpo_fast.doctor.causes import DTYPE, EOS, STALE, Cause
from grpo_fast.doctor.recompute import Noise, measure_noise, trainer_logps
from grpo_fast.errors import require
from grpo_fast.rollout import Engine, Samples, Sampling, awake, generate
from grpo_fast.rollout.engine import Seed
from grpo_fast.train.models.policy import Policy

# Mean difference in nats per token between two correct forward passes, by dtype.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# A difference up to this factor times the trainer's distance from the model's own forward is noise.
MARGIN = 1.5
UNEXPLAINED = 0.1  # share of the difference that the right cause may leave
KNOWN = 0.95  # share of the tokens that an attempt must give a probability above 0
SIMILAR = 0.5  # cosine similarity of the difference with the rounding of a different dtype
SCALE = 1.5  # factor of the LM head's weight in an update that an engine must notice


@dataclass(frozen=True)
class Diagnosis:
    """The difference between engine and trainer in nats per token, and its cause."""

    tokens: int  # number of compared tokens
    mean: float  # mean absolute difference
    largest: float  # largest absolute difference
    own: float  # mean difference between the trainer and the model's own forward pass
    noise: float  # largest mean that rounding explains
    threshold: float  # largest mean that is allowed
    causes: list[Cause]  # the causes that were found
    tried: list[Cause]  # the best attempt of each cause; the attempt that leaves least is first
    own_noise: list[Noise]  # the trainer compared with itself
    ok: bool  # the mean is allowed, and all weight versions and ends are right


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
        policy: The trainer's policy. The engine gets its weights under the number `version`.
        engine: Any `grpo_fast.rollout.Engine`.
        prompts: Texts or chat messages.
        sampling: The sampling settings to request from the engine.
        group_size: Completions of each prompt.
        seed: Seed of the rollout.
        version: Weight version of the policy.
        temperature: Temperature of the loss. None: the temperature of `sampling`.
        uses_kept: Compute the loss over the tokens that the sampler kept, if the engine names them.
        threshold: Allowed mean difference in nats per token. None: the noise of the policy's dtype.

    Returns:
        The measured difference and, if it is more than rounding, the cause.

    Raises:
        ValueError: The tokenizer or the model does not accept the prompts, or sampling is greedy.
        RuntimeError: A completion has no tokens, or a token has no finite log-probability.
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

    # 1. Sample. Recompute the same tokens as training does, and with the model's own forward pass.
    samples = sample(version)
    temperature = sampling.temperature if temperature is None else temperature
    table = samples if uses_kept else dataclasses.replace(samples, support=None)
    case = Case(policy, table, prompts, sampling, temperature)
    trainers = trainer_logps(policy, table, temperature)
    own = float((case.recompute() - trainers).abs().mean())
    gap = (samples.logps - trainers).abs()
    mean = float(gap.mean())
    # 2. A model with large logits rounds more, so the trainer's distance from the model's own
    # forward raises the noise, but at most to twice the usual noise: the distance is also large if
    # the trainer is wrong.
    noise = min(max(noise_of(policy), MARGIN * own), 2 * noise_of(policy))
    threshold = noise if threshold is None else threshold
    # 3. Try the causes one at a time. Count wrong versions and ends.
    found: list[Cause] = []
    tried: list[Cause] = []
    if mean > noise:
        found, tried = explain(case, samples, trainers, MARGIN * own)
        if not found and ignores_update(sample, samples, policy, version, noise):
            found = [Cause(STALE, "the engine's answers do not change with the weights")]
    counted = wrong_versions_and_ends(samples, policy, version, sampling.max_new_tokens)
    return Diagnosis(
        len(gap), mean, float(gap.max()), own, noise, threshold, found + counted, tried,
        measure_noise(policy, samples, temperature), mean <= threshold and not counted,
    )  # fmt: skip


def noise_of(policy: Policy) -> float:
    """Return the mean difference that rounding explains in the policy's dtype."""
    return NOISE.get(policy.autocast or policy.head.weight.dtype, NOISE[torch.bfloat16])


def explain(
    case: Case, kept: Samples, trainers: Tensor, rounding: float
) -> tuple[list[Cause], list[Cause]]:
    """Return the cause if one explains the difference, and the best attempt of each cause.

    Args:
        case: The difference to explain.
        kept: The samples with the tokens that the sampler kept, if the engine names them.
        trainers: The trainer's log-probabilities, shape (R,).
        rounding: Nats per token that the right cause may always leave.
    """
    engines = case.samples.logps
    mean = float((engines - trainers).abs().mean())
    # 1. Keep the attempt of each cause that leaves least.
    best: dict[str, Cause] = {}
    similarity = SIMILAR
    similar: list[Cause] = []
    for name, what, logps in attempts(case, kept):
        cause = Cause(name, what, mean_difference(engines, logps))
        if name not in best or cause.left < best[name].left:
            best[name] = cause
        if name == DTYPE:
            value = float(torch.cosine_similarity(engines - trainers, logps - trainers, 0))
            if value > similarity:
                similarity = value
                similar = [cause]
    tried = sorted(best.values(), key=lambda cause: cause.left)
    # 2. Name the best cause if it explains the difference.
    if tried[0].left <= min(max(UNEXPLAINED * mean, rounding), mean / 2):
        return tried[:1], tried
    # 3. Two kernels round differently in 16 bits, so the right dtype leaves about as much as it
    # explains. A correlated difference is enough for this cause.
    return similar, tried


def mean_difference(engine_logps: Tensor, logps: Tensor) -> float:
    """Return the mean absolute difference; inf if many of the tokens have probability 0."""
    gap = (engine_logps - logps).abs()
    known = gap[gap.isfinite()]
    return float(known.mean()) if len(known) >= KNOWN * len(gap) else float("inf")


def wrong_versions_and_ends(
    samples: Samples, policy: Policy, version: int, longest: int
) -> list[Cause]:
    """Count completions with a different weight version or a wrong end."""
    stale = int((samples.weight_version != version).sum())
    wrong = 0
    for ids in samples.completion_ids:
        ends = [token in policy.eos_ids for token in ids]
        wrong += any(ends[:-1]) or not (ends[-1] or len(ids) == longest)
    counts = {
        STALE: (stale, "completions have a different weight version"),
        EOS: (wrong, "completions stop without EOS or continue after one"),
    }
    return [Cause(name, f"{count} {what}") for name, (count, what) in counts.items() if count]


def ignores_update(
    sample: Callable[[int], Samples], first: Samples, policy: Policy, version: int, noise: float
) -> bool:
    """Send weights with a scaled LM head, and return whether most answers stay the same."""
    weight = policy.lm.get_output_embeddings().weight.data
    saved = weight.clone()
    try:
        weight.mul_(SCALE)
        second = sample(version + 1)
    finally:
        # Dividing by SCALE would round. The last update gives the engine the right weights again.
        weight.copy_(saved)
        sample(version + 2)
    same = 0
    for i in range(len(first)):
        if first.completion(i).equal(second.completion(i)):
            change = (first.sampling_logps[i] - second.sampling_logps[i]).abs().max()
            same += bool(change <= noise)
    return 2 * same > len(first)
