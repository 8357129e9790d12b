"""The files that a run writes, and the progress that it shows: metrics.jsonl (TRL's names),
prompts.jsonl, completions/step_000010.parquet … and completions.html, curves.png, summary.json.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_fast.data import escape_control, reason
from grpo_fast.train.config.run import LogConfig
from grpo_fast.train.files import JsonLines, plain_json, written
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.curves import plot_runs, settings_of
from grpo_fast.train.report.lines import COMPARED, final_line, shown_number, with_error
from grpo_fast.train.report.page import CompletionsPage
from grpo_fast.train.report.samples import read_parquet, write_parquet
from grpo_fast.train.report.trackers import start_trackers

CLIPPED = "clip_ratio/region_mean"  # exactly 0 with one update per batch, and then not shown
PLAIN_LINES = 20  # progress lines of a whole run where there is no terminal
SHOWN = (  # in the progress line: metric, label, format
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl", "{:.4f}"),
    (CLIPPED, "clipped", "{:.2f}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("perf/train_tok_s", "tok/s", "{:.0f}"),
)


Method = TypeVar("Method", bound=Callable[..., Any])


def by_rank_0(method: Method) -> Method:
    """Let a method do its work on rank 0 alone; on the others it returns None."""

    @functools.wraps(method)
    def only_there(self: RunReport, *arguments: Any) -> Any:
        return method(self, *arguments) if self._is_writer else None

    return only_there  # type: ignore[return-value]


class RunReport(AbstractContextManager[Any]):
    """Writes into a run's folder and shows its progress, on rank 0 for all: from `begin` on.

    Args:
        lengths: bytes of metrics.jsonl and prompts.jsonl that stay.
        step: finished steps.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LogConfig,
        steps: int,
        lengths: tuple[int, int] = (0, 0),
        step: int = 0,
        *,
        stream: TextIO | None = None,
    ) -> None:
        self.folder, self.config, self.total_steps = Path(folder), config, steps
        self._lengths, self._step, self._stream = lengths, step, stream or sys.stdout
        self._has_begun, self._is_writer = False, distributed.is_main()
        self._progress: Progress | None = None
        self._plain = False  # lines in place of a bar

    @by_rank_0
    def begin(self) -> None:
        """Cut the logs back to where the run begins: a checkpoint must be loaded before."""
        folder, config, (metrics, prompts) = self.folder, self.config, self._lengths
        with written(folder):
            self._metrics = JsonLines(folder / "metrics.jsonl", metrics)
            self._prompts = JsonLines(folder / "prompts.jsonl", prompts)
        most = 8 * 2**20  # bytes
        self._page = CompletionsPage(folder / "completions.html", folder.name, most)
        self._trackers = start_trackers(config.trackers, folder, settings_of(folder))
        self._read_completions(self._step)
        self._has_begun = True
        console = Console(file=self._stream)
        self._plain = config.progress and not console.is_terminal
        if config.progress and console.is_terminal:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
                       TextColumn("{task.fields[status]}"))  # fmt: skip
            self._progress = Progress(*columns, console=console)
            self._progress.add_task("train", total=self.total_steps, status="")
            self._progress.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @by_rank_0
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line of numbers or 0-d tensors to metrics.jsonl and move the progress on."""
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.append([{"step": int(step), **plain_json(values)}])
        if "update" not in values:  # else one of several in a step
            numbers = {k: v for k, v in values.items() if math.isfinite(v)}
            for tracker in self._trackers:
                tracker.log(dict(numbers), step=int(step))
            self._show(step, values)

    @by_rank_0
    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._prompts.append(rows)

    def lengths(self) -> tuple[int, int]:
        if not self._has_begun:
            return self._lengths
        return self._metrics.length, self._prompts.length

    @by_rank_0
    def sync(self) -> None:
        self._metrics.sync()
        self._prompts.sync()

    @by_rank_0
    def note(self, *lines: str) -> None:
        text = "\n".join(map(escape_control, lines))
        with self._unless_lost():
            if self._progress is not None:
                self._progress.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)

    @by_rank_0
    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write completions/step_….parquet, and completions.html anew with these rows in it."""
        path = self.folder / "completions" / f"step_{int(step):06d}.parquet"
        with written(path):
            path.parent.mkdir(exist_ok=True)
            write_parquet(rows, int(step), path)
            self._page.add(int(step), rows)

    def _read_completions(self, until: int) -> None:
        """The page holds the steps that a run had finished; tables of later ones are forgotten."""
        for path in sorted((self.folder / "completions").glob("step_*.parquet")):
            step = int(re.sub(r"\D", "", path.stem))
            if step <= until:
                self._page.add(step, read_parquet(path))
            else:
                path.unlink()

    @by_rank_0
    def finish(self, summary: Mapping[str, Any]) -> str:
        """Write summary.json and curves.png; print and return the line before → after."""
        self.close()
        whole = self.folder / "summary.json.tmp"
        with written(whole):
            whole.write_text(json.dumps(plain_json(summary), indent=2) + "\n", encoding="utf-8")
            whole.replace(self.folder / "summary.json")
        try:
            plot_runs([self.folder], self.folder / "curves.png")
        except Exception as error:  # a picture does not fail a run
            self.note(f"no curves.png: {reason(error)}")
        line = final_line(summary.get("before") or {}, summary.get("after") or {})
        if line:
            self.note(line)
        return line

    def close(self) -> None:
        """Stop the progress bar, close the files and the trackers; again: nothing."""
        if self._progress is not None:
            with self._unless_lost():
                self._progress.stop()
            self._progress = None
        if self._has_begun:
            self._metrics.close()
            self._prompts.close()
            while self._trackers:  # accelerate's end_training would end the ranks' group, too
                self._trackers.pop().finish()

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Nobody may be reading any more, or the file is full: then nothing is shown."""
        try:
            yield
        except (OSError, ValueError):
            self._progress, lost = None, self._stream
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            # What waits in its buffer would fail once more when the process ends.
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(self._stream.fileno(), lost.fileno())

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        some = (row for row in SHOWN if row[0] in values and (values[row[0]] or row[0] != CLIPPED))
        shown = [(shown_number(values[k], form), name) for k, name, form in some]
        text = " · ".join(f"{name} {number}" for number, name in shown)
        held_out = [f"{name} {with_error(values, key)}" for key, name in COMPARED if key in values]
        if held_out and (self._plain or self._progress is not None):
            self.note(f"step {step}/{self.total_steps} · held out: {' · '.join(held_out)}")
        if self._progress is not None and text:
            with self._unless_lost():
                self._progress.update(self._progress.task_ids[0], completed=step, status=text)
        every = max(1, self.total_steps // PLAIN_LINES)
        if self._plain and text and (step % every == 0 or step in (1, self.total_steps)):
            self.note(f"step {step}/{self.total_steps} · {text}")
