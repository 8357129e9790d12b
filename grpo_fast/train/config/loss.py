"""Section `loss` of a run, with the arguments of `LossConfig` that recipes change."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_fast.errors import nearest_hint
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.config import CHOICES, LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.base import Section, require

# Arguments of LossConfig that the section `loss` does not contain, because the trainer sets them
# from the model and from the section `rollout`.
OF_THE_RUN = ("softcap", "logit_scale", "max_completion_length", "group_size")


def default_corrections() -> list[dict[str, Any]]:
    return [dataclasses.asdict(correction) for correction in LossConfig.corrections]


class LossSettings(Section):
    more_keys = frozenset(
        "cispo_bound delta dual_clip_c entropy_over importance_sampling_level kl_clamp "
        "kl_input_clamp kl_times_ratio sapo_temperature_neg sapo_temperature_pos temperature "
        "top_entropy_quantile vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos".split()
    )

    loss_type: Literal[tuple(OBJECTIVES)] = LossConfig.loss_type  # type: ignore[valid-type]
    """The objective. docs/losses explains each one."""
    epsilon_low: float = LossConfig.epsilon_low
    """The importance ratio is clipped below 1 - epsilon_low."""
    epsilon_high: float | None = LossConfig.epsilon_high
    """The importance ratio is clipped above 1 + epsilon_high; null uses epsilon_low."""
    beta: float = LossConfig.beta
    """Weight of the KL divergence to the reference; 0 needs no reference."""
    kl_estimator: Literal[tuple(CHOICES["kl_estimator"])] = (  # type: ignore[valid-type]
        LossConfig.kl_estimator
    )
    """Estimator of the KL divergence to the reference."""
    aggregation: Literal[(*AGGREGATIONS, None)] = LossConfig.aggregation  # type: ignore[valid-type]
    """How the losses of tokens are averaged; null uses the default of the loss type."""
    entropy_coef: float = LossConfig.entropy_coef
    """Weight of the entropy bonus; 0 adds none."""
    compute_entropy: bool = LossConfig.compute_entropy
    """Log the entropy even if entropy_coef is 0."""
    corrections: list[dict[str, Any]] = Field(default_factory=default_corrections)
    """Corrections by the sampler's log-probabilities, each with the arguments of Correction."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of LossConfig, for example {delta: 4}; loss.delta=4 does the same."""

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, settings: Any) -> Any:
        """Move the rarely changed arguments of LossConfig from the section to `options`."""
        if not isinstance(settings, dict) or cls.more_keys.isdisjoint(settings):
            return settings
        given = settings.get("options", {})
        require(isinstance(given, dict), "options", "a mapping", repr(given))
        others = {name: value for name, value in settings.items() if name not in cls.more_keys}
        rare = {name: value for name, value in settings.items() if name in cls.more_keys}
        return others | {"options": given | rare}

    @field_validator("options")
    @classmethod
    def _know_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(options.keys() - cls.more_keys)
        if unknown:
            known = sorted(cls.more_keys)
            hint = nearest_hint(unknown[0], known) or f"; known: {', '.join(known)}"
            raise ValueError(f"LossConfig has no argument {unknown[0]!r}{hint}")
        return options

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `LossConfig`."""
        arguments = dict(self)
        options = arguments.pop("options")
        # In recipes and saved configurations null means the default, so leave out such options.
        return arguments | {name: value for name, value in options.items() if value is not None}
