"""What a run leaves behind, and what it shows while it goes on.

In `output_dir`: config.yaml (the resolved configuration), metrics.jsonl (one JSON object per logged step, TRL's names,
flushed line by line), completions/step_000010.md … (readable samples), curves.png, summary.json.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from grpo_fast.train.curves import plot_runs, read_metrics
from grpo_fast.train.folders import OutputFolderError, claim_folder, run_folder

if TYPE_CHECKING:
    from rich.progress import Progress

    from grpo_fast.train.config import RunConfig

__all__ = [
    "OutputFolderError",
    "RunReport",
    "escape_control",
    "final_line",
    "kernels_line",
    "memory_line",
    "plot_runs",
    "read_metrics",
    "run_folder",
]

logger = logging.getLogger(__name__)

PLAIN_LINES = 20  # progress lines of a whole run where there is no terminal
SHOWN = (  # in the progress line: metric, label, format
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl", "{:.4f}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("perf/train_tok_s", "tok/s", "{:.0f}"),
)
COMPARED = (("eval_reward", "reward"), ("eval_accuracy_strict", "strict"), ("eval_accuracy_lenient", "lenient"))


class RunReport:
    """Writes a run's folder and shows its progress. Use as a context manager, or call `close`.

    Raises:
        OutputFolderError: `output_dir` holds files of something else (an earlier run), or cannot be made.
    """

    def __init__(self, output_dir: str | Path, config: RunConfig, *, stream: TextIO | None = None) -> None:
        from grpo_fast.train.config import save_config

        self.folder = claim_folder(output_dir)
        self.total_steps = int(config.steps)
        save_config(config, self.folder / "config.yaml")
        self._metrics = (self.folder / "metrics.jsonl").open("x", encoding="utf-8")
        self._stream = stream or sys.stdout
        self._progress = _start_bar(self._stream, self.total_steps) if config.log.progress else None
        self._plain = self._progress is None and config.log.progress
        atexit.register(self.close)  # a run that ends in an exception still gives the terminal back

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and move the progress on. Values: numbers, 0-d tensors; NaN, inf → null."""
        values = {name: float(value) for name, value in metrics.items()}
        line = {"step": int(step), **{name: _json_number(value) for name, value in values.items()}}
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        self._show(step, values)

    def note(self, text: str) -> None:
        """One line for the person watching, above the progress bar."""
        if self._progress is not None:
            self._progress.console.print(escape_control(text), markup=False, highlight=False)
        else:
            print(escape_control(text), file=self._stream, flush=True)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write completions/step_….md. A row: `prompt` (text or messages), `completion`, and any numbers or texts."""
        path = self.folder / "completions" / f"step_{int(step):06d}.md"
        path.parent.mkdir(exist_ok=True)
        parts = [f"# Step {int(step)}\n", *(_row_markdown(number, row) for number, row in enumerate(rows, start=1))]
        path.write_text("\n".join(parts), encoding="utf-8")
        return path

    def finish(self, summary: Mapping[str, Any]) -> str:
        """Write summary.json and curves.png; print and return the line before → after.

        `summary["before"]` and `summary["after"]`, where present, are the metrics of two evaluations.
        """
        self.close()
        _write_atomically(self.folder / "summary.json", json.dumps(_plain_json(summary), indent=2) + "\n")
        try:
            plot_runs([self.folder], self.folder / "curves.png")
        except ImportError:
            self.note("curves.png was not drawn: matplotlib is not installed (pip install 'grpo_fast[train]')")
        line = final_line(summary.get("before") or {}, summary.get("after") or {})
        if line:
            self.note(line)
        return line

    def close(self) -> None:
        """Stop the progress bar and close metrics.jsonl; calling it again does nothing."""
        atexit.unregister(self.close)
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._metrics.close()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        text = " · ".join(f"{label} {form.format(values[key])}" for key, label, form in SHOWN if key in values)
        held_out = " · ".join(f"{label} {_shown(values, key)}" for key, label in COMPARED if key in values)
        if held_out and (self._plain or self._progress is not None):
            self.note(f"step {step}/{self.total_steps} · held out: {held_out}")
        if self._progress is not None and text:
            self._progress.update(self._progress.task_ids[0], completed=step, status=text)
        every = max(1, self.total_steps // PLAIN_LINES)
        if self._plain and text and (step % every == 0 or step in (1, self.total_steps)):
            self.note(f"step {step}/{self.total_steps} · {text}")


def final_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """`reward 0.31 ± 0.02 → 0.95 ± 0.01 · strict 1.2% ± 0.3 → 94.1% ± 1.5 (n=256)`; empty without both evaluations."""
    parts: list[str] = []
    for key, label in COMPARED:
        if key in before and key in after:
            change = f"{_shown(before, key)} → {_shown(after, key)}"
            if not (parts and parts[-1].endswith(change)):  # where strict and lenient are one, say it once
                parts.append(f"{label} {change}")
    if parts and "eval_n" in after:
        parts[-1] += f" (n={after['eval_n']:.0f}, ± one standard error)"
    return " · ".join(parts)


def memory_line(summary: Mapping[str, Any]) -> str:
    """`memory of a training step: 1.24 GiB predicted (micro-batches of up to 4096 tokens), 1.31 GiB measured`.

    Without a GPU the measured part is the growth of the whole process: libraries, rollouts and evaluation, too.
    """
    predicted, peak = summary["predicted_memory"], summary["peak_memory"]
    said = "no prediction" if predicted is None else f"{predicted / 2**30:.2f} GiB predicted"
    grown = f"the whole process grew by {summary['process_growth'] / 2**30:.2f} GiB"
    return f"memory of a training step: {said} (micro-batches of up to {summary['largest_microbatch']} tokens), " + (
        grown if peak is None else f"{peak / 2**30:.2f} GiB measured"
    )


def kernels_line(summary: Mapping[str, Any]) -> str:
    """`kernels: cpu`, or `kernels: torch (slower; cpu: no C++ compiler …)`."""
    reason = summary["backend_fallback"]
    return f"kernels: {summary['backend']}" + (f" (slower; {reason})" if reason else "")


def escape_control(text: str) -> str:
    r"""Model text made safe to see: control, bidi and invisible characters become \x1b, \u202e …; \n and \t stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE else _escaped(c) for c in text)


_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _start_bar(stream: TextIO, total: int) -> Progress | None:
    """A live bar on a terminal, None elsewhere."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    console = Console(file=stream)
    if not console.is_terminal:
        return None
    status = TextColumn("{task.fields[status]}")
    progress = Progress(BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), status, console=console)
    progress.add_task("train", total=total, status="")
    progress.start()
    return progress


def _row_markdown(number: int, row: Mapping[str, Any]) -> str:
    """Numbers in one line; every text in a block of its own, since it may be markdown itself."""
    texts = {key: value for key, value in row.items() if isinstance(value, str) or key == "prompt"}
    listed = " · ".join(f"{key} {_short(value)}" for key, value in row.items() if key not in texts)
    prompt = texts.get("prompt", "")
    if not isinstance(prompt, str):
        texts["prompt"] = "\n".join(f"[{said['role']}] {said['content']}" for said in prompt)
    blocks = [f"{key}\n{_fenced(text)}" for key, text in texts.items()]
    return "\n\n".join([f"## {number}", listed, *blocks]) + "\n"


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{float(value):.4g}"


def _fenced(text: str) -> str:
    """A code block that the text cannot close."""
    longest = run = 0
    for character in text:
        run = run + 1 if character == "`" else 0
        longest = max(longest, run)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{escape_control(text)}\n{fence}"


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value) if isinstance(value, Path) else _json_number(float(value))


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _shown(metrics: Mapping[str, float], key: str) -> str:
    """Value ± standard error, accuracies in per cent."""
    value, error = metrics[key], metrics.get(key + "_se", math.nan)
    if "accuracy" in key:
        return f"{100 * value:.1f}% ± {100 * error:.1f}"
    return f"{value:.3f} ± {error:.3f}"
