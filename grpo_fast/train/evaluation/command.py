"""The command `grpo-fast eval`, which evaluates a model on held-out questions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.data import FILES
from grpo_fast.data.splits import Splits
from grpo_fast.errors import require
from grpo_fast.rewards import build_rewards, check_examples
from grpo_fast.rewards.columns import usable
from grpo_fast.train import folder
from grpo_fast.train.config import DataConfig, EvalConfig, ModelConfig, RunConfig, Section, UserPath
from grpo_fast.train.config.recipes import load_recipe, load_saved
from grpo_fast.train.config.words import apply_words, recipe_in, split_word, validated
from grpo_fast.train.evaluation.evaluate import evaluate
from grpo_fast.train.evaluation.questions import asking_lines
from grpo_fast.train.models import loading

DEFAULT_REWARDS = {"gsm8k": ["gsm8k_correct", "gsm8k_format"], "sort": ["sort_positions"]}
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


# -------------------------------------------------------------------------------------- The command
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
    policy = loading.load_policy(config.model)
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
