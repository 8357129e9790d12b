"""Configuration of a run as pydantic models.

A recipe provides values, and command-line arguments such as `optim.lr=1e-4` override them. The
defaults of the section `loss` come from `LossConfig`.
"""

from grpo_fast.errors import require
from grpo_fast.train.config.run import GAE, LogConfig, RunConfig
from grpo_fast.train.config.sections import (
    CriticConfig,
    DataConfig,
    EvalConfig,
    KLConfig,
    LoraConfig,
    LossSettings,
    ModelConfig,
    OptimConfig,
    Positive,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    UserPath,
    WarmStartConfig,
    named_in,
)

__all__ = [
    "GAE", "CriticConfig", "DataConfig", "EvalConfig", "KLConfig", "LogConfig", "LoraConfig",
    "LossSettings", "ModelConfig", "OptimConfig", "Positive", "ReferenceConfig", "RewardConfig",
    "RolloutConfig", "RunConfig", "Section", "UserPath", "WarmStartConfig", "named_in", "require",
]  # fmt: skip
