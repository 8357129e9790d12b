"""Attention of packed sequences: layout on the host, one function registered with transformers, kernels by dispatch."""

from grpo_fast.attention.layout import PackedLayout
from grpo_fast.attention.packed import (
    NAME,
    check_supported,
    disable_dropout,
    packed_attention,
    register,
    shared_prompt_supported,
)
from grpo_fast.attention.packing import PackedGroups, Share, pack_groups, plan_packs, trunk_tokens

__all__ = [
    "NAME",
    "PackedGroups",
    "PackedLayout",
    "Share",
    "check_supported",
    "disable_dropout",
    "pack_groups",
    "packed_attention",
    "plan_packs",
    "register",
    "shared_prompt_supported",
    "trunk_tokens",
]
