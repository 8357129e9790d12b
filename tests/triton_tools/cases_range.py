"""16-bit gradients under a loss scale through the Triton kernels; test_gradient_range.py says what is asked.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

import pytest

from grpo_fast.kernels import linear_triton
from tests import test_gradient_range as plain_cases
from triton_tools import interpreter  # noqa: F401  (its repairs)

# The vendor's product and row kernels, or the kernels that start from hidden.
HEADS = {"row kernels": 0, "from hidden": 10**6}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", plain_cases.CONFIGS)
@pytest.mark.parametrize("dtype", plain_cases.DTYPES, ids=str)
def test_gradients_from_hidden(dtype, name, head, monkeypatch):
    monkeypatch.setattr(linear_triton, "VENDOR_GEMM_FROM", HEADS[head])
    plain_cases.test_gradients_from_hidden(dtype, "triton", name)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", plain_cases.DTYPES, ids=str)
def test_gradients_from_logits(dtype, inplace):
    plain_cases.test_gradients_from_logits(dtype, "triton", inplace)
