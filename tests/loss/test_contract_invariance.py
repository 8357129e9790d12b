"""Test the bitwise guarantees of the numerical contract.

On-policy ratios are exactly 1. The results of a row do not depend on other rows (level L0), and dW
is the same in every run (level L1). Every comparison uses torch.equal, without tolerances.
test_contract_poison.py tests masked tokens.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast.kernels.head import sources
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LAYOUTS,
    LOSS_LEVELS,
    cu_seqlens_of,
    make_case,
    options_for,
    run,
)
from tests.pairs import pairs

DTYPES = (torch.float32, torch.bfloat16)


@pairs(
    backend=BACKENDS, dtype=DTYPES, layout=LAYOUTS, function=["linear", "logits"],
    level=["token", "sequence"], kl_estimator=["k1", "abs", "k2", "k3", "k3+", "k1+"],
)  # fmt: skip
def test_on_policy_is_exact(kl_estimator, level, function, layout, dtype, backend):
    """Check that the ratio is exactly 1 if old_logps and ref_logps come from a logps function.

    `linear_logps` or `logits_logps` receives the same rows in reverse order.
    """
    options = options_for("grpo", level, beta=0.3, kl_estimator=kl_estimator)
    case = make_case(85, H=33, V=517, dtype=dtype, **options)
    hidden, logits, ids = (
        x.flatten(0, 1).flip(0) for x in (case.hidden, case.logits, case.ids[..., None])
    )
    with torch.no_grad():
        if function == "linear":
            head = hidden, case.weight, ids[:, 0]
            logps = grpo_fast.linear_logps(*head, bias=case.bias, backend=backend)
        else:
            logps = grpo_fast.logits_logps(logits, ids[:, 0], backend=backend)
    logps = logps.flip(0).reshape(case.mask.shape)
    result = run(function, case.but(old=logps, ref=logps.clone()), layout=layout, backend=backend)
    m = result.metrics
    assert m["ratio/mean"] == m["ratio/min"] == m["ratio/max"] == 1.0
    for name in ("approx_kl", "kl", "clip_ratio/region_mean", "clip_ratio/region_max"):
        assert m[name] == 0, name
    assert torch.equal(result.logps[case.mask], logps[case.mask])
    alone = run(function, case.but(old=None).with_options(beta=0.0), layout=layout, backend=backend)
    if kl_estimator != "k1":  # the gradients of the other estimators are 0 on policy
        for name in result.grads:
            assert torch.equal(result.grads[name], alone.grads[name]), name


def token_problem(dtype, N, H, V, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (2 * torch.randn(V, H, generator=g) / H**0.5).to(dtype)
    ids, A = torch.randint(V, (N,), generator=g), torch.randn(N, generator=g)
    return hidden, weight, ids, A, -6 + torch.randn(N, generator=g)


def rows_of(problem, index, backend, *, lengths=None, advantages=None, **options):
    """Compute logps, dH, dW and db of a batch that has only the rows in `index`.

    num_items_in_batch is always 1000, so that the token weights do not depend on the batch.
    """
    hidden, weight, ids, A, old = problem
    A = A if advantages is None else advantages
    leaves = [hidden[index].clone(), weight.clone(), weight[:, 0] * 0]
    h, w, b = (x.requires_grad_() for x in leaves)
    config = grpo_fast.LossConfig(epsilon_low=50.0, epsilon_high=50.0, **options)
    out = grpo_fast.linear_grpo_loss(
        h, w, ids[index], A[index], config, bias=b, old_logps=old[index],
        cu_seqlens=cu_seqlens_of(lengths or [len(index)]), num_items_in_batch=1000,
        backend=backend,
    )  # fmt: skip
    out.loss.backward()
    return out.logps, *(x.grad for x in leaves)


def assert_rows(found, expected, index=slice(None)) -> None:
    assert all(torch.equal(x, y[index]) for x, y in zip(found[:2], expected[:2], strict=True))


# Pairs (H, V). In the first pair, both sizes are multiples of the vector width. In the second, none
# is. The third has the hidden size of a real model and an odd vocabulary size.
SIZES = [(64, 512), (33, 1001), (896, 1009)]
N = 150
EVERY = torch.arange(N)


@pairs(backend=BACKENDS, dtype=DTYPES, H__V=SIZES, entropy_coef=[0.0, 0.2])
def test_a_row_does_not_see_its_batch(H, V, dtype, entropy_coef, backend, monkeypatch):
    """Check that other rows, the packing and the chunk size do not change the bits of a row."""
    problem, g = token_problem(dtype, N, H, V), torch.Generator().manual_seed(1)
    whole = rows_of(problem, EVERY, backend, entropy_coef=entropy_coef)
    subsets = [EVERY[:1], EVERY[5:12], EVERY[:31], EVERY[7:40], EVERY[64:129], EVERY.flip(0)]
    subsets += [torch.randperm(N, generator=g), torch.randperm(N, generator=g)[:77]]
    for index in subsets:
        assert_rows(rows_of(problem, index, backend, entropy_coef=entropy_coef), whole, index)
    for lengths in ([1] * N, [100, 0, 50], [7, 140, 3]):
        packed = rows_of(problem, EVERY, backend, lengths=lengths, entropy_coef=entropy_coef)
        assert_rows(packed, whole)
    for rows in (1, 64, 149):
        monkeypatch.setattr(sources, "workspace_bytes", lambda *_, rows=rows: rows * V * 4)
        assert_rows(rows_of(problem, EVERY, backend, entropy_coef=entropy_coef), whole)


@pairs(backend=BACKENDS, dtype=DTYPES, H__V=SIZES)
def test_a_row_does_not_see_whether_gradients_are_wanted(H, V, dtype, backend):
    problem = hidden, weight, ids, *_ = token_problem(dtype, 70, H, V)
    expected = rows_of(problem, EVERY[:70], backend)[0]
    every = slice(None)
    for rows, wants in ((every, ""), (slice(3, 5), ""), (every, "h"), (every, "w")):
        h, w = hidden[rows].clone(), weight.clone()
        h.requires_grad_("h" in wants), w.requires_grad_("w" in wants)
        found = grpo_fast.linear_logps(h, w, ids[rows], backend=backend)
        assert torch.equal(found.detach(), expected[rows])


@pairs(backend=BACKENDS, dtype=DTYPES, fraction=[0.05, 0.5, 0.95])
def test_a_row_does_not_see_which_other_rows_are_active(dtype, backend, fraction):
    """Check that skipping rows with coefficient 0 does not change the bits of dH in other rows."""
    problem = token_problem(dtype, N, 64, 512)
    expected = rows_of(problem, EVERY, backend)[1]
    off = torch.rand(N, generator=torch.Generator().manual_seed(int(100 * fraction))) < fraction
    dh = rows_of(problem, EVERY, backend, advantages=torch.where(off, 0.0, problem[3]))[1]
    assert torch.equal(dh[~off], expected[~off]) and (dh[off] == 0).all()


@pairs(
    backend=BACKENDS, dtype=DTYPES,
    rule={"plain": {}, "softcap": {"softcap": 4.0, "temperature": 0.7, "logit_scale": 1.3}}.items(),
)  # fmt: skip
def test_rows_of_given_logits_do_not_see_their_batch(rule, dtype, backend):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(90, 1003, generator=g)).to(dtype)
    ids = torch.randint(1003, (90,), generator=g)
    config = grpo_fast.LossConfig(loss_type="reinforce", entropy_coef=0.1, **rule)

    def rows(index):
        x = logits[index].clone().requires_grad_()
        out = grpo_fast.logits_grpo_loss(
            x, ids[index], torch.ones(1), config, cu_seqlens=cu_seqlens_of([len(index)]),
            num_items_in_batch=500, backend=backend,
        )  # fmt: skip
        out.loss.backward()
        return out.logps, x.grad

    whole = rows(EVERY[:90])
    for index in (EVERY[:1], EVERY[3:8], EVERY[40:90], torch.randperm(90, generator=g)):
        assert_rows(rows(index), whole, index)


@pairs(function=FUNCTIONS, level=["token", "sequence"])
def test_padded_and_packed_are_the_same_numbers(function, level):
    case = make_case(86, **options_for("grpo", level, beta=0.2))
    a, b = (run(function, case, layout=layout) for layout in LAYOUTS)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.logps[case.mask], b.logps[case.mask])
    for name in a.grads:
        assert torch.equal(a.grads[name], b.grads[name])


@pairs(backend=BACKENDS, dtype=DTYPES, chunks=[1, 4])
def test_weight_gradient_is_the_same_from_run_to_run(chunks, dtype, backend, monkeypatch):
    problem = token_problem(dtype, 130, 96, 777)
    monkeypatch.setattr(sources, "workspace_bytes", lambda *_: -(-130 // chunks) * 777 * 4)
    results = [rows_of(problem, EVERY[:130], backend, entropy_coef=0.1) for _ in range(3)]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


TOKEN_LEVEL = [x for x, level in LOSS_LEVELS if level == "token"]


@pytest.mark.parametrize("loss_type", sorted({*TOKEN_LEVEL} - {"vespo", "gmpo", "gspo_token"}))
def test_a_token_of_any_token_level_loss_does_not_see_its_batch(loss_type):
    """Check that dL/dlogp of a token has the same bits with and without neighbouring tokens.

    A neighbour decides whether the SIMD loop or the scalar loop for the remaining tokens processes
    a token, so both loops must give the same bits.
    """
    options = options_for(loss_type, "token", "token_mean_global", beta=0.3)
    case = make_case(87, mask=torch.ones(1, 67, dtype=torch.bool), **options).but(num_items=100)
    whole = run("logps", case).grads["logps"]
    for rows in (slice(0, 1), slice(3, 8), slice(10, 27), slice(60, 67), slice(0, 66)):
        names = ("hidden", "ids", "mask", "old", "ref")
        part = case.but(**{name: getattr(case, name)[:, rows] for name in names})
        assert torch.equal(run("logps", part).grads["logps"], whole[:, rows]), rows
