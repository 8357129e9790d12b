"""The commands `grpo-fast eval`, which evaluates or compares models, and `grpo-fast data`."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_fast.data import FILES, Example, Prompt
from grpo_fast.data.answers import parse_number
from grpo_fast.data.prompts import Form, in_chat
from grpo_fast.data.records import TESTS, find
from grpo_fast.data.splits import Splits, asks_in_chat, read_examples, without_long
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.errors import require
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rewards.columns import tests_error, usable
from grpo_fast.rewards.scoring import is_expression
from grpo_fast.rollout import encode_prompts
from grpo_fast.train import folder
from grpo_fast.train.config import DataConfig, EvalConfig, ModelConfig, RunConfig, Section, UserPath
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.config.words import apply_words, own_words, read_words, split_word, validated
from grpo_fast.train.evaluation.evaluate import EvalResult, evaluate, paired
from grpo_fast.train.models import loading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_REWARDS = {"gsm8k": ["gsm8k_correct", "gsm8k_format"], "sort": ["sort_positions"]}
SHORT: dict[str, type[Section]] = {"eval": EvalConfig, "data": DataConfig, "model": ModelConfig}
SAMPLED_AT = 0.7  # default temperature of the sampled pass


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


class Source(NamedTuple):
    """A model to evaluate. `run` is the configuration of its run, or None for a plain model."""

    name: str
    path: str
    run: RunConfig | None

    @classmethod
    def of(cls, model: str) -> Source:
        """Find a model, given as a folder, a hub id, or the folder of a run.

        Raises:
            ValueError: the folder does not exist, is a checkpoint, or belongs to a run that has
                saved no model.
        """
        folder = os.path.expanduser(model)
        is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
        fits = not is_path or os.path.isdir(folder)
        require(fits, "model", "a model or a run", f"{model!r}: no such folder")
        export = f"`grpo-fast export {model} OUT` writes the model of a checkpoint"
        has_config = os.path.isfile(os.path.join(folder, "config.json"))
        is_checkpoint = os.path.isfile(os.path.join(folder, "manifest.json")) and not has_config
        require(not is_checkpoint, "model", "a model or a run", f"a checkpoint; {export}")
        file = os.path.join(folder, "config.yaml")
        if os.path.isfile(file) and os.path.isdir(os.path.join(folder, "model")):
            return cls(model, os.path.join(folder, "model"), load_recipe(file, []))
        fits = not os.path.isfile(file) or has_config
        expected = "a run that has ended and saved its model (log.save_model: true)"
        require(fits, "model", expected, f"no model/ in {model!r}; {export}")
        return cls(model, folder, None)


def is_model(word: str) -> bool:
    """Return True if a command-line argument names a model, False if it is a setting."""
    return os.path.isdir(os.path.expanduser(word)) or ("=" not in word and "/" in word)


def read_settings(
    sources: Sequence[Source], words: Sequence[str], allow_code: bool
) -> tuple[EvalSettings, RunConfig]:
    """Return the settings of an evaluation and the configuration that selects its questions.

    Args:
        sources: the models. If no recipe is named, the settings of the first model that is the
            folder of a run are used.
        words: settings as key=value.
        allow_code: allow reward functions from outside the package.

    Raises:
        ValueError: a setting is invalid, or no setting says where the questions come from.
    """
    # 1. Start with the settings of the recipe. Without a recipe, use the settings of the first run.
    own, words = own_words(EvalSettings, words)
    runs = [(f"{source.name}/config.yaml", source.run) for source in sources if source.run]
    if own.recipe is not None:
        runs = [(own.recipe, load_recipe(own.recipe))]
    settings: dict[str, Any] = {"data": {"task": "gsm8k"}, "eval": {"batch_size": 64}}
    for where, run in runs[:1]:
        settings = run.model_dump(mode="json")
        for reward in run.rewards:
            fits = allow_code or ":" not in reward.name
            came = f"{reward.name!r}, which runs code; if you trust the folder, add --allow-code"
            require(fits, "rewards", f"built-in rewards in {where}", came)
    settings["model"] = {"path": sources[0].path}
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
    missing = [x.name for x in sources if not os.path.isdir(x.path)]
    came = f"nothing, and no folder {missing[0]!r} exists here" if missing else "nothing"
    fits = task not in FILES or bool(data.get("path"))
    if not fits:
        data["path"] = "."
    if not runs:
        settings.setdefault("rewards", DEFAULT_REWARDS.get(task, ["exact_match"]))
    kinds: list[type[Section]] = [EvalSettings, *SHORT.values()]
    also = [key for kind in kinds for key in kind.model_fields]
    config = validated(RunConfig, settings, also)
    require(fits, "data", f"data=<file, folder or hub id> with task={task}", came)
    return own, config


def _with_section(word: str) -> str:
    """Add the section to the key of a `key=value` argument, unless the key contains it."""
    name = split_word(word)[0].partition(".")[0]
    above = next((x for x, kind in SHORT.items() if name in kind.model_fields), None)
    return word if above is None else f"{above}.{word}"


# -------------------------------------------------------------------------------------- The command
Say = Callable[..., object]  # function that receives lines of text

# First bytes of every results file. The command does not overwrite a file that begins differently.
RESULTS_BEGIN = b'{\n  "greedy": {'


def run_eval(
    models: Sequence[str],
    words: Sequence[str] = (),
    *,
    allow_code: bool = False,
    say: Say = lambda *lines: None,
) -> dict[str, dict[str, Any]]:
    """Evaluate a model on held-out questions, or compare two models on the same questions.

    Args:
        models: one or two models, each given as a folder, a hub id, or the folder of a finished
            run. The configuration of the first run selects the questions for both models.
        words: settings as key=value, see `EvalSettings`.
        allow_code: allow custom Python code, which means rewards with an import path and custom
            model classes. In a run's folder, custom model classes also require that the run was
            trained with `trust_remote_code`.
        say: function that receives output lines: the format of the questions, the time, the first
            sample and the results.

    Returns:
        A dict with the key "greedy", and also "sampled" if the settings request a sampled pass.
        For one model, each value is a dict of metrics. For two models, each value is a dict with
        a `Paired` comparison for each metric.

    Raises:
        ValueError: the data or a model cannot be loaded, or custom code is needed and `allow_code`
            is False.
        OSError: the file `out` cannot be written.
    """
    # 1. Read the settings, and check them.
    sources = [Source.of(model) for model in models]
    own, config = read_settings(sources, words, allow_code)
    _check_out(own.out)
    model_configs = []
    for source in sources:
        trust = allow_code and (not source.run or source.run.model.trust_remote_code)
        changes = {"path": source.path, "trust_remote_code": trust}
        model_configs.append(config.model.model_copy(update=changes))
    tasks = {source.run.data.task: source.name for source in sources if source.run}
    listed = ", ".join(f"{task} in {name}" for task, name in tasks.items())
    require(len(tasks) <= 1, "task", "two runs of one task", listed)
    # 2. Load the questions and the rewards before the models, so that errors appear early.
    data = config.data
    examples = _examples(config, model_configs[0], words)
    rewards = build_rewards(config.rewards)
    examples = _usable(examples, data, rewards, model_configs)[: config.eval.n]
    check_examples(rewards, examples, "test")
    # 3. Evaluate each model in each pass.
    modes = _passes(config)
    passes: dict[str, list[EvalResult]] = {mode: [] for mode in modes}
    for name, model in zip(models, model_configs, strict=True):
        policy = loading.load_policy(model)
        policy.template_kwargs = data.template_kwargs
        asked_as = data.model_copy(update={"chat": asks_in_chat(data, policy.tokenizer)})
        questions = [in_chat(e) for e in examples] if asked_as.chat else examples
        say(f"{name}:", *asking_lines(asked_as, policy.tokenizer, questions[0].prompt, "chat"))
        for mode, options in modes.items():
            result = evaluate(policy, questions, rewards, data.task, options, config.seed)
            say(*(f"{mode}: {line}" for line in result.lines))
            passes[mode].append(result)
    # 4. Print the metrics of one model, or the comparison of two models, and write them to `out`.
    if len(models) == 1:
        results: dict[str, dict[str, Any]] = {mode: x[0].metrics for mode, x in passes.items()}
        written = results
        say(table(results))
    else:
        results = {
            mode: {x: paired(a.per_question[x], b.per_question[x]) for x in a.per_question}
            for mode, (a, b) in passes.items()
        }
        written = {**results, "models": dict(zip("ab", models, strict=True))}
        say(f"A: {models[0]}", f"B: {models[1]}", paired_table(results))
    if own.out is not None:
        text = json.dumps(folder.plain_json(written), indent=2) + "\n"
        with folder.written(Path(own.out)):
            Path(own.out).write_text(text, encoding="utf-8")
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
                shown = name.removeprefix("eval_")
                lines.append(f"  {shown:<28}{value:8.4f}{_plus_minus(metrics[name + '_se'])}")
    return "\n".join(lines)


def paired_table(results: dict[str, dict[str, Any]]) -> str:
    """Format a comparison as aligned lines with difference B − A, standard error and p-value."""
    lines = []
    for mode, metrics in results.items():
        n = max(metric.n for metric in metrics.values())
        lines.append(f"{mode:<30}{'A':>8}{'B':>9}   B − A, n={n} questions")
        for name, m in metrics.items():
            values = f"{m.a:8.4f} {m.b:8.4f}   {m.difference:+.4f}{_plus_minus(m.se)}"
            lines.append(f"  {name:<28}{values}   p = {m.p:.2g}")
    lines.append("p: of the two-sided sign-flip test over questions")
    return "\n".join(lines)


def _plus_minus(error: float) -> str:
    """Format a standard error. Return "" if it is NaN, which is the case for a single question."""
    return f" ± {error:.4f}" if math.isfinite(error) else ""


def _check_out(out: str | None) -> None:
    """Raise a ValueError if `out` cannot be written or is a file without evaluation results."""
    if out is None:
        return
    path = Path(out)
    fits = path.parent.is_dir() and not path.is_dir()
    require(fits, "out", "a file in a folder that exists", repr(out))
    if path.is_file():
        with path.open("rb") as file:
            fits = file.read(len(RESULTS_BEGIN)) in (b"", RESULTS_BEGIN)
        require(fits, "out", "a new file or an earlier evaluation's", repr(out))


def _examples(config: RunConfig, model: ModelConfig, words: Sequence[str]) -> Sequence[Example]:
    # If the user names a file, evaluate on all its examples. Otherwise use the test split.
    data = config.data
    is_named = any(word.startswith(("data=", "data.path=", "path=")) for word in words)
    if is_named and data.path and os.path.isfile(data.path):
        return read_examples(data)
    tokenizer = None if data.shots_tokens is None else loading.load_tokenizer(model)
    return Splits(data, config.seed, tokenizer, test_only=True).test


def _usable(
    examples: Sequence[Example], data: DataConfig, rewards: RewardSet, models: Sequence[ModelConfig]
) -> Sequence[Example]:
    """Return the examples without those that the settings drop for one of the models."""
    examples = usable(rewards, data.drop_unusable, examples)
    for model in models if data.max_prompt_tokens is not None else ():
        tokenizer = loading.load_tokenizer(model)
        asked = data.model_copy(update={"chat": asks_in_chat(data, tokenizer)})
        examples = without_long(examples, asked, tokenizer, encode_prompts, "test")
    return examples


# -------------------------------------------------------------------------------- The command data
SHOWN = 3  # number of prompts that the command shows
REFUSED = "with tests that code_tests refuses"


class ViewSettings(Section):
    """Settings of `grpo-fast data`. All other arguments are keys of the section `data`.

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
    # 1. Separate the key `model` from the keys of the section `data`, and read the data set.
    own, rest = own_words(ViewSettings, [word.removeprefix("data.") for word in words])
    data = read_words(DataConfig, rest, {"task": "jsonl", "path": source})
    splits = Splits(data, 0)
    train, test = splits.questions
    # 2. Count the examples of each split and of each kind of answer.
    every = [*train, *test]
    kinds = [kind_of(example) for example in every]
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
    if own.model is not None:
        tokenizer = loading.load_tokenizer(ModelConfig(path=own.model))
        splits = splits.for_tokenizer(tokenizer, encode_prompts).with_shots(tokenizer)
        hint = ""
    for key in ("shots_tokens", "max_prompt_tokens"):
        needs = "model=MODEL, whose tokenizer counts the tokens"
        require(tokenizer or getattr(data, key) is None, key, needs, "none")
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
        lines.append(f"  gold answer: {example.answer!r} ({kind_of(example)})")
    return lines


def kind_of(example: Example) -> str:
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


# ------------------------------------------------------------------------------------------- Asking
SHOWN_PROMPT = 1200  # maximum number of characters of a prompt in the log


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
