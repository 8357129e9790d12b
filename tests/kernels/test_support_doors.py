"""The doors of rows with a support, of torch and of C++: sizes at the edges of vectors and runs,
the order of sums, factors of 0 beside NaN, rows that nobody wrote.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels import route, support_reference
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.support import SupportRows
from grpo_fast.kernels.types import LogitRule
from tests.loss_cases import relative_l2

REASON = route.unavailable("cpu", "cpu")
CSRC = pytest.mark.skipif(REASON is not None, reason=f"backend cpu: {REASON}")
DOORS = [pytest.param("torch", id="torch"), pytest.param("cpu", id="cpu", marks=CSRC)]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=DOORS)
def doors(request):
    if request.param == "cpu":  # never torch in its place, when it does not build
        assert loader.load("support") is None
    return route.support_doors(request.param)


def rows_of_lengths(lengths: list[int], V: int, seed: int = 0) -> SupportRows:
    g = torch.Generator().manual_seed(seed)
    sets = [torch.randperm(V, generator=g)[:n] for n in lengths]
    places = torch.tensor([int(torch.randint(n, (1,), generator=g)) for n in lengths])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return SupportRows(None, None, torch.cat(sets), offsets, places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", [1, 15, 64, 131])
def test_a_head(doors, H, dtype):
    """Logits, statistics, slopes and both gradients, at row sizes around one and four vectors."""
    V, g = 90, torch.Generator().manual_seed(H)
    rows = rows_of_lengths([1, 5, 40, 90, 2, 33], V)
    hidden, weight = (torch.randn(n, H, generator=g).to(dtype) for n in (9, V))
    bias, index = torch.randn(V, generator=g).to(dtype), torch.tensor([8, 0, 3, 3, 7, 1])
    found = doors.head_rows(
        hidden, index, weight, bias, rows, LogitRule(1.2, 5.0, 0.9), return_entropy=True,
        return_slopes=True,
    )  # fmt: skip
    h, w, b = (x.double() for x in (hidden, weight, bias))
    d = torch.randn(len(rows.ids), generator=g)
    d_hidden, d_weight = torch.zeros(6, H).double(), torch.zeros(V, H).double()
    out = torch.full((V, H), torch.nan)
    doors.head_weight(d, hidden, index, rows, out, add=False)
    for r in range(6):
        here = slice(*rows.offsets[r : r + 2].tolist())
        ids, x = rows.ids[here], h[index[r]].clone().requires_grad_()
        raw = w[ids] @ x + b[ids]
        logp_all = (5 * torch.tanh(1.2 * raw / 5) / 0.9).log_softmax(0)
        logp = logp_all[rows.places[r]]
        slope = torch.autograd.grad(logp, x)[0]
        entropy = -(logp_all.exp() * logp_all).sum()
        for ours, true in ((found.raw[here], raw), (found.stats[1][r], logp)):
            torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.stats[2][r].double(), entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.slopes[r].double(), slope, rtol=1e-4, atol=1e-5)
        d_hidden[r] = d[here].double() @ w[ids]
        d_weight[ids] += d[here, None].double() * h[index[r]]
    assert relative_l2(doors.head_hidden(d, weight, rows), d_hidden) < 1e-6
    assert relative_l2(out, d_weight) < 1e-6
    doors.head_weight(d, hidden, index, rows, out, add=True)
    assert relative_l2(out, 2 * d_weight) < 1e-6


def test_terms_are_added_in_the_order_of_the_rows(doors, monkeypatch):
    """1 + 1e8 - 1e8 is 0 in fp32; from the last to the first it is 1. Torch takes blocks of one."""
    monkeypatch.setattr(support_reference, "BLOCK_ELEMENTS", 2)
    rows = SupportRows(None, None, torch.tensor([3, 3, 3]), torch.arange(4), torch.zeros(3).long())
    out = torch.full((6, 2), torch.nan)
    hidden = torch.tensor([[1.0, 2.0], [1e8, 2e8], [-1e8, -2e8]])
    doors.head_weight(torch.ones(3), hidden, None, rows, out, add=False)
    assert not out.any()


def test_many_rows_may_have_one_id(doors):
    """More terms than a run holds: sums of whole numbers are exact."""
    count = 700
    rows = SupportRows(
        None, None, torch.full((count,), 40), torch.arange(count + 1), torch.zeros(count).long()
    )
    out = torch.full((41, 70), torch.nan)
    doors.head_weight(torch.ones(count), torch.ones(count, 70), None, rows, out, add=False)
    assert (out[40] == count).all() and not out[:40].any()


def test_a_factor_of_zero_adds_nothing(doors):
    """Also beside NaN and inf; and a factor of NaN is seen."""
    rows = rows_of_lengths([4, 4], 8)
    d = torch.tensor([0.0, 1, 0, 1, 0, 0, 0, 0])
    weight, hidden = torch.ones(8, 3), torch.ones(2, 3)
    weight[rows.ids[0]], hidden[1] = torch.nan, torch.inf
    out = torch.full((8, 3), torch.nan)
    doors.head_weight(d, hidden, None, rows, out, add=False)
    expected = torch.zeros(8).index_add_(0, rows.ids, d)[:, None].expand(8, 3)
    assert torch.equal(out, expected) or rows.ids[0] in rows.ids[4:]
    weight[rows.ids[4:]] = 1.0
    weight[rows.ids[0]] = torch.nan
    assert torch.equal(doors.head_hidden(d, weight, rows), torch.tensor([[2.0] * 3, [0.0] * 3]))
    d[1] = torch.nan
    assert doors.head_hidden(d, weight, rows)[0].isnan().all()


def test_where_targets_stand(doors):
    ids, offsets = torch.tensor([5, 2, 7, 7, 2, 0]), torch.tensor([0, 3, 6])
    places, repeated = doors.target_places(ids, offsets, torch.tensor([7, 0]), 8)
    assert places.tolist() == [2, 2] and int(repeated) == -1
    places, _ = doors.target_places(ids, offsets, torch.tensor([5, 5]), 8)
    assert places.tolist() == [0, -1]
    ids[4] = 7
    assert int(doors.target_places(ids, offsets, torch.tensor([7, 0]), 8)[1]) == 7


@CSRC
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ids", lambda ids, offsets: (ids + 90, offsets)),
        ("ids", lambda ids, offsets: (ids - 90, offsets)),
        ("offsets", lambda ids, offsets: (ids, offsets + 1)),
        ("offsets", lambda ids, offsets: (ids, offsets.flip(0))),
    ],
)
def test_the_kernels_read_nothing_outside(name, change):
    """Whatever the checks above them let through."""
    rows = rows_of_lengths([3, 4], 90)
    ids, offsets = change(rows.ids, rows.offsets)
    with pytest.raises(RuntimeError, match=f"{name}: expected"):
        route.support_doors("cpu").head_hidden(
            torch.ones(7), torch.ones(90, 4), rows._replace(ids=ids, offsets=offsets)
        )


def test_the_reference_is_taken_without_a_compiler(monkeypatch):
    route.support_doors.cache_clear()
    monkeypatch.setattr(route.loader, "load", lambda name="rows": "no compiler here")
    try:
        assert route.support_doors("cpu") is support_reference
    finally:
        route.support_doors.cache_clear()
