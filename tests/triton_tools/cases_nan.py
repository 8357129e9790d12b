"""What an active row or the head cannot compute, through the Triton kernels: it reaches the loss and every gradient.

Run by test_triton_interpreter.py in a process of its own; test_nan_is_seen.py holds the other backends to the same.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.loss_cases import LOSS_LEVELS, make_case, options_for
from tests.test_nan_is_seen import assert_seen, spoiled
from triton_tools import interpreter  # noqa: F401  (its repairs)


@pytest.mark.parametrize(("loss_type", "level"), LOSS_LEVELS)
def test_for_every_loss(loss_type, level):
    case = make_case(31, **options_for(loss_type, level))
    for on_policy in (False, True):
        case = case.but(old=None) if on_policy else case
        assert_seen(spoiled(case, "hidden", math.nan), "linear", "triton", "packed")
        assert_seen(spoiled(case, "weight", math.inf), "logits", "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["hidden", "weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_for_every_dtype(where, value, dtype):
    case = make_case(34, dtype=dtype, sampling=True, **options_for("grpo", beta=0.1, sampling_correction="token_mask"))
    for advantage in (-0.8, 0.0):
        values = case.advantages.clone()
        values[1] = advantage
        assert_seen(spoiled(case.but(advantages=values), where, value), "linear", "triton")
