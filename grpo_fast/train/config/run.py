"""The complete configuration of a run, `RunConfig`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_fast.objective.advantages import MODES
from grpo_fast.objective.config import LossConfig
from grpo_fast.train.config.base import Count, Positive, Section, UserPath, named_in
from grpo_fast.train.config.data import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from grpo_fast.train.config.loss import LossSettings
from grpo_fast.train.config.model import (
    CriticConfig,
    KLConfig,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    WarmStartConfig,
)
from grpo_fast.train.config.rules import GAE, check_conflicts, check_numbers


def reward_sections(rewards: Any) -> Any:
    """Convert the setting `rewards` to a list of reward sections.

    A single reward becomes a list with one element. A string such as myreward.py:reward becomes a
    section with this name.
    """
    listed = [rewards] if isinstance(rewards, (str, dict)) else rewards
    if not isinstance(listed, list):
        return listed
    return [{"name": reward} if isinstance(reward, str) else reward for reward in listed]


class LogConfig(Section):
    completions_every: Count = 10
    """Steps between saved tables of completions; 0 saves none."""
    trackers: list[str] = Field(default_factory=list)
    """Trackers of accelerate that receive the metrics, for example tensorboard, wandb or mlflow."""
    progress: bool = True
    """Print progress lines and the results of evaluations."""
    save_model: bool = True
    """Write the trained model to output_dir/model."""
    grad_variance: bool = False
    """Log the variance of the gradient between groups. This takes as long as an update."""


class CheckpointConfig(Section):
    """Checkpoint schedule. A run that ends early also writes a checkpoint."""

    every: Count = 0
    """Steps between checkpoints; 0 writes them by time only."""
    every_minutes: float = Field(15, ge=0, le=1e6)
    """Minutes between checkpoints; 0 writes them by steps only."""
    keep: Positive = 2
    """Number of checkpoints to keep; older ones are deleted."""


class RunConfig(Section):
    """All settings of a run. A run saves them in the file config.yaml of its output_dir."""

    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    """Seed of all random numbers."""
    output_dir: UserPath = "runs/default"
    """Folder for metrics, checkpoints and the trained model."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Prompts and answers."""
    loss: LossSettings = Field(default_factory=LossSettings)
    """The objective. All arguments of LossConfig are keys, for example loss.delta."""
    advantages: Literal[(*MODES, GAE)] = "normalized"  # type: ignore[valid-type]
    """How advantages are computed from rewards."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `advantages`, for example {eps: 1e-4}."""
    rewards: Annotated[list[RewardConfig], BeforeValidator(reward_sections)] = Field(
        default_factory=list
    )
    """Reward functions, each given as a name, as file.py:function or as a section."""
    max_reward_failures: float = Field(0.5, ge=0, le=1)
    """Largest share of samples without a reward; above this share the run ends with an error."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How completions are sampled."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer, AdamW."""
    steps: Count = 100
    """Number of steps. Each step samples completions and trains on them."""
    inner_iterations: Positive = 1
    """Number of training passes over the completions of a step (mu)."""
    minibatches: Positive = 1
    """Number of optimizer steps in one pass over the completions."""
    tokens_per_microbatch: Positive | None = None
    """Tokens of one forward and backward pass; null uses as many as fit into memory."""
    shuffle: Literal["off", "groups", "completions"] = "off"
    """Which items to shuffle before each pass is split into minibatches."""
    max_approx_kl: float | None = Field(None, gt=0)
    """Mean KL to the sampling policy above which later passes are skipped; null sets no limit."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    """The reference model of the KL divergence."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """Where the KL divergence to the reference is applied, and how its weight adapts."""
    critic: CriticConfig | None = None
    """The value function of PPO, for advantages: gae; null means no critic."""
    warm_start: WarmStartConfig | None = None
    """Supervised training on solutions before the first rollout; null skips it."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation on held-out questions."""
    log: LogConfig = Field(default_factory=LogConfig)
    """What the run logs and writes."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When checkpoints are written, and how many are kept."""
    distributed: Literal["ddp", "fsdp2", "hsdp"] | None = None
    """Give each process the full model (ddp), a shard (fsdp2), or a shard of a copy (hsdp)."""
    distributed_replicas: Positive | None = None
    """Number of sharded copies of the model, for distributed: hsdp."""
    distributed_timeout: float = Field(1800, gt=0, le=1e6)
    """Seconds that a process waits for the other processes before it fails."""
    resume: Literal["auto"] | None = None
    """auto resumes from the newest checkpoint in output_dir; without one, it starts a new run."""
    resume_allow: list[Literal["data", "rewards", "reference", "model"]] = Field(
        default_factory=list
    )
    """Kinds of files that may have changed since the resumed run began."""

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        # 1. Set rollout.max_new_tokens to the length of the answers of the sorting task.
        by_symbol = self.model.tokenizer == "symbols" and self.data.task == "sort"
        if by_symbol and "max_new_tokens" not in self.rollout.model_fields_set:
            self.rollout.max_new_tokens = self.data.digits
        # 2. Reject settings that cannot be combined.
        check_conflicts(self)
        check_numbers(self)
        return self

    @property
    def is_sharded(self) -> bool:
        """Return True if every rank stores only a shard of the weights."""
        return self.distributed in ("fsdp2", "hsdp")

    @property
    def stores_reference(self) -> bool:
        """Return True if checkpoints must store the reference, which has no other weight file."""
        is_new = self.reference.kind == "synced" or self.warm_start is not None
        return is_new and self.reference.path is None

    @property
    def has_code(self) -> bool:
        """Return True if the run executes Python code from outside the package."""
        return self.model.trust_remote_code or any(":" in reward.name for reward in self.rewards)

    def loss_config(self) -> LossConfig:
        """Return the `LossConfig` of the run. Some arguments come from the section `rollout`."""
        # Null means the default, also for arguments that do not accept None.
        settings = {name: value for name, value in self.loss if value is not None}
        # With kl.into=reward the rewards already contain the KL, so the loss must not add it again.
        if self.kl.into == "reward":
            settings["beta"] = 0.0
        rollout = self.rollout
        settings.setdefault("temperature", rollout.temperature)
        with named_in("loss"):
            config = LossConfig(
                **settings,
                max_completion_length=rollout.max_new_tokens,
                group_size=rollout.group_size,
            )
        # The loss type bnpo averages over the tokens of a micro-batch. Average over all tokens of
        # the step instead, so that the result does not depend on the split into micro-batches.
        if config.aggregation == "token_mean_local":
            return replace(config, aggregation="token_mean_global")
        return config
