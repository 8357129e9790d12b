"""What a run leaves behind, and what it shows while it goes on.

In `output_dir`: config.yaml (the resolved configuration), metrics.jsonl (one JSON object per logged
step, TRL's names, flushed line by line), prompts.jsonl (one per prompt that was asked),
completions/step_000010.parquet … and completions.html (what was written and what it was worth),
curves.png, summary.json.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_fast import LossConfig
from grpo_fast.data import escape_control, reason
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.train.config import RolloutConfig, RunConfig
from grpo_fast.train.config.recipes import save_config
from grpo_fast.train.files import JsonLines, plain_json, written
from grpo_fast.train.report.curves import plot_runs
from grpo_fast.train.report.page import CompletionsPage
from grpo_fast.train.report.samples import read_parquet, write_parquet
from grpo_fast.train.report.trackers import Trackers

LOSS_IS_ZERO = "one update per batch: {} while its gradient does not{}; watch reward and grad_norm"
PLAIN_LINES = 20  # progress lines of a whole run where there is no terminal
SHOWN = (  # in the progress line: metric, label, format
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl", "{:.4f}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("perf/train_tok_s", "tok/s", "{:.0f}"),
)
COMPARED = (  # before and after: metric, label
    ("eval_reward", "reward"),
    ("eval_accuracy_strict", "strict"),
    ("eval_accuracy_lenient", "lenient"),
)


class RunReport:
    """Writes a run's folder and shows its progress.

    A context manager, which leaves the folder free for others; `close` alone keeps its lock.

    Args:
        enter: makes the folder and locks it, or puts it back to where the run begins.
        lengths: bytes of metrics.jsonl and prompts.jsonl that stay.
        is_resumed: the folder stays as it is until `begin`, when a checkpoint is loaded.
        step: finished steps.

    Raises:
        OutputFolderError: `output_dir` holds files of something else (an earlier run), or cannot be
            made.
    """

    def __init__(
        self,
        output_dir: str | Path,
        config: RunConfig,
        *,
        stream: TextIO | None = None,
        enter: Callable[[], tuple[Path, Any]],
        lengths: tuple[int, int] = (0, 0),
        is_resumed: bool = False,
        step: int = 0,
    ) -> None:
        self.folder, self._lock, self._config = Path(output_dir), None, config
        self._enter, self._lengths, self._step = enter, lengths, step
        self.total_steps = int(config.steps)
        self._has_begun = False
        self._stream = stream or sys.stdout
        if not is_resumed:
            self.begin()
        self._progress = _start_bar(self._stream, self.total_steps) if config.log.progress else None
        self._plain = self._progress is None and config.log.progress

    def begin(self) -> None:
        """Take the folder over, as it was at the start: a checkpoint must be loaded before."""
        config, (metrics, prompts) = self._config, self._lengths
        self.folder, self._lock = self._enter()
        with written(self.folder):
            save_config(config.model_copy(update={"resume": None}), self.folder / "config.yaml")
            self._metrics = JsonLines(self.folder / "metrics.jsonl", metrics)
            self._prompts = JsonLines(self.folder / "prompts.jsonl", prompts)
        most = config.log.page_megabytes * 2**20
        self._page = CompletionsPage(self.folder / "completions.html", self.folder.name, most)
        self._trackers = Trackers(config.log.trackers, self.folder, config.model_dump(mode="json"))
        self._read_completions(self._step)
        self._has_begun = True

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._lock is not None:
            self._lock.release()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line of numbers or 0-d tensors to metrics.jsonl and move the progress on."""
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.append([{"step": int(step), **plain_json(values)}])
        if "update" not in values:  # else one of several in a step
            self._trackers.log(int(step), {k: v for k, v in values.items() if math.isfinite(v)})
            self._show(step, values)

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append to prompts.jsonl: one line for each prompt that a step has asked."""
        self._prompts.append(rows)

    def lengths(self) -> tuple[int, int]:
        """Bytes of metrics.jsonl and prompts.jsonl."""
        if not self._has_begun:
            return self._lengths
        return self._metrics.length, self._prompts.length

    def sync(self) -> None:
        """What was logged is on the disk."""
        self._metrics.sync()
        self._prompts.sync()

    def note(self, text: str) -> None:
        """One line for the person watching, above the progress bar."""
        text = escape_control(text)
        with self._unless_lost():
            if self._progress is not None:
                self._progress.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write completions/step_….parquet, and completions.html anew with these rows in it."""
        path = self.folder / "completions" / f"step_{int(step):06d}.parquet"
        with written(path):
            path.parent.mkdir(exist_ok=True)
            write_parquet(rows, int(step), path)
            self._page.add(int(step), rows)
        return path

    def _read_completions(self, until: int) -> None:
        """The page holds the steps that a run had finished; tables of later ones are forgotten."""
        for path in sorted((self.folder / "completions").glob("step_*.parquet")):
            step = int(re.sub(r"\D", "", path.stem))
            if step <= until:
                self._page.add(step, read_parquet(path))
            else:
                path.unlink()

    def finish(self, summary: Mapping[str, Any]) -> str:
        """Write summary.json and curves.png; print and return the line before → after.

        `summary["before"]` and `summary["after"]`, where present, are evaluations' metrics.
        """
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
            self._trackers.close()

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
        shown = [
            f"{label} {form.format(values[key])}" for key, label, form in SHOWN if key in values
        ]
        text = " · ".join(shown)
        held_out = [f"{label} {_with_se(values, key)}" for key, label in COMPARED if key in values]
        if held_out and (self._plain or self._progress is not None):
            self.note(f"step {step}/{self.total_steps} · held out: {' · '.join(held_out)}")
        if self._progress is not None and text:
            with self._unless_lost():
                self._progress.update(self._progress.task_ids[0], completed=step, status=text)
        every = max(1, self.total_steps // PLAIN_LINES)
        if self._plain and text and (step % every == 0 or step in (1, self.total_steps)):
            self.note(f"step {step}/{self.total_steps} · {text}")


def final_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """`reward 0.31 ± 0.02 → 0.95 ± 0.01 · strict 1.2% ± 0.3 → 94.1% ± 1.5 (n=256, …)`.

    Empty without both evaluations.
    """
    parts: list[str] = []
    for key, label in COMPARED:
        if key in before and key in after:
            change = f"{_with_se(before, key)} → {_with_se(after, key)}"
            # Where strict and lenient are one, say it once.
            if not (parts and parts[-1].endswith(change)):
                parts.append(f"{label} {change}")
    if parts and "eval_n" in after:
        parts[-1] += f" (n={after['eval_n']:.0f}, ± one standard error)"
    return " · ".join(parts)


def memory_line(summary: Mapping[str, Any]) -> str:
    """`memory of a training step: 1.24 GiB predicted (micro-batches …), 1.31 GiB measured`.

    Without a GPU the measured part is the growth of the whole process, libraries and rollouts, too.
    """
    predicted, peak = summary["predicted_memory"], summary["peak_memory"]
    said = "no prediction" if predicted is None else f"{predicted / 2**30:.2f} GiB predicted"
    size = f"micro-batches of up to {summary['largest_microbatch']} tokens"
    grown = f"the whole process grew by {summary['process_growth'] / 2**30:.2f} GiB"
    found = grown if peak is None else f"{peak / 2**30:.2f} GiB measured"
    return f"memory of a training step: {said} ({size}), {found}"


def kernels_line(summary: Mapping[str, Any]) -> str:
    """`kernels: cpu`, or `kernels: torch (slower; cpu: no C++ compiler …)`."""
    why = summary["backend_fallback"]
    return f"kernels: {summary['backend']}" + (f" (slower; {why})" if why else "")


def sampler_line(engine: str, fallback: str | None) -> str:
    """`sampler: own loop`, or `sampler: transformers' generate (slower; its logits differ …)`."""
    own = "own loop" if engine == "transformers" else engine
    return "sampler: " + (f"transformers' generate (slower; {fallback})" if fallback else own)


def zero_line(loss: LossConfig, advantages: str) -> str:
    """What the loss shows where the policy term of every step is 0, lengths apart."""
    rest = "beta * KL" if loss.uses_reference else ""
    rest += " - entropy_coef * entropy" if loss.entropy_coef else ""
    by_token = AGGREGATIONS[loss.aggregation].by_length == (advantages == "opo")
    near = "near 0" + ", apart from how lengths go with advantages," * by_token
    term = f"the {'policy term of the ' if rest else ''}loss stays {near}"
    return LOSS_IS_ZERO.format(term, f", and the rest of the loss is {rest.strip()}" * bool(rest))


def support_line(rollout: RolloutConfig) -> str:
    """Of a run whose engine is asked for what its sampler kept."""
    kept = f"top_k {rollout.top_k or 'off'}, top_p {rollout.top_p:g}"
    return f"loss over the tokens that the sampler kept, where it says which ({kept})"


def _start_bar(stream: TextIO, total: int) -> Progress | None:
    """A live bar on a terminal, None elsewhere."""
    console = Console(file=stream)
    if not console.is_terminal:
        return None
    bar, status = BarColumn(bar_width=24), TextColumn("{task.fields[status]}")
    columns = (bar, MofNCompleteColumn(), TimeRemainingColumn(), status)
    progress = Progress(*columns, console=console)
    progress.add_task("train", total=total, status="")
    progress.start()
    return progress


def _with_se(metrics: Mapping[str, float], key: str) -> str:
    """Value ± standard error where there is one, accuracies in per cent."""
    value, error = metrics[key], metrics.get(key + "_se", math.nan)
    scale, form, unit = (100, ".1f", "%") if "accuracy" in key else (1, ".3f", "")
    spread = f" ± {scale * error:{form}}" if math.isfinite(error) else ""  # of one question: none
    return f"{scale * value:{form}}{unit}{spread}"
