"""completions.html: what a run wrote and what it was worth, in one file that needs nothing else.

Texts of models and data are escaped, and a Content-Security-Policy allows this file's style sheet
and nothing more: no script, no picture, no address.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from grpo_fast.data import escape_control
from grpo_fast.train.report.lines import shown_number

LONGEST_TEXT, LONGEST_TOKENS = 4000, 1200  # shown of a prompt, of a completion: begin and end
LOGP_STEP, LOGP_LEVELS = 0.5, 8  # nats for each shade of surprise
ADVANTAGE_LEVELS = 4  # shades of the step's largest advantage, each way
LEAST_STEPS = 4  # that have room: one takes at most the fourth part of the page

FRAME = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
STYLE = FRAME.partition("<style>")[2].partition("</style>")[0]
DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()

Row = Mapping[str, Any]  # of `grpo_fast.train.report.samples.rows_of`


class Part(NamedTuple):
    place: int  # among all the steps that were added
    step: int
    html: str


class CompletionsPage:
    """A page of at most `most` bytes; of more steps every second stays, then every fourth, …"""

    def __init__(self, path: str | Path, title: str, most: int) -> None:
        self.path, self.title, self.most = Path(path), title, most
        self.parts: list[Part] = []  # of places that `every` divides, and of the latest one
        self.added, self.every = 0, 1

    def add(self, step: int, rows: Sequence[Row]) -> None:
        # The latest step of before stays only where its place is one that `every` divides.
        self.parts = [part for part in self.parts if part.place % self.every == 0]
        rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
        mean = _number(math.fsum(rewards) / len(rewards)) if rewards else "unknown"
        about = f"<summary>Step {step} · {len(rows)} completions · mean reward {mean}</summary>"
        html = about + step_html(rows, self.most // LEAST_STEPS)
        self.parts.append(Part(self.added, step, html))
        self.added += 1
        while len((page := self.html()).encode()) > self.most and len(self.parts) > 1:
            self.every *= 2
            *before, latest = self.parts
            self.parts = [part for part in before if part.place % self.every == 0] + [latest]
        unfinished = self.path.with_name(self.path.name + ".tmp")
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, self.path)

    def html(self) -> str:
        title, left_out = text_html(self.title), self.added - len(self.parts)
        note = f" {left_out} steps that do not fit here are in completions/." if left_out else ""
        links = "\n".join(f'<a href="#s{part.step}">{part.step}</a>' for part in self.parts)
        steps = "\n".join(
            f'<details id="s{part.step}"{" open" * (part is self.parts[-1])}>{part.html}</details>'
            for part in self.parts
        )
        return Template(FRAME).substitute(
            digest=DIGEST, title=title, note=note, links=links, steps=steps
        )


def step_html(rows: Sequence[Row], most: int) -> str:
    """The groups of a step, of at most `most` bytes."""
    advantages = [abs(a) for row in rows for a in row["advantages"] if math.isfinite(a)]
    largest = max(advantages, default=0.0)
    pieces: list[str] = []
    size = left_out = 0
    for _, members in groupby(rows, key=lambda row: row["group"]):
        group = sorted(members, key=_worth, reverse=True)
        prompt, answer = (text_html(group[0][name] or "") for name in ("prompt", "answer"))
        # HTML drops one newline behind <pre>: without this one a text would lose its own.
        html = f"<section><h2>Prompt {group[0]['group'] + 1}</h2><pre>\n{prompt}</pre>"
        html += f'<p class="facts">answer <b>{answer}</b></p>' * (group[0]["answer"] is not None)
        for row in group:
            article = completion_html(row, largest)
            if size + len((html + article).encode()) > most:
                left_out += 1
            else:
                html += article
        pieces.append(html + "</section>")
        size += len(pieces[-1].encode())
    more = f'<p class="note">{left_out} completions do not fit here.</p>' if left_out else ""
    return "".join(pieces) + more


def _worth(row: Row) -> float:
    return -math.inf if math.isnan(row["reward"]) else row["reward"]


def completion_html(row: Row, largest: float) -> str:
    functions = [name for name in row if name.startswith("rewards/")]
    scores = [f"{text_html(n.removeprefix('rewards/'))} {_number(row[n])}" for n in functions]
    extracted = row["extracted"]
    if extracted is None and row["extracted_lenient"] is not None:
        said = f"found out of form {text_html(row['extracted_lenient'])}"
    else:
        said = "no answer found" if extracted is None else f"found {text_html(extracted)}"
    kind = {True: "right", False: "wrong", None: "unjudged"}[row["correct"]]
    facts = [
        f"<b>reward {_number(row['reward'])}</b>",
        f"advantage {shown_number(row['advantage'], '{:+.3g}')}",
        f'<span class="{kind}">{said}</span>', f"{len(row['tokens'])} tokens",
        *(["cut off"] if row["truncated"] and not has_fixed_length(row) else []), *scores,
    ]  # fmt: skip
    tokens = zip(row["tokens"], row["logps"], row["advantages"], strict=True)
    shaded = [token_html(*token, largest) for token in tokens]
    hidden = len(shaded) - LONGEST_TOKENS
    if hidden > 0:
        middle = f"<b>… {hidden} tokens …</b>"
        shaded = [*shaded[: LONGEST_TOKENS // 2], middle, *shaded[-(LONGEST_TOKENS // 2) :]]
    body = "".join(shaded)
    return f'<article><p class="facts">{" · ".join(facts)}</p><pre>\n{body}</pre></article>'


def has_fixed_length(row: Row) -> bool:
    """Whether the completion has a symbol for each one of the answer: it ends where it has to."""
    symbols = len((row["answer"] or "").split())
    return symbols == len(row["completion"].split()) == len(row["tokens"])


def token_html(text: str, logp: float, advantage: float, largest: float) -> str:
    if not text:  # the beginning of a character that a later token ends
        return ""
    surprise = int(min(LOGP_LEVELS, max(0.0, -logp) / LOGP_STEP))
    has_shade = largest > 0 and math.isfinite(advantage)
    level = math.ceil(ADVANTAGE_LEVELS * abs(advantage) / largest) if has_shade else 0
    sign = "u" if advantage > 0 else "d"
    classes = [f"p{surprise}"] * (surprise > 0) + [f"{sign}{level}"] * (level > 0)
    shade = f' class="{" ".join(classes)}"' if classes else ""
    numbers = shown_number(logp, "{:.3f}"), shown_number(advantage, "{:+.3g}")
    return f'<i{shade} title="logp {numbers[0]} advantage {numbers[1]}">{text_html(text)}</i>'


def text_html(text: str) -> str:
    """Another's text as text, without markup and control characters; of a long one both ends."""
    if len(text) > LONGEST_TEXT:
        half, hidden = LONGEST_TEXT // 2, len(text) - LONGEST_TEXT
        text = f"{text[:half]}\n… {hidden} characters …\n{text[-half:]}"
    return escape(escape_control(text))


def _number(value: float) -> str:
    return shown_number(value, "{:.4g}")
