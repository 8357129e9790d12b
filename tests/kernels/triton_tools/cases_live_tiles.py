"""Interpreter cases of a variant of `grad_filter` that is not part of the package, against fp64.

The variant is in benchmarks/gpu/live_tiles.py.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import live_tiles, sparse
from benchmarks.gpu.live_tiles import COLUMNS, ROWS
from benchmarks.gpu.sparse import ROUNDING
from grpo_fast.kernels.gpu import linear
from grpo_fast.kernels.gpu.configs import LinearConfig
from grpo_fast.kernels.types import LogitTransform

T, H = 300, 24


def problem():
    p = sparse.peaked(T, H, 456, "cpu")
    p.hidden[5] = -p.weight[p.target_ids[5]] * 40  # -logp is large, so this row is computed twice
    return p


def test_what_is_left_out_is_known():
    """Check that `live_tiles` skips the tiles with the smallest masses, up to the tolerance.

    The mass of a tile is the sum of |d-logits| over its logits. The test computes it in fp64.
    """
    p, tolerance = problem(), 0.3
    slopes = p.grad_logps.clone()
    slopes[7] = 0.0
    d = (p.hidden.double() @ p.weight.double().t()).softmax(1) * slopes.double()[:, None]
    by_target = (slopes - d.gather(1, p.target_ids[:, None])[:, 0]).float()
    d.scatter_(1, p.target_ids[:, None], 0.0)
    found, log_sums = live_tiles.weighed_exponentials(*p[:3], LogitTransform(), p.matrix)
    log_sums[:, 7] = torch.nan  # NaN in a row with slope 0 must have no effect
    live = live_tiles.live_tiles(log_sums, found.stats[0], slopes, by_target, tolerance)
    masses = torch.stack(
        [torch.stack([x.abs().sum() for x in r.split(COLUMNS, 1)]) for r in d.split(ROWS)]
    )
    assert live.is_live.shape == masses.shape and 0 < live.is_live.sum() < masses.numel()
    dead = masses[~live.is_live]
    assert dead.max() <= masses[live.is_live].min() * (1 + 1e-4)
    assert live.dropped.item() == pytest.approx(dead.sum().item(), rel=1e-4)
    whole = masses.sum()
    assert live.total.item() == pytest.approx((whole + by_target.abs().sum()).item(), rel=1e-4)
    lightest = masses[live.is_live].min()
    assert dead.sum() <= tolerance * whole * (1 + 1e-4) < dead.sum() + lightest * (1 + 1e-4)
    log_sums[2, 9] = torch.nan
    seen = live_tiles.live_tiles(log_sums, found.stats[0], slopes, by_target, tolerance)
    assert seen.is_live.all(), "a NaN must be visible, so no tile is skipped"


def test_whole_gradients(monkeypatch):
    """Check that the gradients of the filter are within the bounds that the GPU benchmark uses.

    The tile has several pieces and uses TMA.
    """
    chosen = LinearConfig(64, 128, 32, 4, 2, 32, use_tma=True)
    monkeypatch.setattr(linear, "linear_config", lambda *args, **options: chosen)
    monkeypatch.setitem(live_tiles.BLOCKS, "interpreter", (16, 4, 2, True))
    p, tolerance = problem(), 0.3
    logps = (p.hidden.double() @ p.weight.double().t()).log_softmax(1)
    d = -logps.exp() * p.grad_logps.double()[:, None]
    d.scatter_add_(1, p.target_ids[:, None], p.grad_logps.double()[:, None])
    exact = d @ p.weight.double(), d.t() @ p.hidden.double()
    found = sparse.gradients(p, tolerance)
    sparse.check(p, found, exact)
    assert 0 < found[2].dropped <= tolerance * found[2].total
    errors = [(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=False)]
    assert min(errors) > 2 * ROUNDING, "the filter must skip a visible part"
    wrong = found[2]._replace(dropped=found[2].dropped / 1e3)
    with pytest.raises(ValueError, match="expected an error of at most"):
        sparse.check(p, (*found[:2], wrong), exact)
