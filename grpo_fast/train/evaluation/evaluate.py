"""Evaluation on held-out questions, and the command `grpo-fast eval`.

The metrics are strict and lenient accuracy, mean reward, pass@k and maj@k. Their standard errors
are computed over questions, because samples of one question are not independent.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast import rollout
from grpo_fast.data import FILES, Example
from grpo_fast.data.answers import turns
from grpo_fast.data.prompts import in_chat
from grpo_fast.data.splits import Splits, asks_in_chat, read_examples
from grpo_fast.errors import require
from grpo_fast.rewards import RewardSet, Scorer, build_rewards, check_examples, scorer_for
from grpo_fast.rewards.columns import prefill_of, usable
from grpo_fast.rewards.scoring import shown_answer
from grpo_fast.rollout import Engine
from grpo_fast.train import folder
from grpo_fast.train.collect import generate, score
from grpo_fast.train.config import DataConfig, EvalConfig, ModelConfig, RunConfig, Section, UserPath
from grpo_fast.train.config.recipes import load_recipe, load_saved
from grpo_fast.train.config.words import apply_words, own_words, split_word, validated
from grpo_fast.train.evaluation.questions import asking_lines
from grpo_fast.train.models import loading

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

SHOWN_SAMPLE = 200  # maximum number of characters of a completion in the sample line
DEFAULT_REWARDS = {"gsm8k": ["gsm8k_correct", "gsm8k_format"], "sort": ["sort_positions"]}
SHORT: dict[str, type[Section]] = {"eval": EvalConfig, "data": DataConfig, "model": ModelConfig}
SAMPLED_AT = 0.7  # default temperature of the sampled pass


# ------------------------------------------------------------------------------------------ Metrics
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
        asked: the section `eval`, with the number of samples, the temperature, the batch size and
            the values of k for pass@k and maj@k. Its `max_new_tokens` must be set.
        seed: seed of the first batch. The seed of a later batch is this seed plus the index of the
            batch's first question.
        engine: the engine that samples. With None, the policy samples.

    Returns:
        The metrics eval_n (number of questions), eval_samples (samples per question),
        eval_accuracy_strict, eval_accuracy_lenient, eval_reward, eval_rewards/<function>,
        eval_pass@k and eval_maj@k. The last two use strict answers. The same metrics for lenient
        answers have the suffix `_lenient`. All metrics except eval_n and eval_samples have a
        standard error with the suffix `_se`. Also returns a line that shows the first sample and
        whether its answers are right.

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
            for name, value in _accuracies(scorer_for(task, example), said, asked.k).items():
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


def _accuracies(scorer: Scorer, texts: list[str], k: Sequence[int]) -> dict[str, float]:
    """Return the accuracy, pass@k and maj@k of one question, or {} if it has no gold answer.

    For maj@k, the samples are split into blocks of k samples. The value is the fraction of blocks
    whose most frequent answer is correct.
    """
    if scorer.gold is None:
        return {}
    values: dict[str, float] = {}
    n = len(texts)
    for ending, read in (("", scorer.strict), ("_lenient", scorer.lenient)):
        answers = [read(text) for text in texts]
        right = sum(map(scorer.is_right, answers))
        values[f"accuracy{ending or '_strict'}"] = right / n
        for size in k:
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


# -------------------------------------------------------------------------- Settings of the command
class EvalSettings(Section):
    """Settings of `grpo-fast eval` that are not settings of a run.

    The command also accepts all settings of a run. The keys of the sections in SHORT can be written
    without the section, for example n=100 for eval.n or task=sort for data.task.

    Attributes:
        recipe: Name of a recipe or path of a YAML file; null uses the settings of the evaluated
            run.
        out: JSON file to write the metrics to; null writes no file.
    """

    recipe: str | None = None
    out: UserPath | None = None


def find_model(model: str) -> tuple[str, RunConfig | None]:
    """Find a model, given as a folder, a hub id, or the folder of a run.

    Returns:
        The folder or the hub id of the model, and the configuration of its run. The configuration
        is None for a plain model.

    Raises:
        ValueError: the folder does not exist, is a checkpoint, or belongs to a run that has saved
            no model.
    """
    place = Path(os.path.expanduser(model))
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    fits = not is_path or place.is_dir()
    require(fits, "model", "a model or a run", f"{model!r}: no such folder")
    file = place / folder.CONFIG
    if file.is_file() and (place / "model").is_dir():
        return str(place / "model"), load_saved(file)
    is_run = file.is_file() or (place / "state.json").is_file()
    expected = "a model, or a run that has ended and saved its model (log.save_model: true)"
    remedy = f"`grpo-fast export {model} OUT` writes the model of a run or checkpoint"
    fits = not is_run or (place / "config.json").is_file()
    require(fits, "model", expected, f"no model in {model!r}; {remedy}")
    return str(place), None


def read_settings(
    model: str, words: Sequence[str], allow_code: bool
) -> tuple[EvalSettings, RunConfig]:
    """Return the settings of an evaluation, and the configuration of the model and its questions.

    Args:
        model: the model. If it is the folder of a run and no recipe is named, the settings of the
            run are used.
        words: settings as key=value.
        allow_code: allow reward functions from outside the package, and custom code of the model.
            In a run's folder, custom code of the model also requires that the run was trained with
            `trust_remote_code`.

    Raises:
        ValueError: a setting is invalid, or no setting says where the questions come from.
    """
    # 1. Start with the settings of the recipe. Without a recipe, use the settings of the run.
    path, of_model = find_model(model)
    own, words = own_words(EvalSettings, words)
    where = own.recipe or f"{model}/{folder.CONFIG}"
    run = load_recipe(own.recipe) if own.recipe is not None else of_model
    settings: dict[str, Any] = {"data": {"task": "gsm8k"}, "eval": {"batch_size": 64}}
    if run is not None:
        settings = run.model_dump(mode="json")
        code = [reward.name for reward in run.rewards if ":" in reward.name]
        came = f"{code}, which run code; if you trust the folder, add --allow-code"
        require(allow_code or not code, "rewards", f"built-in rewards in {where}", came)
    trust = allow_code and (of_model is None or of_model.model.trust_remote_code)
    settings["model"] = {"path": path, "trust_remote_code": trust}
    # 2. Apply the key=value arguments.
    words = [_with_section(word) for word in words]
    keys = [split_word(word)[0] for word in words]
    chosen = [key for key in keys if key in ("model", "model.path", "model.trust_remote_code")]
    expected = "the model as the first argument, and --allow-code for its code"
    require(not chosen, "model", expected, ", ".join(chosen))
    if "eval.samples" in keys and "eval.k" not in keys:
        settings["eval"]["k"] = []
    apply_words(settings, words)
    # 3. Validate the settings, and choose the rewards. A missing source of questions is refused
    # last, because its key may be misspelled, and the validation names the nearest key.
    data = settings["data"]
    expected = "a file, a folder, a hub id or a section of keys"
    require(isinstance(data, dict), "data", expected, repr(data))
    task = str(data.get("task"))
    exists = os.path.isdir(path)
    came = "nothing" if exists else f"nothing, and no folder {model!r} exists here"
    fits = task not in FILES or bool(data.get("path"))
    if not fits:
        data["path"] = "."
    if run is None:
        settings.setdefault("rewards", DEFAULT_REWARDS.get(task, ["exact_match"]))
    config = validated(RunConfig, settings, EvalSettings.model_fields)
    require(fits, "data", f"data=<file, folder or hub id> with task={task}", came)
    return own, config


def _with_section(word: str) -> str:
    """Add the section to the key of a `key=value` argument, unless the key contains it."""
    name = split_word(word)[0].partition(".")[0]
    above = next((x for x, kind in SHORT.items() if name in kind.model_fields), None)
    return word if above is None else f"{above}.{word}"


# -------------------------------------------------------------------------------------- The command
Say = Callable[..., object]  # function that receives lines of text


def run_eval(
    model: str,
    words: Sequence[str] = (),
    *,
    allow_code: bool = False,
    say: Say = lambda *lines: None,
) -> dict[str, dict[str, float]]:
    """Evaluate a model on held-out questions.

    Args:
        model: a folder, a hub id, or the folder of a finished run, whose configuration selects the
            questions.
        words: settings as key=value, see `EvalSettings`.
        allow_code: allow custom Python code, see `read_settings`.
        say: function that receives output lines: the format of the questions, the first sample and
            the results.

    Returns:
        A dict with the metrics under the key "greedy", and also "sampled" if the settings request
        a sampled pass.

    Raises:
        ValueError: the data or a model cannot be loaded, or custom code is needed and `allow_code`
            is False.
        OSError: the file `out` cannot be written.
    """
    # 1. Read the settings, and check them.
    own, config = read_settings(model, words, allow_code)
    out = None if own.out is None else Path(own.out)
    fits = out is None or (out.parent.is_dir() and not out.is_file() and not out.is_dir())
    require(fits, "out", "a new file in a folder that exists", repr(own.out))
    # 2. Load the questions and the rewards before the model, so that errors appear early.
    data = config.data
    rewards = build_rewards(config.rewards)
    examples = usable(rewards, data.drop_unusable, _examples(config, words))
    examples = examples[: config.eval.n]
    check_examples(rewards, examples, "test")
    # 3. Evaluate the model in each pass.
    policy = loading.load_policy(config.model)
    policy.template_kwargs = data.template_kwargs
    data = data.model_copy(update={"chat": asks_in_chat(data, policy.tokenizer)})
    questions = [in_chat(e) for e in examples] if data.chat else examples
    say(f"{model}:", *asking_lines(data, policy.tokenizer, questions[0].prompt, "chat"))
    results = {}
    for mode, options in _passes(config).items():
        results[mode], line = evaluate(policy, questions, rewards, data.task, options, config.seed)
        say(f"{mode}: {line}")
    # 4. Print the metrics, and write them to `out`.
    say(table(results))
    if out is not None:
        text = json.dumps(folder.plain_json(results), indent=2) + "\n"
        with folder.written(out):
            out.write_text(text, encoding="utf-8")
    return results


def _passes(config: RunConfig) -> dict[str, EvalConfig]:
    """Return the settings of the greedy pass, and of a sampled pass if `eval` requests one."""
    length = config.eval.max_new_tokens or config.rollout.max_new_tokens
    asked = config.eval.model_copy(update={"max_new_tokens": length})
    modes = {"greedy": asked.model_copy(update={"samples": 1, "temperature": 0.0, "k": []})}
    if asked.samples > 1 or asked.temperature > 0:
        k = asked.k or [1 << i for i in range(asked.samples.bit_length())]
        changes = {"temperature": asked.temperature or SAMPLED_AT, "k": k}
        modes["sampled"] = asked.model_copy(update=changes)
    return modes


def table(results: dict[str, dict[str, float]]) -> str:
    """Format the metrics of a model as aligned lines with standard errors."""
    lines = []
    for mode, metrics in results.items():
        n, samples = metrics["eval_n"], metrics["eval_samples"]
        lines.append(f"{mode} (n={n:.0f} questions, {samples:.0f} sample(s) each)")
        for name, value in metrics.items():
            if name + "_se" in metrics:
                error = metrics[name + "_se"]  # NaN for a single question
                shown = f" ± {error:.4f}" if math.isfinite(error) else ""
                lines.append(f"  {name.removeprefix('eval_'):<28}{value:8.4f}{shown}")
    return "\n".join(lines)


def _examples(config: RunConfig, words: Sequence[str]) -> Sequence[Example]:
    # If the user names a file, evaluate on all its examples. Otherwise use the test split.
    data = config.data
    is_named = any(word.startswith(("data=", "data.path=", "path=")) for word in words)
    if is_named and data.path and os.path.isfile(data.path):
        return read_examples(data)
    tokenizer = None if data.shots_tokens is None else loading.load_tokenizer(config.model)
    return Splits(data, config.seed, tokenizer).test
