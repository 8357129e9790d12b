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
    """Seed of all random numbers."""
    output_dir: UserPath = "runs/reward-model"
    """Folder of the results."""
    model: ScorerConfig
    """The model that learns to score."""
    data: DataConfig
    """A file with the fields chosen and rejected, or a task whose answers are spoiled."""
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5))
    """The optimizer, AdamW."""
    steps: Positive = 1000
    """Optimizer steps."""
    batch_size: Positive = 64
    """Pairs per step, and at a time in the evaluation."""
    center: float = Field(0.0, ge=0)
    """Weight of mean((r_chosen + r_rejected)^2), which keeps scores near 0."""
    progress: bool = True
    """Print a line of metrics now and then."""

    @model_validator(mode="after")
    def _consistent(self) -> RewardModelConfig:
        data, states = self.data, self.optim.states
        fits = data.task in ("sort", "arithmetic", "jsonl")
        require(fits, "data.task", "sort, arithmetic or jsonl", data.task)
        require(not (data.shots or data.shots_tokens), "data.shots", "none for pairs", "some")
        require(states == "full", "optim.states", "full", states)
        return self
