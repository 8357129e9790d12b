"""Test `support=`, the ids from which a sampler chose: bits of a row, sizes and 16-bit sums.

An LM head has two implementations: one gathers rows of W, and one computes all logits. A third
implementation is for given logits. test_logps.py and test_loss_parity.py test their values.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast import Support, linear_logps
from grpo_fast.kernels.head import support as head_support
from tests.loss_cases import (
    ENGINES,
    kept_ids,
    make_case,
    options_for,
    relative_l2,
    run,
    support_of,
    truth,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")
V, H, T = 300, 41, 70


def rows(seed: int = 0):
    """Return hidden (T, H), weight (V, H), bias (V,), ids (T,), and a mask (T, V) of kept ids."""
    g = torch.Generator().manual_seed(seed)
    leaves = [(torch.randn(*n, generator=g) / 3).requires_grad_() for n in ((T, H), (V, H), (V,))]
    ids = torch.randint(V, (T,), generator=g)
    return *leaves, ids, kept_ids(seed, ids[None], V)[0]


EVERYTHING = torch.ones(T, dtype=torch.bool)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_row_does_not_depend_on_its_neighbours(backend):
    hidden, weight, bias, ids, kept = (x.detach() for x in rows(6))
    kept[kept.all(-1), 40:] = False
    kept[:, 100:] &= torch.rand(T, V - 100, generator=torch.Generator().manual_seed(0)) < 0.02
    kept.scatter_(-1, ids[:, None], True)

    def of(part):
        h = hidden[part].clone().requires_grad_()
        sets = support_of(kept[part], EVERYTHING[part])
        lp = linear_logps(h, weight, ids[part], bias=bias, support=sets, backend=backend)
        return lp.detach(), torch.autograd.grad(lp.sum(), h)[0]

    part = torch.tensor([3, T - 10, 17, 22])
    for whole, own in zip(of(torch.arange(T)), of(part), strict=True):
        assert torch.equal(whole[part], own)


def test_the_form_follows_from_the_sizes(spied):
    forms = [spied(head_support, name) for name in ("GatheredSets", "ProductSets")]
    hidden, weight, _, ids, _ = (x.detach() for x in rows())
    for k, expected in ((2, [1, 0]), (200, [1, 1])):
        columns = (ids[:, None] + torch.arange(k)) % V
        support = Support(columns.flatten(), torch.arange(T + 1) * k)
        linear_logps(hidden, weight, ids, support=support)
        assert [len(calls) for calls in forms] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_narrow_weights_gradient_is_summed_in_fp32_and_rounded_once(dtype, monkeypatch):
    """Check that a 16-bit dW is summed in fp32 and rounded only once, with the torch backend.

    The torch backend computes this sum without the C++ kernels.
    """
    monkeypatch.setattr(head_support, "GATHERED_COST", 0)
    hidden = torch.randn(300, 2).to(dtype).requires_grad_()
    weight = torch.randn(3, 2).to(dtype).requires_grad_()
    support = Support(torch.tensor([0, 1] * 300), torch.arange(0, 601, 2))
    logps = linear_logps(
        hidden, weight, torch.zeros(300, dtype=torch.int64), support=support, backend="torch"
    )
    logps.sum().backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    (h @ w[:2].T).log_softmax(-1)[:, 0].sum().backward()
    ulp = 2**-8 if dtype == torch.bfloat16 else 2**-11
    assert ((weight.grad.double() - w.grad).abs() <= ulp * w.grad.abs() + 1e-4).all()


# The hidden sizes are chosen so that the kernel runs with 4, 8 and 16 warps. 897 gives unaligned
# rows. 9000 exceeds SUPPORT_COLUMNS, so torch computes this case.
@pytest.mark.gpu
@pairs(
    options=[options_for("dapo"), options_for("grpo", softcap=3.0, beta=0.2)],
    width__dtype=[
        *((x, torch.bfloat16) for x in (896, 897, 8192, 9000)),
        (4096, torch.float16), (2048, torch.float32),
    ],
)  # fmt: skip
def test_real_sizes(width, dtype, options, monkeypatch):
    """Check gradients, and that repeated runs have the same bits.

    In 16 bits, the limit is based on the rounding error of the exact gradient, which depends on
    the values. Many gradients are below 6e-5, where the spacing of fp16 is constant.
    """
    monkeypatch.setattr(head_support, "GATHERED_COST_GPU", 0)
    case = make_case(5, H=width, V=32000, dtype=dtype, support=True, **options)
    result, again = (run("linear", case, backend="triton") for _ in range(2))
    expected = truth("linear", case)
    assert (result.logps - expected.logps)[case.mask].abs().max() < 2e-5
    for what, found in result.grads.items():
        exact = getattr(expected, f"{what}_grad")
        rounding = 0.0 if dtype == torch.float32 else relative_l2(exact.to(dtype), exact)
        assert relative_l2(found, exact) < 1e-4 + 1.5 * rounding
        assert torch.equal(found, again.grads[what])
