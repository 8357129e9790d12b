"""Tests of the Triton kernels in Triton's interpreter.

They cover fp64 parity, edge cases, memory accesses, program order and public functions. Cases for
the interpreter only are in tests/kernels/triton_tools/cases_*.py. Cases for all engines are in the
test files that OF_ENGINES lists. All cases run in one process with TRITON_INTERPRET=1. Triton's
interpreter and its compiler cannot run in the same process.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "kernels" / "triton_tools"
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Tests that have a backend parameter and also run in Triton's interpreter.
OF_ENGINES = (
    "kernels/test_rows.py kernels/test_head.py kernels/test_support_kernels.py "
    "kernels/test_grad_filter.py loss/test_contract.py::test_on_policy_is_exact "
    "loss/test_divergence.py loss/test_gradient_range.py loss/test_logps.py "
    "loss/test_loss_parity.py::test_sweeps"
).split()


def run_python(*arguments: str, interpret: bool, timeout: float = 1800) -> str:
    """Run Python with the repository on the path, and return its standard output."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")
    }
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    environment["OPENBLAS_NUM_THREADS"] = "1"  # small tiles are slower with threads
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
    output = done.stdout + done.stderr
    if done.returncode:
        raise AssertionError(
            f"{' '.join(arguments)} exited with {done.returncode}:\n{output[-6000:]}"
        )
    return done.stdout


def run_cases() -> str:
    """Run the interpreter cases and the tests in OF_ENGINES, and return the output of pytest."""
    options = ["-q", "-k", "triton", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    files = [*sorted(map(str, TOOLS.glob("cases_*.py"))), *(f"tests/{x}" for x in OF_ENGINES)]
    return run_python("-m", "pytest", *files, *options, interpret=True)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_interpreter():
    passed = re.search(r"(\d+) passed", run_cases())
    assert passed and int(passed[1]) > 250
