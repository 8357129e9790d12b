"""`grpo-fast doctor`: self-tests of this machine, or a rollout engine against the trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from pydantic import Field

from grpo_fast.data import escape_control
from grpo_fast.data.splits import Splits
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose
from grpo_fast.doctor.recompute import HIGHEST, LOWEST
from grpo_fast.doctor.selftest import Check, self_checks
from grpo_fast.errors import conflict
from grpo_fast.rollout import EngineName, build_engine
from grpo_fast.train.config import RunConfig, Section, require
from grpo_fast.train.config.recipes import read_recipe
from grpo_fast.train.config.words import nearest, own_words, read_words
from grpo_fast.train.evaluation.settings import Source
from grpo_fast.train.files import plain_json
from grpo_fast.train.models.loading import build_tokenizer, load_policy

PATIENCE = 10  # seconds to wait for a server that does not answer
OF_A_RUN = {"dtype", "autocast", "attn"}  # of a run's `model`: how it is loaded, but not its code


class DoctorSettings(Section):
    """The doctor's own settings. Every other `key=value` belongs to the run's configuration."""

    recipe: str | None = None  # a recipe's name or a YAML file: its data, sampling and model
    n: int = Field(8, ge=1, le=1 << 10)  # prompts
    samples: int = Field(2, ge=1, le=1 << 10)  # completions of each prompt
    tokens: int = Field(32, ge=1, le=1 << 10)  # longest completion; its logits are in memory
    threshold: float | None = Field(None, ge=0)  # nats per token; None: the dtype's noise


@dataclass(frozen=True)
class Report:
    """What the command found."""

    checks: list[Check]
    title: str = ""  # the engine and the model
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        is_near = self.diagnosis is None or self.diagnosis.ok
        return is_near and all(check.ok for check in self.checks)


def show(report: Report, *, as_json: bool) -> None:
    """Print a report: text, or one JSON object, in which numbers that are not finite are null."""
    if as_json:
        found = report.diagnosis.causes if report.diagnosis else []
        advice = [cause.advice for cause in found]
        print(json.dumps(plain_json({"ok": report.ok, **asdict(report), "advice": advice})))
        return
    for check in report.checks:
        word = "skipped" if check.error is None else "ok" if check.ok else "FAILED"
        numbers = "" if check.error is None else f"{check.error:.1e} (allowed {check.bound:.1e})"
        print(escape_control(f"{word:8} {check.name} {numbers} {check.note}"))
    if report.diagnosis is not None:
        print(escape_control(f"Engine against trainer, {report.title}, in nats per token"))
        for line in _lines(report.diagnosis):
            print(escape_control(line))


def _lines(found: Diagnosis) -> Iterator[str]:
    verdict = "ok" if found.mean <= found.threshold else "TOO MUCH"
    allowed = f"{verdict}, allowed {found.threshold:.1e}"
    yield f"{found.mean:.2e}  mean of {found.tokens} tokens: {allowed}"
    yield f"{found.largest:.2e}  largest"
    yield f"{found.own:.2e}  the trainer against the model's own forward pass"
    for noise in found.own_noise:
        share = f"{noise.share:.2%} of ratios outside [{LOWEST}, {HIGHEST}]"
        yield f"{noise.mean:.2e}  the trainer against itself, {noise.dtype}: {share}"
    for cause in found.tried:
        yield f"{cause.left:.2e}  left by {cause.name}: {cause.what}"
    for cause in found.causes:
        yield f"Cause: {cause.name}. What happens: {cause.advice}"
    if found.mean > found.noise and not found.causes:
        yield "Cause: not found among those that were tried."


def examine(words: Sequence[str]) -> Report:
    """Compare an engine with the trainer; without a model or a recipe, run the self-tests.

    Raises:
        ValueError: for words, a model, data or an engine that cannot be used.
        RuntimeError: for an engine that does not answer with completions.
    """
    from rich.console import Console

    model, own, config = read(words)
    working = Console(stderr=True).status  # shows nothing if stderr is not a terminal
    if config is None:
        with working("self-tests of this machine, about a minute"):
            return Report(self_checks())
    with working("a rollout against the trainer"):
        title = f"{config.rollout.engine}: {model or own.recipe}"
        return Report([], title, examine_engine(own, config))


def examine_engine(own: DoctorSettings, config: RunConfig) -> Diagnosis:
    """Compare the engine of a configuration with the trainer."""
    torch.manual_seed(config.seed)
    splits = Splits(config.data, config.seed)
    policy = load_policy(config.model, build_tokenizer(config.model, splits))
    policy.template_kwargs = config.data.template_kwargs
    examples = splits.for_tokenizer(policy.tokenizer).with_shots(policy.tokenizer).train[: own.n]
    length = min(config.rollout.max_new_tokens, own.tokens)
    with build_engine(policy, config.rollout) as engine:
        return diagnose(
            policy, engine, [example.prompt for example in examples],
            config.rollout.model_copy(update={"max_new_tokens": length}),
            group_size=own.samples, seed=config.seed,
            version=int(time.time()),  # different from the versions that a server has seen
            temperature=float(config.loss_config().temperature),
            uses_kept=config.rollout.needs_support, threshold=own.threshold,
        )  # fmt: skip


def read(words: Sequence[str]) -> tuple[str | None, DoctorSettings, RunConfig | None]:
    """Return the model, the doctor's settings, and the configuration; None without a model.

    Raises:
        ValueError: for a word of no kind, or a configuration that does not fit.
    """
    # 1. The kind of each word.
    engines = [word for word in words if word in get_args(EngineName)]
    urls = [word for word in words if word.startswith(("http://", "https://"))]
    settings = [word for word in words if "=" in word and word not in urls]
    models = [word for word in words if word not in {*engines, *urls, *settings}]
    for kind, found in {"model": models, "url": urls, "engine": engines}.items():
        require(len(found) <= 1, kind, "one at most", ", ".join(found))
    own, rest = own_words(DoctorSettings, settings)
    rest = [f"rollout.engine={name}" for name in engines] + rest
    if urls:
        server = {"rollout.engine": "vllm-server", "rollout.vllm.urls": json.dumps(urls),
                  "rollout.vllm.patience": PATIENCE}  # fmt: skip
        rest = [f"{key}={value}" for key, value in server.items()] + rest
    # 2. Prompts and sampling: the recipe's, the run's, or built-in ones.
    source = Source.of(models[0]) if models else None
    if own.recipe is not None:
        fields = read_recipe(own.recipe)
    elif source is None:
        first = [*rest, *settings, ""][0]
        near = nearest(first.partition("=")[0], list(DoctorSettings.model_fields))
        if first:
            raise conflict("model=none", first, f"it needs a folder, a hub id or recipe=NAME{near}")
        return None, own, None
    elif source.run is not None:
        fields = source.run.model_dump(mode="json", exclude_unset=True)
    else:  # a temperature other than 1 shows whether the engine loses it
        fields = {"data": {"task": "open"}, "rewards": [{"name": "exact_match"}],
                  "rollout": {"temperature": 0.8}}  # fmt: skip
    # 3. The model, and the engine: a different one has no use for the servers of the run.
    if source is not None:
        loading = source.run.model.model_dump(include=OF_A_RUN) if source.run else {}
        fields["model"] = {"path": source.path, **loading}
    if any(word.startswith("rollout.engine=") and "server" not in word for word in rest):
        servers: dict[str, Any] = (fields.get("rollout") or {}).get("vllm") or {}
        servers.pop("urls", None)
    config = read_words(RunConfig, rest, fields, DoctorSettings.model_fields)
    return next(iter(models), None), own, config
