"""Completions for prompts, with the log-probabilities the sampler used."""

from grpo_fast.rollout.hf import Rollout, generate
from grpo_fast.rollout.sampler import NonFiniteLogits

__all__ = ["NonFiniteLogits", "Rollout", "generate"]
