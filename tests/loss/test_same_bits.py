"""The numbers are those stored before the last change that claimed to change none
(tests/same_bits.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOT_STORED = 3


@pytest.mark.parametrize("engine", ["host", "triton"])
def test_the_stored_bits(engine: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GRPO_FAST_", "TRITON_"))}
    kept |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if engine == "triton":
        kept["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.same_bits", "--engine", engine],
        cwd=Path(__file__).resolve().parents[2], env=kept, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    if done.returncode == NOT_STORED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
