"""The page completions.html, which shows completions with rewards in one file without scripts.

The texts of models and data are escaped. The Content-Security-Policy of the page allows only its
inline style sheet, and blocks scripts, images and network requests.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from grpo_fast.data import escape_control
from grpo_fast.train.report.lines import shown_number

LONGEST_TEXT = 4000  # characters of a prompt or answer; of longer texts both ends are shown
LONGEST_TOKENS = 1200  # tokens of a completion; of longer ones both ends are shown
LOGP_STEP = 0.5  # nats for each shade of surprise
LOGP_LEVELS = 8
ADVANTAGE_LEVELS = 4  # shades for each sign; the strongest is the step's largest advantage
MOST_STEPS = 16  # steps on the page: the first one and the latest ones
MOST_COMPLETIONS = 16  # completions of a step

Row = Mapping[str, Any]  # see `grpo_fast.train.report.samples.rows_of`


class CompletionsPage:
    """The completions page of a run, which shows the first step and the latest ones.

    Args:
        path: path of the page.
        title: name of the run.
    """

    def __init__(self, path: str | Path, title: str) -> None:
        self.path = Path(path)
        self.title = title
        self.parts: list[tuple[int, str]] = []  # number and HTML of each step

    def add(self, step: int, rows: Sequence[Row]) -> None:
        """Add the rows of a step to the page and write the file."""
        self.parts.append((step, step_html(step, rows)))
        if len(self.parts) > MOST_STEPS:
            del self.parts[1]
        template = TEMPLATES.get_template("page.html")
        page = template.render(digest=DIGEST, title=self.title, parts=self.parts)
        unfinished = self.path.with_name(self.path.name + ".tmp")
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, self.path)


def step_html(step: int, rows: Sequence[Row]) -> str:
    """Return the HTML of a step with its first completions, sorted by reward in each group."""
    rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
    advantages = [abs(a) for row in rows for a in row["advantages"] if math.isfinite(a)]
    groups = [
        sorted(members, key=_worth, reverse=True)
        for _, members in groupby(rows[:MOST_COMPLETIONS], key=lambda row: row["group"])
    ]
    return TEMPLATES.get_template("step.html").render(
        step=step, count=len(rows), mean=mean, groups=groups, largest=max(advantages, default=0.0)
    )


def _worth(row: Row) -> float:
    return -math.inf if math.isnan(row["reward"]) else row["reward"]


def has_fixed_length(row: Row) -> bool:
    """Return True if completion and gold answer have one symbol per token and equal lengths.

    Such a completion fills its length limit exactly, so the page does not call it cut off.
    """
    symbols = len((row["answer"] or "").split())
    return symbols == len(row["completion"].split()) == len(row["tokens"])


def shaded_tokens(row: Row, largest: float) -> Iterator[dict[str, Any]]:
    """Yield the data of each shown token for the template.

    Each dict has the keys `shade` (CSS classes), `title` (log-prob and advantage) and `text`. If
    the completion is long, the middle is replaced by one dict with the key `hidden`, the number of
    omitted tokens.

    Args:
        row: row of a completion.
        largest: largest absolute advantage of the step.
    """
    half = LONGEST_TOKENS // 2
    count = len(row["tokens"])
    hidden = range(half, count - half) if count > LONGEST_TOKENS else range(0)
    tokens = zip(row["tokens"], row["logps"], row["advantages"], strict=True)
    for place, (text, logp, advantage) in enumerate(tokens):
        if place == half and hidden:
            yield {"hidden": len(hidden)}
        if text and place not in hidden:  # an incomplete character has an empty text
            title = f"logp {shown_number(logp, '{:.3f}')}"
            title += f" advantage {shown_number(advantage, '{:+.3g}')}"
            yield {"shade": _shade(logp, advantage, largest), "text": text, "title": title}


def _shade(logp: float, advantage: float, largest: float) -> str:
    """Return the CSS classes of a token.

    The classes p1 to p8 stand for surprise (negative log-prob), u1 to u4 for positive and d1 to d4
    for negative advantages.
    """
    classes = []
    surprise = int(min(LOGP_LEVELS, max(0.0, -logp) / LOGP_STEP))
    if surprise:
        classes.append(f"p{surprise}")
    if largest > 0 and math.isfinite(advantage) and advantage:
        level = math.ceil(ADVANTAGE_LEVELS * abs(advantage) / largest)
        classes.append(f"{'u' if advantage > 0 else 'd'}{level}")
    return " ".join(classes)


def harmless(text: str) -> str:
    """Escape the control characters of a text. Replace the middle of a long text with a note."""
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
