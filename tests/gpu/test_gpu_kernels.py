"""Tests of the Triton backend that only a real GPU can show.

They cover repeated calls while another stream is busy, long completions, more than 2³¹ logits, and
the CUDA context. `benchmarks/gpu_session.sh --part tests` runs all tests with the mark "gpu". Those
in tests/loss whose backend is "gpu" check losses, options, sizes and relations. They find races,
misaligned vector loads and wrong tensor-core code. The tests in Triton's interpreter and the
compile tests cannot find such errors. Other tests compare torch's fp32 results with fp64.
"""

import pytest
import torch

from benchmarks.kernels import exact, runner
from benchmarks.kernels.operations import Shape
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.providers import providers_of
from grpo_fast import LossConfig, grpo_loss

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = "cuda", torch.bfloat16
REPEATS = 1000
# 8 completions of 65600 tokens. Their length exceeds 65535, the limit of a grid dimension on a GPU.
LONG = 8 * 65600
# A long batch, also with an odd vocabulary size, so that the rows of logits are not aligned. The
# last shape has 2.16e9 logits (4.3 GB in bf16), which are too many for int32 indices.
LARGE = [("linear_grpo_loss", Shape(LONG, 64, 4104)), ("linear_logps", Shape(LONG, 64, 4104)),
         ("logits_grpo_loss", Shape(LONG, 64, 1003)),
         ("logits_grpo_loss_inplace", Shape(LONG, 64, 1003)),
         ("logits_grpo_loss", Shape(16504, 64, 2**17)),
         ("logits_grpo_loss_inplace", Shape(16504, 64, 2**17))]  # fmt: skip
# Largest relative L2 error of a gradient, which is the limit that our documentation promises for
# bf16, and largest error of the loss, relative to the loss of one token.
BAR, LOSS_BAR = 3e-3, 2e-6


def ours(operation):
    return next(p for p in providers_of(operation) if p.name == "grpo_fast (triton)")


@pytest.mark.parametrize(("operation", "shape"), LARGE)
def test_large_calls_are_exact(operation, shape):
    if torch.cuda.mem_get_info()[0] < 5 * 2 * shape.n * shape.v + 2**33:
        pytest.skip("needs more free GPU memory")
    problem = make_problem(shape, DTYPE, DEVICE)
    row, _ = runner.verify(ours(operation), operation, problem, DTYPE, DEVICE)
    assert row["status"] == "ok", row
    bars = {"loss": LOSS_BAR, "logps": exact.logps_bar(shape.h, DEVICE)}
    assert all(x <= bars.get(name, BAR) for name, x in row["errors"].items()), row


@pytest.mark.parametrize("operation", ["linear_grpo_loss", "linear_logps", "logits_grpo_loss"])
def test_the_same_bits_a_thousand_times_while_a_stream_is_busy(operation):
    """Check that repeated calls have the same bits, also in torch's deterministic mode.

    Another stream runs a matrix product at the same time, which changes the timing of the kernels.
    If they contain a race, their results then differ.
    """
    step = ours(operation).prepare(make_problem(Shape(256, 896, 32000), DTYPE, DEVICE))
    first = {name: x.clone() for name, x in step().items()}
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    noise, side = torch.randn(2048, 2048, device=DEVICE).bfloat16(), torch.cuda.Stream()
    scratch = torch.empty_like(noise)
    for repeat in range(REPEATS):
        with torch.cuda.stream(side):
            torch.mm(noise, noise, out=scratch)
        torch.use_deterministic_algorithms(repeat == REPEATS - 1)
        try:
            found = step()
        finally:
            torch.use_deterministic_algorithms(False)
        for name, value in found.items():
            different += (value != first[name]).any()
    torch.cuda.synchronize()
    assert different.item() == 0


def test_bad_offsets_leave_the_context_alive():
    """Check that invalid values in `cu_seqlens` do not break the CUDA context.

    The call with invalid offsets finishes, because the GPU clamps them. The next call raises the
    error for the invalid offsets, and the call after that works.
    """
    logps, good = torch.zeros(9, requires_grad=True), torch.tensor([0, 4, 6, 9])
    logps, good, ones = (x.cuda() for x in (logps, good, torch.ones(3)))
    for offsets in ([0, 4, 6, 12], [0, 2**62, -(2**62), 9], [9, 0, 0, 0]):
        cu = torch.tensor(offsets).cuda()
        grpo_loss(logps, ones, LossConfig("gspo"), cu_seqlens=cu)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="cu_seqlens: expected non-decreasing offsets"):
            grpo_loss(logps, ones, LossConfig(), cu_seqlens=good)
        assert torch.isfinite(grpo_loss(logps, ones, LossConfig(), cu_seqlens=good).loss)
