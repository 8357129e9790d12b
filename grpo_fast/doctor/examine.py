"""Comparison of the trainer with the engine that the configuration of a run selects."""

from __future__ import annotations

import time

import torch
from pydantic import Field

from grpo_fast.data.splits import Splits
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose
from grpo_fast.rollout import build_engine
from grpo_fast.train.config import RunConfig, Section
from grpo_fast.train.models.loading import build_tokenizer, load_policy


class DoctorSettings(Section):
    """Settings of the doctor. Every other `key=value` belongs to the run's configuration."""

    recipe: str | None = None
    """Recipe (name or YAML file) with data, sampling and model."""
    n: int = Field(8, ge=1, le=1 << 10)
    """Number of prompts."""
    samples: int = Field(2, ge=1, le=1 << 10)
    """Completions of each prompt."""
    tokens: int = Field(32, ge=1, le=1 << 10)
    """Longest completion. All logits of a completion are in memory at once."""
    threshold: float | None = Field(None, ge=0)
    """Allowed mean difference in nats per token; null: the noise of the dtype."""


def examine_engine(own: DoctorSettings, config: RunConfig) -> Diagnosis:
    """Build the policy and the engine of a run, and compare their log-probabilities."""
    torch.manual_seed(config.seed)
    splits = Splits(config.data, config.seed)
    policy = load_policy(config.model, build_tokenizer(config.model, splits))
    policy.template_kwargs = config.data.template_kwargs
    examples = splits.for_tokenizer(policy.tokenizer).with_shots(policy.tokenizer).train[: own.n]
    length = min(config.rollout.max_new_tokens, own.tokens)
    with build_engine(policy, config.rollout) as engine:
        return diagnose(
            policy, engine, [example.prompt for example in examples],
            config.rollout.model_copy(update={"max_new_tokens": length}),
            group_size=own.samples, seed=config.seed,
            version=int(time.time()),  # a running server must not have this version already
            temperature=float(config.loss_config().temperature),
            uses_kept=config.rollout.needs_support, threshold=own.threshold,
        )  # fmt: skip
