"""Tests of the Triton backend on a real GPU.

They cover real sizes, waits of the host, the CUDA context and determinism. The tests in tests/loss
whose backend is "gpu" check losses, options and relations on a GPU.

`benchmarks/gpu_session.sh --part tests` runs these tests. They find races, misaligned vector loads
and wrong tensor-core code. The tests in Triton's interpreter and the compile tests cannot find such
errors. Other tests compare torch's fp32 results with fp64.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.exact import logps_bar
from grpo_fast import (
    LossConfig,
    TeacherHead,
    TeacherTopK,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logps,
)
from tests import loss_cases
from tests.loss_cases import options_for
from tests.pairs import pairs

pytestmark = pytest.mark.gpu
DEVICE, BACKEND = "cuda", "triton"
# Maximum relative L2 errors of gradients. The bf16 limit is the one that our documentation
# promises. The fp32 limit is twice the documented one, because the GPU and the oracle both round.
BARS = {torch.float32: 4e-6, torch.bfloat16: 3e-3}
PLAIN = {"temperature": 0.8, "softcap": 25.0, "beta": 0.05}


def wide(tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the tensors, with all floating-point tensors converted to `dtype`."""
    return [x.to(dtype) if x.is_floating_point() else x for x in tensors]


@pairs(vocab=[1, 129, 4099, 50257], dtype=BARS, function=["logits", "linear"])
def test_real_vocabularies(vocab, dtype, function):
    case = loss_cases.make_case(3, H=64, V=vocab, dtype=dtype, **options_for("dapo", **PLAIN))
    result = loss_cases.check(function, case, backend=BACKEND, grad_tol=BARS[dtype], loss_tol=1e-5)
    bar = 1e-5 + logps_bar(64, DEVICE)
    assert (result.logps - loss_cases.truth(function, case).logps)[case.mask].abs().max() <= bar


@pairs(kind=["forward_kl", "reverse_kl", "jsd"], dtype=BARS, vocab=[1000, 32001])
def test_divergences_against_fp64(kind, dtype, vocab):
    g = torch.Generator().manual_seed(0)
    h, t = (torch.randn(100, 64, generator=g).to(dtype) for _ in range(2))
    w, u = ((torch.randn(vocab, 64, generator=g) / 4).to(dtype) for _ in range(2))
    top, ids = (t.float() @ u.float().T).log_softmax(-1).topk(20)
    bars = (1e-3, 1e-2, 1e-2) if dtype == torch.bfloat16 else (1e-4, 2e-3, 2e-3)
    for teacher in (TeacherHead(t, u, softcap=20.0), TeacherTopK(ids, top)):
        found = []
        for device, as_dtype in (("cpu", torch.float64), (DEVICE, dtype)):
            leaves = [x.to(device, as_dtype).detach().requires_grad_() for x in (h, w)]
            given = loss_cases.moved(type(teacher)(*teacher), device)
            out = linear_divergence(*leaves, given, kind, temperature=0.8)
            out.loss.backward()
            found.append(
                [x.detach().cpu().double() for x in (out.values, *(y.grad for y in leaves))]
            )
        for bar, true, x in zip(bars, *found, strict=True):
            assert (x - true).norm() < bar * true.norm()


def linear_gradients(
    hidden, weight, target_ids, advantages, backend, completion_mask=None, **options
):
    """Compute a token-level loss on the device of the tensors, and return (logps, dH, dW)."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    config = LossConfig(epsilon_low=0.9, epsilon_high=9.0, **options)
    cu_seqlens = torch.tensor([0, len(target_ids)], device=hidden.device)
    result = linear_grpo_loss(
        *leaves, target_ids, advantages, config, cu_seqlens=cu_seqlens, num_items_in_batch=1000,
        completion_mask=completion_mask, backend=backend,
    )  # fmt: skip
    result.loss.backward()
    return result.logps, *(x.grad for x in leaves)


def problem(n: int, h: int, v: int) -> tuple:
    g = torch.Generator().manual_seed(n + h + v)
    hidden = torch.randn(n, h, generator=g).bfloat16()
    weight = (torch.randn(v, h, generator=g) * (2 / h**0.5)).bfloat16()
    return hidden, weight, torch.randint(v, (n,), generator=g), torch.randn(n, generator=g)


# Use sizes just below, at and above the block sizes of the kernels. The blocks are a tile of 128 x
# 256 (in pieces of 64 columns), a vocabulary slice of 2048 columns, and an aligned row of 16 bytes.
@pairs(
    n__h__v=[
        (1, 64, 1), (1, 8, 2), (33, 64, 127), (128, 64, 256), (129, 72, 257), (300, 100, 2047),
        (257, 128, 2049), (130, 896, 4104), (65, 60, 50257),
    ],
    softcap=[None, 20.0],
    workspace=["1024", "0"],
)  # fmt: skip
def test_weights_against_fp64(n, h, v, softcap, workspace, monkeypatch):
    """Check that logps, dH and dW in bf16 agree with fp64, in one chunk and in chunks of 32 rows.

    The backward pass uses stored exponentials.
    """
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", workspace)
    inputs = problem(n, h, v)
    exact = linear_gradients(*wide(inputs, torch.float64), "torch", softcap=softcap)
    found = linear_gradients(*(x.to(DEVICE) for x in inputs), BACKEND, softcap=softcap)
    logps, d_hidden, d_weight = (x.cpu().double() for x in found)
    assert (logps - exact[0]).abs().max() <= logps_bar(h, DEVICE)
    for value, want in ((d_hidden, exact[1]), (d_weight, exact[2])):
        assert (value - want).norm() <= 3e-3 * want.norm() + 1e-12
    if v > 2:
        assert ((d_hidden - exact[1]).norm(dim=1) / exact[1].norm(dim=1)).max() <= 3e-3


def test_weights_of_unlikely_targets():
    """Check that gradients agree with fp64 if four targets have a -logp of up to 1000."""
    hidden, weight, target_ids, advantages = problem(300, 64, 5000)
    weight[7], target_ids[:4] = 0.0, 7
    weight[7, 0] = 1.0
    hidden[:4, 0] = torch.tensor([-30.0, -45.0, -100.0, -1000.0])
    given = hidden, weight, target_ids, advantages
    exact = linear_gradients(*wide(given, torch.float64), "torch")
    found = linear_gradients(*(x.to(DEVICE) for x in given), BACKEND)
    for value, want in zip(found[1:], exact[1:], strict=True):
        assert (value.cpu().double() - want).norm() <= 3e-3 * want.norm()


# The GEMMs skip the rows without advantage if they are more than a tenth of all rows, and if the
# GEMMs are large.
@pytest.mark.parametrize(("without_advantage", "read_from"), [(1, 0), (150, 0), (150, 7e11)])
def test_a_nan_is_seen_in_an_active_row_only(without_advantage, read_from, monkeypatch):
    """Check that a NaN in `hidden` propagates to dH and dW even if its row has an advantage of 0.

    The other rows of dH keep their bits. Only element 0 may change, because the GPU sets it to NaN
    if a skipped row has a NaN. If the row is masked out, its NaN changes no gradient.
    """
    monkeypatch.setattr("grpo_fast.kernels.head.terms.READ_FROM", read_from)
    row = 130
    inputs = [x.to(DEVICE) for x in problem(300, 64, 5000)]
    inputs[3][row : row + without_advantage] = 0.0
    mask = torch.ones(300, dtype=torch.bool, device=DEVICE)
    mask[row] = False
    clean, masked = (linear_gradients(*inputs, BACKEND, completion_mask=m) for m in (None, mask))
    inputs[0][row, 5] = float("nan")
    dirty, inert = (linear_gradients(*inputs, BACKEND, completion_mask=m) for m in (None, mask))
    assert dirty[1].isnan().any() and dirty[2].isnan().any()
    same = clean[1] == dirty[1]
    same[row] = same[0, 0] = True
    assert same.all()
    assert all(torch.equal(a, b) for a, b in zip(masked[1:], inert[1:], strict=True))


@pytest.mark.parametrize("entropy", [False, True])
def test_a_row_does_not_depend_on_its_batch(entropy):
    """Check that the logps of a row have the same bits in every batch, with and without gradients.

    If the entropy is computed, the kernel uses a different tile size, so both cases are tested. dH
    is not tested, because the GEMM of cuBLAS may add in an order that depends on the number of
    rows.
    """
    hidden, weight, target_ids, advantages = (x.to(DEVICE) for x in problem(700, 896, 32000))
    given = hidden, weight, target_ids, advantages
    logps = linear_gradients(*given, BACKEND, compute_entropy=entropy)[0]
    for index in (torch.arange(3), torch.arange(130, 500), torch.arange(699, -1, -1)):
        index = index.to(DEVICE)
        part = hidden[index], weight, target_ids[index], advantages[index]
        assert torch.equal(linear_gradients(*part, BACKEND)[0], logps[index])
    with torch.no_grad():
        assert torch.equal(linear_logps(hidden, weight, target_ids, backend=BACKEND), logps)


def test_deterministic_algorithms_change_no_bit():
    """Check that torch's deterministic mode raises no error and changes no bit of the results."""
    inputs = [x.to(DEVICE) for x in problem(400, 128, 9000)]
    plain = linear_gradients(*inputs, BACKEND)
    torch.use_deterministic_algorithms(True)
    try:
        strict = linear_gradients(*inputs, BACKEND)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, strict, strict=True))


def test_bad_offsets_leave_the_context_alive():
    """Check that invalid values in `cu_seqlens` do not break the CUDA context.

    The call with invalid offsets finishes, because the GPU clamps them. The next call raises the
    error for the invalid offsets, and the call after that works.
    """
    logps = torch.zeros(9, device=DEVICE, requires_grad=True)
    for offsets in ([0, 4, 6, 12], [0, 2**62, -(2**62), 9], [9, 0, 0, 0]):
        cu = torch.tensor(offsets, device=DEVICE)
        grpo_loss(logps, torch.ones(3, device=DEVICE), LossConfig("gspo"), cu_seqlens=cu)
        torch.cuda.synchronize()
        good = torch.tensor([0, 4, 6, 9], device=DEVICE)
        with pytest.raises(ValueError, match="cu_seqlens: expected non-decreasing offsets"):
            grpo_loss(logps, torch.ones(3, device=DEVICE), LossConfig(), cu_seqlens=good)
        loss = grpo_loss(logps, torch.ones(3, device=DEVICE), LossConfig(), cu_seqlens=good).loss
        assert torch.isfinite(loss)
