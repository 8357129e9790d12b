"""The log files and the progress display of a run. Only rank 0 writes them.

The files are metrics.jsonl (with the same metric names as TRL), completions.html, curves.png,
summary.json, and a table such as completions/step_000010.parquet for every logged step.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from grpo_fast.errors import WriteError, escape_control, reason
from grpo_fast.train.config import RolloutConfig, RunConfig
from grpo_fast.train.config.words import save_config
from grpo_fast.train.folder import CONFIG, check_regular, plain_json, written
from grpo_fast.train.report.curves import plot_runs
from grpo_fast.train.report.page import shown_number, tables_in, write_page, write_parquet

# --------------------------------------------------------------------- The lines and files of a run
COMPARED = {  # evaluation metrics that are printed, with their labels
    "eval_reward": "reward",
    "eval_accuracy_strict": "strict",
    "eval_accuracy_lenient": "lenient",
}


def final_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Format the change of the evaluation metrics between the start and the end of a run.

    Args:
        before: metrics of the first evaluation.
        after: metrics of the last evaluation.

    Returns:
        A line such as `reward 0.310 ± 0.020 → 0.950 ± 0.010 · strict …`, or "" if an evaluation is
        missing.
    """
    parts: list[str] = []
    for key, label in COMPARED.items():
        if key in before and key in after:
            parts.append(f"{label} {with_error(before, key)} → {with_error(after, key)}")
    if parts and "eval_n" in after:
        parts[-1] += f" (n={after['eval_n']:.0f}, ± one standard error)"
    return " · ".join(parts)


def opening_lines(
    rollout: RolloutConfig, kernels: Mapping[str, object], fallback: str | None
) -> list[str]:
    """Return lines that name the kernels and the sampler, and explain why a slower one is used.

    Args:
        rollout: the section `rollout` of the configuration.
        kernels: a dict with the keys `backend` and `backend_fallback`. The second value is the
            reason why a slower backend is used, or None.
        fallback: reason why the engine samples with the slower `generate` of transformers, or None
            if it uses a faster sampler.
    """
    why = kernels["backend_fallback"]
    lines = [f"kernels: {kernels['backend']}" + (f" (slower; {why})" if why else "")]
    own = "own loop" if rollout.engine == "transformers" else rollout.engine
    slower = f"transformers' generate (slower; {fallback})"
    lines.append(f"sampler: {slower if fallback else own}")
    if rollout.needs_support:
        kept = f"top_k {rollout.top_k or 'off'}, top_p {rollout.top_p:g}"
        lines.append(f"loss over the tokens that the sampler kept, where it says which ({kept})")
    return lines


def closing_lines(folder: Path, has_code: bool = False) -> list[str]:
    """Return lines that list the files of a finished run and the commands to inspect them.

    Args:
        folder: folder of the run.
        has_code: True if the run used custom Python code. The command `grpo-fast eval` then needs
            the option --allow-code.
    """
    names = ("completions.html", "curves.png", "model")
    present = [name for name in names if (folder / name).exists()]
    place = shlex.quote(str(folder))
    lines = [f"{place}: {', '.join(present)}"] if present else []
    if "model" in present:
        lines.append(f"grpo-fast eval {place}" + (" --allow-code" if has_code else ""))
    return [*lines, f"grpo-fast plot {place}"]


def with_error(metrics: Mapping[str, float], key: str) -> str:
    """Format a metric with its standard error, if it is finite. Accuracies are in percent."""
    scale, form, unit = (100, ".1f", "%") if "accuracy" in key else (1, ".3f", "")
    text = shown_number(scale * metrics[key], f"{{:{form}}}") + unit
    error = metrics.get(key + "_se", math.nan)  # an evaluation of one question has the error NaN
    return f"{text} ± {scale * error:{form}}" if math.isfinite(error) else text


# --------------------------------------------------------------------------------------- The report
CLIPPED = "clip_ratio/region_mean"  # hidden if 0, which is normal with one update per batch
SECONDS = 10.0  # minimum time between two progress lines
SHOWN = (  # metric, label and format of each value in a progress line
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl", "{:.4f}"),
    (CLIPPED, "clipped", "{:.2f}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("perf/train_tok_s", "tok/s", "{:.0f}"),
)


class RunReport(AbstractContextManager[Any]):
    """Writer of a run's log files and progress display.

    Only rank 0 calls `begin`. On the other ranks, `log`, `note` and `close` do nothing.

    Args:
        config: the configuration of the run.
        length: number of bytes of an existing metrics.jsonl to keep. `begin` removes the rest.
        step: number of steps that were finished before the run resumed.
        stream: stream for the progress display. None uses stdout.
    """

    def __init__(
        self, config: RunConfig, length: int = 0, step: int = 0, *, stream: TextIO | None = None
    ) -> None:
        self.config = config
        self.folder = Path(config.output_dir)
        self.length = length  # bytes of complete lines in metrics.jsonl
        self._step = step
        self._stream = stream or sys.stdout
        self._has_begun = False
        self._started = self._shown = time.monotonic()

    def begin(self) -> None:
        """Save the configuration, open the files, and remove logs of steps after the checkpoint.

        Call this method after the checkpoint is loaded, so that a failed start changes no file.
        """
        folder = self.folder
        # 1. Save the configuration, and open the files.
        with written(folder):
            save_config(self.config.model_copy(update={"resume": None}), folder / CONFIG)
            # In append mode, each write goes to the end of the file, even after a truncation.
            # Without a buffer, closing the file after an error does not write again.
            self._metrics = check_regular(folder / "metrics.jsonl").open("ab", buffering=0)
            self._metrics.truncate(self.length)
        # 2. Delete the tables of later steps, because the run will repeat these steps.
        for step, path in tables_in(folder):
            if step > self._step:
                path.unlink()
        if tables_in(folder):
            write_page(folder)
        self._has_begun = True
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step's metrics to metrics.jsonl, and print progress."""
        if not self._has_begun:
            return
        values = {name: float(value) for name, value in metrics.items()}
        row = json.dumps({"step": int(step), **plain_json(values)}, allow_nan=False)
        line = f"{row}\n".encode()
        rest = memoryview(line)
        try:
            while rest:  # on a nearly full disk, a call may write only a part
                rest = rest[self._metrics.write(rest) :]
        except OSError as error:
            said = f"{self._metrics.name}: expected room for a line, got {reason(error)}"
            raise WriteError(f"{said}; the lines before it are complete") from error
        self.length += len(line)
        self._show(step, values)

    def note(self, *lines: str) -> None:
        """Print lines to the output stream, with control characters escaped.

        If printing fails, all further output is discarded and the run continues. Printing can fail
        because the disk is full, or because a reader such as `| head` has closed the pipe.
        """
        if not self._has_begun:
            return
        try:
            print("\n".join(map(escape_control, lines)), file=self._stream, flush=True)
        except (OSError, ValueError):
            lost = self._stream
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            # Redirect the file descriptor of the lost stream as well. Otherwise Python would flush
            # the buffer of this stream at exit, and the flush would fail again.
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(self._stream.fileno(), lost.fileno())

    def completions(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the completions of a step to a parquet table, and add them to completions.html."""
        path = self.folder / "completions" / f"step_{int(step):06d}.parquet"
        with written(path):
            path.parent.mkdir(exist_ok=True)
            write_parquet(rows, int(step), path)
            write_page(self.folder)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and curves.png. Print how the evaluation metrics changed."""
        self.close()
        part = self.folder / "summary.json.tmp"
        with written(part):
            part.write_text(json.dumps(plain_json(summary), indent=2) + "\n", encoding="utf-8")
            part.replace(self.folder / "summary.json")
        try:
            plot_runs([self.folder], self.folder / "curves.png")
        except Exception as error:  # a failed picture must not end the run
            self.note(f"no curves.png: {reason(error)}")
        if line := final_line(summary.get("before") or {}, summary.get("after") or {}):
            self.note(line)

    def close(self) -> None:
        """Close the log file. A second call has no effect."""
        if self._has_begun:
            self._metrics.close()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        """Print the evaluation metrics of a step. Print training metrics at most every SECONDS."""
        if not self.config.log.progress:
            return
        place = f"step {step}/{self.config.steps}"
        held_out = [f"{label} {with_error(values, key)}" for key, label in COMPARED.items()
                    if key in values]  # fmt: skip
        if held_out:
            self.note(f"{place} · held out: {' · '.join(held_out)}")
        metrics = [
            f"{label} {shown_number(values[key], form)}"
            for key, label, form in SHOWN
            if key in values and (values[key] or key != CLIPPED)
        ]
        now = time.monotonic()
        if metrics and step == self._step + 1:
            self._started = now
        is_due = now - self._shown >= SECONDS or step in (self._step + 1, self.config.steps)
        if metrics and is_due:
            self._shown = now
            timed = step - self._step - 1  # the first step also compiles kernels
            if timed > 0:
                per_step = (now - self._started) / timed
                left = timedelta(seconds=round(per_step * (self.config.steps - step)))
                metrics.insert(0, f"{left} left")
            self.note(f"{place} · {' · '.join(metrics)}")
