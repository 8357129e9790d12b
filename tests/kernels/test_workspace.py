"""Tests of the workspace of the chunk loop: reuse on the CPU, size limits, and fast zeros."""

import os
from pathlib import Path

import pytest
import torch

from grpo_fast.kernels import workspace as memory

WEIGHT = torch.zeros(7, 3)


@pytest.fixture(autouse=True)
def no_spare(monkeypatch):
    monkeypatch.setattr(memory, "_spare", [])


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "", "1e3", "٣"])
def test_a_size_that_is_none_is_refused_by_its_name(monkeypatch, text):
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", text)
    with pytest.raises(
        ValueError, match="GRPO_FAST_WORKSPACE_MIB: expected a whole number of MiB, got "
    ):
        memory.workspace_bytes(torch.device("cpu"))
    for size in (0, 1024):
        monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", str(size))
        assert memory.workspace_bytes(torch.device("cpu")) == size << 20


def take(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return memory.take_workspace(rows, columns, WEIGHT, dtype)


def test_the_next_call_gets_the_same_memory():
    """Check that requests for equal and smaller shapes reuse the memory of the workspace."""
    first = take(64, 512)
    memory.give_back_workspace(first)
    for rows, columns in ((64, 512), (32, 500), (1, 1), (64, 512)):
        again = take(rows, columns)
        assert again.shape == (rows, columns) and again.is_contiguous()
        assert again.data_ptr() == first.data_ptr()
        memory.give_back_workspace(again)


def test_what_does_not_fit_is_allocated():
    """Check that new memory is allocated if the spare memory cannot be used.

    The spare memory may be in use by a tensor, have a different dtype, or be too small.
    """
    memory.give_back_workspace(take(8, 8))
    one, other = take(8, 8), take(8, 8)
    assert one.data_ptr() != other.data_ptr()
    memory.give_back_workspace(one)
    assert take(8, 8, torch.float64).dtype == torch.float64
    memory.give_back_workspace(other)
    assert take(9, 8).shape == (9, 8)


def test_large_ones_are_not_kept(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_BYTES", 8 * 8 * 4)
    for rows in (9, 8):
        memory.give_back_workspace(take(rows, 8))
        assert bool(memory._spare) == (rows == 8)


def test_none_of_inference_mode_is_kept():
    """Check that the workspace does not keep a tensor that was created in inference mode.

    Outside inference mode, such a tensor cannot be modified.
    """
    with torch.inference_mode():
        memory.give_back_workspace(take(8, 8))
        assert not memory._spare
    memory.give_back_workspace(take(8, 8))
    with torch.inference_mode():
        memory.give_back_workspace(take(8, 8))
    take(8, 8).add_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_zeros_that_can_be_written(dtype):
    """Check the values of `memory.zeros`, and that its memory is returned to the system."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    for shape in ((3, 5), (2049, 1025)):
        x = memory.zeros(shape, dtype)
        assert x.shape == shape and x.dtype == dtype and not x.any() and x.add_(1).all()
    before = resident()
    for _ in range(5):
        memory.zeros((1 << 12, 1 << 12), torch.float32).add_(1)  # 64 MiB
    assert resident() - before < 64 << 20


def test_what_is_kept_counts_as_memory_of_a_measured_call():
    from benchmarks import measure

    def call() -> None:
        memory.give_back_workspace(take(2048, 2048).fill_(1.0))

    call()
    assert memory._spare
    measured = [measure.peak_memory(call, "cpu") for _ in range(2)]
    assert all(abs(mib - 16) < 4 for mib in measured)
