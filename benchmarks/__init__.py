"""Benchmarks that compare grpo_fast with other libraries and with the limits of the hardware.

The results are JSON files. benchmarks/README.md explains the method.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
