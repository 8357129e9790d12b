"""16-bit gradients under a loss scale through the Triton kernels; test_gradient_range.py says what
is asked.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

import pytest

from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)
from tests.loss import test_gradient_range as plain_cases


@pytest.mark.parametrize("name", plain_cases.CONFIGS)
@pytest.mark.parametrize("dtype", plain_cases.DTYPES, ids=str)
def test_gradients_from_hidden(dtype, name):
    plain_cases.test_gradients_from_hidden(dtype, "triton", name)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", plain_cases.DTYPES, ids=str)
def test_gradients_from_logits(dtype, inplace):
    plain_cases.test_gradients_from_logits(dtype, "triton", inplace)
