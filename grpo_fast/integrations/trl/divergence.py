"""Fused divergence for TRL's `DistillationTrainer`, which `use_fast_head(trainer)` installs.

In TRL 1.16, the method `_compute_loss` calls the global function `_chunked_divergence_loss`. The
trainer gets a copy of this method that calls our function instead. Other trainers are not changed.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast import DivergenceTerm, LossConfig, TeacherHead, linear_grpo_loss
from grpo_fast.integrations.fast_head import FastHead, compute_dtype, is_partitioned, run_inside

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import DistillationTrainer

LOSS = "_chunked_divergence_loss"
# Divergences for two values of TRL's `beta`. For all other values, the divergence is "jsd".
KINDS = {0.0: "forward_kl", 1.0: "reverse_kl"}


def swap_divergence(trainer: DistillationTrainer, handle: FastHead) -> None:
    """Make one trainer compute its loss, gradient and student entropy with our kernels.

    `handle.undo()` restores TRL's loss.
    """
    theirs = type(trainer)._compute_loss

    @functools.wraps(theirs)
    def compute_loss(self: DistillationTrainer, student: PreTrainedModel, *args: object) -> object:
        if not handle.active or is_partitioned(student):
            return theirs(self, student, *args)
        head = student.get_output_embeddings()
        run_inside(head)  # so that FSDP2 gathers the weight of a head in a separate group
        scope = {**theirs.__globals__, LOSS: functools.partial(divergence_loss, head)}
        return types.FunctionType(theirs.__code__, scope)(self, student, *args)

    trainer._compute_loss = types.MethodType(compute_loss, trainer)


def divergence_loss(
    head: nn.Linear,
    hidden: Tensor,  # (B, K, H)
    teacher_hidden: Tensor,  # (B, K, H')
    _: Tensor,  # (V, H) the head's weight; unused, because `run` reads the gathered weight
    teacher_weight: Tensor,  # (V, H')
    mask: Tensor,  # (B, K)
    beta: float,
    num_items_in_batch: Tensor | float | None = None,
    **rule: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of TRL's function `_chunked_divergence_loss` from the same arguments.

    `linear_grpo_loss` computes the divergence, because it also returns the entropies. Its
    advantages are 0, so the divergence is the only term of the loss.

    Returns:
        The loss, the sum of the student's entropies, and the number of tokens. Each is 0-d.
    """
    dtype = compute_dtype(teacher_hidden)
    active = mask != 0
    T = rule["temperature"]
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
    count = active.sum()
    own = compute_dtype(hidden)
    total = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch

    def run(layer: nn.Linear, h: Tensor) -> tuple[Tensor, Tensor]:
        bias = None if layer.bias is None else layer.bias.to(own)
        with torch.autocast(h.device.type, enabled=False):  # the operands have their final dtype
            # The targets are arbitrary. With advantages of 0, they do not change the loss.
            out = linear_grpo_loss(
                h.to(own), layer.weight.to(own), active.long(), active.new_zeros(len(h)).float(),
                config, bias=bias, completion_mask=active, num_items_in_batch=total,
                divergence=term,
            )  # fmt: skip
        return out.loss, out.entropy.sum()

    return *head(hidden, run=run), count
