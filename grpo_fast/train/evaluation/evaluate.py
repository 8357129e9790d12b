"""Evaluation on held-out questions: strict and lenient accuracy, mean reward, pass@k and maj@k.

Standard errors are computed over questions, because samples of one question are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from grpo_fast import rollout
from grpo_fast.data import Example
from grpo_fast.data.answers import turns
from grpo_fast.data.splits import Splits
from grpo_fast.errors import require
from grpo_fast.rewards import RewardSet, Scorer, check_examples, scorer_for
from grpo_fast.rewards.columns import prefill_of
from grpo_fast.rewards.scoring import shown_answer
from grpo_fast.rollout import Engine
from grpo_fast.train.collect import generate, score
from grpo_fast.train.config import EvalConfig

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

SHOWN_SAMPLE = 200  # maximum number of characters of a completion in the sample line


def evaluate(
    policy: SampledModel,
    examples: Sequence[Example],
    rewards: RewardSet,
    task: str,
    asked: EvalConfig,
    seed: int,
    engine: Engine | None = None,
) -> tuple[dict[str, float], str]:
    """Sample answers to every question, and compare them with the gold answers.

    Args:
        policy: the policy to evaluate.
        examples: the questions with their gold answers.
        rewards: reward functions, whose means are also reported. A mean excludes samples without
            a reward.
        task: value of `data.task`, which determines how answers are judged.
        asked: the section `eval`, with the number of samples, the temperature and the batch size.
            Its `max_new_tokens` must be set.
        seed: seed of the first batch. The seed of a later batch is this seed plus the index of the
            batch's first question.
        engine: the engine that samples. With None, the policy samples.

    Returns:
        The metrics eval_n (number of questions), eval_samples (samples per question),
        eval_accuracy_strict, eval_accuracy_lenient, eval_reward, eval_rewards/<function>, and with
        several samples eval_pass@k and eval_maj@k, where k is the number of samples or a smaller
        power of 2. The last two use strict answers. The same metrics for lenient answers have the
        suffix `_lenient`. All metrics except eval_n and eval_samples have a standard error with the
        suffix `_se`. Also returns a line that shows the first sample and whether its answers are
        right.

    Raises:
        ValueError: there are no examples.
    """
    require(len(examples), "examples", "at least one", "none")
    per_question: dict[str, list[float]] = {}
    first = ""
    samples = asked.samples
    stride = max(1, asked.batch_size // samples)
    # The loop below forms the batches. Set no batch size here, because the engine would split the
    # batches again and draw different random numbers.
    options = asked.model_copy(update={"batch_size": None})
    for start in range(0, len(examples), stride):
        # 1. Sample the completions of a batch of questions.
        batch = [examples[i] for i in range(start, min(start + stride, len(examples)))]
        prompts = [e.prompt for e in batch]
        done = generate(
            policy, prompts, options,
            group_size=samples, seed=("evaluate", seed + start), engine=engine,
        )  # fmt: skip
        # 2. Compute the rewards.
        repeated = [e for e in batch for _ in range(samples)]
        sent = [text for text in rollout.prompt_texts(policy, prompts) for _ in range(samples)]
        result = score(rewards, repeated, done.texts, done.completion_ids, sent)
        scores = {f"rewards/{name}": values for name, values in result.per_fn.items()}
        for name, given in {"reward": result.total, **scores}.items():
            means = given.view(-1, samples).nanmean(dim=1).tolist()
            per_question.setdefault(name, []).extend(means)
        # 3. Compare the answers with the gold answers. If a prompt ends with the start of the
        # answer, such as an opening tag, prepend this start to the completion.
        prefills = [prefill_of(e.prompt, text) for e, text in zip(repeated, sent, strict=True)]
        judged = turns(done.texts, prefills)
        for i, example in enumerate(batch):
            said = judged[i * samples : (i + 1) * samples]
            for name, value in _accuracies(scorer_for(task, example), said).items():
                per_question.setdefault(name, []).append(value)
        first = first or _sample_line(scorer_for(task, batch[0]), judged[0])
    # 4. Average over the questions.
    metrics = {"eval_n": float(len(examples)), "eval_samples": float(samples)}
    for name, values in per_question.items():
        mean, error = mean_and_error([v for v in values if not math.isnan(v)])
        metrics[f"eval_{name}"] = mean
        metrics[f"eval_{name}_se"] = error
    return metrics, first


def _sample_line(scorer: Scorer, text: str) -> str:
    """Format the end of a sample as one line, with its answers and whether they are correct."""
    shown = text if len(text) <= SHOWN_SAMPLE else f"… {text[-SHOWN_SAMPLE:]}"
    parts = [f"first sample: {shown!r}"]
    if scorer.gold is not None:
        for name, answer in (("strict", scorer.strict(text)), ("lenient", scorer.lenient(text))):
            read = "no answer" if answer is None else repr(shown_answer(answer))
            parts.append(f"{name}: {read}, {'right' if scorer.is_right(answer) else 'wrong'}")
        parts.append(f"gold: {shown_answer(scorer.gold)!r}")
    return "; ".join(parts)


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
    # If fewer than k samples are wrong, every choice of k samples contains a correct one.
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def _accuracies(scorer: Scorer, texts: list[str]) -> dict[str, float]:
    """Return the accuracy, pass@k and maj@k of one question, or {} if it has no gold answer.

    With several samples, k takes the powers of 2 below their number, and the number itself.
    For maj@k, the samples are split into blocks of k samples. The value is the fraction of blocks
    whose most frequent answer is correct.
    """
    if scorer.gold is None:
        return {}
    values: dict[str, float] = {}
    n = len(texts)
    sizes = [1 << i for i in range((n - 1).bit_length())]
    if n > 1:
        sizes.append(n)
    for ending, read in (("", scorer.strict), ("_lenient", scorer.lenient)):
        answers = [read(text) for text in texts]
        right = sum(map(scorer.is_right, answers))
        values[f"accuracy{ending or '_strict'}"] = right / n
        for size in sizes:
            votes = [majority(answers[i : i + size]) for i in range(0, n - size + 1, size)]
            values[f"pass@{size}{ending}"] = pass_at_k(n, right, size)
            values[f"maj@{size}{ending}"] = sum(map(scorer.is_right, votes)) / len(votes)
    return values


def majority(answers: Sequence[Hashable | None]) -> Hashable | None:
    """Return the most frequent answer, or None if no sample has an answer.

    If several answers are equally frequent, the answer that occurs first is returned.

    Args:
        answers: the answer of each sample. None means that the sample has no answer.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__) if votes else None  # of equals, max returns the first


def build_evaluation(
    asked: EvalConfig, splits: Splits, policy: SampledModel, rewards: RewardSet, max_new_tokens: int
) -> Callable[[Engine], dict[str, float]]:
    """Build the evaluation function of a run. Every call uses the same questions and the same seed.

    Args:
        asked: the section `eval`.
        splits: the data.
        policy: the policy to evaluate.
        rewards: the reward functions of the run.
        max_new_tokens: maximum number of tokens in a completion. It is used only if
            `asked.max_new_tokens` is not set.

    Returns:
        A function that samples with an engine and returns the metrics.
    """
    examples = splits.test[: asked.n]
    check_examples(rewards, examples, "test")
    asked = asked.model_copy(update={"max_new_tokens": asked.max_new_tokens or max_new_tokens})
    rollout.check_prompts(policy, [e.prompt for e in examples], asked.max_new_tokens)
    task = splits.data.task
    return lambda engine: evaluate(policy, examples, rewards, task, asked, splits.seed, engine)[0]
