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
from typing import Any, NamedTuple

from grpo_fast.data import escape_control
from grpo_fast.train.report.lines import shown_number

LONGEST_TEXT, LONGEST_TOKENS = 4000, 1200  # shown of a prompt, of a completion: begin and end
LOGP_STEP, LOGP_LEVELS = 0.5, 8  # nats for each shade of surprise
ADVANTAGE_LEVELS = 4  # shades of the step's largest advantage, each way
LEAST_STEPS = 4  # that have room: one takes at most the fourth part of the page

_SURPRISE = "".join(
    f"#by-logp:checked~main .p{i}{{background:rgba(var(--surprise),{0.08 + 0.09 * i:.2f})}}\n"
    for i in range(1, LOGP_LEVELS + 1)
)
_ADVANTAGE = "".join(
    f"#by-advantage:checked~main .{sign}{i}{{background:rgba(var(--{name}),{0.15 * i:.2f})}}\n"
    for sign, name in (("u", "up"), ("d", "down"))
    for i in range(1, ADVANTAGE_LEVELS + 1)
)
STYLE = f"""
:root{{color-scheme:light dark;--text:#1f2733;--soft:#566170;--page:#f6f7f9;--card:#fff;
--line:#dfe3e8;--link:#e6e9ee;--right:#1d7d45;--wrong:#b3283c;
--surprise:214,104,30;--up:34,139,76;--down:200,40,60}}
@media(prefers-color-scheme:dark){{:root{{--text:#e3e7ed;--soft:#a3adba;--page:#15181d;--card:#1d2127;
--line:#343b45;--link:#2b313a;--right:#6bcf92;--wrong:#ff8d9b;
--surprise:176,78,16;--up:24,122,66;--down:188,40,60}}}}
body{{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);margin:0 auto;
max-width:1080px;padding:24px;overflow-wrap:anywhere}}
h1{{font-size:22px;margin:0 0 4px}} nav{{margin:12px 0;line-height:2}}
nav a{{margin-right:4px;padding:2px 8px;border-radius:4px;background:var(--link);color:inherit;
text-decoration:none}}
label{{margin-right:16px}} .note,.facts{{color:var(--soft)}} .facts{{margin:0 0 4px;font-size:13px}}
@media(max-width:600px){{body{{padding:12px}} label::after{{content:"\\a";white-space:pre}}}}
details{{background:var(--card);border:1px solid var(--line);border-radius:8px;margin:14px 0;
padding:8px 16px}}
summary{{cursor:pointer;font-weight:600}}
section{{border-top:1px solid var(--line);margin-top:12px}}
h2{{font-size:13px;font-weight:600;color:var(--soft);margin:12px 0 4px}}
pre{{white-space:pre-wrap;unicode-bidi:plaintext;margin:0 0 8px;
font:13px/1.55 ui-monospace,monospace;background:var(--page);border-radius:6px;padding:8px}}
article pre{{background:none;border:1px solid var(--line)}} i{{font-style:normal;border-radius:2px}}
b{{color:var(--text)}} .right{{color:var(--right);font-weight:600}} .wrong{{color:var(--wrong)}}
{_SURPRISE}{_ADVANTAGE}"""
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-"
    f"{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)
CHOICES = """<input type="radio" name="shade" id="by-logp" checked>
<label for="by-logp">shade by surprise (log-probability when sampled)</label>
<input type="radio" name="shade" id="by-advantage">
<label for="by-advantage">by advantage (green up, red down; of the step's largest)</label>
<input type="radio" name="shade" id="by-nothing"> <label for="by-nothing">not at all</label>"""

Row = Mapping[str, Any]  # of `grpo_fast.train.report.samples.rows_of`


class Part(NamedTuple):
    """A step as it stands in the page."""

    place: int  # among all the steps that were added
    step: int
    about: str
    html: str


class CompletionsPage:
    """A page of bounded size: where the steps exceed it, every second, fourth … of them stays.

    Args:
        path: of the file, which every `add` writes as a whole.
        title: the run's name.
        most: bytes.
    """

    def __init__(self, path: str | Path, title: str, most: int) -> None:
        self.path, self.title, self.most = Path(path), title, most
        self.parts: list[Part] = []  # of places that `every` divides, and of the latest one
        self.added, self.every = 0, 1

    def add(self, step: int, rows: Sequence[Row]) -> None:
        """One more step; the latest one is always there."""
        self.parts = [part for part in self.parts if part.place % self.every == 0]
        rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
        mean = _number(math.fsum(rewards) / len(rewards)) if rewards else "unknown"
        about = f"Step {step} · {len(rows)} completions · mean reward {mean}"
        self.parts.append(Part(self.added, step, about, step_html(rows, self.most // LEAST_STEPS)))
        self.added += 1
        while len((page := self.html()).encode()) > self.most and len(self.parts) > 1:
            self.every *= 2
            *before, latest = self.parts
            self.parts = [part for part in before if part.place % self.every == 0] + [latest]
        unfinished = self.path.with_name(self.path.name + ".tmp")
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, self.path)

    def html(self) -> str:
        """The whole document."""
        title, left_out = text_html(self.title), self.added - len(self.parts)
        note = f" {left_out} steps that do not fit here are in completions/." if left_out else ""
        links = "\n".join(f'<a href="#s{part.step}">{part.step}</a>' for part in self.parts)
        steps = "\n".join(
            f'<details id="s{part.step}"{" open" if part is self.parts[-1] else ""}>'
            f"<summary>{part.about}</summary>{part.html}</details>"
            for part in self.parts
        )
        return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width"><title>Completions of {title}</title>
<style>{STYLE}</style></head><body>
<h1>Completions of {title}</h1>
<p class="note">The best reward of a prompt first; a token shows its numbers when pointed at.{note}
</p>
{CHOICES}
<main><nav>{links}</nav>
{steps}
</main></body></html>
"""


def step_html(rows: Sequence[Row], most: int) -> str:
    """The groups of a step, of at most `most` bytes."""
    advantages = [abs(a) for row in rows for a in row["advantages"] if math.isfinite(a)]
    largest = max(advantages, default=0.0)
    pieces: list[str] = []
    size = left_out = 0
    for _, members in groupby(rows, key=lambda row: row["group"]):
        group = sorted(members, key=_worth, reverse=True)
        html = _group_head(group[0])
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


def _group_head(row: Row) -> str:
    """The prompt of a group and its answer; the section stays open."""
    answer = row["answer"]
    given = "" if answer is None else f'<p class="facts">answer <b>{text_html(answer)}</b></p>'
    prompt = text_html(row["prompt"])
    return f"<section><h2>Prompt {row['group'] + 1}</h2><pre>\n{prompt}</pre>{given}"


def completion_html(row: Row, largest: float) -> str:
    """One completion: its numbers in a line, then its tokens, shaded."""
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
    """A token in its shades: `p1` … for surprise, `u1` … and `d1` … for advantage."""
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
