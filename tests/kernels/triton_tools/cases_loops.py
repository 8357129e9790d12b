"""Interpreter cases of variants of the loop in `slice_kernel`, which may replace it one day.

A variant must give the same bits as the loop of the package.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import loops
from grpo_fast.kernels.gpu import linear
from grpo_fast.kernels.gpu.configs import LinearConfig
from grpo_fast.kernels.gpu.exponentials import head_exponentials
from grpo_fast.kernels.types import LogitTransform
from tests.kernels.triton_tools import interpreter  # noqa: F401  (repairs bf16)

ROWS, HIDDEN, VOCAB = 70, 72, 200  # no multiples of tile sizes


@pytest.fixture(autouse=True)
def config(monkeypatch):
    """Use a tile of four pieces with tensor descriptors (TMA)."""
    chosen = LinearConfig(64, 128, 32, 4, 2, 32, use_tma=True)
    monkeypatch.setattr(linear, "linear_config", lambda *args, **options: chosen)


def head():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    weight = (0.2 * torch.randn(VOCAB, HIDDEN, generator=generator)).bfloat16()
    target = torch.randint(40, (ROWS,), generator=generator)  # some tiles have no target
    target[3] = -100
    return hidden, weight, None, target


@pytest.mark.parametrize("loop", loops.REPLACED)
@pytest.mark.parametrize("columns", [VOCAB, VOCAB + 3], ids=["stored by TMA", "stored by masks"])
def test_the_bits_of_the_shipped_loop(loop, columns):
    """Check that each variant of the loop gives the bits of the shipped loop.

    The target of row 5 is unlikely, so the exponentials of this row are computed twice.
    """

    def run():
        hidden, weight, bias, target = head()
        hidden[5] = -weight[target[5]] * 40
        given = hidden, weight, bias, target, LogitTransform(1.0, None, 0.9)
        logits = torch.full((ROWS, VOCAB), float("nan"))
        stats = linear.head_logps(*given, return_entropy=True, logits_out=logits)
        out = torch.full((ROWS, columns), float("nan"), dtype=torch.bfloat16)[:, :VOCAB]
        found = head_exponentials(*given, out)
        return *stats, logits, *found.stats[:2], found.unit, found.target_unit, out

    expected = run()
    assert -expected[1][5] > 40
    with loops.using_loop(loop):
        assert all(map(torch.equal, run(), expected))
