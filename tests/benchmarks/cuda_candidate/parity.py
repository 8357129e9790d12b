"""The forward kernel against fp64, wherever it runs: its problems, its shapes, what must hold."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernels.exact import logps_bar
from grpo_fast.kernels.gpu import exponentials
from grpo_fast.kernels.types import LogitRule
from tests.kernels import formulas

BF16_UNIT = 2.0**-8  # half a unit in the last place: the relative error of one rounding
PLAIN = LogitRule(1.0, None, 1.0)
# Fewer rows than a warp, a block, a cluster, and more; a last tile of columns of 1, 104 and 192; a
# depth of one stage that is not full, of fewer stages than the ring has, of more, of no multiple.
SHAPES = ((5, 8, 193), (130, 72, 296), (257, 128, 384), (300, 392, 700))

Head = tuple[Tensor, Tensor, None, Tensor]


def make(rows: int, depth: int, vocab: int, device: str = "cpu") -> Head:
    """hidden, weight, no bias, targets in the first and last column and at borders of tiles."""
    g = torch.Generator().manual_seed(rows + depth + vocab)
    hidden = torch.randn(rows, depth, generator=g).bfloat16()
    weight = (torch.randn(vocab, depth, generator=g) * (2 / depth**0.5)).bfloat16()
    places = torch.tensor([0, vocab - 1, 127, 128, 191, 192, 255, 256]).clamp(max=vocab - 1)
    target = torch.randint(vocab, (rows,), generator=g)
    target[: len(places)] = places[:rows]
    return hidden.to(device), weight.to(device), None, target.to(device)


def written(head: Head, rule: LogitRule) -> tuple[tuple, list[Tensor], Tensor]:
    """(stats, units, E) of the door that stores exponentials, in a poisoned buffer."""
    (rows, _), vocab = head[0].shape, head[1].shape[0]
    buffer = head[0].new_full((rows, -(-vocab // 8) * 8), float("nan"))
    stats, *units, _ = exponentials.head_exponentials(*head, rule, buffer[:, :vocab])
    assert buffer[:, vocab:].isnan().all(), "written beyond the vocabulary"
    return stats, units, buffer[:, :vocab]


def assert_right(head: Head, rule: LogitRule, stats, units=None, out=None) -> None:
    """lse and logps, and the d-logits of some upstream gradients, against fp64."""
    hidden, weight, _, target = head
    z, slope = formulas.final(hidden.double() @ weight.double().T, *rule)
    for actual, expected in zip(stats[:2], formulas.statistics(z, target), strict=False):
        bar = logps_bar(hidden.shape[1], hidden.device.type)
        assert (actual - expected).abs().max() <= bar
    if out is None:
        return
    g = torch.linspace(-1, 1, len(target), device=out.device)
    is_target = torch.arange(len(weight), device=out.device) == target[:, None]
    assert (out[is_target] == 0).all()
    own, other = (g * units[1]).double()[:, None], (g * units[0]).double()[:, None] * out.double()
    actual, expected = torch.where(is_target, own, other), formulas.gradient(z, slope, target, g)
    unit = torch.where(is_target, 0.0, BF16_UNIT)
    assert ((actual - expected).abs() <= (unit + 2e-5) * expected.abs() + 1e-30).all()
