"""The configuration section `loss`, whose keys are arguments of `LossConfig`."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Literal

from pydantic import Field, create_model

from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.config import CHOICES, LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.base import Section

# Arguments of LossConfig that the section `loss` does not contain, because the trainer sets them
# from the model and from the section `rollout`.
OF_THE_RUN = ("softcap", "logit_scale", "max_completion_length", "group_size")


ARGUMENTS: dict[str, Any] = {
    field.name: (Any, Field(None, description="An argument of LossConfig; null means its default."))
    for field in fields(LossConfig) if field.name not in OF_THE_RUN
}  # fmt: skip


class LossSettings(create_model("Arguments", __base__=Section, **ARGUMENTS)):  # type: ignore[misc]
    """The objective. All arguments of LossConfig, except OF_THE_RUN, are keys."""

    loss_type: Literal[tuple(OBJECTIVES)] = LossConfig.loss_type  # type: ignore[valid-type]
    """The objective; docs/losses explains each choice."""
    epsilon_low: float = LossConfig.epsilon_low
    """The importance ratio is clipped below 1 - epsilon_low."""
    epsilon_high: float | None = LossConfig.epsilon_high
    """The importance ratio is clipped above 1 + epsilon_high; null uses epsilon_low."""
    beta: float = LossConfig.beta
    """Weight of the KL divergence to the reference; 0 needs no reference."""
    kl_estimator: Literal[tuple(CHOICES["kl_estimator"])] = (  # type: ignore[valid-type]
        LossConfig.kl_estimator
    )
    """How the KL divergence to the reference is estimated."""
    aggregation: Literal[(*AGGREGATIONS, None)] = LossConfig.aggregation  # type: ignore[valid-type]
    """How the losses of tokens are averaged; null uses the default of the loss type."""
    temperature: float | None = None
    """Temperature of the log-probs; null uses rollout.temperature."""
    entropy_coef: float = LossConfig.entropy_coef
    """Weight of the entropy bonus; 0 adds none."""
    compute_entropy: bool = LossConfig.compute_entropy
    """Log the entropy even if entropy_coef is 0."""
    corrections: list[dict[str, Any]] = Field(
        default_factory=lambda: [asdict(correction) for correction in LossConfig.corrections]
    )
    """Corrections of the sampler-trainer mismatch, each with arguments of Correction."""
