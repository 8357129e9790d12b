"""Configuration of a run as pydantic models.

A recipe provides values, and command-line arguments such as `optim.lr=1e-4` override them. The
defaults of the section `loss` come from `LossConfig`.
"""

from grpo_fast.train.config.base import Positive, Section, UserPath, require
from grpo_fast.train.config.data import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from grpo_fast.train.config.loss import LossSettings
from grpo_fast.train.config.model import (
    CriticConfig,
    KLConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    WarmStartConfig,
)
from grpo_fast.train.config.run import RunConfig

__all__ = [
    "CriticConfig", "DataConfig", "EvalConfig", "KLConfig",
    "LoraConfig", "LossSettings", "ModelConfig", "OptimConfig", "Positive", "ReferenceConfig",
    "RewardConfig", "RolloutConfig", "RunConfig", "Section", "UserPath", "WarmStartConfig",
    "require",
]  # fmt: skip
