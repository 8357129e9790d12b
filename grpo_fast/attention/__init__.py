"""Attention of packed sequences: layout on the host, one function registered with transformers, kernels by dispatch."""

from grpo_fast.attention.layout import PackedLayout
from grpo_fast.attention.packed import NAME, check_supported, disable_dropout, packed_attention, register

__all__ = ["NAME", "PackedLayout", "check_supported", "disable_dropout", "packed_attention", "register"]
