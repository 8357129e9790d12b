"""`grpo-fast doctor`: self-tests, a rollout engine against the trainer, and the report of both."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from grpo_fast.data import escape_control, load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose
from grpo_fast.doctor.recompute import BAND
from grpo_fast.doctor.selftest import Check, self_checks
from grpo_fast.doctor.settings import Words
from grpo_fast.rollout import build_engine
from grpo_fast.train.config import RunConfig
from grpo_fast.train.files import plain_json
from grpo_fast.train.models.loading import build_tokenizer, load_policy

NUMBERS = "error", "allowed", "nats per token", "before", "without it"  # columns of the tables


class Report(NamedTuple):
    """Self-tests and, where a model was given, what its engine does."""

    checks: Sequence[Check]
    title: str = ""  # the engine and the model
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks) and (
            self.diagnosis is None or self.diagnosis.ok
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite are null."""
        checks = [{**check._asdict(), "ok": check.ok} for check in self.checks]
        diagnosis = self.diagnosis
        told = None if diagnosis is None else {
            **diagnosis._asdict(), "ok": diagnosis.ok,
            "causes": [x._asdict() for x in diagnosis.causes],
            "own_noise": [x._asdict() for x in diagnosis.own_noise],
        }  # fmt: skip
        return plain_json({"ok": self.ok, "checks": checks, "title": self.title, "diagnosis": told})


def show(report: Report, *, as_json: bool) -> None:
    """Print a report: tables, or one JSON object."""
    from rich.console import Console

    if as_json:
        print(json.dumps(report.as_json()))
        return
    tables = [_checks(report.checks)] if report.checks else []
    if report.diagnosis is not None:
        tables += [_summary(report.title, report.diagnosis), _causes(report.diagnosis)]
    for table in tables:
        Console().print(table)


def _checks(checks: Sequence[Check]) -> Any:
    table = _table("This machine", "self-test", "error", "allowed", "")
    for check in checks:
        row = ["—", "—", "not here"]
        if check.error is not None:
            row = [_short(check.error), _short(check.bound), "ok" if check.ok else "FAILED"]
        name = f"{check.name}: {check.note}" if check.note else check.name
        table.add_row(escape_control(name), *row)
    return table


def _summary(title: str, diagnosis: Diagnosis) -> Any:
    table = _table(escape_control(title), "engine against trainer", "nats per token", "")
    allowed = f"{'ok' if diagnosis.ok else 'TOO MUCH'}, allowed {diagnosis.threshold:.1e}"
    table.add_row(f"mean difference of {diagnosis.tokens} tokens", f"{diagnosis.mean:.2e}", allowed)
    table.add_row("largest", f"{diagnosis.largest:.2e}", "")
    table.add_row("the trainer's forward pass from the model's own", f"{diagnosis.own:.2e}", "")
    for noise in diagnosis.own_noise:
        what = f"the trainer's own noise in {noise.dtype}: the same tokens in other packs"
        outside = f"{noise.share:.2%} of ratios leave [{BAND[0]}, {BAND[1]}]"
        table.add_row(what, f"{noise.mean:.2e}", outside)
    return table


def _causes(diagnosis: Diagnosis) -> Any:
    table = _table("", "cause", "before", "without it", "what to change")
    for cause in diagnosis.causes:
        advice = escape_control(cause.advice)
        table.add_row(cause.name, f"{cause.before:.2e}", f"{cause.after:.2e}", advice)
    table.add_row("what is left", f"{diagnosis.left:.2e}", "", diagnosis.rest)
    return table


def _table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE)
    for name in columns:
        is_number = name in NUMBERS
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _short(number: float) -> str:
    return f"{number:.1e}" if number else "0"


def examine(words: Sequence[str]) -> Report:
    """Run the self-tests and, where the words name a model, examine its engine.

    Raises:
        ValueError: words, a model, data or an engine that cannot be used.
        RuntimeError, NonFiniteLogits: an engine that answers no completions.
    """
    asked = Words(words)
    # The engine first: a typing mistake or a server that is gone is told at once.
    with _working("a rollout against the trainer"):
        diagnosis = None if asked.config is None else examine_engine(asked)
    with _working("self-tests of this machine, about a minute"):
        checks = self_checks() if asked.own.self_tests else []
    if diagnosis is None:
        return Report(checks)
    title = f"{asked.config.rollout.engine}: {asked.model or asked.own.recipe}"
    return Report(checks, title, diagnosis)


def _working(what: str) -> Any:
    from rich.console import Console

    return Console(stderr=True).status(what)  # nothing where stderr is no terminal


def examine_engine(asked: Words) -> Diagnosis:
    """Sample some prompts of the configuration with its engine, and explain the difference."""
    config, own = asked.config, asked.own
    torch.manual_seed(config.seed)
    policy, prompts = _policy_and_prompts(config, own.n)
    earlier = asked.previous_config()
    previous = None if earlier is None else load_policy(earlier, policy.tokenizer)
    with build_engine(policy, config.rollout) as engine:
        return diagnose(
            policy, engine, prompts, asked.sampling, group_size=own.samples, seed=config.seed,
            version=int(time.time()),  # no weights that a server has met before have this one
            temperature=float(config.loss_config().temperature), previous=previous,
            threshold=own.threshold, uses_kept=config.rollout.wants_kept,
        )  # fmt: skip


def _policy_and_prompts(config: RunConfig, count: int) -> tuple[Any, list[Any]]:
    plain = config.data.model_copy(update={"shots_tokens": None})
    questions = load_examples(plain, split="train", seed=config.seed)
    policy = load_policy(config.model, build_tokenizer(config.model, config.data, questions))
    counted = token_counter(policy.tokenizer)
    examples = load_examples(config.data, split="train", seed=config.seed, count_tokens=counted)
    return policy, [example.prompt for example in examples[:count]]
