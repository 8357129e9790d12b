"""TRL's `DistillationTrainer` on our divergence: `use_fast_head(trainer)` comes here.

TRL (1.16) reads `_chunked_divergence_loss` from the globals of `_compute_loss`, which here has a
copy of them in which that one name differs, for one trainer alone.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor

from grpo_fast import DivergenceTerm, LossConfig, TeacherHead, linear_grpo_loss
from grpo_fast.integrations.fast_head import FastHead, compute_dtype, is_partitioned, run_inside

LOSS = "_chunked_divergence_loss"
KINDS = {0.0: "forward_kl", 1.0: "reverse_kl"}  # by TRL's beta; between them jsd


def swap_divergence(trainer: Any, handle: FastHead) -> None:
    """Let our kernels compute loss, gradient and entropy of this trainer's micro-batches."""
    theirs = type(trainer)._compute_loss

    @functools.wraps(theirs)
    def compute_loss(self: Any, student: Any, *args: Any) -> Any:
        if not handle.active or is_partitioned(student):
            return theirs(self, student, *args)
        head = student.get_output_embeddings()
        run_inside(head)  # FSDP2 gathers its weight, whichever group it is in
        scope = {**theirs.__globals__, LOSS: functools.partial(divergence_loss, head)}
        return types.FunctionType(theirs.__code__, scope)(self, student, *args)

    trainer._compute_loss = types.MethodType(compute_loss, trainer)


def divergence_loss(
    head: Any,
    hidden: Tensor,  # (B, K, H)
    teacher_hidden: Tensor,  # (B, K, H')
    _: Tensor,  # (V, H) the head's weight, which is read inside of its forward
    teacher_weight: Tensor,  # (V, H')
    mask: Tensor,  # (B, K)
    beta: float,
    num_items_in_batch: Tensor | float | None = None,
    **rule: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's (loss, sum of the student's entropies, number of tokens), 0-d each.

    The loss is that of advantages which are 0, with a divergence: the pass gives entropies, too.
    """
    dtype, active, T = compute_dtype(teacher_hidden), mask != 0, rule["temperature"]
    bias = rule["teacher_lm_head_bias"]
    teacher = TeacherHead(
        teacher_hidden.to(dtype), teacher_weight.detach().to(dtype),
        None if bias is None else bias.detach().to(dtype), T,
        rule["teacher_final_logit_softcapping"], rule["teacher_logit_scale"],
    )  # fmt: skip
    term = DivergenceTerm(teacher, KINDS.get(beta, "jsd"), beta=0.5 if beta in KINDS else beta)
    config = LossConfig(
        aggregation="token_mean_global", compute_entropy=True, temperature=T,
        softcap=rule["student_final_logit_softcapping"], logit_scale=rule["student_logit_scale"],
    )  # fmt: skip
    count, own = active.sum(), compute_dtype(hidden)
    total = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch

    def run(layer: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        bias = None if layer.bias is None else layer.bias.to(own)
        with torch.autocast(h.device.type, enabled=False):  # h: as the head's hooks cast it
            # Any ids do for targets: their advantages are 0.
            out = linear_grpo_loss(
                h.to(own), layer.weight.to(own), active.long(), active.new_zeros(len(h)).float(),
                config, bias=bias, completion_mask=active, num_items_in_batch=total,
                divergence=term,
            )  # fmt: skip
        return out.loss, out.entropy.sum()

    return *head(hidden, run=run), count
