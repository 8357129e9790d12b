"""Interpreter cases for the kernels around the gradient GEMMs, and for the scaling of gradients.

They compare the kernels with fp64.
"""

import contextlib

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig
from grpo_fast.kernels.gpu import gradients, target_rows, tokens
from grpo_fast.kernels.head import sources
from grpo_fast.kernels.head.terms import TokenLevel
from grpo_fast.kernels.reference import final_logits
from grpo_fast.kernels.types import Exponentials, LogitTransform
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.coefficients import row_coefficients as torch_coefficients
from grpo_fast.objective.losses import OBJECTIVES
from tests.kernels.formulas import draw
from tests.kernels.triton_tools.interpreter import only_memory_of, reversed_programs
from tests.loss_cases import worst_row
from tests.pairs import pairs

NAN = float("nan")


# ---- single kernels


# One width is smaller than a block, and one is larger. 32 rows fill all blocks, and 3 rows leave
# padding rows in the last block.
@pytest.mark.parametrize(("rows", "width"), [(32, 5), (3, 1030)])
def test_dh_rows(rows, width):
    product, weight = draw(32, width), draw(50, width, seed=1).bfloat16()
    by_row, by_target = draw(32, seed=2), draw(32, seed=3)
    ids = torch.arange(rows) * 7 % 50
    by_row[1] = by_target[2] = 0.0
    product[1] = NAN
    expected = by_row[:rows, None].double() * product[:rows].nan_to_num().double()
    expected += by_target[:rows, None].double() * weight[ids].double()
    out = torch.full((rows, width), NAN, dtype=torch.bfloat16)
    with only_memory_of(out, product, by_row, by_target, ids, weight):
        gradients.write_hidden_(out, product, by_row, by_target, ids, weight)
    assert ((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6).all()
    # Tied embedding weights may be stored transposed, which must not change the bits.
    again, hidden = torch.empty_like(out), draw(32, width, seed=4).bfloat16()
    hidden[1] = NAN  # a row with coefficient 0
    scaled = gradients.write_hidden_(
        again, product, by_row, by_target, ids, weight.t().contiguous().t(), hidden
    )
    assert torch.equal(again, out)
    assert torch.equal(scaled, gradients.scaled_hidden(hidden, by_row, hidden.dtype))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_times_pads_with_zeros(softcap):
    g, raw, logps = draw(40), draw(40, seed=1), -draw(40, seed=2).abs()
    transform = LogitTransform(1.5, softcap, 9.0)
    z, slope = final_logits(raw[:, None], transform)
    lse = z[:, 0] - logps
    g[5], lse[5] = 0.0, NAN
    filled = Exponentials((lse, logps, None), None, None, None, raw)
    with only_memory_of(g, raw, lse, logps):
        by_row, by_target = gradients.times(g, filled, transform, 64)
    expected = torch.where(g == 0, 0.0, -g * logps.exp() * 1.5 / 9.0)
    torch.testing.assert_close(by_row[:40], expected)
    slope = slope if softcap is None else slope[:, 0]
    torch.testing.assert_close(by_target[:40], -g * logps.expm1() * slope)
    assert (by_row[40:] == 0).all() and (by_target[40:] == 0).all()


def targets_case(rows=90, width=300, vocab=1500):
    """Return inputs for `add_targets_` and the exact result.

    Token 7 is likely in all rows, and it is the target of a third of the rows.
    """
    generator = torch.Generator().manual_seed(5)
    hidden = (draw(rows, width) + 2 * draw(width, seed=1)).bfloat16()
    ids = torch.randint(vocab, (rows,), generator=generator)
    ids[::3] = 7
    matrix = (torch.rand(96, vocab, generator=generator) / vocab).bfloat16()
    by_target = torch.full((96,), 2 / 3)
    by_target[4] = 0.0
    matrix[:, 7] = 0.5
    matrix[torch.arange(rows), ids] = 0.0
    matrix[rows:] = 0.0
    scaled = torch.zeros(96, width, dtype=torch.bfloat16)
    scaled[:rows] = -hidden
    product = matrix.double().T @ scaled.double()
    exact = product.index_add(0, ids, by_target[:rows, None].double() * hidden.double())
    return hidden, ids, matrix, by_target, scaled, product, exact


def test_target_rows_in_fp32():
    hidden, ids, matrix, by_target, scaled, product, exact = targets_case()
    hidden[4] = NAN  # this row has coefficient 0
    ordered, order = ids.sort(stable=True)
    results = []
    for programs in (contextlib.nullcontext(), reversed_programs()):
        total = product.float()
        with only_memory_of(total, ordered, order, by_target, hidden), programs:
            target_rows.add_targets_(total, ordered, order, by_target, hidden, matrix, scaled)
        results.append(total)
    assert torch.equal(*results)
    assert worst_row(results[0], exact) <= 2e-6
    untouched = torch.ones(1500, dtype=torch.bool)
    untouched[ids] = False
    assert torch.equal(results[0][untouched], product.float()[untouched])


def test_target_rows_in_16_bits_are_rounded_once(monkeypatch):
    """Check that a bf16 result of `add_targets_` is rounded only once.

    Its error may be at most 3% larger than the error of rounding the exact result. The product and
    the added rows nearly cancel, so rounding the product first would give a much larger error.
    """
    hidden, ids, matrix, by_target, scaled, product, exact = targets_case()
    ordered, order = ids.sort(stable=True)
    total, flags = product.bfloat16(), []
    twice = total.float().index_add(0, ids, by_target[:90, None] * hidden.float()).bfloat16()
    once = exact.bfloat16()
    original = target_rows.launch

    def spy(kernel, programs, *arguments, **options):
        original(kernel, programs, *arguments, **options)
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        if given.get("flag_ptr") is not None:
            flags.append(given["flag_ptr"].sum().item())

    monkeypatch.setattr(target_rows, "launch", spy)
    target_rows.add_targets_(total, ordered, order, by_target, hidden, matrix, scaled)
    assert 1 <= flags[0] < len(ids.unique()) // 4, "few rows are formed again"
    assert worst_row(twice, exact) > 4e-3, "the case must show what two roundings cost"
    assert worst_row(total, exact) <= 1.03 * worst_row(once, exact)


def test_target_rows_are_rounded_once_if_a_program_has_several():
    """Check that all recomputed rows of dW are rounded once if a program has several of them."""
    rows, width, vocab = 9, 1030, 12
    hidden, by_target = draw(rows, width).bfloat16(), torch.full((32,), 2 / 3)
    ids, order = (torch.arange(rows, dtype=torch.int32) * 5 % vocab).sort(stable=True)
    # The coefficients of an id sum to 2/3 - 0.66, so every row nearly cancels.
    matrix = torch.zeros(32, vocab, dtype=torch.bfloat16)
    matrix[order, ids.long()] = 0.66
    scaled = torch.zeros(32, width, dtype=torch.bfloat16)
    scaled[:rows] = -hidden
    product = matrix.double().T @ scaled.double()
    added = by_target[:rows, None].double() * hidden.double()
    exact = product.index_add(0, ids.long(), added[order])
    total = product.bfloat16()
    target_rows.add_targets_(total, ids, order, by_target, hidden, matrix, scaled)
    assert worst_row(total, exact) <= 1.03 * worst_row(exact.bfloat16(), exact)


# ---- coefficients


def test_coefficients():
    """Check memory accesses, several blocks of rows, and a NaN.

    tests/loss/test_loss_parity.py tests the values of all losses and KL estimators.
    """
    logps = -5 * draw(300).abs()
    terms = RowInputs(
        draw(300, seed=1), draw(300, seed=2).abs(), draw(300, seed=3).abs(),
        logps + 0.3 * draw(300, seed=4), logps + 0.2 * draw(300, seed=5),
    )  # fmt: skip
    logps[11] = NAN
    config = LossConfig("grpo", beta=0.1, kl_times_ratio=True, kl_clamp=0.4)
    with only_memory_of(logps, *terms):
        found = tokens.row_coefficients(logps, terms, config)
    for actual, expected in zip(found, torch_coefficients(logps, terms, config), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


# ---- a single chunk, and rows that are known to be inactive


def make(rows=70, width=40, vocab=1600, seed=0):
    hidden, weight = draw(rows, width, seed=seed), draw(vocab, width, seed=seed + 1)
    ids = torch.arange(rows) * 37 % vocab
    ids[::4] = 9
    return hidden.bfloat16(), (weight / 3).bfloat16(), ids, draw(rows, seed=seed + 2)


def gradients_of(hidden, weight, ids, advantages, loss_type="dapo", backend="triton", **options):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    out = grpo_fast.linear_grpo_loss(
        *leaves, ids, advantages, LossConfig(loss_type=loss_type, **options), backend=backend,
        cu_seqlens=torch.tensor([0, len(ids)]),
    )  # fmt: skip
    out.loss.backward()
    return out.loss.detach(), leaves[0].grad, leaves[1].grad


# With few tokens, most rows of dW are determined by a single token. The rounding errors of its
# exponential, of its scaled hidden row and of the result then do not average out.
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 16, 64), (5, 40, 127), (200, 64, 400)])
def test_the_worst_rows_of_d_weight_are_those_of_a_16_bit_product(rows, width, vocab):
    """Check that dW is nearly as accurate as torch's bf16 product of exact d-logits.

    The total error may be 10% larger, and the error of the worst row 50% larger. The error of an
    element may be at most that of three roundings to bf16.
    """
    hidden, weight, ids, advantages = make(rows, width, vocab)
    found = gradients_of(hidden, weight, ids, advantages)[2].double()
    p = (hidden.double() @ weight.double().T).softmax(-1)
    is_target = torch.arange(vocab) == ids[:, None]
    d_logits = (advantages.double() / -rows)[:, None] * (is_target.double() - p)
    exact, torchs = d_logits.T @ hidden.double(), d_logits.bfloat16().T @ hidden
    assert worst_row(found, exact) <= 1.5 * worst_row(torchs, exact)
    assert (found - exact).norm() <= 1.1 * (torchs - exact).norm()
    products = d_logits.abs().T @ hidden.double().abs()
    bound = 2 * 2.0**-8 * products + 2.0**-8 * exact.abs()
    assert ((found - exact).abs() <= bound + 2e-5 * products).all()


def chunks_of(monkeypatch, budget):
    """Limit the memory for exponentials to `budget` bytes, and record the chunks of each pass.

    Return a list to which each pass over the head appends the list of its chunk sizes.
    """
    taken = []
    original = sources.DenseHead.chunks

    def chunks(self, *, stores):
        found = original(self, stores=stores)
        taken.append([c.stop - c.start for c in found])
        return found

    monkeypatch.setattr(sources.DenseHead, "chunks", chunks)
    monkeypatch.setattr(
        sources, "workspace_bytes", lambda device, size=4, spared=0: budget + spared
    )
    return taken


def test_one_chunk_where_it_needs_no_fp32_sum(monkeypatch):
    """Check that all rows form one chunk if it takes no more memory than several chunks.

    A single chunk needs no fp32 dW. This saves 256,000 bytes, which its exponentials may use in
    addition to the budget. That is enough for the 16-bit exponentials of all 70 rows, which take
    224,000 bytes.
    """
    hidden, weight, ids, advantages = make()
    bytes_needed, spared = 70 * 1600 * 2, 4 * weight.numel()
    results = []
    for missing, chunks in ((0, [70]), (1, [32, 32, 6])):
        with monkeypatch.context() as patch:
            # Use a budget that is just large enough for a single chunk, and one that is a byte too
            # small.
            taken = chunks_of(patch, bytes_needed - spared - missing)
            results.append(gradients_of(hidden, weight, ids, advantages))
            assert taken[0] == chunks
    assert torch.equal(results[0][1], results[1][1]), "dH of a row depends on the row alone"
    exact = gradients_of(hidden.double(), weight.double(), ids, advantages, backend="torch")
    one, several = (worst_row(x[2], exact[2]) for x in results)
    assert one <= 1.05 * several
    for x in results:
        assert (x[2].double() - exact[2]).norm() <= 3e-3 * exact[2].norm()


def test_frozen_heads_and_filters_spare_nothing(monkeypatch):
    hidden, weight, ids, advantages = make()
    taken = chunks_of(monkeypatch, 70 * 1600 * 2 - 1)
    given = ids, advantages, LossConfig()
    options = {"backend": "triton", "cu_seqlens": torch.tensor([0, 70])}
    grpo_fast.linear_grpo_loss(hidden.clone().requires_grad_(), weight, *given, **options)
    assert taken.pop() == [64, 6]
    trained = weight.clone().requires_grad_()
    grpo_fast.linear_grpo_loss(hidden, trained, *given, **options, grad_filter=0.01)
    assert taken.pop() == [64, 6]
    few = weight[:500]  # with N > V/8, dW needs an fp32 sum in any case
    monkeypatch.setattr(sources, "workspace_bytes", lambda d, s=4, spared=0: 0 + spared)
    gradients_of(hidden, few, ids % 500, advantages)
    assert taken.pop() == [32, 32, 6]


@pytest.mark.parametrize(
    ("active", "is_chunked"), [(0, False), (1, True), (30, True), (69, False), (70, True)]
)
def test_rows_without_advantage_are_left_out(active, is_chunked, monkeypatch):
    """Check the gradients if only the first `active` rows have an advantage.

    A NaN in a row with advantage 0 must still reach the loss and every gradient.
    """
    hidden, weight, ids, advantages = make()
    advantages[active:] = 0.0
    if is_chunked:
        monkeypatch.setattr(sources, "workspace_bytes", lambda *_: 0)
    found = gradients_of(hidden, weight, ids, advantages)
    exact = gradients_of(hidden.double(), weight.double(), ids, advantages, backend="torch")
    assert (found[1][active:] == 0).all()
    for actual, expected in zip(found[1:], exact[1:], strict=True):
        assert (actual.double() - expected).norm() <= 3e-3 * expected.norm()
    if active < len(hidden):
        hidden[active, 3] = NAN
        for result in gradients_of(hidden, weight, ids, advantages):
            assert result.isnan().any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_which_leaves_follow_the_advantage(name):
    logp, ratio = -draw(200).abs(), draw(200, seed=1)
    config = LossConfig(loss_type=name, max_completion_length=3)
    leaf = OBJECTIVES[name].function
    _, slope = leaf(logp, ratio, torch.zeros(200), *config.params)
    assert (slope == 0).all() == OBJECTIVES[name].follows_advantage or name in ("kimi", "dro")


def test_what_is_known_before_the_loop():
    terms = RowInputs(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert TokenLevel(terms, LossConfig()).mask(0).tolist() == [True, False, False]
    for more in (terms._replace(kl_weights=terms[0]), terms._replace(grad_entropy=terms[0])):
        assert TokenLevel(more, LossConfig()).mask(0) is None
    assert TokenLevel(terms, LossConfig(loss_type="kimi")).mask(0) is None


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pairs(programs=[1, 2, 2048], size=[0, 1, 4095, 4096, 4097, 20000], dtype=DTYPES, count=[1, 2, 3])
def test_scaled(dtype, size, programs, count, monkeypatch):
    """Check that `scale_` multiplies each element once, even if a program processes several blocks.

    The product is computed in fp32 and rounded once. Each gradient has a different factor.
    """
    monkeypatch.setattr(gradients, "SCALE_PROGRAMS", programs)
    generator = torch.Generator().manual_seed(size)
    before = [torch.randn(size + i, generator=generator).to(dtype) for i in range(count)]
    x = [y.clone() for y in before]
    factors = [torch.tensor(-0.3 - i) for i in range(count)]
    with only_memory_of(*x, *factors):
        gradients.scale_(x, factors)
    for found, y, factor in zip(x, before, factors, strict=True):
        assert torch.equal(found, (y.float() * factor).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_upstream_of_one_writes_nothing(dtype):
    x = torch.randn(5000).to(dtype)
    x[7], x[8] = float("nan"), float("inf")
    bits = x.view(torch.uint8).clone()
    gradients.scale_([x], [torch.ones((), dtype=dtype)])
    assert torch.equal(x.view(torch.uint8), bits)
