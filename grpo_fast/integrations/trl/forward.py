"""The packed forward of a model of TRL's, inside its own forwards: hooks fire once each."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import Support, linear_grpo_loss, linear_logps
from grpo_fast.integrations.fast_head import run_inside
from grpo_fast.integrations.trl.head import FusedHead
from grpo_fast.integrations.trl.options import SinglePass
from grpo_fast.integrations.trl.packed import Pack, packing


class PackedCall(NamedTuple):
    pack: Pack
    head: FusedHead  # the rules of logits that TRL read from the policy's config
    entropy: bool
    loss: SinglePass | None = None
    support: Support | None = None  # what the sampler drew the scored tokens from


def let_run_inside(lm: Any) -> None:
    """Let this model and its head run ours inside their forwards: the hooks of both fire once."""
    before = lm.forward.__func__
    run_inside(lm)
    # `use_fast_head` looks for it there.
    lm.forward.__func__.trl_fused = getattr(before, "trl_fused", before)
    run_inside(lm.get_output_embeddings())


def packed_forward(lm: Any, call: PackedCall) -> dict[str, Tensor]:
    with packing():
        trunk = getattr(lm, call.head.backbone)(**call.pack.inputs)
    head = lm.get_output_embeddings()
    return head(trunk.last_hidden_state[0], run=functools.partial(_head_forward, call=call))


def _head_forward(layer: Any, hidden: Tensor, call: PackedCall) -> dict[str, Tensor]:
    hidden, weight, bias = call.head.operands(layer, hidden)
    # The operands have their dtype; sums stay fp32.
    with torch.autocast(hidden.device.type, enabled=False):
        of_rows: dict[str, Any] = dict(
            hidden_rows=call.pack.predicting, bias=bias, support=call.support
        )
        if call.loss is not None:
            return _loss(hidden, weight, call.loss, call.pack, of_rows)
        of_rows |= dict(return_entropy=call.entropy, **call.head.rule._asdict())
        result = linear_logps(hidden, weight, call.pack.target_ids, **of_rows)
        return {"logps": result[0], "entropy": result[1]} if call.entropy else {"logps": result}


def _loss(
    hidden: Tensor, weight: Tensor, job: SinglePass, pack: Pack, of_rows: dict[str, Any]
) -> dict[str, Tensor]:
    out = linear_grpo_loss(
        hidden, weight, pack.target_ids, pack.packed(job.advantages), job.config,
        cu_seqlens=pack.cu_seqlens, old_logps=pack.packed(job.old_logps),
        ref_logps=pack.packed(job.ref_logps), num_items_in_batch=job.num_items, **of_rows,
    )  # fmt: skip
    return {"loss": out.loss, "logps": out.logps, "entropy": out.entropy}
