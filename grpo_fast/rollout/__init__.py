"""Engines that sample completions, and `generate` for use in any training loop."""

from grpo_fast.errors import EngineError, NonFiniteLogits
from grpo_fast.rollout.engine import (
    Completion,
    Engine,
    EngineName,
    Request,
    Sampling,
    awake,
    build_engine,
)
from grpo_fast.rollout.own.model import SampledModel
from grpo_fast.rollout.samples import Samples, check_prompts, encode_prompts, generate, prompt_texts

__all__ = [
    "Completion", "Engine", "EngineError", "EngineName", "NonFiniteLogits", "Request",
    "SampledModel", "Samples", "Sampling", "awake", "build_engine", "check_prompts",
    "encode_prompts", "generate", "prompt_texts",
]  # fmt: skip
