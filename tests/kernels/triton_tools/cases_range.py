"""Interpreter cases of tensors with element offsets above 2^31, too large for 32-bit integers."""

from __future__ import annotations

import mmap

import pytest
import torch

from grpo_fast.kernels.gpu import gradients, linear, support
from grpo_fast.kernels.types import HeadInputs, LogitTransform, SupportRows
from tests.kernels.triton_tools.interpreter import only_memory_of


@pytest.fixture
def transposed():
    """Return a (V, H) bf16 weight that is stored transposed and has more than 2^31 elements.

    The operating system allocates only the memory pages that are written, so the weight takes
    little memory.
    """
    vocab, width = 262400, support.SUPPORT_COLUMNS
    pages = mmap.mmap(-1, 2 * vocab * width, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    weight = torch.frombuffer(pages, dtype=torch.bfloat16).view(width, vocab).T
    weight[[5, 7]] = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    return weight


def test_a_transposed_head_beyond_2_to_the_31(transposed):
    """Check that target logits, dH and the kernels for `support` use 64-bit offsets."""
    weight, ids = transposed, torch.tensor([5, 7, 5])
    hidden = torch.randn(weight[ids].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide, ones, factors = weight[ids].double(), torch.ones(3), torch.tensor([0.5, 2.0, 1.0])
    exact = (hidden.double() * wide).sum(1)
    tensors = hidden, weight, ids, ones, factors
    with only_memory_of(*tensors):
        p = linear.prepared(HeadInputs(hidden, weight, None, ids, LogitTransform()))
        raw = linear.target_logits(p)
    assert (raw - exact).abs().max() <= 1e-4
    out, zeros = torch.empty(hidden.shape), torch.zeros(hidden.shape)
    with only_memory_of(*tensors, out, zeros):
        gradients.write_hidden_(out, zeros, ones, factors, ids, weight)
    assert torch.equal(out, factors[:, None] * wide.float())
    # Use rows of W as `hidden`, so that the offsets of its columns also exceed 2^31.
    rows = SupportRows(None, None, ids, torch.tensor([0, 2, 3]), torch.tensor([0, 0]))
    with only_memory_of(*tensors, *(x for x in rows if x is not None)):
        p = HeadInputs(weight[5:8:2], weight, None, rows.places, LogitTransform())
        found = support.head_rows(p, rows, return_entropy=False, return_slopes=False)
        back = support.head_hidden(factors, weight, rows)
    own = (wide[[0, 0, 1]] * wide).sum(1)
    assert (found.raw - own).abs().max() <= 1e-5 * own.abs().max()
    assert (back - torch.stack([0.5 * wide[0] + 2 * wide[1], wide[2]])).abs().max() <= 1e-5
