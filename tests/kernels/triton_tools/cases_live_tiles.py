"""The candidate for `grad_filter` (benchmarks/gpu/live_tiles.py) in the interpreter, against fp64.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import live_tiles, sparse
from benchmarks.gpu.live_tiles import COLUMNS, ROWS, LiveTiles, live_product
from benchmarks.gpu.sparse import ROUNDING
from grpo_fast.kernels.gpu import linear
from grpo_fast.kernels.gpu.configs import LinearConfig
from grpo_fast.kernels.gpu.exponentials import head_exponentials
from grpo_fast.kernels.types import LogitRule
from tests.kernels.triton_tools.interpreter import only_memory_of, reversed_programs

T, H = 300, 24
RULE = LogitRule(1.3, None, 0.7)


@pytest.fixture(params=["loads", "tma"])
def blocks(request, monkeypatch):
    """What sm_80 runs, and tiles of two pieces and of two tiles, through tensor descriptors."""
    if request.param == "tma":
        chosen = LinearConfig(64, 128, 32, 4, 2, 32, use_tma=True)
        monkeypatch.setattr(linear, "linear_config", lambda *args, **options: chosen)
        monkeypatch.setitem(live_tiles.BLOCKS, "interpreter", (16, 4, 2, True))


def problem(vocab=456, width=H):
    p = sparse.peaked(T, width, vocab, "cpu")
    p.hidden[5] = -p.weight[p.target_ids[5]] * 40  # far: its exponentials are swept twice
    return p


@pytest.mark.parametrize("vocab", [456, 136])  # the last tile of 64 and of 128 is not full
def test_sums_of_the_epilogue(blocks, vocab):
    p = problem(vocab)
    shipped = torch.empty_like(p.matrix)
    found, log_sums = live_tiles.weighed_exponentials(*p[:3], RULE, p.matrix)
    expected = head_exponentials(p.hidden, p.weight, None, p.target_ids, RULE, shipped)
    for ours, theirs in zip((*found.stats[:2], *found[1:3]), (*expected.stats[:2], *expected[1:3]),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(p.matrix, shipped, rtol=2**-7, atol=0)
    z = p.hidden.double() @ p.weight.double().t() * (RULE.logit_scale / RULE.temperature)
    z.scatter_(1, p.target_ids[:, None], -torch.inf)
    exact = torch.stack([block.logsumexp(1) for block in z.split(COLUMNS, 1)])
    torch.testing.assert_close(log_sums.double(), exact, rtol=1e-5, atol=2e-5)


def test_a_soft_cap_is_refused():
    p = problem()
    with pytest.raises(ValueError, match="rule.softcap: expected None, got 30.0"):
        live_tiles.weighed_exponentials(*p[:3], LogitRule(1.0, 30.0, 1.0), p.matrix)


@pytest.mark.parametrize("tolerance", [0.3, 1e-2])
def test_what_is_left_out_is_known(tolerance):
    """The lightest tiles, their masses from d-logits in fp64."""
    p = problem()
    slopes = p.grad_logps.clone()
    slopes[7] = 0.0
    d = (p.hidden.double() @ p.weight.double().t()).softmax(1) * slopes.double()[:, None]
    by_target = (slopes - d.gather(1, p.target_ids[:, None])[:, 0]).float()
    d.scatter_(1, p.target_ids[:, None], 0.0)
    found, log_sums = live_tiles.weighed_exponentials(*p[:3], LogitRule(), p.matrix)
    log_sums[:, 7] = torch.nan  # of a row without a slope nothing counts
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
    assert seen.is_live.all(), "a NaN is seen: nothing is left out"


@pytest.mark.parametrize("width", [H, 21])
@pytest.mark.parametrize("vocab", [456, 333])
def test_products_of_live_tiles(blocks, vocab, width):
    """The dense products of E with its dead tiles zeroed, in whatever order programs run."""
    g = torch.Generator().manual_seed(0)
    matrix = torch.rand(T, vocab, generator=g).bfloat16()
    others = [torch.randn(n, width, generator=g).bfloat16() for n in (vocab, T)]
    is_live = torch.rand(-(-T // ROWS), -(-vocab // COLUMNS), generator=g) < 0.4
    is_live[1], is_live[:, 2] = False, False
    live = LiveTiles(is_live, torch.zeros(()), torch.ones(()))
    kept = is_live.repeat_interleave(ROWS, 0)[:T].repeat_interleave(COLUMNS, 1)[:, :vocab]
    filtered = matrix.double() * kept
    for other, transposed in zip(others, (False, True), strict=True):
        left = filtered.t() if transposed else filtered
        exact = left @ other.double()
        out = torch.full_like(exact, torch.nan, dtype=torch.float32)
        # Every element of E in a dead tile may be anything.
        poisoned = torch.where(kept, matrix, torch.nan)
        live_product(poisoned, other, live, out, transposed=transposed)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
        again = torch.full_like(out, torch.nan)
        with reversed_programs():
            live_product(matrix, other, live, again, transposed=transposed)
        assert torch.equal(out, again)


@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_outside_of_its_memory_is_read(transposed, monkeypatch):
    """The lists are temporaries: what they are made of is known to the check."""
    matrix = torch.rand(T, 333).bfloat16()
    other = torch.rand(T if transposed else 333, 21).bfloat16()
    live = LiveTiles(torch.ones(3, 6, dtype=torch.bool), torch.zeros(()), torch.ones(()))
    out = torch.full((333 if transposed else T, 21), torch.nan)
    launch = linear.launch

    def watched(kernel, programs, *arguments, **options):
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        with only_memory_of(*tensors):
            launch(kernel, programs, *arguments, **options)

    monkeypatch.setattr(linear, "launch", watched)
    live_product(matrix, other, live, out, transposed=transposed)
    left = matrix.t() if transposed else matrix
    torch.testing.assert_close(out.double(), left.double() @ other.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tolerance", [0.3, 1e-3])
def test_whole_gradients(blocks, tolerance):
    """Within the filter's bounds of fp64: what the benchmark checks on a GPU."""
    p = problem()
    logps = (p.hidden.double() @ p.weight.double().t()).log_softmax(1)
    d = -logps.exp() * p.grad_logps.double()[:, None]
    d.scatter_add_(1, p.target_ids[:, None], p.grad_logps.double()[:, None])
    exact = d @ p.weight.double(), d.t() @ p.hidden.double()
    found = sparse.gradients(p, tolerance)
    sparse.check(p, found, exact)
    assert 0 < found[2].dropped <= tolerance * found[2].total
    if tolerance == 0.3:  # it leaves out what shows
        errors = [(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=False)]
        assert min(errors) > 2 * ROUNDING
        wrong = found[2]._replace(dropped=found[2].dropped / 1e3)
        with pytest.raises(ValueError, match="expected an error of at most"):
            sparse.check(p, (*found[:2], wrong), exact)
