"""hidden -> 16-bit weights in the interpreter against fp64, alone and through the public functions
(bf16).

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig
from grpo_fast.kernels.gpu import exponentials as weights_triton
from grpo_fast.kernels.gpu import linear as linear_triton
from grpo_fast.kernels.gpu.configs import LinearConfig
from grpo_fast.kernels.head import loop as linear
from grpo_fast.kernels.types import LogitRule
from tests.kernels import formulas
from tests.kernels.triton_tools.interpreter import only_memory_of, reversed_programs

BF16_UNIT = 2.0**-8  # half a unit in the last place: the relative error of one rounding
PLAIN = LogitRule(1.0, None, 1.0)


def make(rows: int, hidden_size: int, vocab: int, scale: float | None = None):
    g = torch.Generator().manual_seed(rows + hidden_size + vocab)
    hidden = torch.randn(rows, hidden_size, generator=g).bfloat16()
    weight = (
        torch.randn(vocab, hidden_size, generator=g) * (scale or 2 / hidden_size**0.5)
    ).bfloat16()
    bias = torch.randn(vocab, generator=g).bfloat16()
    return (
        hidden,
        weight,
        bias,
        torch.randint(vocab, (rows,), generator=g),
        torch.randn(rows, generator=g),
    )


def weights_of(hidden, weight, bias, target, rule, **options):
    """(stats, units (2, T), E) with E in a poisoned buffer, on 16-byte rows."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    buffer = torch.full((rows, -(-vocab // 8) * 8 + 8), float("nan"), dtype=torch.bfloat16)
    out = buffer[:, :vocab]
    stats, *units, _ = weights_triton.head_exponentials(
        hidden, weight, bias, target, rule, out, **options
    )
    assert buffer[:, vocab:].isnan().all(), "written beyond the vocabulary"
    return stats, torch.stack(units), out


def assert_gradient(units, out, g, hidden, weight, bias, target, rule):
    """The d-logits against fp64: one rounding to bf16, in the target's column none, and the fp32
    error of the logit.
    """
    raw = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    z, slope = formulas.final(raw, *rule)
    expected = formulas.gradient(z, slope, target, g)
    is_target = torch.arange(weight.shape[0]) == target[:, None]
    assert (out[is_target] == 0).all()
    actual = torch.where(
        is_target, (g * units[1]).double()[:, None], (g * units[0]).double()[:, None] * out.double()
    )
    unit = torch.where(is_target, 0.0, BF16_UNIT)
    assert ((actual - expected).abs() <= (unit + 2e-5) * expected.abs() + 1e-30).all()


# Rows around the tile of 64 and below it, depths and vocabularies off every block; one column, two
# columns.
@pytest.mark.parametrize(
    ("rows", "hidden_size", "vocab"),
    [(1, 8, 1), (3, 17, 2), (5, 40, 127), (66, 64, 257), (64, 24, 300)],
)
@pytest.mark.parametrize("rule", ["plain", "softcap", "temperatures"])
def test_against_fp64(rows, hidden_size, vocab, rule):
    hidden, weight, bias, target, g = make(rows, hidden_size, vocab)
    rule = {
        "plain": PLAIN,
        "softcap": LogitRule(-0.5, 6.0, 0.8),
        "temperatures": LogitRule(0.7, None, torch.linspace(0.6, 2.0, rows)),
    }[rule]
    b = None if rule is PLAIN else bias
    expected = linear_triton.head_logps(hidden, weight, b, target, rule, return_entropy=True)
    stats, unit, out = weights_of(hidden, weight, b, target, rule, return_entropy=True)
    for actual, want in zip(stats, expected, strict=True):
        assert torch.equal(actual, want), "the store must change no bit of the statistics"
    assert_gradient(unit, out, g, hidden, weight, b, target, rule)
    bare, _, same = weights_of(hidden, weight, b, target, rule)
    assert bare[2] is None and torch.equal(bare[1], stats[1]) and torch.equal(same, out)
    # From known statistics, for some rows only: the same bits.
    index = torch.arange(rows).flip(0)[: max(rows // 2, 1)]
    t = rule.temperature
    part = rule._replace(temperature=t[index] if isinstance(t, torch.Tensor) else t)
    known = tuple(x[index] for x in stats)
    again, unit_again, out_again = weights_of(
        hidden[index], weight, b, target[index], part, known=known
    )
    assert torch.equal(out_again, out[index]) and torch.equal(unit_again, unit[:, index])
    assert all(torch.equal(x, y) for x, y in zip(again, known, strict=True))


@pytest.mark.parametrize("block_v", [64, 128])
def test_tensor_descriptors(monkeypatch, block_v):
    """The TMA path, loads and stores, with tiles of one and of several pieces: the bits do not
    depend on them.
    """
    hidden, weight, _, target, g = make(70, 72, 200)
    target %= 40  # tiles without a target: the short form of the epilogue

    def run(config):
        monkeypatch.setattr(linear_triton, "linear_config", lambda *a, **k: config)
        return weights_of(hidden, weight, None, target, PLAIN)

    config = LinearConfig(64, block_v, 32, 4, 2, 32, use_tma=True)
    stats, unit, out = run(config)
    assert_gradient(unit, out, g, hidden, weight, None, target, PLAIN)
    plain_stats, plain_unit, plain = run(LinearConfig(32, 32, 32, 4, 2, 32))
    assert (
        torch.equal(stats[1], plain_stats[1])
        and torch.equal(unit, plain_unit)
        and torch.equal(out, plain)
    )
    unaligned = torch.full((70, 203), float("nan"), dtype=torch.bfloat16)[:, 1:201]
    monkeypatch.setattr(linear_triton, "linear_config", lambda *a, **k: config)
    weights_triton.head_exponentials(hidden, weight, None, target, PLAIN, unaligned)
    assert torch.equal(unaligned, out)


def peaked(margins: torch.Tensor):
    """Rows whose target (column 9) lies `margin` above all other columns, 63 of them."""
    hidden = torch.stack([margins, torch.full_like(margins, 2.0)], 1).bfloat16()
    weight = torch.zeros(64, 2)
    weight[:, 1] = torch.linspace(0.5, 1.5, 64)
    weight[9] = torch.tensor([1.0, 1.0])
    return hidden, weight.bfloat16(), torch.full((len(margins),), 9)


def test_confident_tokens():
    """p up to 1 - 1e-7: the target's coefficient keeps the digits of 1 - p."""
    hidden, weight, target = peaked(torch.linspace(5, 16, 12))
    _, units, _ = weights_of(hidden, weight, None, target, PLAIN)
    p = (hidden.double() @ weight.double().T).softmax(-1)
    others = torch.where(torch.arange(64) == 9, 0.0, p).sum(-1)
    assert ((units[1] - others).abs() <= 1e-5 * others).all()


def far_rows():
    """Margins far below: -lp from 20 to 1000; 88 nats are the end of bf16, 40 the door's own
    bound.
    """
    margins = torch.tensor([-20.0, -39.0, -41.0, -60.0, -87.0, -90.0, -200.0, -1000.0])
    hidden, weight, target = peaked(margins)
    return hidden, weight, target, torch.linspace(-1, 1, 8)


def test_unlikely_targets():
    hidden, weight, target, g = far_rows()
    (lse, logps, _), unit, out = weights_of(hidden, weight, None, target, PLAIN)
    assert torch.isfinite(out).all() and (out.abs() < 2.0**70).all() and (logps < -15).all()
    assert_gradient(unit, out, g, hidden, weight, None, target, PLAIN)
    # A row next to a far one keeps its bits, and the recomputation from known statistics gives all
    # of them.
    for index in (torch.tensor([0]), torch.tensor([6, 1])):
        assert torch.equal(
            weights_of(hidden[index], weight, None, target[index], PLAIN)[2], out[index]
        )
    assert torch.equal(
        weights_of(hidden, weight, None, target, PLAIN, known=(lse, logps, None))[2], out
    )


def test_only_tiles_with_a_far_row_run_twice(monkeypatch):
    """The second sweep must not touch other tiles: it is what makes the guard free."""
    hidden, weight, target = peaked(torch.full((160,), 3.0))
    hidden[70, 0] = -90.0
    monkeypatch.setattr(
        linear_triton, "linear_config", lambda *a, **k: LinearConfig(64, 64, 32, 4, 2, 32)
    )
    expected = weights_of(hidden, weight, None, target, PLAIN)[2]
    sweeps, original = [], linear_triton.sweep

    def spy(p, partial, out=None, *rest, only_far=False):
        if only_far:
            before = out.clone()
            out[:] = 0.5
        original(p, partial, out, *rest, only_far=only_far)
        if only_far:
            touched = (out != 0.5).any(1)
            sweeps.append(
                (touched.nonzero()[:, 0].min().item(), touched.nonzero()[:, 0].max().item())
            )
            out[~touched] = before[~touched]

    monkeypatch.setattr(weights_triton, "sweep", spy)
    assert torch.equal(weights_of(hidden, weight, None, target, PLAIN)[2], expected)
    assert sweeps == [(64, 127)]


@pytest.mark.parametrize(
    "bad", ["nan hidden", "inf hidden", "-inf target", "-inf columns", "bad ids"]
)
def test_every_row_stays_finite(bad):
    """What a row holds reaches neither another row nor, without a coefficient, its own
    gradients.
    """
    hidden, weight, bias, target, g = make(6, 24, 200)
    clean_stats, clean_unit, clean = weights_of(hidden, weight, bias, target, PLAIN)
    if bad == "nan hidden":
        hidden[2, 3] = float("nan")
    elif bad == "inf hidden":
        hidden[2, 3], hidden[2, 4] = float("inf"), float("-inf")
        hidden[4, 3] = float("inf")
    elif bad == "-inf target":
        bias[target[2]] = -torch.inf
    elif bad == "-inf columns":
        bias[:130] = -torch.inf
        target = target % 70 + 130
    else:
        target[2], target[4] = -100, 10**12
    stats, unit, out = weights_of(hidden, weight, bias, target, PLAIN)
    assert torch.isfinite(out).all()
    rows = torch.tensor([0, 1, 3, 5])
    if bad in ("nan hidden", "inf hidden", "bad ids"):
        assert torch.equal(out[rows], clean[rows]) and torch.equal(
            unit[:, rows], clean_unit[:, rows]
        )
        assert torch.equal(stats[1][rows], clean_stats[1][rows])
    if bad in ("nan hidden", "inf hidden"):
        assert not torch.isfinite(unit[:, 2]).any(), "a coefficient must make the row's NaN visible"
    if bad == "-inf columns":
        assert (out[:, :130] == 0).all()
        assert_gradient(unit, out, g, hidden, weight, bias, target, PLAIN)


def test_memory_and_program_order(monkeypatch):
    monkeypatch.setattr(linear_triton, "SLICE_COLUMNS", 128)
    hidden, weight, bias, target, _ = make(67, 19, 301)
    target[5], target[6] = -100, 10**12
    rule = LogitRule(1.0, 15.0, torch.linspace(0.7, 1.4, 67))
    out = torch.full((67, 301), float("nan"), dtype=torch.bfloat16)

    def run():
        out.fill_(float("nan"))
        with only_memory_of(hidden, weight, bias, target, rule.temperature, out):
            stats, *units, _ = weights_triton.head_exponentials(
                hidden, weight, bias, target, rule, out, return_entropy=True
            )
        return [*stats, *units, out.clone()]

    forward = run()
    with reversed_programs():
        backward = run()
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    with (
        pytest.raises(Exception, match="out of bounds"),
        only_memory_of(hidden, weight[:-1], bias, target, out),
    ):
        weights_triton.head_exponentials(hidden, weight, bias, target, PLAIN, out)


def test_no_rows():
    hidden, weight, _, target, _ = make(0, 16, 50)
    stats, unit, _ = weights_of(hidden, weight, None, target, PLAIN)
    assert stats[0].shape == (0,) and unit.shape == (2, 0)


# ---- through the public functions
# -----------------------------------------------------------------------------------


def loss_gradients(hidden, weight, bias, target, advantages, config, backend, **tokens):
    """(logps, dH, dW, db) of one call."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    tokens = {"cu_seqlens": torch.tensor([0, len(target)]), "num_items_in_batch": 64} | tokens
    out = grpo_fast.linear_grpo_loss(
        leaves[0], leaves[1], target, advantages, config, bias=leaves[2], backend=backend, **tokens
    )
    out.loss.backward()
    return out.logps, *(x.grad for x in leaves)


def worst_row(actual, expected):
    error = (actual.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    return (error[size > 0] / size[size > 0]).max()


CONFIGS = {
    "token level": {"loss_type": "dapo", "epsilon_low": 0.9, "epsilon_high": 9.0},
    "sequence level": {"loss_type": "gspo", "epsilon_low": 0.9, "epsilon_high": 9.0},
    "softcap": {
        "loss_type": "dapo",
        "epsilon_low": 0.9,
        "epsilon_high": 9.0,
        "softcap": 6.0,
        "compute_entropy": True,
    },
    "entropy bonus": {
        "loss_type": "dapo",
        "epsilon_low": 0.9,
        "epsilon_high": 9.0,
        "entropy_coef": 0.05,
    },
}


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setattr(linear, "workspace_bytes", lambda *_: 0)
    return request.param


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name, chunks):
    """dH, dW, db of bf16 inputs within 3e-3 of fp64 all together, dH row by row too."""
    hidden, weight, bias, target, advantages = make(67, 48, 193)
    config = LossConfig(**CONFIGS[name])
    old = (
        grpo_fast.linear_logps(
            hidden, weight, target, bias=bias, softcap=config.softcap, backend="torch"
        )
        - 0.1
    )
    exact = loss_gradients(
        hidden.double(),
        weight.double(),
        bias.double(),
        target,
        advantages,
        config,
        "torch",
        old_logps=old,
    )
    found = loss_gradients(
        hidden, weight, bias, target, advantages, config, "triton", old_logps=old
    )
    assert (found[0] - exact[0]).abs().max() <= 1e-5
    for actual, expected in zip(found[1:], exact[1:], strict=True):
        assert actual.dtype == torch.bfloat16
        assert (actual.double() - expected).norm() <= 3e-3 * expected.norm()
    if name != "entropy bonus":  # whose d-logits, the targets' included, have 16 bits
        assert worst_row(found[1], exact[1]) <= 3e-3


# One token decides most rows of dW where tokens are few: its E, its scaled row of hidden and the
# result are rounded, and nothing averages that out.
@pytest.mark.parametrize(
    ("rows", "hidden_size", "vocab"),
    [(1, 16, 64), (2, 8, 64), (5, 40, 127), (64, 24, 300), (67, 48, 193), (200, 64, 400)],
)
def test_the_worst_rows_of_d_weight_are_those_of_a_16_bit_product(rows, hidden_size, vocab):
    """Side by side with torch's own bf16 product of d-logits that are exact but for one rounding:
    no worse in all, nor in the worst row by more than the second operand's rounding; and element
    by element within the three roundings to bf16.
    """
    hidden, weight, _, target, advantages = make(rows, hidden_size, vocab)
    leaf = weight.clone().requires_grad_()
    offsets = torch.tensor([0, rows])
    out = grpo_fast.linear_grpo_loss(
        hidden, leaf, target, advantages, LossConfig(), cu_seqlens=offsets, num_items_in_batch=64,
        backend="triton",
    )  # fmt: skip
    out.loss.backward()
    p = (hidden.double() @ weight.double().T).softmax(-1)
    is_target = torch.arange(vocab) == target[:, None]
    d_logits = (advantages.double() / -64)[:, None] * (is_target.double() - p)
    exact = d_logits.T @ hidden.double()
    torchs = d_logits.bfloat16().T @ hidden
    assert worst_row(leaf.grad, exact) <= 1.5 * worst_row(torchs, exact)
    assert (leaf.grad - exact).norm() <= 1.1 * (torchs - exact).norm()
    products = d_logits.abs().T @ hidden.double().abs()
    bound = 2 * BF16_UNIT * products + BF16_UNIT * exact.abs()
    assert ((leaf.grad - exact).abs() <= bound + 2e-5 * products).all()


def test_a_row_depends_on_nothing_but_itself(monkeypatch):
    """L0: logp and dH of a row, bit for bit, whatever the batch, its order, the chunk and the other
    gradients are.
    """
    hidden, weight, bias, target, advantages = make(70, 40, 150)
    config = LossConfig(loss_type="dapo")

    def run(index, spare=0, total=True):
        monkeypatch.setattr(linear, "workspace_bytes", lambda *_: spare * 150 * 2)
        return loss_gradients(
            hidden[index], weight, bias, target[index], advantages[index], config, "triton"
        )[:2]

    logps, d_hidden = run(torch.arange(70), spare=96)
    for index, spare in (
        (torch.arange(70), 0),
        (torch.arange(70), 64),
        (torch.arange(69, -1, -1), 32),
        (torch.arange(5, 12), 96),
        (torch.tensor([68]), 96),
    ):
        lp, dh = run(index, spare)
        assert torch.equal(lp, logps[index]) and torch.equal(dh, d_hidden[index])
    with torch.no_grad():
        assert torch.equal(
            grpo_fast.linear_logps(hidden, weight, target, bias=bias, backend="triton"), logps
        )


def test_held_and_computed_again(monkeypatch):
    """A sequence-level loss: the weights of a single chunk are used as they are, those of several
    computed again.
    """
    hidden, weight, bias, target, advantages = make(70, 40, 150)
    sweeps, original = [], linear_triton.sweep

    def spy(p, partial, out=None, *rest, only_far=False):
        sweeps.append(
            "store" if out is not None and not only_far else "far" if only_far else "bare"
        )
        original(p, partial, out, *rest, only_far=only_far)

    for module in (linear_triton, weights_triton):
        monkeypatch.setattr(module, "sweep", spy)

    def run():
        sweeps.clear()
        config = LossConfig(loss_type="gspo")
        return loss_gradients(hidden, weight, bias, target, advantages, config, "triton"), list(
            sweeps
        )

    held, held_sweeps = run()
    assert held_sweeps == ["store", "far"]
    monkeypatch.setattr(linear, "workspace_bytes", lambda *_: 0)
    again, again_sweeps = run()
    assert again_sweeps == ["bare", "bare", "store", "far", "store", "store"], (
        "the last of three chunks is kept"
    )
    assert torch.equal(held[0], again[0]) and torch.equal(held[1], again[1])


@pytest.mark.parametrize("zeros", [1, 40])
def test_rows_without_coefficient_are_inert(zeros):
    """NaN in rows whose logps nobody reads: no bit of any gradient changes, gathered away or
    not.
    """
    hidden, weight, bias, target, _ = make(67, 40, 150)
    share = torch.linspace(0.5, 1.5, 67)
    share[3 : 3 + zeros] = 0.0

    def gradients(hidden):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
        logps = grpo_fast.linear_logps(
            leaves[0], leaves[1], target, bias=leaves[2], backend="triton"
        )
        return logps, torch.autograd.grad(logps, leaves, share)

    _, clean = gradients(hidden)
    dirty = hidden.clone()
    dirty[3, 5] = float("nan")
    logps, found = gradients(dirty)
    assert torch.isnan(logps[3]) and (found[0][3 : 3 + zeros] == 0).all()
    assert all(torch.equal(*pair) for pair in zip(found, clean, strict=True))


@pytest.mark.parametrize("rows", [40, 32])
def test_an_entropy_gradient_forms_the_logits_again(rows, monkeypatch):
    """What `linear_logps` kept for its backward are weights, which know the logps' gradient
    only.
    """
    hidden, weight, bias, target, _ = make(40, 32, 70)
    monkeypatch.setattr(linear, "workspace_bytes", lambda *_: rows * 70 * 2)

    def run(backend, *shares):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        results = grpo_fast.linear_logps(
            leaves[0], leaves[1], target, bias=leaves[2], return_entropy=True, backend=backend
        )
        return torch.autograd.grad(
            sum((r * s).sum() for r, s in zip(results, shares, strict=True) if s), leaves
        )

    for shares in ((1.0, 0.3), (0.0, 1.0), (1.0, 0.0)):
        for actual, expected in zip(run("triton", *shares), run("torch", *shares), strict=True):
            assert (actual - expected).float().norm() <= 1e-2 * expected.float().norm()
