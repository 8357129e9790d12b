"""`RunConfig`: everything a run depends on, and what must fit together."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, cast, get_type_hints

from pydantic import Field, create_model, model_validator

from grpo_fast.objective.advantages import MODES, check_group_size, check_options
from grpo_fast.objective.baseline import split_options
from grpo_fast.objective.config import LossConfig, choice
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.base import Count, Off, Positive, Section, UserPath
from grpo_fast.train.config.data import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from grpo_fast.train.config.model import (
    CriticConfig,
    KLConfig,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    WarmStartConfig,
)

SHARDED = ("fsdp2", "hsdp")  # of `distributed`: every rank has a part of the weights
GAE = "gae"  # advantages of every token, by a critic; the other modes are of a group's rewards


def _loss_settings() -> type[Section]:
    hints = get_type_hints(LossConfig)
    fields: Any = {f.name: (hints[f.name], f.default) for f in dataclasses.fields(LossConfig)}
    fields["temperature"] = (float | None, None)  # None: that of the rollout
    return create_model("LossSettings", __base__=Section, **fields)


# Every field and default of LossConfig, but the temperature's; `RunConfig.loss_config` checks them.
LossSettings = _loss_settings()


class LogConfig(Section):
    """What is written while the run goes on."""

    completions_every: Count = 10  # steps between tables of completions; 0: none
    completions: Positive = 8  # how many in each at least: groups are whole
    page_megabytes: int = Field(8, ge=1, le=1024)  # completions.html; it holds fewer steps then
    every_update: bool = False  # a row of metrics for every optimizer update, beside a step's
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    progress: bool = True  # live progress bar
    save_model: bool = True
    grad_variance: bool = False  # the gradient's variance over groups; as costly as an update


class CheckpointConfig(Section):
    """What of a run is kept to resume from, beside the checkpoint of a run that is ended."""

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
    advantages: str = "normalized"
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    rewards: list[RewardConfig] = Field(min_length=1)
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

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        self._fit_answers()
        self._check_advantages()
        for name in ("softcap", "logit_scale"):
            came = getattr(self.loss, name)
            if came != getattr(LossConfig, name):
                expected = "expected none, the model's own is used"
                raise ValueError(f"loss.{name}: {expected}, came {came}")
        self._check_sampling_correction()
        if not any(reward.weight for reward in self.rewards):
            raise ValueError("rewards: expected a weight that is not 0, came 0 for all")
        self._check_dynamic_sampling()
        if max(self.eval.k, default=1) > self.eval.samples:
            expected = f"expected values up to eval.samples = {self.eval.samples}"
            raise ValueError(f"eval.k: {expected}, came {self.eval.k}")
        self._check_kl()
        self._check_distributed()
        if self.checkpoint.every and self.optim.states != "full":
            expected = "expected full beside checkpoint.every: a file cannot hold the others"
            raise ValueError(f"optim.states: {expected}, came {self.optim.states}")
        if self.reference.kind == "synced" and self.model.lora is not None:
            expected = "with model.lora use frozen (the adapter switched off)"
            raise ValueError(f"reference.kind: {expected}, came synced")
        completions = self.rollout.prompts_per_step * self.rollout.group_size
        if completions % self.minibatches:
            needed = f"must divide the {completions} completions of a step"
            raise ValueError(f"minibatches: {self.minibatches} {needed}")
        return self

    def _check_distributed(self) -> None:
        """Refuse what sharded weights cannot do, and replicas without shards."""
        if (self.distributed == "hsdp") != (self.distributed_replicas is not None):
            expected = "expected a number beside distributed: hsdp, and there alone"
            raise ValueError(f"distributed_replicas: {expected}, came {self.distributed_replicas}")
        if self.distributed not in SHARDED:
            return
        if cast(Any, self.loss).kl_estimator == EXACT:
            expected = "expected an estimator, of the sampled tokens, beside sharded weights"
            raise ValueError(f"loss.kl_estimator: {expected}, came {EXACT}")
        if self.log.grad_variance:
            expected = "expected false beside sharded weights"
            raise ValueError(f"log.grad_variance: {expected}, came true")
        if self.rollout.engine == "continuous":
            expected = "expected transformers, or an engine of its own, beside sharded weights"
            raise ValueError(f"rollout.engine: {expected}, came continuous")
        if self.optim.states != "full":
            expected = "expected full beside sharded weights, which share the moments, too"
            raise ValueError(f"optim.states: {expected}, came {self.optim.states}")

    def _fit_answers(self) -> None:
        """Room for the answer of a generated task, where nobody said how much."""
        by_symbol = self.model.tokenizer == "symbols" and self.data.task in ("sort", "arithmetic")
        if by_symbol and "max_new_tokens" not in self.rollout.model_fields_set:
            # A sum may have a digit more than its parts, and ends with an EOS.
            longer = 2 if self.data.task == "arithmetic" else 0
            self.rollout.max_new_tokens = self.data.digits + longer

    def _check_advantages(self) -> None:
        choice("advantages", self.advantages, [*MODES, GAE])
        if self.advantages != GAE:
            options, _ = split_options(self.advantages, self.advantage_options)
            check_options(self.advantages, options)
            check_group_size(self.advantages, self.rollout.group_size)
        elif self.advantage_options:
            came = f"came {self.advantage_options}"
            raise ValueError(f"advantage_options: expected none, critic has those of gae, {came}")
        if self.critic is None and self.advantages == GAE:
            raise ValueError("critic: expected a section (critic={}) beside advantages: gae")
        if self.log.grad_variance and self.advantages == GAE:
            expected = "expected false with a critic: its advantages are no group's"
            raise ValueError(f"log.grad_variance: {expected}, came true")
        if self.critic is not None and self.advantages != GAE:
            raise ValueError(f"advantages: expected gae beside a critic, came {self.advantages}")

    def _check_kl(self) -> None:
        """Refuse a KL that has no reference, no weight, or no place."""
        loss, kl = cast(Any, self.loss), self.kl
        uses = self.loss_config().uses_reference  # raises with the argument's name
        if kl.into == "reward":
            if self.advantages != GAE:
                raise ValueError(f"kl.into: reward expects advantages: gae, came {self.advantages}")
            if loss.kl_estimator == EXACT:
                expected = "expected an estimator, of the sampled tokens, beside kl.into: reward"
                raise ValueError(f"loss.kl_estimator: {expected}, came {EXACT}")
            if loss.kl_times_ratio or not OBJECTIVES[loss.loss_type].reference:
                expected = "expected loss for a loss_type or kl_times_ratio with a KL of its own"
                raise ValueError(f"kl.into: {expected}, came reward")
            uses = loss.beta != 0
        if (kl.into == "reward" or kl.target is not None) and not (uses and loss.beta > 0):
            expected = "expected a weight > 0 of the KL, beside kl.into: reward or a kl.target"
            raise ValueError(f"loss.beta: {expected}, came {loss.beta}")
        if uses and self.reference.kind == "none":
            expected = "loss.beta is not 0, so it must be frozen or synced"
            raise ValueError(f"reference.kind: {expected}, came none")
        if self.max_ref_kl is not None and self.reference.kind == "none":
            expected = "expected frozen or synced beside max_ref_kl"
            raise ValueError(f"reference.kind: {expected}, came none")

    def _check_dynamic_sampling(self) -> None:
        """Refuse to judge by a reward that is not there, and groups that cannot have a spread."""
        dynamic = self.rollout.dynamic
        if dynamic is None:
            return
        labels = [reward.label or reward.name.rpartition(":")[2] for reward in self.rewards]
        if dynamic.judged_by not in (None, *labels):
            expected = f"expected one of the rewards {', '.join(labels)}"
            raise ValueError(f"rollout.dynamic.judged_by: {expected}, came {dynamic.judged_by!r}")
        if self.rollout.group_size < 2:
            expected = "expected at least 2 beside rollout.dynamic"
            raise ValueError(f"rollout.group_size: {expected}, came {self.rollout.group_size}")

    def _check_sampling_correction(self) -> None:
        """Refuse a correction by logps that the loss is not given, and logps it does not read."""
        given, loss = self.rollout.correct_sampling, cast(Any, self.loss)
        if self.rollout.ahead and not given:
            expected = "expected true beside rollout.ahead, whose completions older weights sampled"
            raise ValueError(f"rollout.correct_sampling: {expected}, came false")
        for name in ("sampling_correction", "sampling_ratio_cap"):
            came, default = getattr(loss, name), getattr(LossConfig, name)
            # A saved configuration holds every default: this one beside correct_sampling: false.
            saved = came == default and "correct_sampling" in self.rollout.model_fields_set
            if not given and name in loss.model_fields_set and came is not None and not saved:
                needed = "rollout.correct_sampling: true"
                raise ValueError(f"loss.{name}: expected {needed} beside it, came {came!r} alone")
        if given and loss.sampling_correction is None and loss.off_policy_threshold is None:
            raise ValueError(
                "rollout.correct_sampling: expected loss.sampling_correction or "
                "loss.off_policy_threshold beside it, came neither"
            )

    def loss_config(self) -> LossConfig:
        """The loss's own frozen configuration, with the sampling temperature unless one was set.

        A KL in the reward is not in the loss, whose beta is then 0.
        """
        settings: dict[str, Any] = dict(self.loss)
        if self.kl.into == "reward":
            settings["beta"] = 0.0
        if settings["temperature"] is None:
            settings["temperature"] = self.rollout.temperature
        if settings["max_completion_length"] is None:
            settings["max_completion_length"] = self.rollout.max_new_tokens
        return LossConfig(**settings)
