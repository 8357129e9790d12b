"""The complete configuration of a run, `RunConfig`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_fast.errors import conflict, require
from grpo_fast.objective.advantages import MODES, check_group_size, check_options
from grpo_fast.objective.baseline import split_options
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config.sections import (
    Count,
    CriticConfig,
    DataConfig,
    EvalConfig,
    KLConfig,
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
from grpo_fast.train.config.words import reward_sections

GAE = "gae"  # value of `advantages` for which a critic provides an advantage for each token
MOST_COMPLETIONS = 1 << 20  # maximum number of completions in one step


class LogConfig(Section):
    """Logs and files of a run.

    Attributes:
        completions_every: Steps between saved tables of completions; 0 saves none.
        trackers: Trackers of accelerate that receive the metrics, for example tensorboard, wandb or
            mlflow.
        progress: Print progress lines and the results of evaluations.
        save_model: Write the trained model to output_dir/model.
        grad_variance: Log the variance of the gradient between groups. This takes as long as an
            update.
    """

    completions_every: Count = 10
    trackers: list[str] = Field(default_factory=list)
    progress: bool = True
    save_model: bool = True
    grad_variance: bool = False


class CheckpointConfig(Section):
    """Checkpoint schedule. A run that ends early also writes a checkpoint.

    With `every: 0` and `every_minutes: 0`, only runs that end early write one.

    Attributes:
        every: Steps between checkpoints; 0 writes them by time, and after the last step.
        every_minutes: Minutes between checkpoints; 0 writes them by steps, and after the last step.
        keep: Number of checkpoints to keep; older ones are deleted.
        on_save: Function module:function or file.py:function that gets each new checkpoint.
    """

    every: Count = 0
    every_minutes: float = Field(15, ge=0, le=1e6)
    keep: Positive = 2
    on_save: str | None = None


class RunConfig(Section):
    """All settings of a run. A run saves them in the file config.yaml of its output_dir.

    Attributes:
        seed: Seed of all random numbers.
        output_dir: Folder for metrics, checkpoints and the trained model.
        model: The policy.
        data: Prompts and answers.
        loss: The objective. All arguments of LossConfig are keys, for example loss.delta.
        advantages: How advantages are computed from rewards.
        advantage_options: Options of `advantages`, for example {eps: 1e-4}.
        rewards: Reward functions, each given as a name, as file.py:function or as a section.
        max_reward_failures: Largest share of samples without a reward; above this share the run
            ends with an error.
        rollout: How completions are sampled.
        optim: The optimizer, AdamW.
        steps: Number of steps. Each step samples completions and trains on them.
        inner_iterations: Number of training passes over the completions of a step (mu).
        minibatches: Number of optimizer steps in one pass over the completions.
        tokens_per_microbatch: Tokens of one forward and backward pass; null uses as many as fit
            into memory.
        shuffle: Which items to shuffle before each pass is split into minibatches.
        max_approx_kl: Mean KL to the sampling policy above which later passes are skipped; null
            sets no limit.
        reference: The reference model of the KL divergence.
        kl: Where the KL divergence to the reference is applied, and how its weight adapts.
        critic: The value function of PPO, for advantages: gae; null means no critic.
        warm_start: Supervised training on solutions before the first rollout; null skips it.
        eval: Evaluation on held-out questions.
        log: What the run logs and writes.
        checkpoint: When checkpoints are written, and how many are kept.
        distributed: Give each process the full model (ddp), a shard (fsdp2), or a shard of a copy
            (hsdp).
        distributed_replicas: Number of sharded copies of the model, for distributed: hsdp.
        distributed_timeout: Seconds that a process waits for the other processes before it fails.
        resume: auto resumes from the newest checkpoint in output_dir; without one, it starts a new
            run.
        resume_allow: Kinds of files that may have changed since the resumed run began.
    """

    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    output_dir: UserPath = "runs/default"
    model: ModelConfig
    data: DataConfig
    loss: LossSettings = Field(default_factory=LossSettings)
    advantages: Literal[(*MODES, GAE)] = "normalized"  # type: ignore[valid-type]
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    rewards: Annotated[list[RewardConfig], BeforeValidator(reward_sections)] = Field(
        default_factory=list
    )
    max_reward_failures: float = Field(0.5, ge=0, le=1)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    steps: Count = 100
    inner_iterations: Positive = 1
    minibatches: Positive = 1
    tokens_per_microbatch: Positive | None = None
    shuffle: Literal["off", "groups", "completions"] = "off"
    max_approx_kl: float | None = Field(None, gt=0)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    critic: CriticConfig | None = None
    warm_start: WarmStartConfig | None = None
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    distributed: Literal["ddp", "fsdp2", "hsdp"] | None = None
    distributed_replicas: Positive | None = None
    distributed_timeout: float = Field(1800, gt=0, le=1e6)
    resume: Literal["auto"] | None = None
    resume_allow: list[Literal["data", "rewards", "reference", "model"]] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        # Set rollout.max_new_tokens to the length of the answers of the sorting task.
        by_symbol = self.model.tokenizer == "symbols" and self.data.task == "sort"
        if by_symbol and "max_new_tokens" not in self.rollout.model_fields_set:
            self.rollout.max_new_tokens = self.data.digits
        self._check_advantages()
        self._check_kl()
        self._check_step()
        return self

    def _check_advantages(self) -> None:
        """Raise a ValueError if advantages, critic and rewards do not fit together."""
        mode = self.advantages
        has_critic = self.critic is not None
        if has_critic != (mode == GAE):
            why = "gae needs the section critic={}, which no other mode reads"
            raise conflict(f"advantages={mode}", "critic" if has_critic else "critic=null", why)
        if mode == GAE:
            if self.advantage_options:
                why = "the options of gae are in the section critic"
                raise conflict("advantages=gae", "advantage_options", why)
        else:
            with named_in("advantage_options"):
                check_options(mode, split_options(mode, self.advantage_options)[0])
            check_group_size(mode, self.rollout.group_size)
        if self.log.grad_variance and (has_critic or self.is_sharded):
            setting = "critic" if has_critic else f"distributed={self.distributed}"
            why = "it needs the gradient of each group on one rank"
            raise conflict("log.grad_variance=true", setting, why)
        came = "0 for all" if self.rewards else "no reward"
        fits = any(reward.weight for reward in self.rewards)
        require(fits, "rewards", "a weight that is not 0", came)
        if self.rollout.dynamic is not None:
            labels = [reward.label or reward.name.rpartition(":")[2] for reward in self.rewards]
            judge = self.rollout.dynamic.judged_by
            expected = f"one of the rewards {', '.join(labels)}"
            require(judge in (None, *labels), "rollout.dynamic.judged_by", expected, repr(judge))

    def _check_kl(self) -> None:
        """Raise a ValueError if the KL divergence, its weight and the reference do not fit."""
        loss = self.loss
        into = f"kl.into={self.kl.into}"
        if self.kl.into == "reward" and self.advantages != GAE:
            why = "only gae spreads a token's reward; use kl.into=loss"
            raise conflict(into, f"advantages={self.advantages}", why)
        if self.kl.into == "reward" or self.kl.target is not None:
            setting = into if self.kl.into == "reward" else f"kl.target={self.kl.target:g}"
            if not OBJECTIVES[loss.loss_type].reference:
                why = "beta is no weight of this KL in this loss"
                raise conflict(setting, f"loss.loss_type={loss.loss_type}", why)
            if loss.beta == 0:
                raise conflict(setting, "loss.beta=0", "the KL needs a weight above 0")
        if self.kl.into == "reward":
            why = "the reward is of the sampled token and has no ratio; use kl.into=loss"
            if loss.kl_estimator in EXACT:
                raise conflict(into, f"loss.kl_estimator={loss.kl_estimator}", why)
            if loss.kl_times_ratio:
                raise conflict(into, "loss.kl_times_ratio=true", why)
        kind = self.reference.kind
        needed = self.loss_config().uses_reference or self.kl.into == "reward"
        if kind == "none" and needed:
            why = "set reference.kind to frozen or synced"
            raise conflict("reference.kind=none", f"loss.beta={loss.beta:g}", why)
        if kind == "synced" and self.model.lora is not None:
            why = "the reference is the model without its adapter"
            raise conflict("reference.kind=synced", "model.lora", why)

    def _check_step(self) -> None:
        """Raise a ValueError if corrections, minibatches or ranks do not fit a step."""
        corrections = self.loss_config().corrections
        corrects = self.rollout.correct_sampling
        if corrects and not corrections:
            why = "without corrections it has no use"
            raise conflict("rollout.correct_sampling=true", "loss.corrections", why)
        of_sampler = any(each.ratio != "current/behaviour" for each in corrections)
        if of_sampler and corrections != LossConfig.corrections and not corrects:
            why = "they read the sampler's log-probabilities; set rollout.correct_sampling=true"
            raise conflict("loss.corrections", "rollout.correct_sampling=false", why)
        count = self.rollout.prompts_per_step * self.rollout.group_size
        expected = f"a number that divides the {count} completions of a step"
        require(count % self.minibatches == 0, "minibatches", expected, self.minibatches)
        expected = f"at most {MOST_COMPLETIONS} completions in a step, prompts times group size"
        require(count <= MOST_COMPLETIONS, "rollout.group_size", expected, count)
        fits = (self.distributed == "hsdp") == (self.distributed_replicas is not None)
        expected = "a number with distributed=hsdp, and null without"
        require(fits, "distributed_replicas", expected, self.distributed_replicas)

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
