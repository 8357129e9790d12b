"""The command `grpo-fast eval`, which evaluates one model or compares two."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.data import Example, load_examples, read_examples
from grpo_fast.data.prompts import in_chat
from grpo_fast.data.splits import asks_in_chat
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.rewards import build_rewards, check_examples, scorer_for
from grpo_fast.rollout import prompt_texts
from grpo_fast.train.config import DataConfig, ModelConfig, RewardConfig, require
from grpo_fast.train.evaluation.asking import asking_lines
from grpo_fast.train.evaluation.evaluate import EvalResult, evaluate, policy_generate
from grpo_fast.train.evaluation.settings import (
    DEFAULT_REWARDS,
    EvalSettings,
    Source,
    complete,
    data_of,
    recipe_of,
)
from grpo_fast.train.evaluation.statistics import Paired, paired
from grpo_fast.train.files import plain_json
from grpo_fast.train.models import loading

Say = Callable[..., Any]  # function that receives lines of text

RESULTS_BEGIN = b'{\n  "greedy": {'  # a file that begins differently is not overwritten


def say_nothing(*lines: str) -> None:
    pass


def run_eval(
    model: str, settings: EvalSettings, *, allow_code: bool = False, say: Say = say_nothing
) -> dict[str, dict[str, float]]:
    """Evaluate a model on held-out questions.

    Args:
        model: folder or hub id of a model, or folder of a finished run.
        settings: the questions and the sampling options.
        allow_code: allow Python code that the model's folder names. This includes rewards with an
            import path and custom model classes. For a run's folder, custom classes also require
            that the run set `trust_remote_code`.
        say: function that receives lines about the form of the questions, the time, and the first
            sample.

    Returns:
        {"greedy": metrics}, and also {"sampled": metrics} if the settings request a sampled pass.

    Raises:
        ValueError: the data or the model cannot be loaded, or `allow_code` is False and code is
            needed.
        OSError: `settings.out` cannot be written. The message contains the results.
    """
    passes = _evaluate_all([model], settings, allow_code, say)
    metrics = {mode: results[0].metrics for mode, results in passes.items()}
    _save(metrics, settings.out, table(metrics))
    return metrics


def compare_models(
    first: str,
    second: str,
    settings: EvalSettings,
    *,
    allow_code: bool = False,
    say: Say = say_nothing,
) -> dict[str, dict[str, Paired]]:
    """Compare two models on the same questions with the same random numbers.

    If `first` is a run, its configuration selects the questions for both models. The other
    arguments and the errors are the same as for `run_eval`.

    Returns:
        {"greedy": {metric: comparison}}, and also "sampled" if the settings request a sampled pass.
    """
    passes = _evaluate_all([first, second], settings, allow_code, say)
    compared = {
        mode: {name: paired(a.per_question[name], b.per_question[name]) for name in a.per_question}
        for mode, (a, b) in passes.items()
    }
    plain = {m: {name: x._asdict() for name, x in pairs.items()} for m, pairs in compared.items()}
    _save({**plain, "models": {"a": first, "b": second}}, settings.out, paired_table(compared))
    return compared


def _evaluate_all(
    models: Sequence[str], settings: EvalSettings, allow_code: bool, say: Say
) -> dict[str, list[EvalResult]]:
    """Load and evaluate the models one after the other.

    Returns:
        For each pass ("greedy", "sampled") the results of all models.
    """
    # 1. Complete the settings, and reject invalid settings before the slow loading of a model.
    _check_out(settings.out)
    sources = [Source.of(model) for model in models]
    recipe = recipe_of(settings, sources, allow_code)
    asked = complete(settings, recipe)
    data = data_of(settings, recipe, models)
    tasks = {source.run.data.task: source.name for source in sources if source.run}
    listed = ", ".join(f"{task} in {name}" for task, name in tasks.items())
    require(len(tasks) <= 1, "task", "two runs of one task", listed)
    configs = [source.model_config_for(asked, allow_code) for source in sources]
    examples = _examples(data, asked, configs[0])
    usual = [RewardConfig(name=name) for name in DEFAULT_REWARDS.get(data.task, ())]
    rewards = build_rewards(recipe.rewards if recipe is not None else usual)
    check_examples(rewards, examples, "test")
    scorer = functools.partial(scorer_for, data.task)
    modes: dict[str, dict[str, Any]] = {"greedy": {}}
    if asked.is_sampled:
        k = asked.k or [1 << i for i in range(asked.samples.bit_length())]
        modes["sampled"] = {"samples": asked.samples, "temperature": asked.temperature, "k": k}
    # 2. Evaluate each model in each pass.
    passes: dict[str, list[EvalResult]] = {mode: [] for mode in modes}
    for source, config in zip(sources, configs, strict=True):
        policy = loading.load_policy(config)
        policy.template_kwargs = data.template_kwargs
        asked_as = data.model_copy(update={"chat": asks_in_chat(data, policy.tokenizer)})
        questions = [in_chat(e) for e in examples] if asked_as.chat else examples
        first = questions[0].prompt
        say(f"{source.name}:", *asking_lines(asked_as, policy.tokenizer, first, "chat"))
        generate = policy_generate(policy, asked)
        texts = functools.partial(prompt_texts, policy)
        for mode, options in modes.items():
            result = evaluate(
                generate, questions, rewards, scorer, seed=asked.seed, prompt_texts=texts, **options
            )
            say(*(f"{mode}: {line}" for line in result.lines))
            passes[mode].append(result)
    return passes


def table(results: dict[str, dict[str, float]]) -> str:
    """Format the metrics as aligned lines with their standard errors."""
    lines = []
    for mode, metrics in results.items():
        n, samples = metrics["eval_n"], metrics["eval_samples"]
        lines.append(f"{mode} (n={n:.0f} questions, {samples:.0f} sample(s) each)")
        for name, value in metrics.items():
            if name + "_se" in metrics:
                shown = name.removeprefix("eval_")
                lines.append(f"  {shown:<28}{value:8.4f}{_plus_minus(metrics[name + '_se'])}")
    return "\n".join(lines)


def paired_table(results: dict[str, dict[str, Paired]]) -> str:
    """Format a comparison as aligned lines with the difference B − A, its error and its p-value."""
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
    """Format a standard error. Return "" if it is not finite, as with a single question."""
    return f" ± {error:.4f}" if math.isfinite(error) else ""


def _check_out(out: str | None) -> None:
    """Raise a ValueError if `out` cannot be written, or is not a file of evaluation results."""
    if out is None:
        return
    path = Path(out)
    came = repr(out)
    fits = path.parent.is_dir() and not path.is_dir()
    require(fits, "out", "a file in a folder that exists", came)
    fits = os.access(path if path.exists() else path.parent, os.W_OK)
    require(fits, "out", "a file that can be written", came)
    if path.is_file():
        with path.open("rb") as file:
            fits = file.read(len(RESULTS_BEGIN)) in (b"", RESULTS_BEGIN)
        require(fits, "out", "a new file or an earlier evaluation's", came)


def _save(results: dict[str, Any], out: str | None, shown: str) -> None:
    if out is None:
        return
    # The evaluation may have taken hours. If writing fails, put the results in the error message.
    try:
        text = json.dumps(plain_json(results), indent=2)
        Path(out).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(f"out: cannot write {out}: {error.strerror}\n{shown}") from error


def _examples(data: DataConfig, settings: EvalSettings, model: ModelConfig) -> Sequence[Example]:
    # Use all lines of a file that the user names. Other sources have a separate test split.
    if settings.data is not None and data.path and os.path.isfile(data.path):
        examples: Sequence[Example] = read_examples(data.path, data=data)
    else:
        counts = data.shots_tokens is not None
        count_tokens = token_counter(loading.load_tokenizer(model)) if counts else None
        examples = load_examples(data, split="test", seed=settings.seed, count_tokens=count_tokens)
    return examples[: settings.n]
