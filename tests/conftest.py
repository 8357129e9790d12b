"""Shared by all tests: one thread, and poison for fresh memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grpo_fast.kernels import route
from tests.loss_cases import Fused

torch.set_num_threads(1)


@pytest.fixture
def poisoned_memory():
    """Every `empty` of torch, in Python and C++, comes filled with NaN (floats) or the largest integer.

    torch's own switch does this under deterministic algorithms; an output slot that a kernel forgets shows up as NaN.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fused_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests whose `backend` is `Fused`: our products, and the kernels that start from hidden, on every CPU."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or not isinstance(callspec.params.get("backend"), Fused):
        yield
        return
    monkeypatch.setenv("GRPO_FAST_GEMM", "own")
    monkeypatch.setattr(route, "FROM_HIDDEN", 1)
    route._gemm_choice.cache_clear()
    yield
    route._gemm_choice.cache_clear()


# These take minutes in one process; started last they would run alone while the other processes have nothing to do.
SLOW_FILES = ("test_triton_compile.py", "test_triton_interpreter.py", "test_trl_parity.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)
