"""Lines for the person watching a run: each says one fact of its start or its end."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_fast.train.config import RolloutConfig

ONE_UPDATE = "one update per batch: the loss itself says little; watch reward and grad_norm"
USUAL_CLIP = "several updates per batch: 0.1 to 0.3 `clipped` is usual; near 1 nothing is learnt"
NOTHING = 1e-6  # of what a reader is shown, not of what metrics.jsonl holds
COMPARED = (  # before and after: metric, label
    ("eval_reward", "reward"),
    ("eval_accuracy_strict", "strict"),
    ("eval_accuracy_lenient", "lenient"),
)


def final_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """`reward 0.31 ± 0.02 → 0.95 ± 0.01 · strict 1.2% … → …`; empty without both evaluations."""
    parts: list[str] = []
    for key, label in COMPARED:
        if key in before and key in after:
            change = f"{with_error(before, key)} → {with_error(after, key)}"
            # Where strict and lenient are one, say it once.
            if not (parts and parts[-1].endswith(change)):
                parts.append(f"{label} {change}")
    if parts and "eval_n" in after:
        parts[-1] += f" (n={after['eval_n']:.0f}, ± one standard error)"
    return " · ".join(parts)


def memory_line(summary: Mapping[str, Any]) -> str:
    """`memory of a training step: 1.24 GiB predicted (micro-batches …), 1.31 GiB measured`; without
    a GPU the growth of the whole process.
    """
    predicted, peak = summary["predicted_memory"], summary["peak_memory"]
    said = "no prediction" if predicted is None else f"{predicted / 2**30:.2f} GiB predicted"
    size = f"micro-batches of up to {summary['largest_microbatch']} tokens"
    grown = f"the whole process grew by {summary['process_growth'] / 2**30:.2f} GiB"
    measured = grown if peak is None else f"{peak / 2**30:.2f} GiB measured"
    return f"memory of a training step: {said} ({size}), {measured}"


def opening_lines(
    rollout: RolloutConfig, kernels: Mapping[str, Any], fallback: str | None
) -> list[str]:
    """`kernels: cpu`, `sampler: own loop`, with why where they are slower ones, and the line on a
    loss over the tokens that the sampler kept.

    fallback: why the engine samples by transformers' `generate`; None: it does not.
    """
    why = kernels["backend_fallback"]
    own = "own loop" if rollout.engine == "transformers" else rollout.engine
    sampler = f"transformers' generate (slower; {fallback})" if fallback else own
    lines = [f"kernels: {kernels['backend']}" + (f" (slower; {why})" if why else "")]
    lines.append(f"sampler: {sampler}")
    if rollout.needs_support:
        kept = f"top_k {rollout.top_k or 'off'}, top_p {rollout.top_p:g}"
        lines.append(f"loss over the tokens that the sampler kept, where it says which ({kept})")
    return lines


def closing_lines(folder: Path, has_code: bool = False) -> list[str]:
    """Where a run's results lie, and commands to type that look at them.

    has_code: the settings name code of somebody's own, which an evaluation must be allowed.
    """
    names = ("completions.html", "curves.png", "model")
    present = [name for name in names if (folder / name).exists()]
    place = shlex.quote(str(folder))
    lines = [f"{place}: {', '.join(present)}"] if present else []
    if (folder / "model").is_dir():
        lines.append(f"grpo-fast eval {place}{' --allow-code' * has_code}")
    return [*lines, f"grpo-fast plot {place}"]


def shown_number(value: float, form: str) -> str:
    """The number in this format; what rounding leaves of 0 (−0, 1e-22, 1e-8) is 0."""
    text = form.format(0.0 if abs(value) < NOTHING else value)
    return text.lstrip("+-") if not text.strip("+-0.") else text


def with_error(metrics: Mapping[str, float], key: str) -> str:
    """Value ± standard error where there is one, accuracies in per cent."""
    value, error = metrics[key], metrics.get(key + "_se", math.nan)
    scale, form, unit = (100, ".1f", "%") if "accuracy" in key else (1, ".3f", "")
    spread = f" ± {scale * error:{form}}" if math.isfinite(error) else ""  # of one question: none
    return f"{shown_number(scale * value, f'{{:{form}}}')}{unit}{spread}"
