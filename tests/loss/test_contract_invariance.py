"""Bitwise promises: on policy is exact, a row depends on itself only (L0), dW is the
same from run to run (L1). Every comparison here is torch.equal, never a tolerance. Masked poison:
test_contract_poison.py."""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LAYOUTS,
    LOSS_LEVELS,
    cu_seqlens_of,
    make_case,
    options_for,
    run,
)  # fmt: skip
from tests.pairs import pairs

DTYPES = (torch.float32, torch.bfloat16)


# ----------------------------------------------------------
# on policy
@pairs(
    backend=BACKENDS, dtype=DTYPES, layout=LAYOUTS, function=["linear", "logits"],
    level=["token", "sequence"], kl_estimator=["k1", "abs", "k2", "k3", "k3+", "k1+"],
)  # fmt: skip
def test_on_policy_is_exact(kl_estimator, level, function, layout, dtype, backend):
    """old and ref computed by linear_logps / logits_logps from the same rows, in another pass and
    another packing.
    """
    case = make_case(
        85,
        H=33,
        V=517,
        dtype=dtype,
        **options_for("grpo", level, beta=0.3, kl_estimator=kl_estimator),
    )
    with torch.no_grad():
        if function == "linear":
            flat, ids = case.hidden.reshape(-1, 33).flip(0), case.ids.reshape(-1).flip(0)
            logps = grpo_fast.linear_logps(flat, case.weight, ids, bias=case.bias, backend=backend)
        else:
            logps = grpo_fast.logits_logps(
                case.logits.reshape(-1, 517).flip(0), case.ids.reshape(-1).flip(0), backend=backend
            )
    logps = logps.flip(0).reshape(case.mask.shape)
    result = run(function, case.but(old=logps, ref=logps.clone()), layout=layout, backend=backend)
    m = result.metrics
    assert m["ratio/mean"] == m["ratio/min"] == m["ratio/max"] == 1.0
    assert (
        m["approx_kl"] == 0
        and m["kl"] == 0
        and m["clip_ratio/region_mean"] == 0
        and m["clip_ratio/region_max"] == 0
    )
    assert torch.equal(result.logps[case.mask], logps[case.mask])
    alone = run(function, case.but(old=None).with_options(beta=0.0), layout=layout, backend=backend)
    if kl_estimator in ("k2", "k3", "k3+", "k1+", "abs"):  # their slope is 0 on policy; k1's is 1
        for name in result.grads:
            assert torch.equal(result.grads[name], alone.grads[name]), name


# ----------------------------------------------------------
# L0: one row
def token_problem(dtype, N, H, V, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (2 * torch.randn(V, H, generator=g) / H**0.5).to(dtype)
    ids, A = torch.randint(V, (N,), generator=g), torch.randn(N, generator=g)
    old = -6 + torch.randn(N, generator=g)
    return hidden, weight, ids, A, old


def rows_of(hidden, weight, ids, A, old, index, backend, *, entropy_coef=0.0, lengths=None):
    """lp and dH of the rows in `index`, as one batch with the step's total fixed at 1000 tokens."""
    h = hidden[index].clone().requires_grad_()
    w = weight.clone().requires_grad_()
    cu = cu_seqlens_of(lengths or [len(index)])
    config = grpo_fast.LossConfig(
        loss_type="dapo", epsilon_low=50.0, epsilon_high=50.0, entropy_coef=entropy_coef
    )
    out = grpo_fast.linear_grpo_loss(
        h, w, ids[index], A[index], config, old_logps=old[index], cu_seqlens=cu,
        num_items_in_batch=1000, backend=backend,
    )  # fmt: skip
    out.loss.backward()
    return out.logps, h.grad


# (H, V): a vector width divides both / neither; a real hidden size with an odd vocabulary.
SIZES = [(64, 512), (33, 1001), (896, 1009)]


@pairs(backend=BACKENDS, dtype=DTYPES, H__V=SIZES, entropy_coef=[0.0, 0.2])
def test_a_row_does_not_see_its_batch(H, V, dtype, entropy_coef, backend):
    N = 150
    problem = token_problem(dtype, N, H, V)
    everything = torch.arange(N)
    logps, d_hidden = rows_of(*problem, everything, backend, entropy_coef=entropy_coef)
    g = torch.Generator().manual_seed(1)
    subsets = [
        torch.arange(1),
        torch.arange(5, 12),
        torch.arange(31),
        torch.arange(7, 40),
        torch.arange(64, 129),
    ]
    subsets += [
        torch.randperm(N, generator=g),
        torch.randperm(N, generator=g)[:77],
        torch.arange(N).flip(0),
    ]
    for index in subsets:
        lp, dh = rows_of(*problem, index, backend, entropy_coef=entropy_coef)
        assert torch.equal(lp, logps[index]), f"lp of {len(index)} rows"
        assert torch.equal(dh, d_hidden[index]), f"dH of {len(index)} rows"


@pairs(backend=BACKENDS, dtype=DTYPES, packing=[[150], [1] * 150, [100, 0, 50], [7, 140, 3]])
def test_a_row_does_not_see_the_packing(packing, dtype, backend):
    problem = token_problem(dtype, 150, 64, 512)
    index = torch.arange(150)
    expected = rows_of(*problem, index, backend)
    packed = rows_of(*problem, index, backend, lengths=packing)
    assert torch.equal(expected[0], packed[0]) and torch.equal(expected[1], packed[1])


@pairs(backend=BACKENDS, dtype=DTYPES, H__V=SIZES)
def test_a_row_does_not_see_the_chunks(H, V, dtype, backend, monkeypatch):
    from grpo_fast.kernels.head import loop as linear

    problem = token_problem(dtype, 150, H, V)
    index = torch.arange(150)
    expected = rows_of(*problem, index, backend)
    for rows in (1, 32, 64, 96, 149):
        monkeypatch.setattr(linear, "workspace_bytes", lambda *_, rows=rows: rows * V * 4)
        chunked = rows_of(*problem, index, backend)
        assert torch.equal(expected[0], chunked[0]) and torch.equal(expected[1], chunked[1]), rows


@pairs(backend=BACKENDS, dtype=DTYPES, H__V=SIZES)
def test_a_row_does_not_see_whether_gradients_are_wanted(H, V, dtype, backend):
    hidden, weight, ids, A, old = token_problem(dtype, 70, H, V)
    expected, _ = rows_of(hidden, weight, ids, A, old, torch.arange(70), backend)
    with torch.no_grad():
        assert torch.equal(grpo_fast.linear_logps(hidden, weight, ids, backend=backend), expected)
        assert torch.equal(
            grpo_fast.linear_logps(hidden[3:5], weight, ids[3:5], backend=backend), expected[3:5]
        )
    for h, w in ((True, False), (False, True)):
        out = grpo_fast.linear_logps(
            hidden.clone().requires_grad_(h), weight.clone().requires_grad_(w), ids, backend=backend
        )
        assert torch.equal(out.detach(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_see_which_other_rows_are_active(dtype, backend):
    """Rows without a coefficient are skipped: 0%, 5%, 50%, 95% of them; the others' dH stays the
    same, bit for bit.
    """
    hidden, weight, ids, A, old = token_problem(dtype, 150, 64, 512)
    index = torch.arange(150)
    _, expected = rows_of(hidden, weight, ids, A, old, index, backend)
    for fraction in (0.05, 0.5, 0.95):
        off = (
            torch.rand(150, generator=torch.Generator().manual_seed(int(100 * fraction))) < fraction
        )
        _, dh = rows_of(hidden, weight, ids, torch.where(off, 0.0, A), old, index, backend)
        assert torch.equal(dh[~off], expected[~off]) and (dh[off] == 0).all()


@pairs(
    backend=BACKENDS,
    dtype=DTYPES,
    rule={"plain": {}, "softcap": {"softcap": 4.0, "temperature": 0.7, "logit_scale": 1.3}}.items(),
)
def test_rows_of_given_logits_do_not_see_their_batch(rule, dtype, backend):
    g = torch.Generator().manual_seed(0)
    logits, ids = (
        (3 * torch.randn(90, 1003, generator=g)).to(dtype),
        torch.randint(1003, (90,), generator=g),
    )
    config = grpo_fast.LossConfig(loss_type="reinforce", entropy_coef=0.1, **rule)

    def rows(index):
        x = logits[index].clone().requires_grad_()
        out = grpo_fast.logits_grpo_loss(
            x,
            ids[index],
            torch.ones(1),
            config,
            cu_seqlens=cu_seqlens_of([len(index)]),
            num_items_in_batch=500,
            backend=backend,
        )
        out.loss.backward()
        return out.logps, x.grad

    logps, grads = rows(torch.arange(90))
    for index in (
        torch.arange(1),
        torch.arange(3, 8),
        torch.arange(40, 90),
        torch.randperm(90, generator=g),
    ):
        lp, dx = rows(index)
        assert torch.equal(lp, logps[index]) and torch.equal(dx, grads[index])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_padded_and_packed_are_the_same_numbers(function, level):
    case = make_case(86, **options_for("grpo", level, beta=0.2))
    a, b = (run(function, case, layout=layout) for layout in LAYOUTS)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.logps[case.mask], b.logps[case.mask])
    for name in a.grads:
        assert torch.equal(a.grads[name], b.grads[name])


# -----------------------------------------------------------------------------------------------
# L1: run to run
@pairs(backend=BACKENDS, dtype=DTYPES, chunks=[1, 4])
def test_weight_gradient_is_the_same_from_run_to_run(chunks, dtype, backend, monkeypatch):
    from grpo_fast.kernels.head import loop as linear

    hidden, weight, ids, A, old = token_problem(dtype, 130, 96, 777)
    monkeypatch.setattr(linear, "workspace_bytes", lambda *_: -(-130 // chunks) * 777 * 4)
    config = grpo_fast.LossConfig(
        loss_type="dapo", epsilon_low=50.0, epsilon_high=50.0, entropy_coef=0.1
    )
    results = []
    for _ in range(3):
        h, w, b = (
            hidden.clone().requires_grad_(),
            weight.clone().requires_grad_(),
            torch.zeros(777, dtype=dtype).requires_grad_(),
        )
        out = grpo_fast.linear_grpo_loss(
            h,
            w,
            ids,
            A,
            config,
            bias=b,
            old_logps=old,
            cu_seqlens=cu_seqlens_of([130]),
            backend=backend,
        )
        out.loss.backward()
        results.append((out.loss.detach(), h.grad, w.grad, b.grad))
        _ = torch.randn(1000)  # other work in between must not matter
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    "loss_type",
    [
        x
        for x, level in LOSS_LEVELS
        if level == "token" and x not in ("vespo", "gmpo", "gspo_token")
    ],
)
def test_a_token_of_any_token_level_loss_does_not_see_its_batch(loss_type):
    """dL/dlogp of a token, whatever stands beside it: SIMD bodies and scalar tails must compute the
    same function.
    """
    case = make_case(
        87,
        mask=torch.ones(1, 67, dtype=torch.bool),
        **options_for(loss_type, "token", "token_mean_global", beta=0.3),
    )
    case = case.but(num_items=100)
    whole = run("logps", case).grads["logps"]
    for rows in (slice(0, 1), slice(3, 8), slice(10, 27), slice(60, 67), slice(0, 66)):
        part = case.but(
            hidden=case.hidden[:, rows],
            ids=case.ids[:, rows],
            mask=case.mask[:, rows],
            old=case.old[:, rows],
            ref=case.ref[:, rows],
        )
        assert torch.equal(run("logps", part).grads["logps"], whole[:, rows]), rows
