"""`grpo-fast audit RUN`: what became of each prompt that a run has drawn.

Its prompts.jsonl has a line for each prompt of the finished steps, its newest checkpoint knows
those of a step that is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from grpo_fast.data import escape_control, reason
from grpo_fast.train.collect.groups import PromptRecord
from grpo_fast.train.runs.checkpoint import newest
from grpo_fast.train.runs.state import read_state

FATES = {"kept": "trained", "filled": "trained (filled in)", "dropped": "dropped"}
WAITING = "drawn and not yet trained"


class Fate(NamedTuple):
    place: int
    prompt: int
    step: int
    fate: str


class Audit(NamedTuple):
    """All drawings of a run, and where the order was broken."""

    fates: list[Fate]
    problems: list[str]  # prompts that were skipped or asked again
    notes: list[str]  # damaged checkpoints

    def lines(self) -> Iterator[str]:
        for one in self.fates:
            when = f"at step {one.step}" if one.fate != WAITING else f"step {one.step} is under way"
            yield f"prompt {one.prompt}: {one.fate}, {when}"
        counted = Counter(one.fate for one in self.fates)
        total = ", ".join(f"{number} {fate}" for fate, number in counted.items())
        yield f"{len(self.fates)} prompts drawn: {total or 'none'}"
        yield from (escape_control(note) for note in self.notes)
        yield from self.problems
        if not self.problems:
            yield "no prompt was skipped, none was repeated out of turn"


def audit(run: str | Path) -> Audit:
    """Follow the prompts of a run's folder; ValueError without a prompts.jsonl to be read."""
    folder, notes = Path(run), list[str]()
    rows = _rows(folder / "prompts.jsonl")
    checkpoint = newest(folder, notes.append)
    state = None if checkpoint is None else read_state(checkpoint)
    drawn = [(row, FATES[row.use]) for row in rows]
    step = None if state is None else state.underway
    if step is not None and step.collected and all(row.step < step.number for row in rows):
        ends = {"dropped": FATES["dropped"]}
        drawn += [(row, ends.get(row.use, WAITING)) for row in step.collected.prompts]
    fates = [Fate(i, row.prompt, row.step, fate) for i, (row, fate) in enumerate(drawn)]
    size = None if state is None else state.training_set
    return Audit(fates, list(_problems(fates, size)), notes)


def _problems(fates: list[Fate], size: int | None) -> Iterator[str]:
    """A sentence for each prompt that is not the next one of the training set; `size` is that
    set's, and where it is not known a prompt 0 may follow any other.
    """
    for before, now in zip([None, *fates], fates, strict=False):
        expected = 0 if before is None else before.prompt + 1
        if size is not None:
            expected %= size
        if now.prompt != expected and not (size is None and now.prompt == 0):
            expectation = f"place {now.place}: expected prompt {expected}, found {now.prompt}"
            yield f"{expectation} (step {now.step})"


def _rows(file: Path) -> list[PromptRecord]:
    record = TypeAdapter(PromptRecord)
    try:
        return [record.validate_json(line) for line in file.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:  # pydantic's own among them
        expected = "expected a run's folder with a prompts.jsonl that can be read"
        raise ValueError(f"audit: {expected}, got {file}: {reason(error)}") from error
