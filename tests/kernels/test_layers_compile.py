"""Tests of torch.compile on models with fast CPU layers: equal values and no graph break."""

from __future__ import annotations

import copy

import pytest
import torch

from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.kernels.cpu.layers import fast_layers
from tests.tiny import tiny_model

MISSING = gemm.unavailable(torch.float32) or loader.unavailable("layers")
pytestmark = pytest.mark.skipif(bool(MISSING), reason="no C++ kernels here")


@pytest.mark.parametrize("eager_first", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "cohere"])
def test_compiles_without_a_graph_break(family, eager_first):
    check(family, "eager", eager_first)


@pytest.mark.slow
def test_compiles_with_inductor():
    check("llama", "inductor", eager_first=False)


def check(family: str, backend: str, eager_first: bool) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    plain = tiny_model(family, num_hidden_layers=1)
    model = copy.deepcopy(plain)
    fast_layers(model)
    ids = torch.arange(2, 22).view(2, 10)
    if eager_first:  # run the trials of the fast layers before compiling
        model(input_ids=ids)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    logits = compiled(input_ids=ids).logits
    expected = plain(input_ids=ids).logits
    for one in (logits, expected):
        one.square().mean().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
