"""Completions for prompts, with the log-probabilities the sampler used."""

from grpo_fast.rollout.hf import Rollout, check_prompts, encode_prompts, generate
from grpo_fast.rollout.sampler import NonFiniteLogits, Sampling

__all__ = ["NonFiniteLogits", "Rollout", "Sampling", "check_prompts", "encode_prompts", "generate"]
