"""The web page completions.html, which shows completions and their rewards.

The page is a single file. Texts of models and data sets are escaped, and the
Content-Security-Policy of the page blocks scripts, images and network requests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader
from torch import Tensor

from grpo_fast.data import Example
from grpo_fast.data.answers import turns
from grpo_fast.errors import escape_control
from grpo_fast.rewards import Scorer
from grpo_fast.rewards.columns import prefill_of
from grpo_fast.rewards.scoring import shown_answer
from grpo_fast.rollout import Samples
from grpo_fast.train.folder import check_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rows_of(
    samples: Samples,
    advantages: Sequence[Tensor],  # advantages of each completion's tokens, shape (tokens,)
    examples: Sequence[Example],  # the example that each completion answers
    sent: Sequence[str],  # prompt of each completion, as the model received it
    tokenizer: PreTrainedTokenizerBase,
    scorer: Callable[[Example], Scorer],
    *,
    group_size: int,
) -> list[dict[str, Any]]:
    """Return a dict for each sample, with its texts, rewards and advantages.

    The values of `tokens`, `logps` (from the sampler) and `advantages` are lists with an entry for
    each token. All other values describe the whole completion.
    """
    assert samples.rewards is not None
    logps = samples.logps.cpu().split(samples.lengths)
    rows = []
    for i in range(len(samples)):
        token_advantages = advantages[i].float().cpu()
        ids = samples.completion(i).tolist()
        text = samples.texts[i]
        answer = examples[i].answer
        judge = scorer(examples[i])
        turn = turns([text], [prefill_of(examples[i].prompt, sent[i])])[0]
        strict = judge.strict(turn)
        rows.append({
            "group": i // group_size, "prompt": sent[i],
            "completion": text, "answer": answer, "extracted": shown_answer(strict),
            "extracted_lenient": shown_answer(judge.lenient(turn)),
            "correct": judge.is_right(strict) if answer else None,
            "reward": float(samples.rewards[i]),
            **{f"rewards/{name}": float(values[i]) for name, values in samples.scores.items()},
            "advantage": float(token_advantages.mean()), "truncated": bool(samples.truncated[i]),
            "tokens": token_texts(tokenizer, ids), "token_ids": ids,
            "logps": logps[i].tolist(), "advantages": token_advantages.tolist(),
        })  # fmt: skip
    return rows


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the decoded completion.

    If a character consists of several tokens, it is attributed to the last of them, and the others
    get an empty string.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    try:
        texts = [stream.step(tokenizer.backend_tokenizer, i) or "" for i in ids]
    except Exception:  # not a fast tokenizer, or invalid bytes
        return [tokenizer.decode([i]) for i in ids]
    whole = tokenizer.decode(ids)
    streamed = "".join(texts)
    if texts and whole.startswith(streamed):  # the stream omits an incomplete end
        texts[-1] += whole[len(streamed) :]
    return texts


def write_parquet(rows: Sequence[Mapping[str, object]], step: int, path: str | Path) -> None:
    """Write rows to a parquet table, with a column `step`. The file is replaced atomically."""
    import pyarrow
    from pyarrow import parquet

    plain = [{"step": step} | {name: _storable(row[name]) for name in row} for row in rows]
    part = Path(f"{path}.tmp")
    parquet.write_table(pyarrow.Table.from_pylist(plain), part)
    os.replace(part, path)


def read_parquet(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a parquet table, without the column `step`."""
    from pyarrow import parquet

    return parquet.read_table(check_regular(Path(path))).drop_columns("step").to_pylist()


def _storable(value: Any) -> Any:
    r"""Replace lone surrogates with escapes such as \ud800, because UTF-8 cannot encode them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return [_storable(item) for item in value] if isinstance(value, list) else value


# ----------------------------------------------------------------------------------------- The page
# Maximum number of characters of a prompt or answer on the page, and maximum number of tokens of a
# completion. If the text is longer, the page omits its middle.
LONGEST_TEXT = 4000
LONGEST_TOKENS = 1200
NEAR_ZERO = 1e-6  # smaller numbers are printed as 0; metrics.jsonl contains the exact numbers
LOGP_STEP = 0.5  # a token's shade gets stronger by one level for each 0.5 nats of surprise
LOGP_LEVELS = 8
MOST_STEPS = 16  # maximum number of steps on the page: the first step and the latest steps
MOST_COMPLETIONS = 16  # maximum number of completions per step

Row = Mapping[str, Any]  # see `grpo_fast.train.report.page.rows_of`


def shown_number(value: float, form: str = "{:.4g}") -> str:
    """Format a number. Numbers closer to 0 than NEAR_ZERO are printed as 0 without a sign."""
    text = form.format(0.0 if abs(value) < NEAR_ZERO else value)
    return text.lstrip("+-") if not text.strip("+-0.") else text


def tables_in(run: Path) -> list[tuple[int, Path]]:
    """Return the step and the path of all tables of completions in a run's folder, in order."""
    found = [(path.stem.removeprefix("step_"), path) for path in run.glob("completions/*.parquet")]
    return sorted((int(step), path) for step, path in found if step.isdecimal())


def write_page(run: Path) -> None:
    """Write the page of a run from the tables of the first step and of the latest steps."""
    tables = tables_in(run)
    shown = [*tables[:1], *tables[1:][1 - MOST_STEPS :]]
    parts = [(step, step_html(step, read_parquet(path))) for step, path in shown]
    page = TEMPLATES.get_template("page.html").render(title=run.name, parts=parts)
    unfinished = run / "completions.html.tmp"
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, run / "completions.html")


def step_html(step: int, rows: Sequence[Row]) -> str:
    """Return the HTML of a step. In each group, the completion with the highest reward is first."""
    rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
    ranked = sorted(
        rows[:MOST_COMPLETIONS], key=lambda row: (math.isnan(row["reward"]), -row["reward"])
    )  # the template groups them by prompt
    return TEMPLATES.get_template("step.html").render(
        step=step, count=len(rows), mean=mean, ranked=ranked
    )


def shaded_tokens(row: Row) -> Iterator[dict[str, Any]]:
    """Yield a dict for each shown token of a completion, for use in the HTML template.

    A dict has the keys `level` (0 to LOGP_LEVELS, from low to high surprise), `title` (log-prob and
    advantage) and `text`. In a long completion, one dict stands for all omitted tokens in the
    middle. It has only the key `hidden`, which is the number of these tokens.

    Args:
        row: data of the completion, see `rows_of`.
    """
    half = LONGEST_TOKENS // 2
    count = len(row["tokens"])
    hidden = range(half, count - half) if count > LONGEST_TOKENS else range(0)
    tokens = zip(row["tokens"], row["logps"], row["advantages"], strict=True)
    for place, (text, logp, advantage) in enumerate(tokens):
        if place == half and hidden:
            yield {"hidden": len(hidden)}
        if text and place not in hidden:  # a token that ends within a character has an empty text
            title = f"logp {shown_number(logp, '{:.3f}')}"
            title += f" advantage {shown_number(advantage, '{:+.3g}')}"
            level = int(min(LOGP_LEVELS, max(0.0, -logp) / LOGP_STEP))
            yield {"level": level, "text": text, "title": title}


def harmless(text: str) -> str:
    """Escape control characters. If the text is long, replace its middle with a note."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        hidden = len(text) - LONGEST_TEXT
        text = f"{text[:half]}\n… {hidden} characters …\n{text[-half:]}"
    return escape_control(text)


TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
TEMPLATES.filters |= {"harmless": harmless, "number": shown_number}
TEMPLATES.globals["shaded_tokens"] = shaded_tokens
