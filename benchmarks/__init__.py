"""Benchmarks that compare grpo_fast with other libraries and with limits of the hardware.

Results are written as JSON. benchmarks/README.md explains the method.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
