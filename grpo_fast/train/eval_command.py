"""`grpo-fast eval`: a model, or a finished run's folder, on held-out questions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from grpo_fast.data import Example, is_local, load_examples, read_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.rewards import build_rewards, check_examples, scorer_for
from grpo_fast.train import loading
from grpo_fast.train.config import (
    DataConfig,
    HeldOut,
    ModelConfig,
    Positive,
    RewardConfig,
    RunConfig,
    UserPath,
    home_path,
)
from grpo_fast.train.evaluate import evaluate, policy_generate
from grpo_fast.train.settings import load_recipe, nearest, quoted, read_yaml

DEFAULT_REWARDS = {
    "gsm8k": ("gsm8k_correct", "gsm8k_format"),
    "sort": ("sort_positions",),
    "arithmetic": ("exact_match",),
    "jsonl": ("exact_match",),
}

RESULTS_BEGIN = b'{\n  "greedy": {'  # how `out` begins: another file is not overwritten


class EvalSettings(HeldOut):
    """The `key=value` settings of `grpo-fast eval`.

    A run's folder brings its own data, rewards and lengths. With more than one sample per question
    a sampled pass follows the greedy one.
    """

    data: UserPath | None = None  # jsonl file, folder or hub id
    task: Literal["sort", "arithmetic", "gsm8k", "jsonl"] | None = None
    prompt_template: str | None = None
    chat: bool = False
    temperature: float = Field(0.7, gt=0)  # of the sampled pass
    k: list[int] | None = None  # for pass@k and maj@k; None: 1, 2, 4, … up to samples
    batch_size: Positive = 64
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    seed: int = 0
    out: UserPath | None = None  # also write the metrics to this JSON file


def parse_settings(assignments: Sequence[str]) -> EvalSettings:
    """`key=value` words as settings. Raises ValueError naming the unknown key or misfit value."""
    given: dict[str, Any] = {}
    for word in assignments:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ValueError(f"expected key=value, got {word!r}")
        given[key] = read_yaml(value, key)
    if "k" in given and given["k"] is not None and not isinstance(given["k"], list):
        given["k"] = str(given["k"]).split(",")  # k=1,4,8
    try:
        settings = EvalSettings.model_validate(given)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(e) for e in error.errors())) from None
    for size in settings.k or ():
        if not 1 <= size <= settings.samples:
            raise ValueError(f"k: expected values from 1 to samples={settings.samples}, got {size}")
    return settings


def run_eval(
    model: str, settings: EvalSettings, *, allow_code: bool = False
) -> dict[str, dict[str, float]]:
    """Evaluate and return {"greedy": metrics, "sampled": metrics}, the latter with samples > 1.

    Args:
        model: a model's folder or hub id, or the folder of a finished run.
        allow_code: run code that such a folder brings along: rewards by import path, and the
            model's own classes (of a run, if its configuration says `trust_remote_code`).

    Raises:
        ValueError: data or a model that cannot be loaded, or code that was not allowed.
        OSError: `settings.out` cannot be written after all; the message holds the results.
    """
    _check_out(settings.out)
    run = _run_config(home_path(model), allow_code)
    data = _data_config(settings, run)
    source = ModelConfig(
        path=os.path.join(model, "model") if run else model,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=allow_code and (run is None or run.model.trust_remote_code),
    )
    examples = _examples(data, settings, source)
    names = [RewardConfig(name=name) for name in DEFAULT_REWARDS[data.task]]
    rewards = build_rewards(run.rewards if run else names)
    check_examples(rewards, examples, "test")
    scorer = scorer_for(data.task, [e.answer for e in examples if e.answer is not None])
    length = settings.max_new_tokens or (run.rollout.max_new_tokens if run else 256)
    sampling = settings.model_copy(update={"max_new_tokens": length})
    generate = policy_generate(loading.load_policy(source), sampling)
    common: dict[str, Any] = {"seed": settings.seed}
    results = {"greedy": evaluate(generate, examples, rewards, scorer, **common).metrics}
    if settings.samples > 1:
        k = settings.k or [1 << i for i in range(settings.samples.bit_length())]
        common |= {"samples": settings.samples, "temperature": settings.temperature, "k": k}
        results["sampled"] = evaluate(generate, examples, rewards, scorer, **common).metrics
    if settings.out is not None:
        _save(results, settings.out)
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    """The metrics as aligned lines, value ± one standard error."""
    lines = []
    for mode, metrics in results.items():
        n, samples = metrics["eval_n"], metrics["eval_samples"]
        lines.append(f"{mode} (n={n:.0f} questions, {samples:.0f} sample(s) each)")
        for name, value in metrics.items():
            if name + "_se" in metrics:
                shown, error = name.removeprefix("eval_"), metrics[name + "_se"]
                spread = f" ± {error:.4f}" if math.isfinite(error) else ""  # of one question: none
                lines.append(f"  {shown:<28}{value:8.4f}{spread}")
    return "\n".join(lines)


def _check_out(out: str | None) -> None:
    """Refuse a place that cannot be written to before there is anything to write."""
    if out is None:
        return
    folder = os.path.dirname(out) or "."
    if not os.path.isdir(folder) or os.path.isdir(out):
        raise ValueError(f"out: expected a file in a folder that exists, got {out!r}")
    if not os.access(out if os.path.exists(out) else folder, os.W_OK):
        raise ValueError(f"out: expected a file that can be written, got {out!r}")
    if os.path.isfile(out):
        with open(out, "rb") as file:
            begins = file.read(len(RESULTS_BEGIN))
        if begins not in (b"", RESULTS_BEGIN):
            raise ValueError(f"out: expected a new file or an earlier evaluation's, got {out!r}")


def _save(results: dict[str, dict[str, float]], out: str) -> None:
    """The metrics as JSON; those that are not finite are null."""
    finite = {
        mode: {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        for mode, metrics in results.items()
    }
    try:
        Path(out).write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(f"out: cannot write {out}: {error.strerror}\n{table(results)}") from error


def _run_config(model: str, allow_code: bool) -> RunConfig | None:
    """The configuration, when `model` is a run's folder; refused where it names code to import."""
    file = os.path.join(model, "config.yaml")
    if not (os.path.isfile(file) and os.path.isdir(os.path.join(model, "model"))):
        return None
    run = load_recipe(file, [])
    for reward in run.rewards:
        if ":" in reward.name and not allow_code:
            raise ValueError(
                f"rewards: expected built-in ones in {file}, got {reward.name!r}, whose code "
                "would be run; --allow-code allows that to a folder that you trust"
            )
    return run


def _data_config(settings: EvalSettings, run: RunConfig | None) -> DataConfig:
    fields: dict[str, Any] = run.data.model_dump() if run else {"task": "gsm8k"}
    if settings.data is not None:
        kind = "path" if is_local(settings.data) else "name"
        fields |= {"path": None, "name": None, kind: settings.data}
    for name in ("task", "prompt_template"):
        value = getattr(settings, name)
        if value is not None:
            fields[name] = value
    fields["chat"] = fields.get("chat", False) or settings.chat
    if fields["task"] in ("gsm8k", "jsonl") and not (fields.get("path") or fields.get("name")):
        whose = f"with task={fields['task']}" if run else "for a model that is not a run's folder"
        raise ValueError(f"data: expected data=<jsonl file, folder or hub id> {whose}, got nothing")
    try:
        return DataConfig.model_validate(fields)
    except ValidationError as error:
        reasons = (e["msg"].removeprefix("Value error, ") for e in error.errors())
        raise ValueError("; ".join(reasons)) from None


def _examples(data: DataConfig, settings: EvalSettings, model: ModelConfig) -> Sequence[Example]:
    # A file given by name is asked in full.
    if settings.data is not None and data.path and os.path.isfile(data.path):
        examples: Sequence[Example] = read_examples(
            data.path, gsm8k=data.task == "gsm8k", prompt_template=data.prompt_template,
            chat=data.chat, system=data.system_prompt,
        )  # fmt: skip
    else:
        counts = data.shots_tokens is not None
        count_tokens = token_counter(loading.load_tokenizer(model)) if counts else None
        examples = load_examples(data, split="test", seed=settings.seed, count_tokens=count_tokens)
    return examples[: settings.n]


def _explain(error: Any) -> str:
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key" + nearest(key, list(EvalSettings.model_fields))
    return f"{key}: {error['msg']}, got {quoted(error['input'])}"
