"""The Triton kernel of divergences against its reference in torch, by the interpreter."""

from __future__ import annotations

import torch

from grpo_fast.kernels import divergence_reference as reference
from grpo_fast.kernels.gpu import divergence as ours
from grpo_fast.kernels.teachers import Divergence
from grpo_fast.kernels.types import LogitRule
from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)
from tests.pairs import pairs

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5)]
RULES = [(LogitRule(), LogitRule()), (LogitRule(0.7, 5.0, 1.3), LogitRule(1.2, None, 0.8))]


def sides(count: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of both sides, among them a certain row, equal rows and excluded columns."""
    g = torch.Generator().manual_seed(vocab)
    z, y = (3 * torch.randn(count, vocab, generator=g) for _ in range(2))
    z[1, 3] += 20
    y[1] = z[1] + 0.1 * torch.randn(vocab, generator=g)
    y[2] = z[2]
    z[3, :5] = y[3, :5] = -torch.inf
    return z, y, torch.tensor([1.0, 1.0, 0.5, 2.0, 0.0])[:count]


@pairs(kind__beta=KINDS, rules=RULES, vocab=[37, 1025, 2049])
def test_values_and_gradients(kind, beta, rules, vocab):
    z, y, w = sides(5, vocab)
    if rules is RULES[1]:  # under one side's soft cap -inf is a number
        z, y = (x.clamp(min=-9) for x in (z, y))
    wide = z.double(), y.double(), w.double(), Divergence(kind, beta)
    d_true = torch.empty_like(wide[0])
    true = reference.row_divergence_(*wide, *rules, out=d_true)
    given = z, y, w, Divergence(kind, beta), *rules
    values = ours.row_divergence_(*given)
    found = ours.row_divergence_(*given, out=y)
    assert all(torch.equal(a, b) for a, b in zip(values, found, strict=True))
    assert (found.values >= 0).all() and (y[4] == 0).all()
    assert rules is RULES[1] or (found.values[2] == 0 and (y[2] == 0).all())
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for t in range(5):  # the certain row by its own size
        assert (y[t] - d_true[t]).norm() <= 2e-4 * d_true[t].norm() + 1e-9, t


def test_columns_of_one_rank():
    """Two shards that know the whole rows' lse and centers are the whole."""
    z, y, w = sides(5, 1025)
    z, y = (x.clamp(min=-9) for x in (z, y))
    given = w, Divergence("jsd", 0.3), *RULES[1]
    d_whole = torch.empty_like(z)
    whole = ours.row_divergence_(z, y, *given, out=d_whole)
    shards = [(z[:, s].contiguous(), y[:, s].contiguous()) for s in (slice(300), slice(300, None))]
    sums = [ours.row_divergence_(*x, *given, known=whole) for x in shards]
    for i in (0, 1):
        torch.testing.assert_close(sums[0][i] + sums[1][i], whole[i], rtol=1e-5, atol=1e-7)
    parts = [torch.empty_like(a) for a, _ in shards]
    for (a, b), out in zip(shards, parts, strict=True):
        ours.row_divergence_(a, b, *given, out=out, known=whole)
    torch.testing.assert_close(torch.cat(parts, 1), d_whole, rtol=1e-4, atol=1e-7)


def test_temperatures_by_row_and_strides():
    z, y, w = sides(5, 300)
    rule = LogitRule(1.0, None, torch.tensor([0.5, 1.0, 1.0, 2.0, 0.7]))
    out, true = torch.full((5, 310), 7.0), torch.empty_like(z)
    given = w, Divergence("reverse_kl"), rule, LogitRule()
    strided = torch.empty(5, 400)[:, :300].copy_(z)
    ours.row_divergence_(strided, y, *given, out=out[:, :300])
    reference.row_divergence_(z, y, *given, out=true)
    torch.testing.assert_close(out[:, :300], true, rtol=1e-4, atol=1e-6)
    assert (out[:, 300:] == 7.0).all()
