"""hidden -> logps kernel in the interpreter against fp64. Run by test_triton_interpreter.py in a
process of its own.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels.gpu import configs
from grpo_fast.kernels.gpu import linear as linear_triton
from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.gpu.configs import LinearConfig
from grpo_fast.kernels.types import LogitRule
from tests.kernels import formulas
from tests.kernels.triton_tools.interpreter import only_memory_of, reversed_programs

LP_BAR = 1e-5


def make(rows: int, hidden_size: int, vocab: int, dtype=torch.float32, scale: float = 1.0):
    generator = torch.Generator().manual_seed(rows + hidden_size + vocab)
    hidden = torch.randn(rows, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=generator) * scale).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    return hidden, weight, bias, torch.randint(vocab, (rows,), generator=generator)


def truth(hidden, weight, bias, target, rule):
    raw = hidden.double() @ weight.double().T
    if bias is not None:
        raw = raw + bias.double()
    return raw, formulas.statistics(formulas.final(raw, *rule)[0], target)


def assert_close(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).abs().max() <= LP_BAR


def assert_same(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)


# Rows around the tile of 64; hidden sizes below, at and off the tile of 32; vocabularies around the
# tile of 64.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "hidden_size", "vocab"),
    [(1, 1, 1), (3, 17, 2), (5, 33, 127), (64, 64, 129), (65, 40, 257), (130, 8, 300)],
)
def test_against_fp64(rows, hidden_size, vocab, dtype):
    hidden, weight, bias, target = make(rows, hidden_size, vocab, dtype, 2 / hidden_size**0.5)
    rules = [LogitRule(1.0, None, 1.0), LogitRule(0.5, 20.0, torch.linspace(0.6, 2.0, rows))]
    for rule, b in zip(rules, (None, bias), strict=True):
        raw, expected = truth(hidden, weight, b, target, rule)
        plain = linear_triton.head_logps(hidden, weight, b, target, rule, return_entropy=True)
        assert_close(plain, expected)
        for store in (torch.float32, dtype):
            out = torch.full((rows, vocab + 3), float("nan"), dtype=store)[:, 1 : vocab + 1]
            stored = linear_triton.head_logps(
                hidden, weight, b, target, rule, return_entropy=True, logits_out=out
            )
            assert_same(stored, plain)
            bar = 2e-6 if store == torch.float32 else 2.0**-8
            assert ((out - raw).abs() <= bar * raw.abs() + 3e-6).all()
        lse, logps, entropy = linear_triton.head_logps(
            hidden, weight, b, target, rule, return_entropy=False
        )
        assert entropy is None
        assert_same((lse, logps), plain[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensor_descriptors(monkeypatch, dtype):
    """The TMA path of Hopper and Blackwell, on rows, columns and depth that do not fill the last
    tile.
    """
    config = LinearConfig(64, 64, 32, 4, 2, 32, use_tma=True)
    monkeypatch.setattr(linear_triton, "linear_config", lambda *a, **k: config)
    hidden, weight, bias, target = make(70, 72, 200, dtype, 0.2)
    target %= 40  # tiles without a target: the short form of the epilogue
    rule = LogitRule(1.0, None, 0.9)
    raw, expected = truth(hidden, weight, bias, target, rule)
    out = torch.empty(70, 200)
    with only_memory_of(hidden, weight, bias, target, out):
        result = linear_triton.head_logps(
            hidden, weight, bias, target, rule, return_entropy=True, logits_out=out
        )
    assert_close(result, expected)
    assert ((out - raw).abs() <= 2e-6 * raw.abs() + 3e-6).all()
    # An unaligned hidden is copied and meets the same tile.
    unaligned = torch.zeros(70, 75, dtype=dtype)[:, 1:73].copy_(hidden)
    assert_same(
        linear_triton.head_logps(unaligned, weight, bias, target, rule, return_entropy=True), result
    )


def test_several_slices(monkeypatch):
    """Slices of the vocabulary join to the same result; -inf columns fill one whole slice and lead
    another.
    """
    monkeypatch.setattr(linear_triton, "SLICE_COLUMNS", 128)
    hidden, weight, bias, target = make(9, 24, 515, torch.float32, 0.4)
    bias[:128] = bias[200:300] = -torch.inf
    target = torch.tensor([129, 514, 199, 300, 150, 400, 511, 512, 513])
    rule = LogitRule(1.0, None, 0.8)
    _, expected = truth(hidden, weight, bias, target, rule)
    result = linear_triton.head_logps(hidden, weight, bias, target, rule, return_entropy=True)
    assert_close(result, expected)
    monkeypatch.undo()
    assert configs.SLICE_COLUMNS == linear_triton.SLICE_COLUMNS
    assert_close(
        linear_triton.head_logps(hidden, weight, bias, target, rule, return_entropy=True), expected
    )


@pytest.mark.parametrize("first", [0, 31, 32, 63, 64, 95, 149])
def test_tiles_with_and_without_a_target(monkeypatch, first):
    """The short form of the epilogue, for calls without options: targets at both ends of a tile of
    64, and nowhere.
    """
    monkeypatch.setattr(
        linear_triton, "linear_config", lambda *a, **k: LinearConfig(32, 64, 16, 4, 2, 32)
    )
    hidden, weight, _, _ = make(9, 16, 150, torch.bfloat16, 0.8)
    target, rule = torch.full((9,), first), LogitRule(1.0, None, 1.0)
    target[5:8] = torch.tensor([-100, 10**12, 150])
    lse, logps, _ = linear_triton.head_logps(
        hidden, weight, None, target, rule, return_entropy=False
    )
    inside = torch.tensor([0, 1, 2, 3, 4, 8])
    _, expected = truth(hidden[inside], weight, None, target[inside], rule)
    assert_close((lse[inside], logps[inside]), expected[:2])
    heavy = linear_triton.head_logps(hidden, weight, None, target, rule, return_entropy=True)
    assert_same((lse, logps), heavy[:2])  # the entropy takes the long form everywhere


def test_groups_of_row_blocks(monkeypatch):
    """5 row blocks in groups of 1, 2 and all: another order of the programs, the same bits, every
    row written.
    """
    monkeypatch.setattr(linear_triton, "SLICE_COLUMNS", 128)
    monkeypatch.setattr(
        linear_triton, "linear_config", lambda *a, **k: LinearConfig(32, 32, 16, 4, 2, 32)
    )
    hidden, weight, bias, target = make(130, 16, 300, torch.float32, 0.4)
    rule = LogitRule(1.0, None, 0.8)
    expected = linear_triton.head_logps(hidden, weight, bias, target, rule, return_entropy=True)
    assert_close(expected, truth(hidden, weight, bias, target, rule)[1])
    for blocks in (1, 2, 4):
        monkeypatch.setattr(linear_triton, "GROUP_BYTES", blocks * 32 * 16 * 4)
        with only_memory_of(hidden, weight, bias, target):
            assert_same(
                linear_triton.head_logps(hidden, weight, bias, target, rule, return_entropy=True),
                expected,
            )


def test_a_row_depends_on_nothing_but_itself():
    """Order, batch, chunk, position in the tile, strides and NaN in other rows change no bit of a
    row.
    """
    hidden, weight, bias, target = make(70, 48, 150, torch.bfloat16, 0.3)
    rule = LogitRule(1.0, None, torch.linspace(0.7, 1.4, 70))

    def run(index, poison=None, strided=False):
        h = hidden[index].clone()
        if poison is not None:
            h[poison] = float("nan")
        if strided:
            h = h.T.contiguous().T
        part = LogitRule(1.0, None, rule.temperature[index])
        return linear_triton.head_logps(h, weight, bias, target[index], part, return_entropy=True)

    everything = run(torch.arange(70))
    for index in (torch.arange(7), torch.arange(69, -1, -1), torch.tensor([68])):
        assert_same(run(index), [x[index] for x in everything])
    assert_same(run(torch.arange(70), strided=True), everything)
    poisoned = run(torch.arange(70), poison=3)
    others = torch.arange(70) != 3
    assert_same([x[others] for x in poisoned], [x[others] for x in everything])
    assert all(torch.isnan(x[3]) for x in poisoned)


def test_strided_weight():
    hidden, weight, bias, target = make(5, 24, 100)
    rule = LogitRule(1.0, None, 1.0)
    expected = linear_triton.head_logps(hidden, weight, bias, target, rule, return_entropy=True)
    for view in (
        weight.T.contiguous().T,
        torch.full((100, 61), float("nan"))[:, 3:51:2].copy_(weight),
    ):
        # Not bit for bit: rows off the 16-byte grid take a smaller tile.
        assert_close(
            linear_triton.head_logps(hidden, view, bias, target, rule, return_entropy=True),
            expected,
        )


def test_confident_token():
    """p from 1 - 1e-2 to 1 - 1e-7: 1 - p keeps its digits (z[target] - lse would have lost
    them).
    """
    margins = torch.linspace(5, 16.5, 12)
    hidden = torch.stack([margins, torch.full_like(margins, 25.0)], 1)
    weight = torch.zeros(40, 2)
    weight[:, 1] = 1.0
    weight[9, 0] = 1.0
    target, rule = torch.full((12,), 9), LogitRule(1.0, None, 1.0)
    _, (_, expected, _) = truth(hidden, weight, None, target, rule)
    _, logps, _ = linear_triton.head_logps(hidden, weight, None, target, rule, return_entropy=False)
    raw = hidden @ weight.T
    _, from_rows, _ = rows_triton.row_logps(raw, target, rule, return_entropy=False)
    # 2e-6 is half a unit in the last place of logits near 40, which the inputs of the softmax carry
    # anyway.
    for actual in (logps, from_rows):
        assert ((actual - expected).abs() <= 4e-6 * expected.abs()).all()


@pytest.mark.parametrize("vocab", [1, 64, 70])
def test_more_slices_than_a_block_of_the_join(monkeypatch, vocab):
    """Up to 70 slices of 32 columns, in blocks of 32 slices: against one slice and fp64, targets in
    every block.
    """
    monkeypatch.setattr(
        linear_triton, "linear_config", lambda *a, **k: LinearConfig(32, 32, 32, 4, 2, 32)
    )
    hidden, weight, bias, _ = make(40, 24, vocab * 32, torch.float32, 0.4)
    # The maximum rises from block to block of the join, and falls.
    weight[16 * vocab : 16 * vocab + 32] *= 40
    target, rule = torch.arange(40) * (vocab * 32 - 1) // 39, LogitRule(1.0, None, 0.8)
    _, expected = truth(hidden, weight, bias, target, rule)
    for columns in (32, 1 << 20):
        monkeypatch.setattr(linear_triton, "SLICE_COLUMNS", columns)
        with only_memory_of(hidden, weight, bias, target):
            result = linear_triton.head_logps(
                hidden, weight, bias, target, rule, return_entropy=True
            )
        for got, want in zip(result, expected, strict=True):
            assert ((got - want).abs() <= 1e-6 * want.abs() + LP_BAR).all()


def test_no_rows_and_mixed_dtypes():
    hidden, weight, _, target = make(0, 16, 50)
    for x in linear_triton.head_logps(
        hidden, weight, None, target, LogitRule(1.0, None, 1.0), return_entropy=True
    ):
        assert x.shape == (0,)
    with pytest.raises(ValueError, match="hidden: expected the dtype of weight"):
        linear_triton.head_logps(
            hidden.bfloat16(), weight, None, target, LogitRule(1.0, None, 1.0), return_entropy=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_and_program_order(monkeypatch, dtype):
    monkeypatch.setattr(linear_triton, "SLICE_COLUMNS", 128)
    hidden, weight, bias, target = make(67, 19, 301, dtype, 0.3)
    rule = LogitRule(1.0, 15.0, torch.linspace(0.7, 1.4, 67))
    out = torch.full((67, 301), float("nan"), dtype=dtype)

    def run():
        with only_memory_of(hidden, weight, bias, target, rule.temperature, out):
            return linear_triton.head_logps(
                hidden, weight, bias, target, rule, return_entropy=True, logits_out=out
            )

    forward, first = run(), out.clone()
    with reversed_programs():
        backward = run()
    assert_same(forward, backward)
    assert torch.equal(out, first)
    with (
        pytest.raises(Exception, match="out of bounds"),
        only_memory_of(weight[:-1], bias, target, rule.temperature),
    ):
        linear_triton.head_logps(hidden, weight, bias, target, rule, return_entropy=True)
