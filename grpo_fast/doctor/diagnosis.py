"""Compare the log-probabilities of engine and trainer, and find the cause of a difference."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from grpo_fast import LossConfig
from grpo_fast.data import Prompt
from grpo_fast.data.splits import Splits
from grpo_fast.doctor.causes import DTYPE, EOS, STALE, Case, Cause, attempts
from grpo_fast.errors import require
from grpo_fast.rollout import Engine, Samples, Sampling, awake, build_engine, generate
from grpo_fast.rollout.engine import Seed
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.config import RunConfig
from grpo_fast.train.policy import Policy, build_tokenizer, load_policy
from grpo_fast.train.update import precompute

# Mean difference, in nats per token, that two correct forward passes may have in each dtype.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# `own` is the mean difference between the trainer and the model's own forward pass. Rounding
# explains a mean difference between engine and trainer of up to MARGIN times `own`.
MARGIN = 1.5
UNEXPLAINED = 0.1  # fraction of the difference that the right cause may leave unexplained
# An attempt is rejected unless it gives at least this fraction of the sampled tokens a probability
# above 0.
KNOWN = 0.95
# Minimum cosine similarity with which a dtype is reported as the cause. It compares two differences
# from the trainer's log-probabilities: that of the trainer in this dtype, and that of the engine.
SIMILAR = 0.5


@dataclass(frozen=True)
class Diagnosis:
    """Difference between engine and trainer in nats per token, and its cause."""

    tokens: int  # number of compared tokens
    mean: float  # mean absolute difference
    largest: float  # largest absolute difference
    own: float  # mean difference between the trainer and the model's own forward pass
    noise: float  # largest mean difference that rounding explains
    threshold: float  # largest mean difference that is allowed
    causes: list[Cause]  # the causes that were found
    tried: list[Cause]  # the best attempt of each cause, sorted by the remaining difference
    ok: bool  # True if the mean is allowed and all weight versions and endings are right


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
    """Sample with an engine, recompute its log-probabilities, and explain the difference.

    Args:
        policy: The trainer's policy. Its weights are sent to the engine with the number `version`.
        engine: Any `grpo_fast.rollout.Engine`.
        prompts: Strings or lists of chat messages.
        sampling: The sampling settings to request from the engine.
        group_size: Number of completions of each prompt.
        seed: Seed of the rollout.
        version: Number that identifies the policy's weights.
        temperature: Temperature of the loss. Default: the temperature of `sampling`.
        uses_kept: True if the loss is computed over the tokens that the sampler kept. This requires
            an engine that reports them.
        threshold: Allowed mean difference in nats per token. Default: the noise of the policy's
            dtype.

    Returns:
        The measured difference and, if rounding does not explain it, the cause.

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

    # 1. Sample completions. Compute their log-probabilities with the code that training uses, and
    # again with the model's own forward pass.
    samples = sample(version)
    temperature = sampling.temperature if temperature is None else temperature
    table = samples if uses_kept else dataclasses.replace(samples, support=None)
    case = Case(policy, table, prompts, sampling, temperature)
    trainers = trainer_logps(policy, table, temperature)
    plain = case.recompute()
    own = float((plain - trainers).abs().mean())
    gap = (samples.logps - trainers).abs()
    mean = float(gap.mean())
    # 2. Choose the largest difference that counts as noise. A model with large logits has larger
    # rounding errors, which show in `own`. Raise the limit to MARGIN times `own`. At most double
    # it, because a wrong trainer also increases `own`.
    rounding = NOISE.get(policy.autocast or policy.head.weight.dtype, NOISE[torch.bfloat16])
    noise = min(max(rounding, MARGIN * own), 2 * rounding)
    threshold = noise if threshold is None else threshold
    # 3. If the difference exceeds the noise, test each cause alone. Always count the completions
    # with a wrong weight version or ending.
    found: list[Cause] = []
    tried: list[Cause] = []
    if mean > noise:
        found, tried = explain(case, samples, trainers, plain, MARGIN * own)
        if not found and ignores_update(sample, samples, policy, version, noise):
            found = [Cause(STALE, "the engine's answers do not change with the weights")]
    counted = wrong_versions_and_ends(samples, policy, version, sampling.max_new_tokens)
    return Diagnosis(
        len(gap), mean, float(gap.max()), own, noise, threshold, found + counted, tried,
        mean <= threshold and not counted,
    )  # fmt: skip


def explain(
    case: Case, kept: Samples, trainers: Tensor, plain: Tensor, rounding: float
) -> tuple[list[Cause], list[Cause]]:
    """Find the cause of a difference between engine and trainer.

    Args:
        case: The difference to explain.
        kept: The samples with the tokens that the sampler kept, if the engine reports them.
        trainers: The trainer's log-probabilities, shape (R,).
        plain: Log-probabilities of the model's own forward pass, shape (R,).
        rounding: Difference in nats per token that rounding alone explains. It may remain after a
            cause is taken into account.

    Returns:
        Two lists. The first contains the cause, or nothing if no cause explains the difference. The
        second contains the best attempt of each cause, sorted by the difference that remains.
    """
    gap = case.samples.logps - trainers
    mean = float(gap.abs().mean())
    # 1. For each cause, find the attempt that leaves the smallest difference. Ignore tokens with
    # probability 0 in an attempt, and reject an attempt with too many such tokens.
    best: dict[str, Cause] = {}
    similar: list[tuple[float, Cause]] = []
    for name, what, logps in attempts(case, kept, plain):
        left = (case.samples.logps - logps).abs()
        known = left[left.isfinite()]
        if len(known) < KNOWN * len(left):
            known = torch.tensor(torch.inf)
        cause = Cause(name, what, float(known.mean()))
        if name not in best or cause.left < best[name].left:
            best[name] = cause
        if name == DTYPE:
            similar.append((float(torch.cosine_similarity(gap, logps - trainers, 0)), cause))
    tried = sorted(best.values(), key=lambda cause: cause.left)
    # 2. If the best cause leaves only a small part of the difference unexplained, return it.
    if tried[0].left <= min(max(UNEXPLAINED * mean, rounding), mean / 2):
        return tried[:1], tried
    # 3. Otherwise, accept a dtype as the cause if the difference correlates with the rounding of
    # that dtype. About half of the difference remains even with the right dtype, because two 16-bit
    # kernels round differently.
    similarity, cause = max(similar, key=lambda pair: pair[0], default=(0.0, tried[0]))
    return [cause] if similarity > SIMILAR else [], tried


def wrong_versions_and_ends(
    samples: Samples, policy: Policy, version: int, longest: int
) -> list[Cause]:
    """Count the completions with a wrong weight version, and those with a wrong ending.

    A completion must end at its first EOS or after `longest` tokens.

    Returns:
        One cause for each count that is not 0.
    """
    stale = int((samples.weight_version != version).sum())
    wrong = 0
    for ids in samples.completion_ids:
        ends = [token in policy.eos_ids for token in ids]
        wrong += any(ends[:-1]) or not (ends[-1] or len(ids) == longest)
    found = [Cause(STALE, f"{stale} completions have a different weight version")] * (stale > 0)
    text = f"{wrong} completions stop without EOS or continue after one"
    return found + [Cause(EOS, text)] * (wrong > 0)


def ignores_update(
    sample: Callable[[int], Samples], first: Samples, policy: Policy, version: int, noise: float
) -> bool:
    """Send weights with a scaled LM head to the engine, and sample again.

    Returns:
        True if most completions and their log-probabilities do not change.
    """
    weight = policy.lm.get_output_embeddings().weight.data
    saved = weight.clone()
    try:
        weight.mul_(1.5)
        second = sample(version + 1)
    finally:
        # Restore the saved weight. Division by 1.5 would round. Then sample once more, so that
        # the engine receives the original weights.
        weight.copy_(saved)
        sample(version + 2)
    same = sum(
        first.completion(i).equal(second.completion(i))
        and bool((first.sampling_logps[i] - second.sampling_logps[i]).abs().max() <= noise)
        for i in range(len(first))
    )
    return 2 * same > len(first)


def trainer_logps(policy: Policy, samples: Samples, temperature: float) -> Tensor:
    """Recompute the log-probabilities of all sampled tokens with the code that training uses.

    Args:
        policy: The trainer's policy.
        samples: The completions. If they record a support (the tokens that the sampler kept), the
            log-probabilities are computed over the support.
        temperature: Temperature of the loss.

    Returns:
        Log-probabilities in fp32 on the CPU, shape (R,).
    """
    table = dataclasses.replace(samples, advantages=torch.zeros(len(samples)))
    # Limit a packed row to 8192 tokens, which bounds the memory of a forward pass.
    batch = StepBatch(table, budget=8192, device=policy.device, shared=policy.unshared is None)
    precompute(batch, policy, LossConfig(temperature=temperature), keep_old=True)
    assert batch.samples.old_logps is not None
    return batch.samples.old_logps.float().cpu()


# ----------------------------------------------------------------------- From a run's configuration
class DoctorSettings(RunConfig):
    """Settings of the doctor, in addition to the settings of a run.

    Attributes:
        recipe: Recipe (name or YAML file) with data, sampling and model.
        n: Number of prompts.
        samples: Completions of each prompt.
        tokens: Longest completion. All logits of a completion are in memory at once.
        threshold: Allowed mean difference in nats per token; null: the noise of the dtype.
    """

    recipe: str | None = None
    n: int = Field(8, ge=1, le=1 << 10)
    samples: int = Field(2, ge=1, le=1 << 10)
    tokens: int = Field(32, ge=1, le=1 << 10)
    threshold: float | None = Field(None, ge=0)


def examine_engine(config: DoctorSettings) -> Diagnosis:
    """Build the policy and the engine of a run, and compare their log-probabilities."""
    torch.manual_seed(config.seed)
    splits = Splits(config.data, config.seed)
    policy = load_policy(config.model, build_tokenizer(config.model, splits))
    policy.template_kwargs = config.data.template_kwargs
    examples = splits.for_tokenizer(policy.tokenizer).train[: config.n]
    length = min(config.rollout.max_new_tokens, config.tokens)
    with build_engine(policy, config.rollout) as engine:
        return diagnose(
            policy, engine, [example.prompt for example in examples],
            config.rollout.model_copy(update={"max_new_tokens": length}),
            group_size=config.samples, seed=config.seed,
            version=int(time.time()),  # a running server must not have this version already
            temperature=float(config.loss_config().temperature),
            uses_kept=config.rollout.needs_support, threshold=config.threshold,
        )  # fmt: skip
