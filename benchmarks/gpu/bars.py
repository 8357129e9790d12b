"""Bars, which are acceptance thresholds for the measurements on one GPU.

Each bar has a prediction and, if it was measured, a value. A bar that is a ratio compares two times
of the same run, such as the time of grpo_fast and the time of a limit. The bars for contexts depend
on the memory of the card.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from benchmarks.gpu.parts import STEPS
from benchmarks.gpu.predict import CARDS, Case, estimates
from benchmarks.kernels.shapes import MODELS, Shape

OURS = "grpo_fast (auto)"
RATIOS = {"qwen3-8b": 1.12, "qwen3-1.7b": 1.15, "qwen2.5-0.5b": 1.30}
# For each (prompt, completion, group) in STEPS: the required speedup over TRL's step, and the
# speedup that LOG.md predicts for Qwen2.5-0.5B.
STEP_RATIOS = dict(zip(STEPS, ((5.0, 6.9), (3.0, 4.3), (1.3, 1.5)), strict=True))
# Number of prompt tokens that must fit on an H200, for each model. For a card with less memory, the
# required number is lower in proportion. No part of the session measures it. The command is
# python -m benchmarks.trainers.step --device cuda --providers shared --model-config M --prompt N
# with --lora 16 for the 7B model.
CONTEXTS = {"qwen2.5-0.5b": 1_000_000, "qwen2.5-1.5b": 650_000, "qwen2.5-7b": 300_000}


class Results(NamedTuple):
    """Measurements of one card.

    Attributes:
        cases: the cases of the kernel benchmarks, oldest first.
        reports: the reports of all benchmarks.
    """

    cases: list[dict[str, Any]]
    reports: list[dict[str, Any]]

    def rows(self, case: Case, other: str = OURS) -> dict[str, dict[str, Any]]:
        """Return the timed rows of a case from the newest run that timed grpo_fast and `other`.

        `other` is the name or the role of a provider. Without such a run, the dict is empty.
        """
        for found in reversed(self.cases):
            timed = {name: row for name, row in found["rows"].items() if "median_ms" in row}
            known = {*timed, *(row["role"] for row in timed.values())}
            fields = found["operation"], Shape(*found["shape"]), found["active"], found["inactive"]
            if Case(*fields) == case and {OURS, other} <= known:
                return timed
        return {}

    def value(self, case: Case, field: str) -> float | None:
        """Return a field of grpo_fast's row in the newest run of a case, or None if none exists."""
        return self.rows(case).get(OURS, {}).get(field)


class Bar(NamedTuple):
    """A measured value with an upper or a lower bound.

    Attributes:
        title: description of the value in the report.
        wanted: the bound.
        predicted: the predicted value, or None if there is no prediction.
        value: the measured value, or None if it was not measured.
        unit: text after the value.
        at_least: True if `wanted` is a lower bound.
    """

    title: str
    wanted: float
    predicted: float | None
    value: float | None
    unit: str = "×"
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.wanted if self.at_least else value <= self.wanted

    def text(self, value: float) -> str:
        digits = 0 if self.wanted >= 1000 else 2
        return f"{value:,.{digits}f}{self.unit}"


def bars(card: str, results: Results) -> list[Bar]:
    """Return all bars for a card, with the most important bar first."""
    heads = [Shape(8192, *MODELS[name]) for name in RATIOS]
    small = Shape(1024, *MODELS["qwen2.5-0.5b"])
    title = "head forward + backward / three GEMMs"
    limits = zip((*heads, small), (*RATIOS.values(), 1.35), strict=True)
    found = [ratio(card, results, "linear_grpo_loss", title, *pair) for pair in limits]
    found += [over_peer(results, shape, "TRL", 2.5) for shape in heads]
    found += [over_peer(results, shape, "peer", 1.0) for shape in (*heads, small)]
    title = "linear_logps without gradient / one GEMM"
    found += [ratio(card, results, "linear_logps", title, shape, 1.10) for shape in heads]
    found += [sparse(card, results, inactive) for inactive in ("masked", "zero-advantage")]
    operations = ("logits_grpo_loss_inplace", "logits_grpo_loss")
    found += [copy_share(card, results, operation) for operation in operations]
    longest = Shape(131072, *MODELS["qwen3-8b"])
    found += [peak(card, results, shape) for shape in (*heads, longest)]
    found += [step_ratio(results, sizes) for sizes in STEPS]
    return found + [context(card, results, name) for name in CONTEXTS]


def title_of(shape: Shape) -> str:
    return f"N = {shape.n}, H = {shape.h}, V = {shape.v}"


def ratio(
    card: str, results: Results, operation: str, title: str, shape: Shape, wanted: float
) -> Bar:
    """Return a bar for the time of an operation divided by the time of its limit."""
    case = Case(operation, shape)
    value = results.value(case, "ratio_to_limit")
    title = f"{title}, {title_of(shape)}"
    return Bar(title, wanted, estimates(card)[case].ratio, value)


def over_peer(results: Results, shape: Shape, peer: str, wanted: float) -> Bar:
    """Return a bar for the speedup over a peer, or over the fastest peer if `peer` is "peer"."""
    case = Case("linear_grpo_loss", shape)
    rows = results.rows(case, peer)
    peers = [row["median_ms"] for name, row in rows.items() if peer in (name, row["role"])]
    value = min(peers) / rows[OURS]["median_ms"] if peers else None
    title = f"faster than {'the fastest peer' if peer == 'peer' else peer}, {title_of(shape)}"
    return Bar(title, wanted, None, value, at_least=True)


def sparse(card: str, results: Results, inactive: str) -> Bar:
    """Return a bar for the speedup of a call with 20% active rows over a call with 100%.

    The two runs may differ in speed, so each time is first divided by the limit of its run.
    """
    dense = Case("linear_grpo_loss", Shape(8192, *MODELS["qwen3-8b"]))
    case = dense._replace(active=0.2, inactive=inactive)
    pair = [results.value(c, "ratio_to_limit") for c in (dense, case)]
    value = pair[0] / pair[1] if pair[0] and pair[1] else None
    guess = estimates(card)[dense].ours_ms / estimates(card)[case].ours_ms
    title = f"0.2 active rows ({inactive}) over all, {title_of(case.shape)}"
    return Bar(title, 2.0, guess, value, at_least=True)


def copy_share(card: str, results: Results, operation: str) -> Bar:
    case = Case(operation, Shape(8192, 64, 151936))
    ratio = results.value(case, "ratio_to_limit")
    title = f"{operation}, share of a copy's speed"
    guess = 1 / estimates(card)[case].ratio
    value = None if ratio is None else 1 / ratio
    return Bar(title, 0.8, guess, value, at_least=True)


def peak(card: str, results: Results, shape: Shape) -> Bar:
    """Return a bar for the peak memory. Its bound is the prediction, rounded up to 0.05 GiB."""
    case = Case("linear_grpo_loss", shape)
    planned = estimates(card)[case].workspace_mib / 1024
    value = results.value(case, "workspace_mib")
    title = f"peak besides inputs and gradients, {title_of(shape)}"
    wanted = math.ceil(20 * planned) / 20
    value = None if value is None else value / 1024
    return Bar(title, wanted, planned, value, " GiB")


def step_ratio(results: Results, sizes: tuple[int, int, int]) -> Bar:
    wanted, guess = STEP_RATIOS[sizes]
    value = None
    for report in results.reports:
        settings, rows = report.get("settings", {}), report.get("providers", {})
        same = tuple(settings.get(name) for name in ("prompt", "completion", "group")) == sizes
        if same and {"TRL", "shared"} <= rows.keys():
            value = rows["TRL"]["median_ms"] / rows["shared"]["median_ms"]
    prompt, completion, group = sizes
    size = f"{prompt} + {group} x {completion} tokens"
    title = f"training step faster than TRL's, Qwen2.5-0.5B, {size}"
    return Bar(title, wanted, guess, value, at_least=True)


def context(card: str, results: Results, model: str) -> Bar:
    """Return a bar for the longest prompt with which a training step fits into GPU memory."""
    prompts = [
        float(report["settings"]["prompt"])
        for report in results.reports
        if report.get("settings", {}).get("model_config") == model
        and "shared" in report.get("providers", {})
    ]
    # Ignore shorter prompts. Their runs measured the time of a step, not the memory limit.
    value = max((prompt for prompt in prompts if prompt >= 100_000), default=None)
    wanted = CONTEXTS[model] * CARDS[card] // CARDS["H200"] // 1000 * 1000
    title = f"context of a step that fits, {model}"
    return Bar(title, wanted, None, value, " tokens", at_least=True)
