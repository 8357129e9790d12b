"""The page completions.html: what a run wrote and what it was worth, in one file without scripts.

The texts of models and data are escaped, and a Content-Security-Policy allows the page its own
style sheet and nothing more: no script, no picture, no address.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from grpo_fast.data import escape_control
from grpo_fast.train.report.lines import shown_number

LONGEST_TEXT = 4000  # characters of a prompt or an answer; of a longer one both ends are shown
LONGEST_TOKENS = 1200  # tokens of a completion; of a longer one both ends are shown
LOGP_STEP = 0.5  # nats for each shade of surprise
LOGP_LEVELS = 8
ADVANTAGE_LEVELS = 4  # shades up to the step's largest advantage, in both directions
LEAST_STEPS = 4  # steps that have room: one step takes at most a fourth of the page

Row = Mapping[str, Any]  # see `grpo_fast.train.report.samples.rows_of`


class Part(NamedTuple):
    """One step of the page."""

    place: int  # among all steps that were added
    step: int
    html: str


class CompletionsPage:
    """The page of a run, of a bounded size.

    When the steps no longer fit, every second one stays, then every fourth, and so on; the latest
    one always stays.

    Args:
        path: The file of the page.
        title: The name of the run.
        most: The largest size of the file in bytes.
    """

    def __init__(self, path: str | Path, title: str, most: int = 8 << 20) -> None:
        self.path = Path(path)
        self.title = title
        self.most = most
        self.parts: list[Part] = []
        self.added = 0
        self.every = 1

    def add(self, step: int, rows: Sequence[Row]) -> None:
        """Add the rows of a step, and write the page."""
        # The latest step of the previous call stays only if its place is a multiple of `every`.
        self.parts = [part for part in self.parts if part.place % self.every == 0]
        self.parts.append(Part(self.added, step, step_html(step, rows, self.most // LEAST_STEPS)))
        self.added += 1
        while len((page := self.html()).encode()) > self.most and len(self.parts) > 1:
            self.every *= 2
            *before, latest = self.parts
            self.parts = [part for part in before if part.place % self.every == 0] + [latest]
        unfinished = self.path.with_name(self.path.name + ".tmp")
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, self.path)

    def html(self) -> str:
        """Return the page with the steps that it holds."""
        left_out = self.added - len(self.parts)
        template = TEMPLATES.get_template("page.html")
        return template.render(digest=DIGEST, title=self.title, left_out=left_out, parts=self.parts)


def step_html(step: int, rows: Sequence[Row], most: int) -> str:
    """Return the HTML of a step, without the last completions if they exceed `most` bytes."""
    rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
    advantages = [abs(a) for row in rows for a in row["advantages"] if math.isfinite(a)]
    largest = max(advantages, default=0.0)
    template = TEMPLATES.get_template("step.html")
    shown = len(rows)
    while True:
        groups = [
            sorted(members, key=_worth, reverse=True)
            for _, members in groupby(rows[:shown], key=lambda row: row["group"])
        ]
        html = template.render(
            step=step, count=len(rows), mean=mean, groups=groups, largest=largest,
            left_out=len(rows) - shown,
        )  # fmt: skip
        if shown == 0 or len(html.encode()) <= most:
            return html
        shown = shown * 3 // 4


def _worth(row: Row) -> float:
    return -math.inf if math.isnan(row["reward"]) else row["reward"]


def has_fixed_length(row: Row) -> bool:
    """Return whether completion and answer have a symbol per token, so that none is cut off."""
    symbols = len((row["answer"] or "").split())
    return symbols == len(row["completion"].split()) == len(row["tokens"])


def shaded_tokens(row: Row, largest: float) -> Iterator[dict[str, Any]]:
    """Yield the class, the numbers and the text of each token, and `hidden` for the middle.

    Args:
        row: A completion.
        largest: The largest absolute advantage of the step.
    """
    half = LONGEST_TOKENS // 2
    hidden = len(row["tokens"]) - LONGEST_TOKENS
    tokens = zip(row["tokens"], row["logps"], row["advantages"], strict=True)
    for place, (text, logp, advantage) in enumerate(tokens):
        if hidden > 0 and place == half:
            yield {"hidden": hidden}
        is_hidden = half <= place < half + hidden
        if text and not is_hidden:  # no text: the beginning of a character
            numbers = shown_number(logp, "{:.3f}"), shown_number(advantage, "{:+.3g}")
            yield {
                "shade": _shade(logp, advantage, largest), "text": text,
                "title": f"logp {numbers[0]} advantage {numbers[1]}",
            }  # fmt: skip


def _shade(logp: float, advantage: float, largest: float) -> str:
    """Return the classes of a token: p1 to p8 by surprise, u1 to u4 or d1 to d4 by advantage."""
    classes = []
    surprise = int(min(LOGP_LEVELS, max(0.0, -logp) / LOGP_STEP))
    if surprise:
        classes.append(f"p{surprise}")
    if largest > 0 and math.isfinite(advantage) and advantage:
        level = math.ceil(ADVANTAGE_LEVELS * abs(advantage) / largest)
        classes.append(f"{'u' if advantage > 0 else 'd'}{level}")
    return " ".join(classes)


def harmless(text: str) -> str:
    """Return a text without control characters, of a long one both ends."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        hidden = len(text) - LONGEST_TEXT
        text = f"{text[:half]}\n… {hidden} characters …\n{text[-half:]}"
    return escape_control(text)


TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
TEMPLATES.filters |= {"harmless": harmless, "number": shown_number}
TEMPLATES.globals |= {"has_fixed_length": has_fixed_length, "shaded_tokens": shaded_tokens}
STYLE = (
    TEMPLATES.get_template("page.html").render().partition("<style>")[2].partition("</style>")[0]
)
DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
