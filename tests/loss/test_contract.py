"""Test the numerical contract: bitwise guarantees, and bounds on the errors of logps and gradients.

On-policy ratios are exactly 1. The results of a row do not depend on other rows (level L0), and dW
is the same in every run (level L1). These comparisons use torch.equal, without tolerances.
test_fuzz.py tests masked tokens.
"""

import pytest
import torch

import grpo_fast
from benchmarks.kernels.exact import logps_bar
from grpo_fast.kernels.head import sources
from grpo_fast.kernels.head import support as head_support
from tests import oracles
from tests.kernels.formulas import torch_threads
from tests.loss_cases import (
    BACKENDS,
    EVERYWHERE,
    HAS_GPU,
    LAYOUTS,
    LOSS_LEVELS,
    cu_seqlens_of,
    make_case,
    moved,
    on_device,
    options_for,
    relative_l2,
    run,
    worst_row,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

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


def token_problem(dtype, N, H, V, *, std=1.0):
    """Return random inputs whose logits have the standard deviation `std`.

    Every fp32 matrix product computes a logit z with an error of about z·6e-8·√H/4.

    Returns:
        hidden (N, H), weight (V, H), target ids (N,), advantages (N,) and old logps (N,).
    """
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (std * torch.randn(V, H, generator=g) / H**0.5).to(dtype)
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
    """Check that other rows, the packing and the chunk size do not change the bits of a row.

    It also does not matter which other rows have a coefficient of 0, and which gradients are
    computed.
    """
    problem, g = token_problem(dtype, N, H, V, std=2.0), torch.Generator().manual_seed(1)
    hidden, weight, ids, A, _ = problem
    whole = rows_of(problem, EVERY, backend, entropy_coef=entropy_coef)
    subsets = [EVERY[:1], EVERY[5:12], EVERY[:31], EVERY[7:40], EVERY[64:129], EVERY.flip(0)]
    subsets += [torch.randperm(N, generator=g), torch.randperm(N, generator=g)[:77]]
    for index in subsets:
        assert_rows(rows_of(problem, index, backend, entropy_coef=entropy_coef), whole, index)
    for lengths in ([1] * N, [100, 0, 50], [7, 140, 3]):
        packed = rows_of(problem, EVERY, backend, lengths=lengths, entropy_coef=entropy_coef)
        assert_rows(packed, whole)
    for fraction in (0.05, 0.5, 0.95) if entropy_coef == 0 else ():
        off = torch.rand(N, generator=g) < fraction
        dh = rows_of(problem, EVERY, backend, advantages=torch.where(off, 0.0, A))[1]
        assert torch.equal(dh[~off], whole[1][~off]) and (dh[off] == 0).all()
    for rows, wants in ((EVERY, ""), (EVERY[3:5], ""), (EVERY, "h"), (EVERY, "w")):
        h, w = hidden[rows].clone(), weight.clone()
        h.requires_grad_("h" in wants), w.requires_grad_("w" in wants)
        found = grpo_fast.linear_logps(h, w, ids[rows], backend=backend)
        assert torch.equal(found.detach(), whole[0][rows])
    for rows in (1, 64, 149):
        monkeypatch.setattr(sources, "workspace_bytes", lambda *_, rows=rows: rows * V * 4)
        assert_rows(rows_of(problem, EVERY, backend, entropy_coef=entropy_coef), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("entropy", [False, True])
def test_a_row_does_not_see_its_batch_on_a_gpu(entropy):
    """Check the logps only, because a GEMM of cuBLAS may add in an order that depends on its size.

    If the entropy is computed, the kernel uses a different tile size.
    """
    hidden, weight, ids, *_ = (
        x.cuda() for x in token_problem(torch.bfloat16, 700, 896, 32000, std=2.0)
    )

    def logps(rows):
        found = grpo_fast.linear_logps(hidden[rows], weight, ids[rows], return_entropy=entropy)
        return found[0] if entropy else found

    whole = logps(slice(None))
    for index in (torch.arange(3), torch.arange(130, 500), torch.arange(699, -1, -1)):
        assert torch.equal(logps(index.cuda()), whole[index.cuda()])
    weight.requires_grad_()
    assert torch.equal(logps(slice(None)), whole)


@pytest.mark.parametrize("kind", ["plain", "hidden_rows", "gathered", "product"])
def test_any_number_of_threads_gives_the_same_bits(kind, monkeypatch):
    """Check also 2,000 targets that share 7 rows of `hidden`, and token sets of a sampler."""
    monkeypatch.setattr(head_support, "GATHERED_COST", 0 if kind == "gathered" else 10**9)
    T, V = 2000, 50
    hidden, weight, ids, *_ = token_problem(torch.float32, T, 64, V, std=2.0)
    leaves, more = [hidden, weight], {}
    if kind == "hidden_rows":
        more = {"hidden_rows": torch.randint(7, (T,), generator=torch.Generator().manual_seed(2))}
        leaves[0] = hidden[:7]
    elif kind != "plain":
        sets = (ids[:, None] + torch.arange(20)) % V
        more = {"support": grpo_fast.Support(sets.flatten(), torch.arange(T + 1) * 20)}
    leaves, found = [x.clone().requires_grad_() for x in leaves], []
    for count in (1, 2, 3):
        with torch_threads(count):
            logps = grpo_fast.linear_logps(*leaves, ids, **more)
            found.append([logps.detach(), *torch.autograd.grad(logps.sum(), leaves)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


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


# -------- Test the promised bounds on the errors of logps and gradients, also for confident tokens
GRADIENT_BAR = {torch.float32: 2e-6, torch.bfloat16: 3e-3}


# 896 and 2048 are the hidden sizes of the models in our recipes. 8192 is the largest hidden size
# for which the bounds are promised, and 33 is not a multiple of any vector width.
@pairs(
    backend=EVERYWHERE, H=[33, 896, 2048, 8192],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
)  # fmt: skip
def test_logps_against_fp64_of_the_same_inputs(dtype, H, backend):
    hidden, weight, ids, *_ = token_problem(dtype, 16, H, 1000, std=2.5)
    lp64, H64 = oracles.logps_and_entropy(hidden.double() @ weight.double().T, ids)
    bar = logps_bar(H, on_device(backend))
    for wants in (False, True):
        given = moved((hidden, weight.requires_grad_(wants), ids), on_device(backend))
        lp, entropy = grpo_fast.linear_logps(*given, return_entropy=True, backend=backend)
        assert (lp.detach().cpu().double() - lp64).abs().max() <= bar
        assert (entropy.detach().cpu().double() - H64).abs().max() <= bar


def loss_gradients(hidden, weight, ids, advantages, old, config, backend):
    h, w = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    given = moved((h, w, ids, advantages, config), on_device(backend))
    more = {"old_logps": old, "cu_seqlens": cu_seqlens_of([len(ids)]), "backend": backend}
    grpo_fast.linear_grpo_loss(*given, **moved(more, on_device(backend))).loss.backward()
    return h.grad, w.grad


def exact_of(hidden, weight, ids, advantages, options, old=None):
    """Compute loss and gradients with the fp64 oracle. All tokens form one completion."""
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    own = hidden[None], weight, ids[None], advantages[None], options
    return oracles.oracle_from_hidden(*own, mask=mask, old=None if old is None else old[None])


# On a GPU, use sizes (N, H, V) just below, at and above the block sizes of the kernels. The blocks
# are a tile of 128 x 256 (in pieces of 64 columns), a vocabulary slice of 2048 columns, and an
# aligned row of 16 bytes.
GPU_SIZES = [(1, 64, 1), (1, 8, 2), (33, 64, 127), (128, 64, 256), (129, 72, 257), (300, 100, 2047),
             (257, 128, 2049), (130, 896, 4104), (65, 60, 50257)]  # fmt: skip
WAYS = [pytest.param(*p.values, (96, 256, 700), id=p.id, marks=p.marks) for p in BACKENDS]
WAYS += [pytest.param("triton", x, id=f"gpu-{x}", marks=pytest.mark.gpu) for x in GPU_SIZES]


@pairs(
    backend__size=WAYS if HAS_GPU else WAYS[: len(BACKENDS)], dtype=DTYPES, chunks=[1, 3],
    off_policy=[False, True], softcap=[None, 20.0],
)  # fmt: skip
def test_gradients_against_fp64_overall_and_worst_row(
    off_policy, chunks, dtype, backend, size, softcap, monkeypatch
):
    N, H, V = size
    hidden, weight, ids, advantages, _ = token_problem(dtype, N, H, V)
    if chunks > 1:
        rows = -(-N // chunks // 32) * 32
        monkeypatch.setattr(sources.DenseHead, "chunk_rows", rows)
    old, options = None, {"loss_type": "dapo", "softcap": softcap}
    if off_policy:
        raw = hidden.double() @ weight.double().T
        lp64, _ = oracles.logps_and_entropy(raw, ids, softcap=softcap)
        g = torch.Generator().manual_seed(9)
        old = (lp64 - 0.11 * torch.randn(len(ids), generator=g).clamp(-1, 1)).float()
    d_hidden, d_weight = loss_gradients(
        hidden, weight, ids, advantages, old, grpo_fast.LossConfig(**options), backend
    )
    exact = exact_of(hidden, weight, ids, advantages, options, old)
    bar = GRADIENT_BAR[dtype] * (2 if backend == "triton" and dtype == torch.float32 else 1)
    for found, true in ((d_hidden, exact.hidden_grad[0]), (d_weight, exact.weight_grad)):
        assert relative_l2(found, true) <= bar
        if V > 2:
            assert worst_row(found, true) <= bar


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradient_is_summed_in_fp32_over_many_chunks(backend, monkeypatch):
    """Check that dW is summed in fp32 over 32 chunks, and rounded to bf16 only when it is stored.

    The tolerance is 1.05 times the error of one rounding. Sums in bf16 would have 2.8 times the
    error of one rounding.
    """
    hidden, weight, ids, advantages, _ = token_problem(torch.bfloat16, 1024, 16, 64)
    # Use advantages of one sign, so that the running sum is much larger than each term.
    advantages = 1.0 + 0.1 * advantages
    monkeypatch.setattr(sources.DenseHead, "chunk_rows", 32)
    _, d_weight = loss_gradients(
        hidden, weight, ids, advantages, None, grpo_fast.LossConfig(loss_type="reinforce"), backend
    )
    exact = exact_of(hidden, weight, ids, advantages, {"loss_type": "reinforce"})
    stored = exact.weight_grad.to(torch.bfloat16)
    assert relative_l2(d_weight, exact.weight_grad) <= 1.05 * relative_l2(stored, exact.weight_grad)


@pytest.mark.parametrize("all_active", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rival_that_resembles_the_target_in_bf16(backend, all_active):
    """Check that dH is accurate if the weight vectors of the two most likely ids nearly agree.

    One of the two ids is the target. dH = g·p·(w_other − w_target) is then ten times smaller than
    its two terms, so rounding p to bf16 would cause an error of 1%. With `all_active=False`, the
    code gathers the active rows and their dominant columns.
    """
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 64, generator=g)
    ids = torch.arange(0, 64, 2)
    weight[ids + 1] = weight[ids] + 0.1 * torch.randn(32, 64, generator=g)
    weight, advantages = weight.bfloat16(), torch.randn(32, generator=g)
    active = torch.ones(32, dtype=torch.bool) if all_active else torch.arange(32) % 3 == 1
    advantages = advantages * active
    hidden = (weight[ids].float() / 4).bfloat16().requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    logps = (exact @ weight.double().T).log_softmax(1)[torch.arange(32), ids]
    (-(advantages * logps).mean()).backward()
    out = grpo_fast.linear_grpo_loss(
        hidden, weight, ids, advantages, grpo_fast.LossConfig(loss_type="reinforce"),
        cu_seqlens=cu_seqlens_of([32]), backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert worst_row(hidden.grad, exact.grad) <= 3e-3 and (hidden.grad[~active] == 0).all()
