"""The Triton kernels in the interpreter: parity with fp64, edge cases, memory, program order, the
public functions.

The cases lie in tests/kernels/triton_tools/cases_*.py and run in processes started with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.triton_tools.launcher import HAS_TRITON, OTHER_TRITON, run_cases  # noqa: E402

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
CASES = (
    "cases_rows.py",
    "cases_linear.py",
    "cases_weights.py",
    "cases_gradients.py",
    "cases_grad_filter.py",
    "cases_public.py",
    "cases_nan.py",
    "cases_range.py",
    "cases_scale.py",
    "cases_divergence.py",
    "cases_support.py",
    "cases_support_public.py",
    "cases_loops.py",
    "cases_live_tiles.py",
)


@pytest.mark.parametrize("cases", CASES)
def test_interpreter(cases):
    passed = re.search(r"(\d+) passed", run_cases(cases))
    assert passed and int(passed[1]) >= 10


@pytest.mark.slow
@pytest.mark.skipif(
    OTHER_TRITON is None, reason="GRPO_FAST_TRITON36 does not name a folder with triton 3.6"
)
@pytest.mark.parametrize("cases", CASES)
def test_interpreter_other_triton(cases):
    assert "passed" in run_cases(cases, OTHER_TRITON)
