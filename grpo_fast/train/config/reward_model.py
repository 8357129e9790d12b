"""`RewardModelConfig`: everything the training of a reward model depends on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_fast.train.config.base import Positive, Section, Size, UserPath, require
from grpo_fast.train.config.data import DataConfig
from grpo_fast.train.config.model import OptimConfig, check_source


class ScorerConfig(Section):
    """The model that learns to score: loaded (`path`), or a random start (`config`)."""

    path: UserPath | None = None  # hub id or folder; a causal LM gets a new output
    config: dict[str, Any] | None = None  # model_type and the fields of that transformers config
    tokenizer: Literal["bpe", "symbols"] | None = None  # built here; None: loaded from `path`
    vocab_size: Size = 2048  # of the "bpe" tokenizer

    @model_validator(mode="after")
    def _one_source(self) -> ScorerConfig:
        check_source(self.path, self.config)
        fits = (self.tokenizer is None) == (self.config is None)
        expected = "bpe or symbols beside config, none beside path"
        require(fits, "tokenizer", expected, self.tokenizer)
        return self


class RewardModelConfig(Section):
    """Saved resolved as config.yaml beside the model."""

    seed: int = Field(0, ge=0, lt=1 << 32)
    output_dir: UserPath = "runs/reward-model"
    model: ScorerConfig
    data: DataConfig  # jsonl with chosen and rejected, or a task whose answers are spoiled
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5))
    steps: Positive = 1000
    batch_size: Positive = 64  # pairs per step, and at a time in the evaluation
    center: float = Field(0.0, ge=0)  # times mean((r_chosen + r_rejected)²): keeps scores near 0
    progress: bool = True  # a line now and then

    @model_validator(mode="after")
    def _consistent(self) -> RewardModelConfig:
        data, states = self.data, self.optim.states
        fits = data.task in ("sort", "arithmetic", "jsonl")
        require(fits, "data.task", "sort, arithmetic or jsonl", data.task)
        require(not (data.shots or data.shots_tokens), "data.shots", "none for pairs", "some")
        require(states == "full", "optim.states", "full", states)
        return self
