"""Models and helper functions for the tests of the fast CPU layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.kernels.cpu.layers import fast_layers
from tests.kernels.formulas import draw

NEEDS_KERNELS = pytest.mark.skipif(
    gemm.unavailable(torch.float32) or loader.unavailable("layers"), reason="no C++ kernels here"
)

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip


class TinyRMSNorm(nn.Module):
    """RMSNorm as in Llama. With `offset` 1, it is the RMSNorm of Gemma."""

    def __init__(self, size, offset=0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(draw(size, seed=5)), offset
        self.variance_epsilon = 0.3

    def forward(self, x, gate=None):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        y = y * (self.weight + self.offset)
        return y if gate is None else y * gate


def pair_of():
    """Return a Llama model with fast CPU layers, and a copy of it with the original layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, attn_implementation="eager")
    plain = transformers.LlamaForCausalLM(config)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = copy.deepcopy(plain)
    fast_layers(model)
    return model, plain


def is_fused(x):
    """Return whether a fast layer computed x, possibly followed by a view."""
    nodes = [x.grad_fn, *(node for node, _ in x.grad_fn.next_functions)]
    return "_FusedBackward" in {type(node).__name__ for node in nodes}
