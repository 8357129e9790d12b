"""Completions for prompts, with the log-probabilities the sampler used."""

from grpo_fast.rollout.hf import Rollout, generate

__all__ = ["Rollout", "generate"]
