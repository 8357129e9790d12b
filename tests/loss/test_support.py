"""Test which implementation of `support=` is used for which sizes, and its sums of 16-bit weights.

`support` has the ids from which a sampler chose. An LM head has two implementations: one gathers
rows of W, and one computes all logits. A third implementation is for given logits. test_logps.py
and test_loss_parity.py test the values of all three.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast import Support, linear_logps
from grpo_fast.kernels.head import support as head_support
from tests.loss_cases import make_case, options_for, relative_l2, run, truth
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_the_form_follows_from_the_sizes(spied):
    forms = [spied(head_support, name) for name in ("GatheredSets", "ProductSets")]
    hidden, weight, ids = torch.randn(70, 41), torch.randn(300, 41), torch.randint(300, (70,))
    for k, expected in ((2, [1, 0]), (200, [1, 1])):
        columns = (ids[:, None] + torch.arange(k)) % 300
        support = Support(columns.flatten(), torch.arange(71) * k)
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
