"""The complete configuration of a run, `RunConfig`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_fast.objective.advantages import MODES
from grpo_fast.objective.config import LossConfig
from grpo_fast.rollout.vllm.options import plain_url
from grpo_fast.train.config.base import Count, Positive, Section, UserPath, named_in
from grpo_fast.train.config.data import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from grpo_fast.train.config.loss import LossSettings
from grpo_fast.train.config.model import (
    CriticConfig,
    DistillConfig,
    KLConfig,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    WarmStartConfig,
)
from grpo_fast.train.config.rules import GAE, check_conflicts, check_numbers


def reward_sections(rewards: Any) -> Any:
    """Convert the setting `rewards` to a list of sections.

    A plain text such as myreward.py:reward becomes a section with this name.
    """
    listed = [rewards] if isinstance(rewards, (str, dict)) else rewards
    if not isinstance(listed, list):
        return listed
    return [{"name": reward} if isinstance(reward, str) else reward for reward in listed]


class LogConfig(Section):
    completions_every: Count = 10
    """Steps between tables of completions; 0 writes none."""
    trackers: list[str] = Field(default_factory=list)
    """Trackers of accelerate that receive the metrics, for example tensorboard, wandb or mlflow."""
    progress: bool = True
    """Show the progress of the run."""
    save_model: bool = True
    """Write the trained model to output_dir/model."""
    grad_variance: bool = False
    """Log the variance of the gradient over groups, which takes as long as an update."""


class CheckpointConfig(Section):
    """Schedule of the checkpoints. A run that ends early also writes a checkpoint."""

    every: Count = 0
    """Steps between checkpoints; 0 writes them by time only."""
    every_minutes: float = Field(15, ge=0, le=1e6)
    """Minutes between checkpoints; 0 writes them by steps only."""
    keep: Positive = 2
    """Number of newest checkpoints that are kept."""


class RunConfig(Section):
    """All settings of a run. The run saves them as config.yaml in its output_dir."""

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
    """How rewards become advantages."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `advantages`, for example {eps: 1e-4}."""
    rewards: Annotated[list[RewardConfig], BeforeValidator(reward_sections)] = Field(
        default_factory=list
    )
    """Reward functions, each as a name, as file.py:function or as a section."""
    max_reward_failures: float = Field(0.5, ge=0, le=1)
    """Share of samples without a reward above which the run ends."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How completions are sampled."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer, AdamW."""
    steps: Count = 100
    """Steps of the run; each samples completions and trains on them."""
    inner_iterations: Positive = 1
    """Passes over the completions of a step (mu)."""
    minibatches: Positive = 1
    """Optimizer steps per pass."""
    tokens_per_microbatch: Positive | None = None
    """Tokens of one forward and backward pass; null uses as many as fit into memory."""
    shuffle: Literal["off", "groups", "completions"] = "off"
    """What is shuffled before each pass is split into minibatches."""
    max_approx_kl: float | None = Field(None, gt=0)
    """Mean KL to the sampling policy after which no further pass is made; null has no limit."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    """The reference model of the KL divergence."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """Use of the KL divergence to the reference, and an adaptive weight."""
    distill: DistillConfig | None = None
    """A teacher for on-policy distillation; null has none."""
    critic: CriticConfig | None = None
    """PPO's value function, for advantages: gae; null has none."""
    warm_start: WarmStartConfig | None = None
    """Supervised training on the solutions before the first rollout; null has none."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation on held-out questions."""
    log: LogConfig = Field(default_factory=LogConfig)
    """What the run logs and writes."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When checkpoints are written, and how many are kept."""
    distributed: Literal["ddp", "fsdp2", "hsdp"] | None = None
    """Whether the processes of torchrun hold copies, shards or copies of shards of the model."""
    distributed_replicas: Positive | None = None
    """Number of copies for distributed: hsdp."""
    distributed_timeout: float = Field(1800, gt=0, le=1e6)
    """Seconds that a process waits for the others."""
    resume: Literal["auto"] | None = None
    """auto continues from the newest checkpoint of output_dir, or begins if it has none."""
    resume_allow: list[Literal["data", "rewards", "reference"]] = Field(default_factory=list)
    """Parts that may differ from the run that is resumed."""

    @model_validator(mode="before")
    @classmethod
    def _teacher_is_the_reference(cls, values: Any) -> Any:
        distill = values.get("distill") if isinstance(values, dict) else None
        path = distill.get("teacher") if isinstance(distill, dict) else None
        # Check the URL here, because it may contain a password and pydantic's error message would
        # print the password.
        if "://" in str(path):
            teacher = plain_url("distill.teacher", path)
            return {**values, "distill": {**distill, "teacher": teacher}}
        # A teacher that is not a server is loaded as the frozen reference, unless the user has set
        # a reference.
        if path is None or "reference" in values:
            return values
        return {**values, "reference": {"kind": "frozen", "path": path}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        # 1. Set rollout.max_new_tokens to the length of a generated task's longest answer.
        by_symbol = self.model.tokenizer == "symbols" and self.data.task in ("sort", "arithmetic")
        if by_symbol and "max_new_tokens" not in self.rollout.model_fields_set:
            # A sum can have one digit more than its terms, and an EOS follows it. Both need a
            # token.
            longer = 2 if self.data.task == "arithmetic" else 0
            self.rollout.max_new_tokens = self.data.digits + longer
        # 2. Reject settings that do not fit together.
        check_conflicts(self)
        check_numbers(self)
        return self

    @property
    def is_sharded(self) -> bool:
        """True if every rank stores only a shard of the weights."""
        return self.distributed in ("fsdp2", "hsdp")

    @property
    def stores_reference(self) -> bool:
        """True if checkpoints must contain the reference, because no path can load it again."""
        is_new = self.reference.kind == "synced" or self.warm_start is not None
        return is_new and self.reference.path is None

    @property
    def has_code(self) -> bool:
        """True if the run executes Python code from outside the package."""
        return self.model.trust_remote_code or any(":" in reward.name for reward in self.rewards)

    def loss_config(self) -> LossConfig:
        """Return the configuration of the loss, including settings from the section `rollout`."""
        settings = self.loss.arguments()
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
        # bnpo averages over the tokens of a micro-batch. Replace this mean with the mean over all
        # tokens of the step, so that the result does not depend on the split into micro-batches.
        if config.aggregation == "token_mean_local":
            return replace(config, aggregation="token_mean_global")
        return config
