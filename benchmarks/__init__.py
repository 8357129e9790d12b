"""Benchmarks: operations and trainers against peers and limits, results as JSON; see README.md."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
