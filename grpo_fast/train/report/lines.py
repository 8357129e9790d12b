"""Lines for the person watching a run. Each states one fact of its start or its end."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_fast.train.config import RolloutConfig

ONE_UPDATE = "one update per batch: the loss itself says little; watch reward and grad_norm"
USUAL_CLIP = "several updates per batch: 0.1 to 0.3 `clipped` is usual; near 1 nothing is learnt"
NEAR_ZERO = 1e-6  # smaller numbers are shown as 0; metrics.jsonl has all digits
COMPARED = {  # metrics of an evaluation, with their labels
    "eval_reward": "reward",
    "eval_accuracy_strict": "strict",
    "eval_accuracy_lenient": "lenient",
}


def final_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return `reward 0.31 ± 0.02 → 0.95 ± 0.01 · strict …`, or "" without both evaluations."""
    parts: list[str] = []
    for key, label in COMPARED.items():
        if key in before and key in after:
            change = f"{with_error(before, key)} → {with_error(after, key)}"
            if not (parts and parts[-1].endswith(change)):  # lenient is often equal to strict
                parts.append(f"{label} {change}")
    if parts and "eval_n" in after:
        parts[-1] += f" (n={after['eval_n']:.0f}, ± one standard error)"
    return " · ".join(parts)


def memory_line(summary: Mapping[str, Any]) -> str:
    """Return a line with the predicted and the measured memory of a training step.

    Without a GPU it has the growth of the process instead of the measured memory.
    """
    predicted = summary["predicted_memory"]
    peak = summary["peak_memory"]
    said = "no prediction" if predicted is None else f"{predicted / 2**30:.2f} GiB predicted"
    size = f"micro-batches of up to {summary['largest_microbatch']} tokens"
    measured = f"the whole process grew by {summary['process_growth'] / 2**30:.2f} GiB"
    if peak is not None:
        measured = f"{peak / 2**30:.2f} GiB measured"
    return f"memory of a training step: {said} ({size}), {measured}"


def opening_lines(
    rollout: RolloutConfig, kernels: Mapping[str, Any], fallback: str | None
) -> list[str]:
    """Return lines with the kernels and the sampler, and why they are slower ones if they are.

    Args:
        rollout: The section `rollout` of the configuration.
        kernels: `backend`, and the reason `backend_fallback` or None.
        fallback: Why the engine samples by transformers' `generate`, or None if it does not.
    """
    why = kernels["backend_fallback"]
    lines = [f"kernels: {kernels['backend']}" + (f" (slower; {why})" if why else "")]
    if fallback:
        lines.append(f"sampler: transformers' generate (slower; {fallback})")
    else:
        own = "own loop" if rollout.engine == "transformers" else rollout.engine
        lines.append(f"sampler: {own}")
    if rollout.needs_support:
        kept = f"top_k {rollout.top_k or 'off'}, top_p {rollout.top_p:g}"
        lines.append(f"loss over the tokens that the sampler kept, where it says which ({kept})")
    return lines


def closing_lines(folder: Path, has_code: bool = False) -> list[str]:
    """Return the result files of a run that exist, and commands that look at them.

    Args:
        folder: The folder of the run.
        has_code: The settings name custom code, which an evaluation must be allowed to run.
    """
    names = ("completions.html", "curves.png", "model")
    present = [name for name in names if (folder / name).exists()]
    place = shlex.quote(str(folder))
    lines = [f"{place}: {', '.join(present)}"] if present else []
    if "model" in present:
        lines.append(f"grpo-fast eval {place}" + (" --allow-code" if has_code else ""))
    return [*lines, f"grpo-fast plot {place}"]


def shown_number(value: float, form: str = "{:.4g}") -> str:
    """Return the formatted number. What rounding leaves of 0 (−0, 1e-22, 1e-8) is shown as 0."""
    text = form.format(0.0 if abs(value) < NEAR_ZERO else value)
    return text.lstrip("+-") if not text.strip("+-0.") else text


def with_error(metrics: Mapping[str, float], key: str) -> str:
    """Return a metric ± its standard error if it is known, accuracies in per cent."""
    scale, form, unit = (100, ".1f", "%") if "accuracy" in key else (1, ".3f", "")
    text = shown_number(scale * metrics[key], f"{{:{form}}}") + unit
    error = metrics.get(key + "_se", math.nan)  # NaN for a single question
    return f"{text} ± {scale * error:{form}}" if math.isfinite(error) else text
