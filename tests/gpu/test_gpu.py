"""Tests of the Triton backend that only a real GPU can show: the CUDA context and determinism.

`benchmarks/gpu_session.sh --part tests` runs all tests with the mark "gpu". Those in tests/loss
whose backend is "gpu" check losses, options, sizes and relations. They find races, misaligned
vector loads and wrong tensor-core code. The tests in Triton's interpreter and the compile tests
cannot find such errors. Other tests compare torch's fp32 results with fp64.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast import LossConfig, grpo_loss
from tests.loss_cases import make_case, options_for, run

pytestmark = pytest.mark.gpu


def test_deterministic_algorithms_change_no_bit():
    """Check that torch's deterministic mode raises no error and changes no bit of the results."""
    mask = torch.ones(4, 100, dtype=torch.bool)
    case = make_case(3, H=128, V=9000, mask=mask, dtype=torch.bfloat16, **options_for("dapo"))
    plain = run("linear", case, backend="triton").named()
    torch.use_deterministic_algorithms(True)
    try:
        strict = run("linear", case, backend="triton").named()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, strict[name]) for name, x in plain.items())


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
