"""`RewardModelConfig`: everything the training of a reward model depends on."""

from __future__ import annotations

from pydantic import Field, model_validator

from grpo_fast.errors import conflict
from grpo_fast.train.config.base import Positive, Section, UserPath, require
from grpo_fast.train.config.data import DataConfig
from grpo_fast.train.config.model import OptimConfig, Origin


class ScorerConfig(Origin):
    """The model that learns to score; a causal LM gets a new output."""

    @model_validator(mode="after")
    def _own_tokenizer(self) -> ScorerConfig:
        if self.tokenizer is not None and self.path is not None:
            why = "a model from a path has its own tokenizer"
            raise conflict(f"tokenizer={self.tokenizer}", f"path={self.path}", why)
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
