"""Evaluation on held-out questions: strict and lenient accuracy, mean reward, pass@k and maj@k.

Standard errors are computed over questions, because samples of one question are not independent.

The file also has the commands `grpo-fast eval` (`run_eval`) and `grpo-fast data` (`data_lines`).
`asking_lines` returns the log lines that show how questions are formatted for the model.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast import rollout
from grpo_fast.data import FILES, Example, Prompt
from grpo_fast.data.answers import parse_number, turns
from grpo_fast.data.prompts import Form
from grpo_fast.data.records import TESTS, find
from grpo_fast.data.splits import Splits
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.errors import require
from grpo_fast.rewards import RewardSet, Scorer, build_rewards, check_examples, scorer_for
from grpo_fast.rewards.columns import prefill_of, tests_error, usable
from grpo_fast.rewards.scoring import is_expression, shown_answer
from grpo_fast.rollout import Engine, encode_prompts
from grpo_fast.train import folder
from grpo_fast.train.collect import generate, score
from grpo_fast.train.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    RunConfig,
    Section,
    UserPath,
    load_recipe,
    load_saved,
)
from grpo_fast.train.config.words import apply_words, read_words, recipe_in, split_word, validated
from grpo_fast.train.policy import load_policy, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


# ----------------------------------------------------------------------- The command grpo-fast eval
DEFAULT_REWARDS = {"gsm8k": ["gsm8k_correct", "gsm8k_format"], "sort": ["sort_positions"]}
# Sections whose keys can be written without the name of the section.
SHORT: dict[str, type[Section]] = {"eval": EvalConfig, "data": DataConfig, "model": ModelConfig}


class EvalSettings(RunConfig):
    """Settings of `grpo-fast eval`, in addition to the settings of a run.

    Keys of the sections in SHORT can be written without the section, for example n=100 for eval.n,
    or task=sort for data.task.

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


def read_settings(model: str, words: Sequence[str], allow_code: bool) -> EvalSettings:
    """Return the settings of an evaluation.

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
    recipe = recipe_in(words)
    where = recipe or f"{model}/{folder.CONFIG}"
    run = of_model if recipe is None else load_recipe(recipe)
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
        names = DEFAULT_REWARDS.get(task, ["exact_match"])
        settings.setdefault("rewards", [{"name": name} for name in names])
    config = validated(EvalSettings, settings)
    require(fits, "data", f"data=<file, folder or hub id> with task={task}", came)
    return config


def _with_section(word: str) -> str:
    """Add the section to the key of a `key=value` argument, unless the key contains it."""
    name = split_word(word)[0].partition(".")[0]
    above = next((x for x, kind in SHORT.items() if name in kind.model_fields), None)
    return word if above is None else f"{above}.{word}"


def run_eval(
    model: str,
    words: Sequence[str] = (),
    *,
    allow_code: bool = False,
    say: Callable[..., object] = lambda *lines: None,
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
    config = read_settings(model, words, allow_code)
    out = None if config.out is None else Path(config.out)
    fits = out is None or (out.parent.is_dir() and not out.is_file() and not out.is_dir())
    require(fits, "out", "a new file in a folder that exists", repr(config.out))
    # 2. Load the questions and the rewards before the model, so that errors appear early.
    data = config.data
    rewards = build_rewards(config.rewards)
    # If the user names a file, evaluate on all its examples. Otherwise use the test split.
    is_named = any(word.startswith(("data=", "data.path=", "path=")) for word in words)
    whole = is_named and data.path is not None and os.path.isfile(data.path)
    can_use = partial(usable, rewards, data.drop_unusable)
    splits = Splits(data, config.seed, usable=can_use, whole=whole)
    check_examples(rewards, splits.test[: config.eval.n], "test")
    # 3. Evaluate the model in each pass.
    policy = load_policy(config.model)
    policy.template_kwargs = data.template_kwargs
    splits = splits.for_tokenizer(policy.tokenizer)
    questions = splits.test[: config.eval.n]
    say(f"{model}:", *asking_lines(splits.data, policy.tokenizer, questions[0].prompt, "chat"))
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
    modes = {"greedy": asked.model_copy(update={"samples": 1, "temperature": 0.0})}
    if asked.samples > 1 or asked.temperature > 0:
        temperature = asked.temperature or 0.7  # greedy samples would all be equal
        modes["sampled"] = asked.model_copy(update={"temperature": temperature})
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


# -------------------------------------------------------- The command grpo-fast data, and log lines
SHOWN = 3  # number of prompts that the command shows
SHOWN_PROMPT = 1200  # maximum number of characters of a prompt in the log
REFUSED = "with tests that code_tests refuses"


class ViewSettings(DataConfig):
    """Settings of `grpo-fast data`, in addition to the keys of the section `data`.

    Attributes:
        model: Model whose tokenizer and chat template format the prompts; null shows them
            unformatted.
    """

    model: UserPath | None = None


def data_lines(source: str, words: Sequence[str]) -> list[str]:
    """Return output lines that describe a data set.

    The lines report how many examples each split has, why rows were skipped, and the first prompts.

    Args:
        source: a file, a folder, or a hub id.
        words: key=value arguments: the key `model`, and keys of the section `data`, with or without
            the prefix `data.`.

    Raises:
        ValueError: a setting, the source or a row of the data is invalid.
    """
    # 1. Read the data set.
    words = [word.removeprefix("data.") for word in words]
    data = read_words(ViewSettings, words, {"task": "jsonl", "path": source})
    needs = "model=MODEL, whose tokenizer counts the tokens"
    require(data.model or data.shots_tokens is None, "shots_tokens", needs, "none")
    splits = Splits(data, 0)
    train, test = splits.questions
    # 2. Count the examples of each split and of each kind of answer.
    every = [*train, *test]
    kinds = [kind_of_answer(example) for example in every]
    columns = dict.fromkeys(name for example in train[:100] for name in example.fields)
    lines = [
        f"{source}: {len(train)} training and {len(test)} test examples",
        f"columns that rewards may name: {', '.join(columns) or 'none'}",
        "gold answers: " + ", ".join(f"{n} {x}" for x, n in Counter(kinds).most_common()),
    ]
    if REFUSED in kinds:
        first = every[kinds.index(REFUSED)]
        remedy = "data.drop_unusable=true skips such rows"
        lines.append(f"the first tests that code_tests refuses: {tests_error(first)}; {remedy}")
    # 3. Show the first prompts. With model=MODEL, show them as the model receives them.
    tokenizer = None
    hint = " (model=MODEL shows its tokens)"
    if data.model is not None:
        tokenizer = load_tokenizer(ModelConfig(path=data.model))
        splits = splits.for_tokenizer(tokenizer)
        hint = ""
    form = Form.of(splits.data)
    shown = [form.apply(example) for example in train[:SHOWN]]
    if data.shots_tokens is not None:
        shown = list(splits.train[:SHOWN])
    for number, example in enumerate(shown, 1):
        prompt = example.prompt
        lines.append(f"prompt {number}{hint}:")
        if tokenizer is not None:
            lines += prompt_lines(tokenizer, prompt, data.template_kwargs)
        elif isinstance(prompt, str):
            lines += [f"  | {line}" for line in prompt.split("\n")]
        else:
            lines += [f"  | {message['role']}: {message['content']!r}" for message in prompt]
        lines.append(f"  gold answer: {example.answer!r} ({kind_of_answer(example)})")
    return lines


def kind_of_answer(example: Example) -> str:
    """Describe how a completion is compared with the gold answer of an example."""
    if example.answer is None and example.label is not None:
        return "as lists or mappings, for your own reward"
    if example.answer is None:
        if find(example.fields, TESTS) is None:
            return "without an answer"
        return REFUSED if tests_error(example) else "judged by code_tests"
    if parse_number(example.answer) is not None:
        return "judged as numbers"
    if is_expression(example.answer):
        return "judged as expressions"
    return "judged as texts"


def asking_lines(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, key: str = "data.chat"
) -> list[str]:
    """Return log lines that say whether the chat template is used, and show the first prompt.

    Args:
        data: the section `data`, with `chat` resolved to true or false.
        tokenizer: tokenizer of the model.
        prompt: the first prompt. The middle of a long prompt is replaced with an ellipsis.
        key: name of the setting that turns the chat template on or off.
    """
    if data.chat or not isinstance(prompt, str):
        way = f"through the model's chat template ({key}=false sends plain text)"
    elif data.task in FILES and has_chat_template(tokenizer):
        way = f"as plain text, although the model has a chat template ({key}=true uses it)"
    else:
        way = "as plain text"
    shown = prompt_lines(tokenizer, prompt, data.template_kwargs)
    return [f"questions are asked {way}; the first prompt:", *shown]


def prompt_lines(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template_kwargs: Mapping[str, object]
) -> list[str]:
    """Return the lines of a prompt as the model receives it, including special tokens."""
    text = tokenizer.decode(encode_prompts(tokenizer, [prompt], template_kwargs)[0])
    half = SHOWN_PROMPT // 2
    if len(text) > SHOWN_PROMPT:
        text = f"{text[:half]} … {text[-half:]}"
    return [f"  | {line}" for line in text.split("\n")]
