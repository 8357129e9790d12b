"""Evaluation on held-out questions: accuracy strict and lenient, mean reward, pass@k, maj@k.

The samples of a question are not independent: a standard error is that of the mean over questions.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from grpo_fast import rollout
from grpo_fast.data import TRACES, Example, Prompt
from grpo_fast.data.splits import Splits
from grpo_fast.rewards import RewardSet, Scorer, check_examples, scorer_for
from grpo_fast.rewards.columns import prefill_of
from grpo_fast.rewards.scoring import shown_answer, turns
from grpo_fast.rollout import Engine, Samples, Sampling
from grpo_fast.train.config import EvalConfig, require
from grpo_fast.train.ranks import rollouts

SHOWN_SAMPLE = 200  # characters of a completion
# (prompts, *, samples, temperature, seed) → the samples, those of a prompt side by side.
Generate = Callable[..., Samples]


class EvalResult(NamedTuple):
    """The metrics of an evaluation, and the values that they are means of."""

    metrics: dict[str, float]  # `eval_…`, and standard errors `eval_…_se`
    per_question: dict[str, list[float]]  # NaN: does not count
    lines: list[str]  # time, tokens per second, and the first sample with its score


def evaluate(
    generate: Generate,
    examples: Sequence[Example],
    rewards: RewardSet | None,
    scorer: Callable[[Example], Scorer],
    *,
    samples: int = 1,
    temperature: float = 0.0,
    k: Sequence[int] = (),
    batch_size: int | None = None,
    seed: int = 0,
    prompt_texts: Callable[[Sequence[Prompt]], list[str]] | None = None,
) -> EvalResult:
    """Ask every question `samples` times and count.

    Args:
        rewards: also report their mean; samples that a reward failed on do not count in it.
        scorer: how the completions of an example are judged.
        samples: completions per question; at temperature 0 all samples of a question are equal.
        k: values for pass@k and maj@k, each at most `samples`.
        batch_size: completions per call of `generate` (at least one question); None: one call.
        prompt_texts: returns prompts as the model receives them, which may open a thought.

    Returns eval_accuracy_strict, eval_accuracy_lenient, eval_reward (+ `_se` each),
    eval_rewards/<fn>, eval_pass@k and eval_maj@k (strict), the same with `_lenient`, eval_n,
    eval_samples.

    Raises ValueError for no examples, or a wrong number of texts.
    """
    require(len(examples), "examples", "at least one", "none")
    per_question: dict[str, list[float]] = {}
    accuracies: dict[str, list[float]] = {}
    seconds = tokens = 0.0
    first = ""
    stride = len(examples) if batch_size is None else max(1, batch_size // samples)
    for start in range(0, len(examples), stride):
        batch = [examples[i] for i in range(start, min(start + stride, len(examples)))]
        prompts = [e.prompt for e in batch]
        begun = time.perf_counter()
        done = generate(prompts, samples=samples, temperature=temperature, seed=seed + start)
        seconds += time.perf_counter() - begun
        tokens += sum(map(len, done.completion_ids))
        repeated = [e for e in batch for _ in range(samples)]
        texts = [""] * len(batch) if prompt_texts is None else prompt_texts(prompts)
        sent = [text for text in texts for _ in range(samples)]
        prefills = [prefill_of(e.prompt, text) for e, text in zip(repeated, sent, strict=True)]
        judged = turns(done.texts, prefills)
        for i, example in enumerate(batch):
            said = judged[i * samples : (i + 1) * samples]
            for name, value in _accuracies(scorer(example), said, k).items():
                accuracies.setdefault(name, []).append(value)
        if rewards is not None:
            result = rollouts.score(rewards, repeated, done.texts, done.completion_ids, sent)
            scores = {f"rewards/{name}": values for name, values in result.per_fn.items()}
            for name, score in {"reward": result.total, **scores}.items():
                means = score.view(-1, samples).nanmean(dim=1).tolist()
                per_question.setdefault(name, []).extend(means)
        first = first or _sample_line(scorer(batch[0]), judged[0])
    per_question |= accuracies
    metrics = {"eval_n": float(len(examples)), "eval_samples": float(samples)}
    for name, values in per_question.items():
        mean, error = mean_and_error([v for v in values if not math.isnan(v)])
        metrics[f"eval_{name}"], metrics[f"eval_{name}_se"] = mean, error
    speed = f"{tokens:.0f} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
    return EvalResult(metrics, per_question, [speed, first])


def _sample_line(scorer: Scorer, text: str) -> str:
    """Return the first sample of an evaluation in one line, with how it was judged."""
    shown = text if len(text) <= SHOWN_SAMPLE else f"{text[:20]} … {text[20 - SHOWN_SAMPLE :]}"
    if scorer.gold is None:
        return f"first sample: {shown!r}"
    verdicts = []
    for name, answer in (("strict", scorer.strict(text)), ("lenient", scorer.lenient(text))):
        read = "no answer" if answer is None else repr(shown_answer(answer))
        verdicts.append(f"{name}: {read}, {'right' if scorer.is_right(answer) else 'wrong'}")
    gold = shown_answer(scorer.gold)
    return f"first sample: {shown!r}; gold answer {gold!r}; {'; '.join(verdicts)}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, sqrt(Σ(v − mean)² / (n−1) / n); NaN where n is too small."""
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples hold a correct one: 1 − C(n−c, k) / C(n, k).

    Unbiased (Chen et al. 2021, 2107.03374), as a product so that no large binomial is formed.
    """
    fits, came = 0 <= correct <= n and 1 <= k <= n, f"n={n}, correct={correct}, k={k}"
    require(fits, "pass_at_k", "0 ≤ correct ≤ n and 1 ≤ k ≤ n", came)
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def majority(answers: Sequence[Hashable | None]) -> Hashable | None:
    """The most frequent answer, the first of equals; None (not found) has no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__) if votes else None  # max keeps the first of equals


def _accuracies(scorer: Scorer, texts: list[str], k: Sequence[int]) -> dict[str, float]:
    """Name → value of one question; nothing where it has no answer.

    maj@k is how often a vote is right, over the disjoint blocks of k among the samples.
    """
    if scorer.gold is None:
        return {}
    values: dict[str, float] = {}
    for ending, read in (("", scorer.strict), ("_lenient", scorer.lenient)):
        answers = [read(text) for text in texts]
        count = sum(map(scorer.is_right, answers))
        values[f"accuracy{ending or '_strict'}"] = count / len(answers)
        for size in k:
            blocks = range(0, len(answers) - size + 1, size)
            votes = [majority(answers[i : i + size]) for i in blocks]
            right = sum(map(scorer.is_right, votes))
            values[f"pass@{size}{ending}"] = pass_at_k(len(answers), count, size)
            values[f"maj@{size}{ending}"] = right / len(votes)
    return values


def policy_generate(policy: Any, sampling: Sampling, engine: Engine | None = None) -> Generate:
    """The rollout of a `Policy`, or of its engine, in the form `evaluate` asks for."""

    def generate(prompts: list[Any], *, samples: int, temperature: float, seed: int) -> Samples:
        options, key = sampling.model_copy(update={"temperature": temperature}), ("evaluate", seed)
        return rollouts.generate(
            policy, prompts, options, group_size=samples, seed=key, engine=engine
        )

    return generate


def build_evaluation(
    asked: EvalConfig, splits: Splits, policy: Any, rewards: RewardSet, max_new_tokens: int
) -> Callable[[Engine], dict[str, float]]:
    """A function that gives an engine's metrics, by the same prompts and seed each time.

    Recorded rollouts have no prompts: their evaluation is empty.

    max_new_tokens: of the rollout, where the evaluation does not have its own.
    """
    if splits.data.task == TRACES:
        return lambda engine: {}
    examples = splits.test[: asked.n]
    check_examples(rewards, examples, "test")
    scorer = functools.partial(scorer_for, splits.data.task)
    length = asked.max_new_tokens or max_new_tokens
    rollout.check_prompts(policy, [e.prompt for e in examples], length)
    # `evaluate` makes the batches here, and with them the random numbers of a sampled evaluation.
    sampling = asked.model_copy(update={"max_new_tokens": length, "batch_size": None})
    return lambda engine: evaluate(
        policy_generate(policy, sampling, engine), examples, rewards, scorer, samples=asked.samples,
        temperature=asked.temperature, k=asked.k, batch_size=asked.batch_size, seed=splits.seed,
        prompt_texts=functools.partial(rollout.prompt_texts, policy),
    ).metrics  # fmt: skip
