"""`RunConfig`: everything a run depends on, and what must fit together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.objective.advantages import MODES
from grpo_fast.objective.config import LossConfig
from grpo_fast.rollout.vllm.options import plain_url
from grpo_fast.train.config.base import Count, Off, Positive, Section, UserPath, named_in
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


class LogConfig(Section):
    completions_every: Count = 10  # steps between tables of completions; 0: none
    completions: Positive = 8  # how many in each at least: groups are whole
    page_megabytes: int = Field(8, ge=1, le=1024)  # completions.html; it holds fewer steps then
    every_update: bool = False  # a row of metrics for every optimizer update, beside a step's
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    progress: bool = True  # live progress bar
    save_model: bool = True
    grad_variance: bool = False  # the gradient's variance over groups; as costly as an update


class CheckpointConfig(Section):
    """When checkpoints are written, and how many stay. A run that is ended writes one, too."""

    every: Count = 0  # steps between checkpoints; 0: only when a signal or an error ends the run
    keep: Positive = 2  # the newest ones
    best: str | None = None  # and the one of the highest value of this metric, of its step's row


class RunConfig(Section):
    """Everything a run depends on; saved resolved as config.yaml beside its results."""

    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    output_dir: UserPath = "runs/default"
    model: ModelConfig
    data: DataConfig
    loss: LossSettings = Field(default_factory=LossSettings)  # type: ignore[valid-type]
    advantages: Literal[(*MODES, GAE)] = "normalized"  # type: ignore[valid-type]
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    rewards: list[RewardConfig] = Field(default_factory=list)  # none beside data.task: traces
    max_reward_failures: float = Field(0.5, ge=0, le=1)  # a larger share without one ends the run
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    steps: Count = 100
    inner_iterations: Positive = 1  # μ: passes over one batch of completions
    minibatches: Positive = 1  # optimizer steps per pass
    tokens_per_microbatch: Positive | None = None  # None: what the memory model finds room for
    # what is dealt to the minibatches anew in every pass; off: completions in their order
    shuffle: Annotated[Literal["off", "groups", "completions"], Off] = "off"
    shared_prompt: bool = True  # the completions of a group share one copy of their prompt
    # These end the inner passes of a batch early, by the mean over a whole pass.
    max_approx_kl: float | None = Field(None, gt=0)  # to the policy that sampled the batch
    max_ref_kl: float | None = Field(None, gt=0)  # to the reference
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    distill: DistillConfig | None = None
    critic: CriticConfig | None = None
    warm_start: WarmStartConfig | None = None
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    # of the processes that torchrun starts: all with the weights, all with a shard of them, or
    # `distributed_replicas` groups of processes with shards
    distributed: Literal["ddp", "fsdp2", "hsdp"] | None = None
    distributed_replicas: Positive | None = None  # hsdp
    distributed_timeout: float = Field(1800, gt=0, le=1e6)  # seconds that one waits for another
    # auto: the newest whole checkpoint of output_dir, or the beginning; else a run or a checkpoint
    resume: UserPath | None = None
    # what may have changed since the run that goes on was left, and is taken as it is now
    resume_allow: list[Literal["data", "rewards", "reference"]] = Field(default_factory=list)

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
            return LossConfig(**settings, group_size=self.rollout.group_size)
