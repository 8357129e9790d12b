"""Test extreme shapes: vocabulary sizes, long and empty batches, −inf columns, 64-bit offsets."""

from __future__ import annotations

import math

import pytest
import torch

import grpo_fast
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LAYOUTS,
    LOSS_LEVELS,
    check,
    cu_seqlens_of,
    make_case,
    options_for,
    reference_logps,
    run,
)
from tests.pairs import pairs

# With 1 column, the softmax is constant. 127 and 129 are next to a power of two, and not multiples
# of a vector width. The last three are sizes of real tokenizers (GPT-2, Qwen, Gemma). 50257 is odd,
# and 262144 is the largest size in use.
VOCABULARIES = (1, 2, 127, 129, 50257, 151936, 262144)
# The relative and the absolute error that one rounding to a dtype may cause. The relative error is
# half a unit in the last place. The absolute error is half the smallest positive fp16 number.
ONE_STORE = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2**-8, 0.0),
    torch.float16: (2**-11, 2**-25),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("V", "dtype"),
    [(V, d) for V in VOCABULARIES for d in ONE_STORE if V < 1e5 or d != torch.float16],
)
def test_vocabulary_sizes(V, dtype, backend):
    g = torch.Generator().manual_seed(V)
    # Do not use a much smaller H. MKL would then choose a matrix product whose sums over V are 100
    # times less accurate.
    T, H = (3, 64)
    hidden, weight = (
        torch.randn(T, H, generator=g).to(dtype),
        (torch.randn(V, H, generator=g) / 8).to(dtype),
    )
    ids = torch.tensor([0, V - 1, V // 2])
    cu, config = cu_seqlens_of([1, T - 1]), grpo_fast.LossConfig(loss_type="grpo")
    A = torch.tensor([1.0, -0.5])
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = grpo_fast.linear_grpo_loss(h, w, ids, A, config, cu_seqlens=cu, backend=backend)
    out.loss.backward()
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    lp = torch.log_softmax(h64 @ w64.T, -1).gather(1, ids[:, None]).squeeze(1)
    loss = -(A[0] * lp[0] + A[1] * lp[1:].mean()) / 2
    loss.backward()
    assert (out.logps.double() - lp).abs().max() <= 1e-5
    if V == 1:
        assert (h.grad == 0).all() and (w.grad == 0).all() and (out.logps == 0).all()
        return
    for own, true in ((h.grad, h64.grad), (w.grad, w64.grad)):
        arithmetic = 3e-6 * true.norm(dim=1, keepdim=True)
        half_ulp, smallest = ONE_STORE[dtype]
        error = own.double() - true
        # The bf16 instructions of a CPU are less accurate, so allow a larger error.
        if dtype == torch.bfloat16 and backend == "cpu":
            assert (error.norm(dim=1) <= 3e-3 * true.norm(dim=1)).all()
        else:
            assert (error.abs() <= arithmetic + half_ulp * true.abs() + smallest).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("L", [65536, 70001])
def test_completions_longer_than_a_16_bit_index(L, backend):
    mask = torch.ones(2, L, dtype=torch.bool)
    case = make_case(71, H=2, V=3, mask=mask, **options_for("gspo", "sequence"))
    # Give all terms of each sum over tokens the same sign. Otherwise the error would measure
    # cancellation instead of arithmetic.
    case = case.but(
        ids=torch.zeros_like(case.ids), hidden=case.hidden.abs(),
        advantages=torch.tensor([1.3, 0.8]),
    )  # fmt: skip
    case = case.but(old=reference_logps(case)[0] - 0.1)
    check("linear", case, layout="packed", backend=backend, loss_tol=3e-6, grad_tol=2e-5)
    by_token = case.with_options(**options_for("dapo"), importance_sampling_level="token")
    assert torch.isfinite(run("linear", by_token, backend=backend).loss)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_offsets_beyond_two_to_the_31(dtype, backend):
    """Check that two rows of logits may be more than 2³¹ elements apart, beyond 32-bit offsets.

    The memory between the rows is reserved but never touched.
    """
    V, stride = 64, 2**31 + 128
    try:
        base = torch.empty(stride + V, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(
            f"cannot reserve {(stride + V) * dtype.itemsize / 2**30:.0f} GiB of addresses: {error}"
        )
    logits = base.as_strided((2, V), (stride, 1))
    logits.copy_(torch.randn(2, V, generator=torch.Generator().manual_seed(0)))
    near = logits.clone()
    ids, cu, A = torch.tensor([5, 63]), torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1.0])
    config = grpo_fast.LossConfig(loss_type="reinforce")
    assert torch.equal(
        grpo_fast.logits_logps(logits, ids, backend=backend),
        grpo_fast.logits_logps(near, ids, backend=backend),
    )
    grads = []
    for x in (logits, near):
        x = x.detach().requires_grad_()
        out = grpo_fast.logits_grpo_loss(x, ids, A, config, cu_seqlens=cu, backend=backend)
        (grad,) = torch.autograd.grad(out.loss, x)
        grads.append(grad.clone())
    assert torch.equal(*grads) and (grads[0] != 0).all()


NOTHING = {
    **{str(shape): torch.ones(shape, dtype=torch.bool) for shape in [(0, 5), (3, 0), (0, 0)]},
    "masked": torch.zeros(3, 2, dtype=torch.bool),
}


@pairs(backend=BACKENDS, mask=NOTHING.items(), layout=LAYOUTS, function=FUNCTIONS,
       loss_type__level=LOSS_LEVELS)  # fmt: skip
def test_no_active_token_gives_zeros(loss_type, level, function, layout, mask, backend):
    options = options_for(loss_type, level, beta=0.2, entropy_coef=0.1)
    result = run(function, make_case(70, mask=mask, **options), layout=layout, backend=backend)
    assert result.loss.item() == 0 and result.logps.shape == mask.shape
    assert all((grad == 0).all() for grad in result.grads.values())
    assert not any(torch.isnan(m).any() for m in result.metrics.values())


EMPTY = {str(x): x for x in ([], [0], [4], [0, 4], [1, 2, 3])}


@pairs(backend=BACKENDS, layout=LAYOUTS, empty=EMPTY.items(),
       loss_type=["grpo", "gspo", "gmpo", "luspo", "vespo"])  # fmt: skip
def test_empty_completions_anywhere_count_in_b_and_nowhere_else(loss_type, empty, layout, backend):
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[empty] = False
    case = make_case(72, mask=mask, **options_for(loss_type, beta=0.2))
    check("linear", case, layout=layout, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_one_allowed_token(backend):
    logits = torch.full((2, 40), -math.inf)
    logits[0, 3], logits[1, 39] = 1.5, -70.0
    logits.requires_grad_()
    config = grpo_fast.LossConfig(loss_type="reinforce", entropy_coef=0.3)
    out = grpo_fast.logits_grpo_loss(
        logits, torch.tensor([3, 39]), torch.ones(1), config, cu_seqlens=cu_seqlens_of([2]),
        backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert (out.logps == 0).all() and (out.entropy == 0).all() and (logits.grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("V", [1, 40])
@pytest.mark.parametrize(
    "transform", [{}, {"temperature": 0.7}, {"softcap": 5.0}, {"logit_scale": 1.3}]
)
def test_a_row_whose_only_id_is_the_target_has_no_gradient(transform, V, backend):
    """Check that logp, entropy and gradients are exactly 0 if there is only one id."""
    g = torch.Generator().manual_seed(7)
    leaves = [30 * torch.randn(6, 24, generator=g), torch.randn(V, 24, generator=g)]
    leaves = [x.requires_grad_() for x in leaves]
    ids = torch.randint(V, (6,), generator=g)
    support = None if V == 1 else grpo_fast.Support(ids.clone(), torch.arange(7))
    logps, entropy = grpo_fast.linear_logps(
        *leaves, ids, support=support, return_entropy=True, backend=backend, **transform
    )
    (logps + 0.3 * entropy).sum().backward()
    found = [logps.detach(), entropy.detach(), *(x.grad for x in leaves)]
    config = grpo_fast.LossConfig(entropy_coef=0.1, **transform)
    given = ids, torch.ones(1), config
    cu = torch.tensor([0, 6])
    out = grpo_fast.linear_grpo_loss(
        *leaves, *given, cu_seqlens=cu, support=support, backend=backend
    )
    found += [out.logps, out.entropy, *torch.autograd.grad(out.loss, leaves)]
    assert all((x == 0).all() for x in found)
