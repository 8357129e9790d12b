"""Evaluation on held-out questions: accuracy strict and lenient, mean reward, pass@k, maj@k, all with standard errors.

The model comes in as `generate(prompts, samples=…, temperature=…, seed=…)`, which returns `samples` texts per prompt,
prompt by prompt. A question's samples are not independent, so every standard error is that of the mean over questions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from grpo_fast.data.example import Example
from grpo_fast.rewards.reward_set import RewardSet
from grpo_fast.rewards.scoring import Scorer


class Generate(Protocol):
    """Returns `len(prompts) * samples` texts, the samples of a prompt side by side; temperature 0 is greedy."""

    def __call__(self, prompts: list[Any], *, samples: int, temperature: float, seed: int) -> list[str]: ...


class Judged(NamedTuple):
    """One question with what the model said to it."""

    example: Example
    completions: list[str]
    strict: list[Hashable | None]  # the answers found, None where none was
    lenient: list[Hashable | None]
    gold: Hashable | None


class EvalResult(NamedTuple):
    """`metrics` under their `eval_…` names, standard errors with the ending `_se`; `judged` for reading along."""

    metrics: dict[str, float]
    judged: list[Judged]


def evaluate(
    generate: Generate,
    examples: Sequence[Example],
    rewards: RewardSet | None,
    scorer: Scorer,
    *,
    samples: int = 1,
    temperature: float = 0.0,
    k: Sequence[int] = (),
    batch_size: int | None = None,
    seed: int = 0,
) -> EvalResult:
    """Ask every question `samples` times and count.

    Args:
        rewards: also report their mean; None leaves it out. Samples a reward failed on do not count in the mean.
        samples: completions per question; with temperature 0 there is only one different.
        k: values for pass@k and maj@k, each at most `samples`.
        batch_size: completions per call of `generate` (at least one question); None: one call for all, which leaves
            the size of batches to `generate` and makes the samples independent of it.

    Returns:
        eval_accuracy_strict, eval_accuracy_lenient, eval_reward (+ `_se` each), eval_rewards/<fn>, eval_pass@k and
        eval_maj@k (strict), the same with `_lenient`, eval_n (questions), eval_samples.

    Raises:
        ValueError: no examples, samples < 1, a k that is not in 1…samples, or a wrong number of generated texts.
    """
    if not len(examples):
        raise ValueError("examples: expected at least one, got none")
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature: expected a number ≥ 0 (0: greedy), got {temperature}")
    for value in k:
        if not 1 <= value <= samples:
            raise ValueError(f"k: expected values from 1 to samples = {samples}, got {value}")
    judged: list[Judged] = []
    per_question: dict[str, list[float]] = {}
    stride = len(examples) if batch_size is None else max(1, batch_size // samples)
    for start in range(0, len(examples), stride):
        batch = [examples[i] for i in range(start, min(start + stride, len(examples)))]
        texts = generate([e.prompt for e in batch], samples=samples, temperature=temperature, seed=seed + start)
        if len(texts) != len(batch) * samples:
            raise ValueError(f"generate: expected {len(batch)}·{samples} texts, it returned {len(texts)}")
        judged += [_judge(e, texts[i * samples : (i + 1) * samples], scorer) for i, e in enumerate(batch)]
        if rewards is not None:
            _add_rewards(per_question, rewards, batch, texts, samples)
    per_question |= _accuracies(judged, k)
    metrics = {"eval_n": float(len(judged)), "eval_samples": float(samples)}
    for name, values in per_question.items():
        mean, error = mean_and_error([v for v in values if not math.isnan(v)])
        metrics[f"eval_{name}"], metrics[f"eval_{name}_se"] = mean, error
    return EvalResult(metrics, judged)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, sqrt(Σ(v − mean)² / (n−1) / n); NaN where n is too small for it."""
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a correct one: 1 − C(n−c, k) / C(n, k).

    Unbiased (Chen et al. 2021, 2107.03374), as a product so that no large binomial is formed.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k: expected 0 ≤ correct ≤ n and 1 ≤ k ≤ n, got n={n}, correct={correct}, k={k}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def majority(answers: Sequence[Hashable | None]) -> Hashable | None:
    """The most frequent answer; of equally frequent ones the first seen. None (nothing found) has no vote."""
    votes: dict[Hashable, int] = {}
    for answer in answers:
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
    return max(votes, key=votes.__getitem__) if votes else None  # max keeps the first of equals


def _judge(example: Example, completions: list[str], scorer: Scorer) -> Judged:
    return Judged(
        example,
        completions,
        [scorer.strict(text) for text in completions],
        [scorer.lenient(text) for text in completions],
        scorer.gold(example.answer),
    )


def _accuracies(judged: list[Judged], k: Sequence[int]) -> dict[str, list[float]]:
    """Name → one value per question."""
    values: dict[str, list[float]] = {}
    for suffix in ("strict", "lenient"):
        found = [(getattr(j, suffix), j.gold) for j in judged]
        right = [sum(a is not None and a == gold for a in answers) for answers, gold in found]
        values[f"accuracy_{suffix}"] = [c / len(a) for c, (a, _) in zip(right, found, strict=True)]
        ending = "" if suffix == "strict" else "_lenient"
        for size in k:
            values[f"pass@{size}{ending}"] = [
                pass_at_k(len(a), c, size) for c, (a, _) in zip(right, found, strict=True)
            ]
            values[f"maj@{size}{ending}"] = [_majority_rate(answers, gold, size) for answers, gold in found]
    return values


def _majority_rate(answers: list[Hashable | None], gold: Hashable | None, k: int) -> float:
    """How often the vote of k samples is right, over the disjoint blocks of k among the samples."""
    votes = [majority(block) for block in _blocks(answers, k)]
    return sum(v is not None and v == gold for v in votes) / len(votes)


def _blocks(answers: list[Hashable | None], k: int) -> Iterator[list[Hashable | None]]:
    return (answers[i : i + k] for i in range(0, len(answers) - k + 1, k))


def _add_rewards(
    values: dict[str, list[float]], rewards: RewardSet, batch: list[Example], texts: list[str], samples: int
) -> None:
    repeated = [e for e in batch for _ in range(samples)]
    result = rewards([e.prompt for e in repeated], texts, [e.answer for e in repeated])
    for name, scores in {"reward": result.total, **{f"rewards/{n}": s for n, s in result.per_fn.items()}}.items():
        values.setdefault(name, []).extend(scores.view(-1, samples).nanmean(dim=1).tolist())


@dataclass
class Sampling:
    """What the rollout's `generate` reads: how many completions of a prompt, how long, how random."""

    group_size: int
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int | None = None


def policy_generate(
    policy: Any, *, max_new_tokens: int, top_p: float = 1.0, top_k: int = 0, batch_size: int | None = None
) -> Generate:
    """The rollout of a `Policy` in the form `evaluate` asks for."""

    def generate(prompts: list[Any], *, samples: int, temperature: float, seed: int) -> list[str]:
        from grpo_fast import rollout

        options = Sampling(samples, max_new_tokens, temperature, top_p, top_k, batch_size)
        return rollout.generate(policy, prompts, options, seed=("evaluate", seed)).texts

    return generate
