"""What the doctor says: tables for people, an object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_fast.data import escape_control
from grpo_fast.doctor.diagnosis import Diagnosis
from grpo_fast.doctor.recompute import BAND
from grpo_fast.doctor.selftest import Check
from grpo_fast.train.files import plain_json


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
        found = None
        if self.diagnosis is not None:
            found = {**self.diagnosis._asdict(), "ok": self.diagnosis.ok}
            for name in ("causes", "own_noise"):
                found[name] = [row._asdict() for row in found[name]]
        told = {"ok": self.ok, "checks": checks, "title": self.title, "diagnosis": found}
        return plain_json(told)

    def tables(self) -> list[Any]:
        """As rich shows it."""
        shown = [_checks(self.checks)] if self.checks else []
        if self.diagnosis is not None:
            shown += [_summary(self.title, self.diagnosis), _causes(self.diagnosis)]
        return shown


def _checks(checks: Sequence[Check]) -> Any:
    table = _table("This machine", "self-test", "error", "allowed", "")
    for check in checks:
        missing = check.error is None
        error, allowed = ("—", "—") if missing else (_short(check.error), _short(check.bound))
        verdict = "not here" if missing else "ok" if check.ok else "FAILED"
        name = f"{check.name}: {check.note}" if check.note else check.name
        table.add_row(escape_control(name), error, allowed, verdict)
    return table


def _summary(title: str, found: Diagnosis) -> Any:
    table = _table(escape_control(title), "engine against trainer", "nats per token", "")
    verdict = "ok" if found.ok else "TOO MUCH"
    allowed = f"{verdict}, allowed {found.threshold:.1e}"
    table.add_row(f"mean difference of {found.tokens} tokens", f"{found.mean:.2e}", allowed)
    table.add_row("largest", f"{found.largest:.2e}", "")
    table.add_row("the trainer's forward pass from the model's own", f"{found.own:.2e}", "")
    for noise in found.own_noise:
        what = f"the trainer's own noise in {noise.dtype}: the same tokens in other packs"
        outside = f"{noise.share:.2%} of ratios leave [{BAND[0]}, {BAND[1]}]"
        table.add_row(what, f"{noise.mean:.2e}", outside)
    return table


def _causes(found: Diagnosis) -> Any:
    table = _table("", "cause", "before", "without it", "what to change")
    for cause in found.causes:
        numbers = (f"{cause.before:.2e}", f"{cause.after:.2e}")
        table.add_row(cause.name, *numbers, escape_control(cause.advice))
    table.add_row("what is left", f"{found.left:.2e}", "", found.rest)
    return table


def _table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE)
    for name in columns:
        is_number = name in ("error", "allowed", "nats per token", "before", "without it")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _short(number: float) -> str:
    return f"{number:.1e}" if number else "0"
