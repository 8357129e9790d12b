"""`grpo-fast doctor`: self-tests, a rollout engine against the trainer, and the report of both."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from grpo_fast.data import escape_control
from grpo_fast.data.splits import Splits
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose
from grpo_fast.doctor.recompute import BAND
from grpo_fast.doctor.selftest import Check, self_checks
from grpo_fast.doctor.settings import Words
from grpo_fast.rollout import build_engine
from grpo_fast.train.files import plain_json
from grpo_fast.train.models.loading import build_tokenizer, load_policy

NUMBERS = "error", "allowed", "nats per token", "before", "without it"  # columns of the tables


class Report(NamedTuple):
    checks: Sequence[Check]
    title: str = ""  # the engine and the model
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        parts: tuple[Check | Diagnosis | None, ...] = (*self.checks, self.diagnosis)
        return all(x.ok for x in parts if x is not None)


def show(report: Report, *, as_json: bool) -> None:
    """Print a report: tables, or one JSON object, in which numbers that are not finite are null."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    if as_json:
        print(json.dumps(plain_json(_plain(report))))
        return
    tables = [_checks(report.checks)] if report.checks else []
    if report.diagnosis is not None:
        tables += [_summary(report.title, report.diagnosis), _causes(report.diagnosis)]
    for title, columns, rows in tables:
        table = Table(title=title or None, title_justify="left", box=SIMPLE)
        for name in columns:
            is_number = name in NUMBERS
            table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
        for row in rows:
            table.add_row(*row)
        Console().print(table)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not hasattr(value, "_asdict"):
        return value
    fields = {name: _plain(item) for name, item in value._asdict().items()}
    return fields | ({"ok": value.ok} if hasattr(value, "ok") else {})


Rows = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows of a table


def _checks(checks: Sequence[Check]) -> Rows:
    rows: list[tuple[str, ...]] = []
    for check in checks:
        name = escape_control(f"{check.name}: {check.note}" if check.note else check.name)
        if check.error is None:
            rows.append((name, "—", "—", "not here"))
        else:
            numbers = (f"{x:.1e}" if x else "0" for x in (check.error, check.bound))
            rows.append((name, *numbers, "ok" if check.ok else "FAILED"))
    return "This machine", ("self-test", "error", "allowed", ""), rows


def _summary(title: str, diagnosis: Diagnosis) -> Rows:
    allowed = f"{'ok' if diagnosis.ok else 'TOO MUCH'}, allowed {diagnosis.threshold:.1e}"
    rows = [
        (f"mean difference of {diagnosis.tokens} tokens", f"{diagnosis.mean:.2e}", allowed),
        ("largest", f"{diagnosis.largest:.2e}", ""),
        ("the trainer's forward pass from the model's own", f"{diagnosis.own:.2e}", ""),
    ]
    for noise in diagnosis.own_noise:
        what = f"the trainer's own noise in {noise.dtype}: the same tokens in other packs"
        outside = f"{noise.share:.2%} of ratios leave [{BAND[0]}, {BAND[1]}]"
        rows.append((what, f"{noise.mean:.2e}", outside))
    return escape_control(title), ("engine against trainer", "nats per token", ""), rows


def _causes(diagnosis: Diagnosis) -> Rows:
    rows = [
        (cause.name, f"{cause.before:.2e}", f"{cause.after:.2e}", escape_control(cause.advice))
        for cause in diagnosis.causes
    ]
    rows.append(("what is left", f"{diagnosis.left:.2e}", "", diagnosis.rest))
    return "", ("cause", "before", "without it", "what to change"), rows


def examine(words: Sequence[str]) -> Report:
    """Run the self-tests and, where the words name a model, examine its engine.

    Raises:
        ValueError: words, a model, data or an engine that cannot be used.
        RuntimeError, NonFiniteLogits: an engine that answers no completions.
    """
    from rich.console import Console

    asked, working = Words(words), Console(stderr=True).status  # nothing where there is no terminal
    # The engine first: a typing mistake or a server that is gone is told at once.
    with working("a rollout against the trainer"):
        diagnosis = None if asked.config is None else examine_engine(asked)
    with working("self-tests of this machine, about a minute"):
        checks = self_checks() if asked.own.self_tests else []
    if diagnosis is None:
        return Report(checks)
    title = f"{asked.config.rollout.engine}: {asked.model or asked.own.recipe}"
    return Report(checks, title, diagnosis)


def examine_engine(asked: Words) -> Diagnosis:
    config, own = asked.config, asked.own
    torch.manual_seed(config.seed)
    splits = Splits(config.data, config.seed)
    policy = load_policy(config.model, build_tokenizer(config.model, splits))
    policy.template_kwargs = config.data.template_kwargs
    examples = splits.asked_of(policy.tokenizer).with_shots(policy.tokenizer).train[: own.n]
    prompts = [example.prompt for example in examples]
    earlier = asked.previous_config()
    previous = None if earlier is None else load_policy(earlier, policy.tokenizer)
    with build_engine(policy, config.rollout) as engine:
        return diagnose(
            policy, engine, prompts, asked.sampling, group_size=own.samples, seed=config.seed,
            version=int(time.time()),  # no weights that a server has met before have this one
            temperature=float(config.loss_config().temperature), previous=previous,
            threshold=own.threshold, uses_kept=config.rollout.wants_kept,
        )  # fmt: skip
