"""The divergence that a run adds to its loss: an exact KL to the reference, or a teacher's."""

from __future__ import annotations

from grpo_fast import DivergenceTerm, LossConfig, TeacherHead, TeacherTopK
from grpo_fast.attention import Head
from grpo_fast.objective.kl import EXACT
from grpo_fast.train.config import DistillConfig
from grpo_fast.train.ranks.distributed import whole
from grpo_fast.train.update.micro_batch import MicroBatch


def policy_term(config: LossConfig) -> LossConfig:
    """What is left for the loss: the same without the KL where that is exact."""
    if config.kl_estimator not in EXACT:
        return config
    return config.replace(beta=0.0, kl_estimator=LossConfig.kl_estimator)


def divergence_term(
    batch: MicroBatch,
    ref_head: Head | None,
    config: LossConfig,
    distill: DistillConfig | None = None,
) -> DivergenceTerm | None:
    """The divergence for a micro-batch with a `teacher`, or from the reference for one with
    `ref_hidden`; None without either.
    """
    if batch.teacher is not None and distill is not None:
        ids, logps = batch.teacher.unbind(-1)
        said = TeacherTopK(ids.long(), logps.float())
        return DivergenceTerm(said, distill.kind, distill.coef, distill.beta)
    if batch.ref_hidden is None or ref_head is None:
        return None
    weight, bias = (None if x is None else whole(x.detach()) for x in ref_head[:2])
    temperature = float(config.temperature)
    teacher = TeacherHead(
        batch.ref_hidden, weight, bias, temperature, ref_head.softcap, ref_head.logit_scale
    )  # fmt: skip
    if distill is None:
        return DivergenceTerm(teacher, EXACT[config.kl_estimator], config.beta)
    return DivergenceTerm(teacher, distill.kind, distill.coef, distill.beta)
