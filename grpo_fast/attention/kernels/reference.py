"""Dense attention of a packed row, written directly from the definition.

Every kernel is compared with this reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.attention.layout import AttentionParams, TreeLayout


def visible(layout: TreeLayout, window: int | None = None, rows: slice = slice(None)) -> Tensor:
    """Return a bool tensor (rows, T) that says which keys each query in `rows` attends to."""
    segment = layout.segments
    position = layout.position_ids[0]
    related = layout.related[segment[rows, None], segment[None]]
    distance = position[rows, None] - position[None]
    return related & (distance >= 0) & (distance < (window or layout.total + 1))


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, params: AttentionParams) -> Tensor:
    """Compute the attention output (T, H, D) of q (T, H, D), k and v (T, H_kv, D).

    The computation is in fp32 or fp64.
    """
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.to(acc_dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(acc_dtype), keys) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~visible(layout, params.window), -torch.inf)
    if params.sinks is not None:
        column = params.sinks.to(acc_dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
