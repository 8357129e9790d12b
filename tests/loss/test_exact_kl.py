"""KL over the vocabulary against fp64: values, gradients, chunks, memory, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from grpo_fast import LossConfig, Support, grpo_loss
from grpo_fast.kernels import route
from grpo_fast.kernels.types import LogitRule
from grpo_fast.loss import exact_kl
from grpo_fast.loss.exact_kl import linear_exact_kl

PLAIN = LogitRule()
RULES = {
    "plain": (PLAIN, None),
    "temperature": (LogitRule(temperature=0.7), None),
    "cohere and gemma": (LogitRule(0.25, None, 1.3), LogitRule(1.0, 3.0, 1.3)),
    "softcap": (LogitRule(1.5, 2.0, 0.9), LogitRule(0.5, 4.0, 0.9)),
}


def z_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule) -> Tensor:
    """The final logits as the formula has them, in fp64."""
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    z = rule.logit_scale * z
    if rule.softcap is not None:
        z = rule.softcap * torch.tanh(z / rule.softcap)
    return z / rule.temperature


def truth(
    sides: list[Tensor | None], rule: LogitRule, ref_rule: LogitRule | None, upstream: Tensor
):
    """KL (R,) and its gradients to hidden, weight and bias by autograd, in fp64."""
    wide = [None if x is None else x.detach().double() for x in sides]
    leaves = [None if x is None else x.requires_grad_() for x in wide[:3]]
    p = torch.softmax(z_of(*leaves, rule), dim=-1)
    q = torch.softmax(z_of(*wide[3:], ref_rule or rule), dim=-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    (kl * upstream.double()).sum().backward()
    return kl.detach(), [None if x is None else x.grad for x in leaves]


def sides_of(R=37, H=6, V=53, ref_H=9, *, dtype=torch.float32, bias=True, seed=0):
    """hidden, weight, bias of the policy and of the reference."""
    g = torch.Generator().manual_seed(seed)

    def side(width):
        hidden = torch.randn(R, width, generator=g).to(dtype)
        weight = (torch.randn(V, width, generator=g) / width**0.5).to(dtype)
        return hidden, weight, (0.3 * torch.randn(V, generator=g)).to(dtype) if bias else None

    return [*side(H), *side(ref_H)]


def ours(sides, rule, ref_rule, upstream):
    leaves = [None if x is None else x.clone().requires_grad_() for x in sides[:3]]
    hidden, weight, bias = leaves
    kl = linear_exact_kl(
        hidden, weight, sides[3], sides[4], bias=bias, ref_bias=sides[5], rule=rule,
        ref_rule=ref_rule,
    )  # fmt: skip
    (kl * upstream).sum().backward()
    return kl.detach(), [None if x is None else x.grad for x in leaves]


def error(value: Tensor, true: Tensor) -> float:
    return ((value.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mib", ["0", "256"])  # chunks of 32 rows; one chunk
def test_value_and_gradients_against_fp64(name, bias, mib, monkeypatch):
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", mib)
    sides, (rule, ref_rule) = sides_of(bias=bias), RULES[name]
    upstream = torch.linspace(-1, 2, 37)
    upstream[5] = 0.0
    kl, grads = ours(sides, rule, ref_rule, upstream)
    true, expected = truth(sides, rule, ref_rule, upstream)
    assert kl.dtype == torch.float32 and error(kl, true) < 1e-6
    for grad, wanted in zip(grads, expected, strict=True):
        assert (grad is None) == (wanted is None)
        assert grad is None or error(grad, wanted) < 2e-6
    assert (grads[0][5] == 0).all()


@pytest.mark.parametrize("mib", ["0", "256"])
def test_over_a_samplers_sets_against_fp64(mib, monkeypatch):
    """Sets of every size from one token to the whole vocabulary, which an empty one stands for."""
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", mib)
    sides, upstream = sides_of(), torch.linspace(-1, 2, 37)
    sizes = [0, 1, 2, 53, *range(3, 36)]
    sets = [torch.randperm(53, generator=torch.Generator().manual_seed(n))[:n] for n in sizes]
    support = Support(torch.cat(sets), torch.tensor([0, *itertools.accumulate(sizes)]))
    leaves = [x.clone().requires_grad_() for x in sides[:3]]
    kl = linear_exact_kl(*leaves[:2], *sides[3:5], bias=leaves[2], ref_bias=sides[5],
                         support=support)  # fmt: skip
    (kl * upstream).sum().backward()
    wide = [x.double().requires_grad_(i < 3) for i, x in enumerate(sides)]
    expected = []
    for t, ids in enumerate(sets):
        ids = ids if len(ids) else torch.arange(53)
        p, q = ((x[t] @ w[ids].T + bias[ids]).softmax(-1) for x, w, bias in (wide[:3], wide[3:]))
        expected.append((p * (p / q).log()).sum())
    (torch.stack(expected) * upstream).sum().backward()
    assert kl[1] == 0 and error(kl.detach(), torch.stack(expected).detach()) < 1e-6
    for leaf, true in zip(leaves, wide[:3], strict=True):
        assert error(leaf.grad, true.grad) < 2e-6
    with pytest.raises(ValueError, match=r"support.offsets: expected 38 of 37 rows, got 3"):
        linear_exact_kl(*sides[:2], *sides[3:5], support=Support(sets[1], torch.arange(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """Logits come in fp32 from 16-bit products: only the gradients are rounded."""
    sides, upstream = sides_of(dtype=dtype), torch.linspace(0.1, 2, 37)
    kl, grads = ours(sides, PLAIN, None, upstream)
    true, expected = truth(sides, PLAIN, None, upstream)
    assert error(kl, true) < 1e-6
    for grad, wanted in zip(grads, expected, strict=True):
        assert grad.dtype == dtype and error(grad, wanted) < 6e-3


def test_a_reference_of_another_dtype():
    sides, upstream = sides_of(), torch.ones(37)
    wide = [*sides[:3], *(x.double() for x in sides[3:])]
    assert (
        error(ours(wide, PLAIN, None, upstream)[0], truth(sides, PLAIN, None, upstream)[0]) < 1e-6
    )


def test_it_is_zero_at_the_reference_itself():
    hidden, weight, bias = sides_of()[:3]
    kl, grads = ours([hidden, weight, bias] * 2, PLAIN, None, torch.ones(37))
    assert (kl == 0).all() and all((grad == 0).all() for grad in grads)


def test_what_the_policy_excludes_adds_nothing():
    """Columns of −inf: the KL is that of the vocabulary without them."""
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = sides_of()
    bias[7] = ref_bias[7] = bias[11] = -math.inf
    kl, grads = ours([hidden, weight, bias, ref_hidden, ref_weight, ref_bias], PLAIN, None,
                     torch.ones(37))  # fmt: skip
    keep = torch.ones(53, dtype=torch.bool)
    keep[[7, 11]] = False
    q = torch.softmax(z_of(ref_hidden.double(), ref_weight.double(), ref_bias.double(), PLAIN), -1)
    p = torch.softmax(z_of(hidden.double(), weight.double(), bias.double(), PLAIN), -1)
    true = (p * (p.log() - q.log()))[:, keep].sum(-1)
    assert error(kl, true) < 1e-6
    assert all(grad.isfinite().all() for grad in grads) and (grads[1][[7, 11]] == 0).all()


def test_a_shared_row_and_no_rows():
    """A prompt's last row serves several completions; a micro-batch may have no active token."""
    hidden, weight, bias, *reference = sides_of(R=5)
    rows = torch.tensor([0, 0, 3, 1, 0])
    leaf = hidden.clone().requires_grad_()
    ref = reference[0], reference[1]
    linear_exact_kl(leaf.index_select(0, rows), weight, *ref).sum().backward()
    true = truth([hidden[rows], weight, None, *ref, None], PLAIN, None, torch.ones(5))[1][0]
    expected = torch.zeros(5, 6, dtype=torch.float64).index_add_(0, rows, true)
    assert error(leaf.grad, expected) < 2e-6
    leaf = hidden[:0].clone().requires_grad_()
    kl = linear_exact_kl(leaf, weight, reference[0][:0], reference[1])
    kl.sum().backward()
    assert kl.shape == (0,) and leaf.grad.shape == (0, 6)


def test_only_one_chunk_of_logits_lives(monkeypatch):
    """32 chunks of (32, 32768), 4 MiB a buffer; one whole matrix would take 128 MiB."""
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", "1")
    sides, rule = sides_of(1024, 8, 1 << 15, 8, bias=False), LogitRule(1.0, 5.0, 0.9)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        ours(sides, rule, None, torch.ones(1024))
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    steps = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    peak = max(itertools.accumulate(steps)) / 2**20
    heads = 3  # copies of weight and hidden rows, dW
    assert peak < exact_kl.BUFFERS * 4 + heads


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5, 1e-7])
def test_a_certain_policy_has_a_small_exact_kl(gap):
    """Where one token has all but `gap` of the probability, p·log(p/q) cancels in fp32."""
    g = torch.Generator().manual_seed(0)
    hidden, (R, V) = torch.eye(64), (64, 53)
    weight = torch.randn(V, R, generator=g)
    weight[3] = weight[4:].double().logsumexp(0).float() - math.log(gap)
    ref_weight = weight + 0.3 * torch.randn(V, R, generator=g)
    sides = [hidden, weight, None, hidden, ref_weight, None]
    true, _ = truth(sides, PLAIN, None, torch.ones(R))
    kl = linear_exact_kl(hidden, weight, hidden, ref_weight)
    assert (kl >= 0).all() and error(kl, true) < 1e-5
    assert not linear_exact_kl(hidden, weight, hidden, weight).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", ["own", "vendor"])
def test_autocast_changes_nothing(product, dtype, monkeypatch):
    monkeypatch.setenv("GRPO_FAST_GEMM", product)
    route._gemm_choice.cache_clear()
    try:
        plain = ours(sides_of(), PLAIN, None, torch.ones(37))
        with torch.autocast("cpu", dtype):
            inside = ours(sides_of(), PLAIN, None, torch.ones(37))
    finally:
        monkeypatch.undo()
        route._gemm_choice.cache_clear()
    assert torch.equal(plain[0], inside[0])
    assert all(torch.equal(x, y) for x, y in zip(plain[1], inside[1], strict=True))


def test_no_double_backward():
    hidden, weight, _, *reference = sides_of(bias=False)
    hidden.requires_grad_()
    kl = linear_exact_kl(hidden, weight, reference[0], reference[1])
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(kl.sum(), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ref_hidden", dict(ref_hidden=torch.zeros(36, 9))),
        ("ref_lm_head_weight", dict(ref_lm_head_weight=torch.zeros(52, 9), ref_bias=None)),
        ("ref_lm_head_weight", dict(ref_lm_head_weight=torch.zeros(53, 8))),
        ("hidden", dict(hidden=torch.zeros(1, 37, 6))),
        ("lm_head_weight", dict(hidden=torch.zeros(37, 6, dtype=torch.float64))),
        ("ref_bias", dict(ref_bias=torch.zeros(52))),
        ("rule.temperature", dict(rule=LogitRule(temperature=0.0))),
        ("ref_rule.softcap", dict(ref_rule=LogitRule(softcap=-1.0))),
        ("rule.logit_scale", dict(rule=LogitRule(logit_scale=math.nan))),
    ],
)
def test_refusals(name, change):
    names = ("hidden", "lm_head_weight", "bias", "ref_hidden", "ref_lm_head_weight", "ref_bias")
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        linear_exact_kl(**{**dict(zip(names, sides_of(), strict=True)), **change})


def test_the_losses_refuse_what_they_cannot_see():
    config = LossConfig(loss_type="grpo", beta=0.1, kl_estimator="exact")
    with pytest.raises(ValueError, match="kl_estimator: expected one of .* got 'exact', which"):
        grpo_loss(torch.zeros(1, 2), torch.ones(1), config, ref_logps=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="kl_times_ratio: expected False"):
        LossConfig(beta=0.1, kl_estimator="exact", kl_times_ratio=True)
