"""Tests of the Triton kernels in Triton's interpreter.

They cover fp64 parity, edge cases, memory accesses, program order and public functions. Cases for
the interpreter only are in tests/kernels/triton_tools/cases_*.py. Cases for all engines are in the
test files that launcher.OF_ENGINES lists. All cases run in one process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.triton_tools.launcher import HAS_TRITON, run_cases


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_interpreter():
    passed = re.search(r"(\d+) passed", run_cases())
    assert passed and int(passed[1]) > 250
