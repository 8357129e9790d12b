"""Attention over packed rows, where a prefix shared by several sequences is computed only once."""

from grpo_fast.attention.agree import draw_groups, small_windows, worst_gap
from grpo_fast.attention.dispatch import packed_rows_attention
from grpo_fast.attention.hybrid import hidden_by_samples, split_recurrent_layers
from grpo_fast.attention.layout import TreeLayout
from grpo_fast.attention.model import (
    NAME,
    Head,
    check_rope,
    check_supported,
    check_tolerance,
    disable_dropout,
    head_of,
    offload_checkpoints,
    packed_attention,
    prepare,
    register,
    shared_prompt_supported,
    tile_mlps,
    window_as_mask,
    window_of,
)
from grpo_fast.attention.packing import (
    PackedGroups,
    PackedTree,
    Share,
    pack_groups,
    pack_tree,
    plan_packs,
    plan_trees,
    trunk_tokens,
)
from grpo_fast.kernels.agree import Pair
from grpo_fast.kernels.cpu.layers import fast_layers

__all__ = [
    "NAME", "Head", "PackedGroups", "PackedTree", "Pair", "Share", "TreeLayout", "check_rope",
    "check_supported",
    "check_tolerance", "disable_dropout", "draw_groups", "fast_layers", "head_of",
    "hidden_by_samples", "offload_checkpoints", "pack_groups", "pack_tree", "packed_attention",
    "packed_rows_attention", "plan_packs", "plan_trees", "prepare", "register",
    "shared_prompt_supported", "small_windows", "split_recurrent_layers", "tile_mlps",
    "trunk_tokens", "window_as_mask", "window_of", "worst_gap",
]  # fmt: skip
