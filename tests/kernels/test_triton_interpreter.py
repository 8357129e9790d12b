"""The Triton kernels in the interpreter: parity with fp64, edge cases, memory, program order, the
public functions.

The cases lie in tests/kernels/triton_tools/cases_*.py and run in processes started with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.triton_tools.launcher import HAS_TRITON, OTHER_TRITON, TOOLS, run_cases

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
CASES = sorted(path.name for path in TOOLS.glob("cases_*.py"))


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
