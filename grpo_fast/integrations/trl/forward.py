"""The packed forward of a model of TRL's, and the completions that it gets together.

Trunk and head run inside the forwards of the model and of its head, so that the hooks of DDP, FSDP
and accelerate fire once each.

`keep_groups`: TRL shuffles a generation batch before it cuts it into micro-batches, so with
gradient accumulation the completions of a prompt meet by chance only. Within one optimizer step the
order adds nothing: sums over the step stay the same whichever micro-batch a completion is in, for
every normaliser but those that are local to a micro-batch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import Support, linear_grpo_loss, linear_logps
from grpo_fast.integrations.fast_head import run_inside
from grpo_fast.integrations.trl.head import FusedHead
from grpo_fast.integrations.trl.options import NORMALISERS, SinglePass
from grpo_fast.integrations.trl.packed import Pack, packing

Batch = dict[str, Any]


class PackedCall(NamedTuple):
    """One request to the model's forward: logps or, with `loss`, loss and gradient."""

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
    """The trunk on one packed row, then the head."""
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


# ---- keep_groups


def window_of(trainer: Any) -> int:
    """Micro-batches among which completions may change places: those of one optimizer step.

    Raises ValueError, naming the option, where that would change the gradient.
    """
    by_tokens = NORMALISERS.get(trainer.loss_type) == "tokens"
    local = {
        "loss_type='bnpo' divides by the tokens of the micro-batch": by_tokens,
        "entropy_coef is a mean over the micro-batch": trainer._entropy_bonus_enabled,
        "top_entropy_quantile is of the micro-batch": trainer.top_entropy_quantile < 1,
        "the forward pass is TRL's": not trainer._packs,
    }
    for reason, holds in local.items():
        if holds:
            raise ValueError(f"keep_groups: {reason}")
    args = trainer.args
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    if max(steps, accumulation) % min(steps, accumulation):
        both = f"steps_per_generation ({steps}) and gradient_accumulation_steps ({accumulation})"
        raise ValueError(f"keep_groups: expected {both} to divide one another")
    return min(steps, accumulation)


def regroup(batches: list[Batch], window: int) -> list[Batch]:
    """The same rows in micro-batches of the same sizes; within a window a prompt's are together."""
    regrouped: list[Batch] = []
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        sizes = [batch["prompt_ids"].shape[0] for batch in part]
        order = _by_prompt(part).split(sizes)
        regrouped += [{name: _rows(name, part, rows) for name in part[0]} for rows in order]
    return regrouped


def _by_prompt(batches: list[Batch]) -> Tensor:
    """Rows of all batches, prompt by prompt, in the order in which prompts first appear."""
    prompts = torch.cat([torch.cat([b["prompt_ids"], b["prompt_mask"]], 1) for b in batches]).cpu()
    first: dict[bytes, int] = {}
    group = [first.setdefault(row.numpy().tobytes(), len(first)) for row in prompts]
    return torch.tensor(group).argsort(stable=True)


def _rows(name: str, batches: list[Batch], rows: Tensor) -> Any:
    values = [batch[name] for batch in batches]
    if isinstance(values[0], Tensor) and values[0].dim():
        return torch.cat(values)[rows.to(values[0].device)]
    if isinstance(values[0], (list, tuple)):
        flat = [item for value in values for item in value]
        return [flat[row] for row in rows.tolist()]
    return values[0]  # of the whole generation batch: num_items_in_batch
