"""Which kernel computes the attention of packed rows; probed once, logged once for each kind of input."""

from __future__ import annotations

import logging

from torch import Tensor

from grpo_fast.attention import kernels_cpu, kernels_explicit
from grpo_fast.attention.kernel import Kernel
from grpo_fast.attention.layout import PackedLayout
from grpo_fast.attention.shared_prefix import PackedAttention
from grpo_fast.attention.spans import Rule

log = logging.getLogger(__name__)

CPU = Kernel("flash_cpu", kernels_cpu.forward, kernels_cpu.backward)
EXPLICIT = Kernel("explicit", kernels_explicit.forward, kernels_explicit.backward)


def segment_attention(
    q: Tensor,  # (T, H, D)
    k: Tensor,  # (T, H_kv, D), H_kv divides H
    v: Tensor,  # (T, H_kv, D)
    layout: PackedLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # (T, H, D)
    """Causal attention of each segment on itself and on its shared prompt: softmax(mask(softcap(scale·q·kᵀ)))·v."""
    # A window that no query reaches is no window; the plain kernels are faster.
    window = window if window and window < layout.longest_context else None
    rule = Rule(scale, window, softcap)
    kernel = EXPLICIT if q.device.type != "cpu" or window or softcap else CPU
    return PackedAttention.apply(q, k, v, layout, rule, kernel, window is not None)
