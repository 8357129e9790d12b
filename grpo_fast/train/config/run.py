"""`RunConfig`: everything a run depends on, and what must fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_fast.objective.advantages import MODES
from grpo_fast.objective.config import LossConfig
from grpo_fast.rollout.vllm.options import plain_url
from grpo_fast.train.config.base import (
    Count,
    Off,
    Positive,
    Section,
    UserPath,
    named_in,
    reward_sections,
)
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
from grpo_fast.train.config.rules import GAE, RULES

Rewards = Annotated[list[RewardConfig], BeforeValidator(reward_sections)]


class LogConfig(Section):
    completions_every: Count = 10
    """Steps between tables of completions; 0 writes none."""
    completions: Positive = 8
    """Completions in each table, rounded up to complete groups."""
    page_megabytes: int = Field(8, ge=1, le=1024)
    """Largest size of completions.html in MiB; beyond it the page holds fewer steps."""
    every_update: bool = False
    """Also write a row of metrics for every optimizer update."""
    trackers: list[str] = Field(default_factory=list)
    """Experiment trackers of accelerate that receive the metrics: tensorboard, wandb, mlflow, …"""
    progress: bool = True
    """Show progress while the run goes on."""
    save_model: bool = True
    """Write the trained model to output_dir/model."""
    grad_variance: bool = False
    """Log the gradient's variance over groups, which costs as much as an update."""


class CheckpointConfig(Section):
    """When checkpoints are written, and how many stay. A run that ends early writes one, too."""

    every: Count = 0  # steps between checkpoints; 0: by time alone
    every_minutes: float = Field(15, ge=0, le=1e6)  # between checkpoints; 0: by steps alone
    keep: Positive = 2  # the newest ones
    best: str | None = None  # and the one of the highest value of this metric, of its step's row


class RunConfig(Section):
    """Everything a run depends on; saved resolved as config.yaml beside its results."""

    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    """Seed of all random numbers."""
    output_dir: UserPath = "runs/default"
    """Folder of the run's results."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Prompts and answers."""
    loss: LossSettings = Field(default_factory=LossSettings)  # type: ignore[valid-type]
    """The options of LossConfig."""
    advantages: Literal[(*MODES, GAE)] = "normalized"  # type: ignore[valid-type]
    """How rewards become advantages."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `advantages`, for example {eps: 1e-4}."""
    rewards: Annotated[list[RewardConfig], BeforeValidator(reward_sections)] = Field(
        default_factory=list
    )
    """Reward functions: names, file.py:function, or sections."""
    max_reward_failures: float = Field(0.5, ge=0, le=1)
    """Largest share of samples without a reward; a larger share ends the run."""
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
    """Tokens of a forward and backward pass; null takes what fits into memory."""
    shuffle: Annotated[Literal["off", "groups", "completions"], Off] = "off"
    """What is shuffled before each pass is split into minibatches."""
    shared_prompt: bool = True
    """Compute the prompt of a group once for all its completions."""
    max_approx_kl: float | None = Field(None, gt=0)
    """End the passes over a batch when a pass's mean KL to the sampling policy exceeds this."""
    max_ref_kl: float | None = Field(None, gt=0)
    """End the passes over a batch when a pass's mean KL to the reference exceeds this."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    """The reference model of the KL term."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """Where the KL to the reference enters, and an adaptive weight."""
    distill: DistillConfig | None = None
    """A teacher, for on-policy distillation."""
    critic: CriticConfig | None = None
    """PPO's value function, for advantages: gae."""
    warm_start: WarmStartConfig | None = None
    """Supervised training on the solutions before the first rollout."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation on held-out questions."""
    log: LogConfig = Field(default_factory=LogConfig)
    """What the run logs and writes."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When checkpoints are written, and how many are kept."""
    distributed: Literal["ddp", "fsdp2", "hsdp"] | None = None
    """How the processes of torchrun share the model: copies, shards, or copies of shards."""
    distributed_replicas: Positive | None = None
    """Number of copies for distributed: hsdp."""
    distributed_timeout: float = Field(1800, gt=0, le=1e6)
    """Seconds that a process waits for the others."""
    resume: Literal["auto"] | None = None
    """auto continues from the newest checkpoint of output_dir, or begins if it has none."""
    resume_allow: list[Literal["data", "rewards", "reference"]] = Field(default_factory=list)
    """What may differ from the run that is resumed."""

    @model_validator(mode="before")
    @classmethod
    def _teacher_is_the_reference(cls, values: Any) -> Any:
        distill = values.get("distill") if isinstance(values, dict) else None
        path = distill.get("teacher") if isinstance(distill, dict) else None
        if "://" in str(path):  # a URL may hold a password, which a field's own refusal would quote
            teacher = plain_url("distill.teacher", path)
            return {**values, "distill": {**distill, "teacher": teacher}}
        if path is None or "reference" in values:
            return values
        return {**values, "reference": {"kind": "frozen", "path": path}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        self._fit_answers()
        for rules in RULES:
            for error in rules(self):
                raise error
        return self

    def _fit_answers(self) -> None:
        """Give a generated task room for its answer, unless the settings say how much."""
        by_symbol = self.model.tokenizer == "symbols" and self.data.task in ("sort", "arithmetic")
        if by_symbol and "max_new_tokens" not in self.rollout.model_fields_set:
            # A sum may have a digit more than its parts, and ends with an EOS.
            longer = 2 if self.data.task == "arithmetic" else 0
            self.rollout.max_new_tokens = self.data.digits + longer

    @property
    def is_sharded(self) -> bool:
        """Whether every rank has a part of the weights."""
        return self.distributed in ("fsdp2", "hsdp")

    @property
    def stores_reference(self) -> bool:
        """Whether a checkpoint holds the reference: synced, or the model of a warm start."""
        is_new = self.reference.kind == "synced" or self.warm_start is not None
        return is_new and self.reference.path is None

    @property
    def has_code(self) -> bool:
        return self.model.trust_remote_code or any(":" in reward.name for reward in self.rewards)

    @property
    def _loss(self) -> Any:  # its type is made at run time
        return self.loss

    def loss_config(self) -> LossConfig:
        """The loss's own frozen configuration, with the sampling temperature unless one was set.

        A KL in the reward is not in the loss, whose beta is then 0.
        """
        settings: dict[str, Any] = dict(self.loss)
        settings["corrections"] = [dict(x) for x in settings["corrections"]]
        if self.kl.into == "reward":
            settings["beta"] = 0.0
        if settings["temperature"] is None:
            settings["temperature"] = self.rollout.temperature
        if settings["max_completion_length"] is None:
            settings["max_completion_length"] = self.rollout.max_new_tokens
        with named_in("loss"):
            config = LossConfig(**settings, group_size=self.rollout.group_size)
        if config.aggregation == "token_mean_local":
            # How a step is split into micro-batches must not change it: bnpo's batch is the step.
            return replace(config, aggregation="token_mean_global")
        return config
