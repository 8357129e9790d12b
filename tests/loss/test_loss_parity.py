"""Test the values and gradients of every loss against the fp64 oracle, also for extreme inputs.

The oracle computes in fp64 from the same fp32 numbers. No ratio is near a clip bound, so
differences come only from fp32 arithmetic. The tolerance for gradients is a relative L2 error of
1e-5 instead of the 2e-6 of the contract. At V = 23 the log ratio has an absolute error of about
1e-7, which a slope such as 1 − e^d amplifies. The contract applies only to dH and dW of the policy
term, and test_contract.py tests it.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from benchmarks.kernels.exact import logps_bar
from tests.loss_cases import (
    AGGREGATIONS,
    BACKENDS,
    ENGINES,
    EVERYWHERE,
    LAYOUTS,
    LOSS_LEVELS,
    check,
    make_case,
    on_device,
    options_for,
    pack,
    reference_logps,
    run,
    spans,
    truth,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KLS = {"none": {}, "kl": {"beta": 0.4}, "kl times ratio": {"beta": 0.4, "kl_times_ratio": True}}
MASKS = [torch.bool, torch.int64, torch.float32, torch.uint16, torch.float8_e5m2]
# One axis, because "logps" has no backend. With two axes, a loss could miss a backend.
WAYS = [
    pytest.param("logps", None, id="logps"),
    *(
        pytest.param(function, *p.values, id=f"{function}-{p.id}", marks=p.marks)
        for function, backends in (("logits", ENGINES), ("linear", EVERYWHERE))
        for p in backends
    ),
]


@pairs(function__backend=WAYS, layout=LAYOUTS, aggregation=AGGREGATIONS,
       loss_type__level=LOSS_LEVELS, kl=KLS, per_token=[False, True],
       totals=[(None, None), (131, 17)], mask_dtype=MASKS)  # fmt: skip
def test_sweeps(
    function, loss_type, level, aggregation, layout, backend, kl, per_token, totals, mask_dtype
):
    """Check also totals of the whole step, advantages per token, and masks of other dtypes."""
    options = options_for(loss_type, level, aggregation)
    options |= KLS[kl] if loss_type not in ("kimi", "dro") else {}
    case = make_case(2, per_token_advantages=per_token, **options)
    case = case.but(num_items=totals[0], num_completions=totals[1])
    mask = case.mask.to(mask_dtype)
    if layout == "packed":
        mask = pack(mask, spans(case.mask))
    check(function, case, layout=layout, backend=backend, completion_mask=mask)


def of_unlikely_targets(case, gap):
    """Return a copy of the case in which all targets are unlikely.

    The bias makes the last vocabulary id very likely, and this id is never a target. The logps of
    the targets fall by roughly `gap` nats.
    """
    V, before = len(case.weight), reference_logps(case)[0]
    bias = case.bias.clone()
    bias[V - 1] += gap + 10
    far = case.but(ids=case.ids.clamp(max=V - 2), bias=bias)
    return far.but(ref=reference_logps(far)[0] + case.ref - before)


@pairs(function=["logps", "logits", "linear"], gap=[25.0, 90.0, 1e4], loss_type__level=LOSS_LEVELS)
def test_trap_old_logp_far_from_logp(loss_type, level, gap, function):
    """Check that results are finite and correct if logp is far above or far below old_logp.

    In other libraries, the ratio becomes inf, and the gradient of a clipped row is 0·inf = NaN. A
    ratio is clamped to e^20, but its gradient must not be set to 0: the step must still bring logp
    back to old_logp. If tokens differ in both directions, their log ratios must not be clamped
    before their mean or sum is computed. Some results are only checked to be finite: logits near
    1e4 and the thresholds of "dppo" are not accurate in fp32, and "kimi" clamps its log ratios.
    """
    is_exact = function == "logps" and loss_type not in ("kimi", "dro", "dppo_tv", "dppo_kl")
    likely = make_case(25, **options_for(loss_type, level, beta=0.1))
    unlikely = of_unlikely_targets(likely, gap)
    both = torch.where(torch.arange(7) % 2 == 0, -gap, gap)
    for case, difference in ((likely, -gap), (unlikely, gap), (unlikely, both)):
        old = reference_logps(case)[0] + difference
        assert (old[case.mask] <= 0).all()
        case = case.but(old=old)
        result = check(function, case) if is_exact else run(function, case)
        assert torch.isfinite(result.loss)
        for name, grad in result.grads.items():
            assert torch.isfinite(grad).all(), name
        for name, metric in result.metrics.items():
            assert torch.isfinite(metric).all(), name


# ----- Test extreme shapes: vocabulary sizes, long and empty batches, −inf columns, 64-bit offsets
# With 1 column, the softmax is constant. 127 and 129 are next to a power of two, and not multiples
# of a vector width. The last two are sizes of real tokenizers (GPT-2, Gemma). 50257 is odd, and
# 262144 is the largest size in use.
VOCABULARIES = (1, 2, 127, 129, 50257, 262144)
# The relative and the absolute error that one rounding to a dtype may cause. The relative error is
# half a unit in the last place. The absolute error is half the smallest positive fp16 number.
ONE_STORE = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2**-8, 0.0),
    torch.float16: (2**-11, 2**-25),
}


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize(
    ("V", "dtype"),
    [(V, d) for V in VOCABULARIES for d in ONE_STORE if V < 1e5 or d == torch.bfloat16],
)
def test_vocabulary_sizes(V, dtype, backend):
    # Do not use a much smaller H. MKL would then choose a matrix product whose sums over V are 100
    # times less accurate.
    mask = torch.tensor([[True, False], [True, True]])
    case = make_case(V, H=64, V=V, mask=mask, dtype=dtype, bias=False, **options_for("grpo"))
    case = case.but(ids=torch.tensor([[0, 0], [V - 1, V // 2]]), old=None)
    found, true = run("linear", case, backend=backend), truth("linear", case)
    bar = logps_bar(64, on_device(backend))
    assert (found.logps.double() - true.logps).abs().max() <= bar
    for name, own in found.grads.items():
        exact = getattr(true, f"{name}_grad")
        if V == 1:
            assert (own == 0).all() and (found.logps == 0).all()
            continue
        arithmetic = (3e-6 if backend != "triton" else 6e-6) * exact.norm(dim=-1, keepdim=True)
        half_ulp, smallest = ONE_STORE[dtype]
        error = own.double() - exact
        # 16-bit products of a CPU or a GPU are less accurate, so allow a larger error.
        if dtype == torch.bfloat16 and backend != "torch":
            assert (error.norm(dim=-1) <= 3e-3 * exact.norm(dim=-1)).all()
        else:
            assert (error.abs() <= arithmetic + half_ulp * exact.abs() + smallest).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_completions_longer_than_a_16_bit_index(backend):
    mask = torch.ones(2, 70001, dtype=torch.bool)
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
def test_row_offsets_beyond_two_to_the_31(dtype, backend, monkeypatch):
    """Check that two rows of logits may be more than 2³¹ elements apart, beyond 32-bit offsets.

    The memory between the rows is reserved but never touched, so it must not be poisoned.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
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
