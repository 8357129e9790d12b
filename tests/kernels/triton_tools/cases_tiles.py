"""Interpreter cases that run the head kernels with different tiles and with very large weights.

The results must agree with fp64, and be bitwise equal for different tiles. The cases cover tensor
descriptors, slices of the vocabulary, groups of rows, and tiles that are computed twice. In a
weight with more than 2^31 elements, the element offsets are too large for 32-bit integers.
test_head.py also checks values, with the tiles that are selected by default.
"""

import mmap

import pytest
import torch

from grpo_fast import linear_logps
from grpo_fast.kernels.gpu import gradients, linear, support
from grpo_fast.kernels.gpu.linear import LinearConfig
from grpo_fast.kernels.types import HeadInputs, LogitTransform, SupportRows
from grpo_fast.loss import call
from tests.kernels.formulas import final, statistics
from tests.kernels.test_head import HEAD_KERNELS, check_gradient, problem, raw_of, weigh
from tests.kernels.triton_tools.interpreter import only_memory_of

HEAD, TRANSFORM = HEAD_KERNELS[0].values[0], LogitTransform(1.0, None, 0.8)


@pytest.fixture
def blocks(monkeypatch):
    """Return a function that sets the block sizes of all head kernels."""
    return lambda *sizes, use_tma=False: monkeypatch.setattr(
        linear, "linear_config", lambda *_, **options: LinearConfig(*sizes, use_tma=use_tma)
    )


def check_logps(given, bar: float = 0.0, **options) -> tuple:
    with only_memory_of(*given[:4], *options.values()):
        found = linear.head_logps(HeadInputs(*given), return_entropy=True, **options)
    exact = statistics(final(raw_of(*given[:3]), *given[4])[0], given[3])
    for got, want in zip(found, exact, strict=True):
        assert ((got - want).abs() <= 1e-5 + bar * want.abs()).all()
    return found


@pytest.mark.parametrize(("dtype", "block_v"), [(torch.bfloat16, 128), (torch.float16, 64)])
def test_tensor_descriptors(blocks, dtype, block_v):
    """Check that TMA loads and stores are correct if the last tile is incomplete.

    The numbers of rows, columns and hidden units are not multiples of the tile sizes. Tiles with
    one piece and tiles with several pieces must give the same bits.
    """
    hidden, weight, _, ids = problem(70, 72, 200, dtype)
    ids %= 40  # tiles of later columns have no target, and use a shorter path
    given = hidden, weight, None, ids, TRANSFORM
    blocks(32, 32, 32, 4, 2, 32)
    plain = check_logps(given)
    expected = weigh(HEAD, *given) if dtype == torch.bfloat16 else None
    blocks(64, block_v, 32, 4, 2, 32, use_tma=True)
    out = torch.empty(70, 200)
    assert all(map(torch.equal, check_logps(given, logits_out=out), plain))
    raw = raw_of(*given[:3])
    assert ((out - raw).abs() <= 2e-6 * raw.abs() + 3e-6).all()
    # An unaligned `hidden` is copied, so it uses the same tile as an aligned one.
    unaligned = torch.zeros(70, 75, dtype=dtype)[:, 1:73].copy_(hidden)
    assert all(map(torch.equal, check_logps((unaligned, *given[1:])), plain))
    if expected is not None:
        stats, units, weights = weigh(HEAD, *given)
        check_gradient(weights, units, *given)
        assert torch.equal(weights, expected[2]) and torch.equal(units, expected[1])
        unaligned = torch.full((70, 203), torch.nan, dtype=dtype)[:, 1:201]
        linear.head_exponentials(HeadInputs(*given), unaligned)
        assert torch.equal(unaligned, weights) and torch.equal(stats[1], expected[0][1])


@pytest.mark.parametrize("first", [0, 31, 32, 63, 149])
def test_tiles_with_and_without_a_target(blocks, first):
    """Check that the short code path of tiles without a target gives bitwise equal results.

    The short path exists only without entropy. The targets are at both ends of a tile, and some are
    outside the vocabulary.
    """
    blocks(32, 64, 16, 4, 2, 32)
    hidden, weight, _, _ = problem(9, 16, 150)
    ids = torch.full((9,), first)
    ids[5:8] = torch.tensor([-100, 10**12, 150])
    given = hidden, weight, None, ids, LogitTransform()
    light = linear.head_logps(HeadInputs(*given), return_entropy=False)
    # The entropy needs the long path.
    heavy = linear.head_logps(HeadInputs(*given), return_entropy=True)
    assert all(map(torch.equal, light[:2], heavy))
    inside = (ids >= 0) & (ids < 150)
    found = check_logps((hidden[inside], weight, None, ids[inside], LogitTransform()))
    assert all(torch.equal(x[inside], y) for x, y in zip(light[:2], found, strict=False))


def test_groups_of_row_blocks(monkeypatch, blocks):
    """Check that the results are bitwise independent of the order of the row blocks.

    Groups of two row blocks are compared with a single group of all row blocks.
    """
    monkeypatch.setattr(linear, "SLICE_COLUMNS", 128)
    blocks(32, 32, 16, 4, 2, 32)
    given = *problem(130, 16, 300, torch.float32), TRANSFORM
    expected = check_logps(given)
    monkeypatch.setattr(linear, "GROUP_BYTES", 2 * 32 * 16 * 4)
    assert all(map(torch.equal, check_logps(given), expected))


def test_more_slices_than_a_block_of_the_join(monkeypatch, blocks):
    """Check that 70 slices, which the join kernel adds 32 at a time, give the fp64 result.

    A single slice must give the fp64 result, too. Columns of −inf fill the first two slices, and
    the beginning of another.
    """
    slices = 70
    blocks(32, 32, 32, 4, 2, 32)
    hidden, weight, bias, _ = problem(40, 24, slices * 32, torch.float32)
    # Make the maximum vary from block to block, so that the join must rescale its sums.
    weight[16 * slices : 16 * slices + 32] *= 40
    bias[:64] = bias[320:340] = -torch.inf
    ids = torch.arange(40) * (slices * 32 - 1 - 340) // 39 + 340
    for columns in (32, 1 << 20):
        monkeypatch.setattr(linear, "SLICE_COLUMNS", columns)
        check_logps((hidden, weight, bias, ids, TRANSFORM), bar=1e-6)


def test_only_tiles_with_a_far_row_run_twice(monkeypatch, blocks):
    """Check that the second pass computes only tiles that contain a row with an unlikely target.

    A second pass over all tiles would double the cost.
    """
    blocks(64, 64, 32, 4, 2, 32)
    hidden, weight, _, _ = problem(160, 16, 64)
    ids = torch.full((160,), 9)
    hidden[70] = -40 * weight[9]
    given = hidden, weight, None, ids, LogitTransform()
    expected = weigh(HEAD, *given)[2]
    sweeps, original = [], linear.sweep

    def spy(p, partial, out=None, *rest, only_high_nll=False):
        before = out.clone()
        if only_high_nll:
            out[:] = 0.5
        original(p, partial, out, *rest, only_high_nll=only_high_nll)
        if only_high_nll:
            is_touched = (out != 0.5).any(1)
            sweeps.append(is_touched.nonzero()[:, 0].tolist())
            out[~is_touched] = before[~is_touched]

    monkeypatch.setattr(linear, "sweep", spy)
    assert torch.equal(weigh(HEAD, *given)[2], expected)
    assert sweeps == [list(range(64, 128))]


@pytest.mark.parametrize(("sorts", "computed"), [(True, 64), (False, 128)])
def test_blocks_without_a_target(monkeypatch, blocks, sorts, computed):
    """Check that `linear_logps` without gradient need not know how many rows have a target.

    All rows are passed to the kernel, which must skip each block of rows without a target. In a
    large call, the rows without a target are sorted to the end. Results must be bitwise equal to
    those of a call that removes these rows.
    """
    blocks(32, 32, 16, 4, 2, 32)
    hidden, weight, _, ids = problem(160, 16, 150, torch.float32)
    for rows in (slice(1, 63), slice(64, 96), slice(130, 160)):
        ids[rows], hidden[rows] = -100, torch.nan

    def run():
        options = {"temperature": 0.8, "return_entropy": True, "backend": "triton"}
        return linear_logps(hidden, weight, ids, **options)

    expected, swept, original = run(), [], linear.sweep

    def spy(p, partial, *rest):
        original(p, partial, *rest)
        swept.append(int((partial[1] != 0).sum()))

    monkeypatch.setattr(linear, "sweep", spy)
    monkeypatch.setattr(call.Call, "_skips_blocks", lambda *_: True)
    monkeypatch.setattr(call, "saves_time", lambda *_: sorts)
    assert all(map(torch.equal, run(), expected)) and swept == [computed]
    hidden.requires_grad_()
    assert all(map(torch.equal, run(), expected)) and swept == [computed, 36]
    ids[63] = 150
    with torch.no_grad(), pytest.raises(ValueError, match="target_ids: expected ids in .0, 150."):
        run()


def test_the_memory_check_sees_a_planted_error():
    hidden, weight, bias, ids = problem(67, 19, 301)
    with pytest.raises(Exception, match="out of bounds"), only_memory_of(hidden, weight[:-1], bias):
        linear.head_logps(HeadInputs(hidden, weight, bias, ids, TRANSFORM), return_entropy=True)


@pytest.fixture
def transposed():
    """Return a (V, H) bf16 weight that is stored transposed and has more than 2^31 elements.

    The operating system allocates only the memory pages that are written, so the weight takes
    little memory.
    """
    vocab, width = 262400, support.SUPPORT_COLUMNS
    pages = mmap.mmap(-1, 2 * vocab * width, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    weight = torch.frombuffer(pages, dtype=torch.bfloat16).view(width, vocab).T
    weight[[5, 7]] = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    return weight


def test_a_transposed_head_beyond_2_to_the_31(transposed):
    """Check that target logits, dH and the kernels for `support` use 64-bit offsets."""
    weight, ids = transposed, torch.tensor([5, 7, 5])
    hidden = torch.randn(weight[ids].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide, ones, factors = weight[ids].double(), torch.ones(3), torch.tensor([0.5, 2.0, 1.0])
    exact = (hidden.double() * wide).sum(1)
    tensors = hidden, weight, ids, ones, factors
    with only_memory_of(*tensors):
        p = linear.prepared(HeadInputs(hidden, weight, None, ids, LogitTransform()))
        raw = linear.target_logits(p)
    assert (raw - exact).abs().max() <= 1e-4
    out, zeros = torch.empty(hidden.shape), torch.zeros(hidden.shape)
    with only_memory_of(*tensors, out, zeros):
        gradients.write_hidden_(out, zeros, ones, factors, ids, weight)
    assert torch.equal(out, factors[:, None] * wide.float())
    # Use rows of W as `hidden`, so that the offsets of its columns also exceed 2^31.
    rows = SupportRows(None, None, ids, torch.tensor([0, 2, 3]), torch.tensor([0, 0]))
    with only_memory_of(*tensors, *(x for x in rows if x is not None)):
        p = HeadInputs(weight[5:8:2], weight, None, rows.places, LogitTransform())
        found = support.head_rows(p, rows, return_entropy=False, return_slopes=False)
        back = support.head_hidden(factors, weight, rows)
    own = (wide[[0, 0, 1]] * wide).sum(1)
    assert (found.raw - own).abs().max() <= 1e-5 * own.abs().max()
    assert (back - torch.stack([0.5 * wide[0] + 2 * wide[1], wide[2]])).abs().max() <= 1e-5
