"""The workspace of the chunk loop: kept on the CPU from call to call, whatever shape it had, up to
a bound.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_fast
from grpo_fast.attention import TreeLayout
from grpo_fast.attention.dispatch import packed_rows_attention
from grpo_fast.kernels import workspace as memory
from tests.loss_cases import BACKENDS

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
    """The same shape, a smaller one, and the first one again: nothing is allocated."""
    first = take(64, 512)
    memory.give_back_workspace(first)
    for rows, columns in ((64, 512), (32, 500), (1, 1), (64, 512)):
        again = take(rows, columns)
        assert again.shape == (rows, columns) and again.is_contiguous()
        assert again.data_ptr() == first.data_ptr()
        memory.give_back_workspace(again)


def test_what_is_not_given_back_is_not_given_twice():
    memory.give_back_workspace(take(8, 8))
    one, other = take(8, 8), take(8, 8)
    assert one.data_ptr() != other.data_ptr()


def test_another_dtype_and_a_larger_shape_get_their_own():
    memory.give_back_workspace(take(8, 8))
    assert take(8, 8, torch.float64).dtype == torch.float64
    memory.give_back_workspace(take(8, 8))
    assert take(9, 8).shape == (9, 8)


def test_large_ones_are_not_kept(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_BYTES", 8 * 8 * 4)
    memory.give_back_workspace(take(9, 8))
    assert not memory._spare
    memory.give_back_workspace(take(8, 8))
    assert memory._spare


def test_none_of_inference_mode_is_kept():
    """Such a tensor may not be written outside of it."""
    with torch.inference_mode():
        memory.give_back_workspace(take(8, 8))
        assert not memory._spare
    memory.give_back_workspace(take(8, 8))
    with torch.inference_mode():
        memory.give_back_workspace(take(8, 8))
    take(8, 8).add_(1)


@pytest.mark.parametrize("shape", [(3, 5), (2049, 1025), (1 << 11, 1 << 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_zeros_that_can_be_written(shape, dtype):
    x = memory.zeros(shape, dtype)
    assert x.shape == shape and x.dtype == dtype and not x.any()
    x.add_(1)
    assert not memory.zeros(shape, dtype).any() and x.all()


def test_memory_of_zeros_is_given_back():
    """The process does not grow by what was dropped."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    for _ in range(5):
        memory.zeros((1 << 12, 1 << 12), torch.float32).add_(1)  # 64 MiB
    assert resident() - before < 64 << 20


# ---- memory that torch would fill
# -----------------------------------------------------------------------------------


@pytest.fixture
def filling():
    """The user's `torch.use_deterministic_algorithms(True)`: what is empty comes filled."""
    torch.use_deterministic_algorithms(True)
    assert deterministic.fill_uninitialized_memory
    yield
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)


class Filled(TorchDispatchMode):
    """Notes the sizes of what torch allocates and fills."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "empty" in str(function) and deterministic.fill_uninitialized_memory:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_buffer_of_a_loss_is_filled(filling, dtype, backend):
    """Nothing above some vectors over the tokens."""
    tokens, hidden_size, vocab = 6, 64, 512
    hidden, weight = (torch.ones(n, hidden_size, dtype=dtype) for n in (tokens, vocab))
    ids, cu = torch.arange(tokens), torch.tensor([0, tokens])
    for name in ("logits", "linear"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        with Filled() as filled:
            if name == "linear":
                out = grpo_fast.linear_grpo_loss(
                    *leaves, ids, torch.ones(1), grpo_fast.LossConfig(), cu_seqlens=cu,
                    backend=backend,
                )  # fmt: skip
            else:
                logits = torch.zeros(tokens, vocab, dtype=dtype, requires_grad=True)
                out = grpo_fast.logits_grpo_loss(
                    logits, ids, torch.ones(1), grpo_fast.LossConfig(), cu_seqlens=cu,
                    backend=backend,
                )  # fmt: skip
            out.loss.backward()
        assert max(filled.sizes, default=0) < tokens * hidden_size, name


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_no_buffer_of_the_attention_is_filled(filling, softcap):
    q, k, v = (torch.ones(40, heads, 16, requires_grad=True) for heads in (2, 1, 1))
    layout = TreeLayout.of([25, 15])
    packed_rows_attention(q, k, v, layout, scale=1.0, softcap=softcap)  # its self-test, once
    with Filled() as filled:
        packed_rows_attention(q, k, v, layout, scale=1.0, softcap=softcap).sum().backward()
    assert max(filled.sizes, default=0) < v.numel()


def test_the_switch_is_put_back(filling):
    def empty(*shape):
        seen.append(deterministic.fill_uninitialized_memory)
        return torch.empty(*shape)

    def failing():
        raise MemoryError

    seen: list[bool] = []
    for found in (True, False):
        deterministic.fill_uninitialized_memory = found
        assert memory.unset(empty, 2, 3).shape == (2, 3)
        with pytest.raises(MemoryError):
            memory.unset(failing)
        assert deterministic.fill_uninitialized_memory is found
    assert seen == [False, False]


def test_threads_put_back_what_was_there_before_all_of_them(filling):
    """The second begins while the first is at it, and the first ends while the second is."""
    inside, go_on = threading.Event(), threading.Event()

    def slow():
        inside.set()
        go_on.wait(10)
        return torch.empty(1)

    def slower():
        first.join(10)
        return torch.empty(1)

    first = threading.Thread(target=memory.unset, args=(slow,))
    second = threading.Thread(target=memory.unset, args=(slower,))
    first.start()
    inside.wait(10)
    second.start()
    second.join(0.2)
    go_on.set()
    first.join()
    second.join()
    assert deterministic.fill_uninitialized_memory


def test_without_the_users_switch_nothing_is_switched(monkeypatch):
    monkeypatch.setattr(memory, "_switch", None)
    assert memory.unset(torch.empty, 2, dtype=torch.float64).dtype == torch.float64


def test_the_fixture_that_poisons_memory_reaches_ours(poisoned_memory):
    assert memory.unset(torch.empty, 5).isnan().all() and take(3, 7).isnan().all()
