"""The packed forward of a model of TRL's: logps, or loss and gradient, from one packed row.

Trunk and head run inside the forwards of the model and of its head, so that the hooks of DDP, FSDP
and accelerate fire once each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_fast import linear_grpo_loss, linear_logps
from grpo_fast.integrations.fast_head import run_inside
from grpo_fast.integrations.packed import Pack, packing
from grpo_fast.integrations.trl_fused import FusedHead
from grpo_fast.integrations.trl_options import SinglePass


@dataclass(frozen=True)
class PackedCall:
    """What the model's forward is asked for: logps or, with `loss`, loss and gradient."""

    pack: Pack
    head: FusedHead  # the rules of logits that TRL read from the policy's config
    entropy: bool
    loss: SinglePass | None = None


def let_run_inside(lm: Any) -> None:
    """Let this model and its head run ours inside their forwards: the hooks of both fire once."""
    before = lm.forward.__func__
    run_inside(lm)
    # `use_fast_head` looks for it there.
    lm.forward.__func__.trl_fused = getattr(before, "trl_fused", before)
    run_inside(lm.get_output_embeddings())


def packed_forward(lm: Any, call: PackedCall) -> dict[str, Tensor]:
    """The trunk on one packed row, then the head."""
    with packing():
        trunk = getattr(lm, call.head.backbone)(**call.pack.inputs)
    head = lm.get_output_embeddings()
    return head(trunk.last_hidden_state[0], run=functools.partial(_head_forward, call=call))


def _head_forward(layer: Any, hidden: Tensor, call: PackedCall) -> dict[str, Tensor]:
    hidden, weight, bias = call.head.operands(layer, hidden)
    # The operands have their dtype; sums stay fp32.
    with torch.autocast(hidden.device.type, enabled=False):
        if call.loss is None:
            return _logps(hidden, weight, bias, call)
        return _loss(hidden, weight, bias, call.loss, call.pack)


def _logps(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: PackedCall
) -> dict[str, Tensor]:
    result = linear_logps(
        hidden, weight, call.pack.target_ids, hidden_rows=call.pack.predicting, bias=bias,
        return_entropy=call.entropy, **call.head.rule,
    )  # fmt: skip
    return {"logps": result[0], "entropy": result[1]} if call.entropy else {"logps": result}


def _loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, job: SinglePass, pack: Pack
) -> dict[str, Tensor]:
    out = linear_grpo_loss(
        hidden, weight, pack.target_ids, pack.packed(job.advantages), job.config,
        hidden_rows=pack.predicting, bias=bias, cu_seqlens=pack.cu_seqlens,
        old_logps=pack.packed(job.old_logps), ref_logps=pack.packed(job.ref_logps),
        num_items_in_batch=job.num_items,
    )  # fmt: skip
    return {"loss": out.loss, "logps": out.logps, "entropy": out.entropy}
