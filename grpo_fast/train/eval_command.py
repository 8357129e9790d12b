"""`grpo-fast eval`: a model, or a finished run's folder, on held-out questions, greedy and sampled."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_fast.data import Example, load_examples
from grpo_fast.data.files import read_examples
from grpo_fast.rewards import build_rewards, scorer_for
from grpo_fast.train.config import DataConfig, ModelConfig, RewardConfig, RunConfig, load_recipe
from grpo_fast.train.evaluate import evaluate, policy_generate
from grpo_fast.train.explain import nearest
from grpo_fast.train.setup import token_counter
from grpo_fast.train.yaml_file import read_yaml

DEFAULT_REWARDS = {
    "gsm8k": ("gsm8k_correct", "gsm8k_format"),
    "sort": ("sort_positions",),
    "arithmetic": ("exact_match",),
    "jsonl": ("exact_match",),
}


class EvalSettings(BaseModel):
    """The `key=value` settings of `grpo-fast eval`. A run's folder brings its own data, rewards and lengths."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    data: str | None = None  # jsonl file, folder or hub id; a run's folder brings its own
    task: Literal["sort", "arithmetic", "gsm8k", "jsonl"] | None = None
    prompt_template: str | None = None
    chat: bool = False
    n: int | None = Field(None, ge=1)  # questions; None: all
    samples: int = Field(1, ge=1)  # per question; above 1 a sampled pass follows the greedy one
    temperature: float = Field(0.7, gt=0)  # of the sampled pass
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    k: list[int] | None = None  # for pass@k and maj@k; None: 1, 2, 4, … up to samples
    max_new_tokens: int | None = Field(None, ge=1)
    batch_size: int = Field(64, ge=1)  # completions per generate call
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    seed: int = 0
    out: str | None = None  # also write the metrics to this JSON file


def parse_settings(assignments: Sequence[str]) -> EvalSettings:
    """`key=value` words as settings. Raises ValueError naming the unknown key and its nearest, or the misfit value."""
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


def run_eval(model: str, settings: EvalSettings) -> dict[str, dict[str, float]]:
    """Evaluate and return {"greedy": metrics, "sampled": metrics}, the latter with samples > 1.

    Raises ValueError for data or a model that cannot be loaded.
    """
    if settings.out and not Path(settings.out).parent.is_dir():
        raise ValueError(f"out: expected a file in a folder that exists, got {settings.out!r}")
    run = _run_config(model)
    data = _data_config(settings, run)
    path = str(Path(model) / "model") if run else model
    examples = _examples(data, settings, path)
    names = [RewardConfig(name=name) for name in DEFAULT_REWARDS[data.task]]
    rewards = build_rewards(run.rewards if run else names)
    scorer = scorer_for(data.task, [example.answer for example in examples])
    policy = _load(path, settings)
    length = settings.max_new_tokens or (run.rollout.max_new_tokens if run else 256)
    generate = policy_generate(
        policy, max_new_tokens=length, top_p=settings.top_p, top_k=settings.top_k, batch_size=settings.batch_size
    )
    common: dict[str, Any] = {"seed": settings.seed}
    results = {"greedy": evaluate(generate, examples, rewards, scorer, **common).metrics}
    if settings.samples > 1:
        k = settings.k or [1 << i for i in range(settings.samples.bit_length())]
        common |= {"samples": settings.samples, "temperature": settings.temperature, "k": k}
        results["sampled"] = evaluate(generate, examples, rewards, scorer, **common).metrics
    if settings.out:
        finite = {mode: {n: v if math.isfinite(v) else None for n, v in m.items()} for mode, m in results.items()}
        Path(settings.out).write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    """The metrics as aligned lines, value ± one standard error."""
    lines = []
    for mode, metrics in results.items():
        lines.append(f"{mode} (n={metrics['eval_n']:.0f} questions, {metrics['eval_samples']:.0f} sample(s) each)")
        for name, value in metrics.items():
            if name + "_se" in metrics:
                lines.append(f"  {name.removeprefix('eval_'):<28}{value:8.4f} ± {metrics[name + '_se']:.4f}")
    return "\n".join(lines)


def _run_config(model: str) -> RunConfig | None:
    """The configuration of a run, when `model` is the folder of one."""
    folder = Path(model)
    if (folder / "config.yaml").is_file() and (folder / "model").is_dir():
        return load_recipe(str(folder / "config.yaml"), [])
    return None


def _data_config(settings: EvalSettings, run: RunConfig | None) -> DataConfig:
    fields: dict[str, Any] = run.data.model_dump() if run else {"task": "gsm8k"}
    if settings.data is not None:
        local = Path(settings.data).expanduser().exists() or settings.data.endswith(".jsonl")
        fields |= {"path": settings.data if local else None, "name": None if local else settings.data}
    for name in ("task", "prompt_template"):
        value = getattr(settings, name)
        if value is not None:
            fields[name] = value
    fields["chat"] = fields.get("chat", False) or settings.chat
    if fields["task"] in ("gsm8k", "jsonl") and not (fields.get("path") or fields.get("name")):
        whose = "for a model that is not a run's folder" if run is None else f"with task={fields['task']}"
        raise ValueError(f"data: expected data=<jsonl file, folder or hub id> {whose}, got nothing")
    try:
        return DataConfig.model_validate(fields)
    except ValidationError as error:
        raise ValueError("; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())) from None


def _examples(data: DataConfig, settings: EvalSettings, model: str) -> Sequence[Example]:
    if settings.data is not None and data.path and Path(data.path).is_file():  # a file given by name is asked in full
        template = data.prompt_template
        examples: Sequence[Example] = read_examples(
            data.path, gsm8k=data.task == "gsm8k", prompt_template=template, chat=data.chat, system=data.system_prompt
        )
    else:
        count_tokens = None if data.shots_tokens is None else token_counter(_tokenizer(model))
        examples = load_examples(data, split="test", seed=settings.seed, count_tokens=count_tokens)
    return examples[: settings.n]


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _load(path: str, settings: EvalSettings) -> Any:
    from grpo_fast.train.policy import load_policy

    return load_policy(ModelConfig(path=path, dtype=settings.dtype, device=settings.device))


def _explain(error: Any) -> str:
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key" + nearest(key, list(EvalSettings.model_fields))
    return f"{key}: {error['msg']}, got {error['input']!r}"
