"""Lines that a run prints for the user at its start and at its end."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from grpo_fast.train.config import RolloutConfig

NEAR_ZERO = 1e-6  # smaller numbers are printed as 0; metrics.jsonl contains the exact numbers
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


def shown_number(value: float, form: str = "{:.4g}") -> str:
    """Format a number. Numbers closer to 0 than NEAR_ZERO are printed as 0 without a sign."""
    text = form.format(0.0 if abs(value) < NEAR_ZERO else value)
    return text.lstrip("+-") if not text.strip("+-0.") else text


def with_error(metrics: Mapping[str, float], key: str) -> str:
    """Format a metric with its standard error, if it is finite. Accuracies are in percent."""
    scale, form, unit = (100, ".1f", "%") if "accuracy" in key else (1, ".3f", "")
    text = shown_number(scale * metrics[key], f"{{:{form}}}") + unit
    error = metrics.get(key + "_se", math.nan)  # an evaluation of one question has the error NaN
    return f"{text} ± {scale * error:{form}}" if math.isfinite(error) else text
