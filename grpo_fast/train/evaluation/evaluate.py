"""Evaluation on held-out questions: strict and lenient accuracy, mean reward, pass@k and maj@k.

Standard errors are computed over questions, because samples of one question are not independent.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_fast import rollout
from grpo_fast.data import TRACES, Example, Prompt
from grpo_fast.data.splits import Splits
from grpo_fast.rewards import RewardSet, Scorer, check_examples, scorer_for
from grpo_fast.rewards.columns import prefill_of
from grpo_fast.rewards.scoring import shown_answer, turns
from grpo_fast.rollout import Engine, Samples
from grpo_fast.train.config import EvalConfig, require
from grpo_fast.train.ranks import rollouts

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

SHOWN_SAMPLE = 200  # maximum number of characters of a completion in the sample line
# Function that samples completions: generate(prompts, samples=, temperature=, seed=). The samples
# of a prompt must be adjacent.
Generate = Callable[..., Samples]


class EvalResult(NamedTuple):
    """Metrics of an evaluation, and the values per question from which they are computed."""

    metrics: dict[str, float]  # means as `eval_…`, standard errors as `eval_…_se`
    per_question: dict[str, list[float]]  # values by metric; NaN is excluded from the mean
    lines: list[str]  # output lines: tokens, time and speed; the first sample and its verdict


def evaluate(
    generate: Generate,
    examples: Sequence[Example],
    rewards: RewardSet | None,
    scorer: Callable[[Example], Scorer],
    asked: EvalConfig,
    seed: int = 0,
    *,
    prompt_texts: Callable[[Sequence[Prompt]], list[str]] | None = None,
) -> EvalResult:
    """Sample answers to every question, and compare the answers with the gold answers.

    Args:
        generate: function that samples completions for prompts.
        examples: the questions with their gold answers.
        rewards: reward functions, whose means are also reported. A mean excludes samples without
            a reward. None means no rewards.
        scorer: function that returns the `Scorer` of an example.
        asked: the section `eval`, with the number of samples, the temperature, the batch size and
            the values of k for pass@k and maj@k.
        seed: seed of the first batch. The seed of a later batch is this seed plus the index of the
            batch's first question.
        prompt_texts: function that formats prompts as the model receives them. It is needed if a
            chat template ends with the start of the answer, such as an opening tag. This start is
            then judged together with the completion. None means that no prompt has such a start.

    Returns:
        The metrics eval_n (number of questions), eval_samples (samples per question),
        eval_accuracy_strict, eval_accuracy_lenient, eval_reward, eval_rewards/<function>,
        eval_pass@k and eval_maj@k. All except the first two metrics have a standard error with the
        suffix `_se`. The metrics pass@k and maj@k use strict answers, and exist with the suffix
        `_lenient` for lenient answers.

    Raises:
        ValueError: there are no examples, or `generate` returned a wrong number of texts.
    """
    require(len(examples), "examples", "at least one", "none")
    per_question: dict[str, list[float]] = {}
    accuracies: dict[str, list[float]] = {}
    seconds = 0.0
    tokens = 0
    first = ""
    samples = asked.samples
    stride = max(1, asked.batch_size // samples)
    for start in range(0, len(examples), stride):
        # 1. Sample the completions of a batch of questions.
        batch = [examples[i] for i in range(start, min(start + stride, len(examples)))]
        prompts = [e.prompt for e in batch]
        begun = time.perf_counter()
        done = generate(prompts, samples=samples, temperature=asked.temperature, seed=seed + start)
        seconds += time.perf_counter() - begun
        tokens += sum(map(len, done.completion_ids))
        # 2. Judge the answers against the gold answers.
        repeated = [e for e in batch for _ in range(samples)]
        texts = [""] * len(batch) if prompt_texts is None else prompt_texts(prompts)
        sent = [text for text in texts for _ in range(samples)]
        prefills = [prefill_of(e.prompt, text) for e, text in zip(repeated, sent, strict=True)]
        judged = turns(done.texts, prefills)
        for i, example in enumerate(batch):
            said = judged[i * samples : (i + 1) * samples]
            for name, value in _accuracies(scorer(example), said, asked.k).items():
                accuracies.setdefault(name, []).append(value)
        # 3. Compute the rewards.
        if rewards is not None:
            result = rollouts.score(rewards, repeated, done.texts, done.completion_ids, sent)
            scores = {f"rewards/{name}": values for name, values in result.per_fn.items()}
            for name, score in {"reward": result.total, **scores}.items():
                means = score.view(-1, samples).nanmean(dim=1).tolist()
                per_question.setdefault(name, []).extend(means)
        first = first or _sample_line(scorer(batch[0]), judged[0])
    # 4. Average over the questions.
    per_question |= accuracies
    metrics = {"eval_n": float(len(examples)), "eval_samples": float(samples)}
    for name, values in per_question.items():
        mean, error = mean_and_error([v for v in values if not math.isnan(v)])
        metrics[f"eval_{name}"] = mean
        metrics[f"eval_{name}_se"] = error
    speed = f"{tokens} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):.0f} tokens/s"
    return EvalResult(metrics, per_question, [speed, first])


def _sample_line(scorer: Scorer, text: str) -> str:
    """Format a sample as one line that shows the extracted answers and says if they are right."""
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
    """Return the mean of n values v and its standard error sqrt(Σ(v - mean)² / (n - 1) / n).

    The mean is NaN if there are no values. The error is NaN if there are fewer than two values.
    """
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate pass@k, the probability that at least one of k samples is correct.

    The estimator 1 - C(n - c, k) / C(n, k) is unbiased (Chen et al. 2021, arXiv 2107.03374). It is
    computed as a product, because the binomial coefficients would overflow a float.

    Args:
        n: number of samples of the question.
        correct: number of correct samples (c).
        k: number of samples of which at least one must be correct.
    """
    fits = 0 <= correct <= n and 1 <= k <= n
    came = f"n={n}, correct={correct}, k={k}"
    require(fits, "pass_at_k", "0 ≤ correct ≤ n and 1 ≤ k ≤ n", came)
    # If fewer than k samples are wrong, every choice of k samples contains a correct one.
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def majority(answers: Sequence[Hashable | None]) -> Hashable | None:
    """Return the most frequent answer, or None if no sample has an answer.

    If several answers are equally frequent, the answer that occurs first is returned.

    Args:
        answers: the answer of each sample. None means that the sample has no answer.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__) if votes else None  # of equals, max returns the first


def _accuracies(scorer: Scorer, texts: list[str], k: Sequence[int]) -> dict[str, float]:
    """Return the accuracy, pass@k and maj@k of one question, or {} if it has no gold answer.

    For maj@k, the samples are split into blocks of k samples. The value is the share of blocks
    whose most frequent answer is right.
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


def evaluate_policy(
    policy: SampledModel,
    examples: Sequence[Example],
    rewards: RewardSet,
    task: str,
    asked: EvalConfig,
    seed: int,
    engine: Engine | None = None,
) -> EvalResult:
    """Evaluate a policy. It samples with `engine`, or by itself if `engine` is None."""

    def generate(prompts: list[Any], *, samples: int, temperature: float, seed: int) -> Samples:
        # `evaluate` has already formed batches. Set no batch size here, because the engine would
        # split the batches again and draw different random numbers.
        options = asked.model_copy(update={"temperature": temperature, "batch_size": None})
        return rollouts.generate(
            policy, prompts, options, group_size=samples, seed=("evaluate", seed), engine=engine
        )

    scorer = functools.partial(scorer_for, task)
    texts = functools.partial(rollout.prompt_texts, policy)
    return evaluate(generate, examples, rewards, scorer, asked, seed, prompt_texts=texts)


def build_evaluation(
    asked: EvalConfig, splits: Splits, policy: SampledModel, rewards: RewardSet, max_new_tokens: int
) -> Callable[[Engine], dict[str, float]]:
    """Build the evaluation function of a run. Every call uses the same questions and the same seed.

    Args:
        asked: the section `eval`.
        splits: the data. For recorded rollouts, the returned function returns no metrics.
        policy: the policy to evaluate.
        rewards: the reward functions of the run.
        max_new_tokens: maximum number of tokens in a completion, if the section `eval` sets none.

    Returns:
        A function that samples with an engine and returns the metrics.
    """
    if splits.data.task == TRACES:
        return lambda engine: {}
    examples = splits.test[: asked.n]
    check_examples(rewards, examples, "test")
    asked = asked.model_copy(update={"max_new_tokens": asked.max_new_tokens or max_new_tokens})
    rollout.check_prompts(policy, [e.prompt for e in examples], asked.max_new_tokens)
    task = splits.data.task
    return lambda engine: (
        evaluate_policy(policy, examples, rewards, task, asked, splits.seed, engine).metrics
    )
