"""Test the values and gradients of every loss against the fp64 oracle, also for extreme inputs.

The oracle computes in fp64 from the same fp32 numbers. No ratio is near a clip bound, so
differences come only from fp32 arithmetic. The tolerance for gradients is a relative L2 error of
1e-5 instead of the 2e-6 of the contract. At V = 23 the log ratio has an absolute error of about
1e-7, which a slope such as 1 − e^d amplifies. The contract applies only to dH and dW of the policy
term, and test_contract.py tests it.
"""

import math

import pytest
import torch

import grpo_fast
from benchmarks.kernels.exact import logps_bar
from grpo_fast.kernels.head import given, sources, support
from grpo_fast.objective.losses import OBJECTIVES
from tests import oracles
from tests.loss_cases import (
    AGGREGATIONS,
    BACKENDS,
    ENGINES,
    EVERYWHERE,
    IS_INTERPRETER,
    LAYOUTS,
    LEAVES_AND_LEVELS,
    LOSS_LEVELS,
    assert_seen,
    check,
    default_mask,
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

CLAMPS = ({}, {"kl_clamp": 0.2}, {"kl_input_clamp": 0.8}, {"kl_clamp": 0.3, "kl_input_clamp": 0.8})
RULES = {
    "plain": {},
    "bonus": {"entropy_coef": 0.2, "temperature": 0.8},
    "quantile": {"entropy_coef": 0.2, "top_entropy_quantile": 0.6},
    "softcap": {"softcap": 3.0, "logit_scale": 1.3},
    "metric": {"compute_entropy": True},
}
MASKS = [torch.bool, torch.int64, torch.float32, torch.uint16, torch.float8_e5m2]
# The long batches form several chunks of 32 rows. Without masked tokens, these chunks are slices
# instead of index tensors. Triton's interpreter is slow, so it gets only two chunks.
LENGTH = 8 if IS_INTERPRETER else 30
SHAPES = {
    "short": default_mask(),
    "chunks": torch.rand(7, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.7,
    "idle rows": torch.ones(7, LENGTH, dtype=torch.bool),
}
# The cost of a gathered logit, which selects the form of a sampler's token sets. None: no sets.
SETS = {"no sets": None, "gathered": 0, "product": 10**9}
# One axis, because "logps" has no backend. With two axes, a loss could miss a backend.
WAYS = [
    *([] if IS_INTERPRETER else [pytest.param("logps", None, id="logps")]),
    *(
        pytest.param(function, *p.values, id=f"{function}-{p.id}", marks=p.marks)
        for function, backends in (("logits", ENGINES), ("linear", EVERYWHERE))
        for p in backends
    ),
]


@pairs(
    function__backend=WAYS, loss_type__level=LEAVES_AND_LEVELS if IS_INTERPRETER else LOSS_LEVELS,
    layout=LAYOUTS, aggregation=AGGREGATIONS, kl_estimator=[None, *oracles.KL_ORACLES],
    clamps=CLAMPS, times_ratio=[False, True], delta=[None, 1.7], is_on_policy=[False, True],
    rule=RULES.items(), per_token=[False, True], totals=[(None, None), (131, 17)],
    mask_dtype=MASKS, mask=SHAPES.items(), cost=SETS.items(), value=[math.nan, math.inf, -math.inf],
)  # fmt: skip
def test_sweeps(
    function, backend, loss_type, level, layout, aggregation, kl_estimator, clamps, times_ratio,
    delta, is_on_policy, rule, per_token, totals, mask_dtype, mask, cost, value, monkeypatch,
):  # fmt: skip
    """Check every option of a loss, and that chunks do not mix up their rows and coefficients.

    With the mask "idle rows", some completions have advantages of 0, and the loss has no KL and no
    entropy term. The loss then skips the rows of these completions.
    """
    # 1. Use chunks of 32 rows for hidden states, and blocks of 16 rows for given logits.
    monkeypatch.setattr(sources, "workspace_bytes", lambda *_: 32 * 23 * 4)
    monkeypatch.setattr(given, "CPU_BLOCK_BYTES", 1)
    for name in ("GATHERED_COST", "GATHERED_COST_GPU"):
        monkeypatch.setattr(support, name, cost or 0)
    # 2. Make the batch.
    is_idle = bool(mask.all())
    if is_idle:
        kl_estimator, rule = None, {}
    options = options_for(loss_type, level, aggregation, **rule)
    if kl_estimator is not None and loss_type not in ("kimi", "dro"):
        options |= {"beta": 0.4, "kl_estimator": kl_estimator, "kl_times_ratio": times_ratio}
        options |= clamps
    if delta is not None and "delta" in OBJECTIVES[loss_type].params:
        options["delta"] = delta
    case = make_case(
        2, mask=mask, per_token_advantages=per_token, support=cost is not None, **options
    )
    if is_idle:
        case.advantages[1::3] = 0.0
    if is_on_policy:
        case = case.but(old=None)
    case = case.but(num_items=totals[0], num_completions=totals[1])
    given_mask = case.mask.to(mask_dtype)
    if layout == "packed":
        given_mask = pack(given_mask, spans(case.mask))
    # 3. Compare the loss and the gradients with the oracle.
    how = {"layout": layout, "backend": backend, "completion_mask": given_mask}
    result = check(function, case, **how)
    if function == "logits":
        again = run(function, case, inplace=True, **how)
        assert torch.equal(again.grads["logits"], result.grads["logits"])
    # 4. Check that a NaN or an infinity in a row is seen. A soft cap makes infinities finite.
    bad = math.nan if "softcap" in rule else value
    case.hidden[1, int(mask[1].nonzero()[0]), 3] = bad
    assert_seen(case, function, backend, layout)


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


@pairs(function__backend=WAYS, gap=[25.0, 90.0, 1e4], loss_type__level=LOSS_LEVELS)
def test_trap_old_logp_far_from_logp(loss_type, level, gap, function, backend):
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
        result = (check if is_exact else run)(function, case, backend=backend)
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
