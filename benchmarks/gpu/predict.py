"""Predicted times and memory of the calls for which bars.py sets thresholds, on one GPU.

`python -m benchmarks.gpu.report` shows these predictions next to the measured values.

predictions.json has the predictions. They were computed from flops and bytes that were counted by
hand, before the visit that measures them. The script that computed them is this file at the commit
that predictions.json names. LOG.md has the reasons.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kernels.shapes import Shape

FILE = Path(__file__).with_name("predictions.json")
CARDS = {"H100": 78 << 30, "H200": 139 << 30}  # bytes of memory


class Case(NamedTuple):
    """Operation, shape and active rows of a benchmark case, as in `Variant` of problem.py."""

    operation: str
    shape: Shape
    active: float = 1.0
    inactive: str = "masked"


class Estimate(NamedTuple):
    """Prediction for one case.

    Attributes:
        limit_ms: time of the limit. It is one bare GEMM, three GEMMs or a copy.
        ours_ms: time of grpo_fast.
        workspace_mib: peak memory, without inputs and gradients.
        parts: the three slowest parts of grpo_fast's call, and their times in ms.
    """

    limit_ms: float
    ours_ms: float
    workspace_mib: float
    parts: str

    @property
    def ratio(self) -> float:
        """Return the time of grpo_fast divided by the time of the limit."""
        return self.ours_ms / self.limit_ms


@functools.cache
def predictions(card: str) -> dict[str, Any]:
    """Return all predictions for a card, as the file stores them."""
    found: dict[str, Any] = json.loads(FILE.read_text())["cards"][card]
    return found


@functools.cache
def estimates(card: str) -> dict[Case, Estimate]:
    """Return the predictions for a card, in the order of the report."""
    found = {}
    for row in predictions(card)["cases"]:
        case = Case(row["operation"], Shape(*row["shape"]), row["active"], row["inactive"])
        found[case] = Estimate(*(row[name] for name in Estimate._fields))
    return found


def label(case: Case) -> str:
    rows = "" if case.active == 1 else f", {case.active:g} active ({case.inactive})"
    return f"{case.operation} {','.join(map(str, case.shape))}{rows}"
