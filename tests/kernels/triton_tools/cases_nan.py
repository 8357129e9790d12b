"""What an active row or the head cannot compute, through the Triton kernels: it reaches the loss
and every gradient.

Run by test_triton_interpreter.py in a process of its own; test_nan_is_seen.py holds the other
backends to the same.
"""

from __future__ import annotations

import math

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.kernels.gpu import rows
from grpo_fast.kernels.types import LogitRule
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.losses import OBJECTIVES
from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)
from tests.loss.test_nan_is_seen import assert_seen, spoiled
from tests.loss_cases import LEAVES_AND_LEVELS, make_case, options_for
from tests.oracles import WORDS
from tests.pairs import pairs


@pytest.mark.parametrize(("loss_type", "level"), LEAVES_AND_LEVELS)
def test_for_every_leaf(loss_type, level):
    case = make_case(31, **options_for(loss_type, level))
    for on_policy in (False, True):
        case = case.but(old=None) if on_policy else case
        assert_seen(spoiled(case, "hidden", math.nan), "linear", "triton", "packed")
        assert_seen(spoiled(case, "weight", math.inf), "logits", "triton")


@pairs(dtype=[torch.float32, torch.bfloat16, torch.float16], where=["hidden", "weight"],
       value=[math.nan, math.inf, -math.inf])  # fmt: skip
def test_for_every_dtype(where, value, dtype):
    case = make_case(
        34,
        dtype=dtype,
        sampling=True,
        **options_for("grpo", beta=0.1, corrections=WORDS["token_mask"]),
    )
    for advantage in (-0.8, 0.0):
        values = case.advantages.clone()
        values[1] = advantage
        assert_seen(spoiled(case.but(advantages=values), where, value), "linear", "triton")


def test_rows_that_do_not_count_are_inert_for_every_leaf():
    leaves = {
        o.leaf: name
        for name, o in OBJECTIVES.items()
        if o.window == "ratio" and "token" in o.levels
    }
    for loss_type in leaves.values():
        logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
        logits[1] = torch.nan
        weights, ids = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1, -100, 3])
        config = LossConfig(loss_type=loss_type, beta=0.1, max_completion_length=9)
        old, advantages = torch.full((3,), -2.0), torch.tensor([1.0, -1.0, -0.5])
        terms = RowTerms(advantages, weights, weights, old, old)
        rule = LogitRule(1.0, None, 1.0)
        rows.row_loss_(logits, logits, ids, terms, config, rule, return_entropy=False)
        assert (logits[1] == 0).all() and torch.isfinite(logits).all(), loss_type
        assert (logits[0] != 0).any(), loss_type
