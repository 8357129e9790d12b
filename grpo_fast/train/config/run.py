"""`RunConfig`: everything a run depends on, and what must fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.objective.advantages import MODES, check_group_size, check_options
from grpo_fast.objective.baseline import split_options
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.rollout.vllm.options import plain_url
from grpo_fast.train.config.base import Count, Off, Positive, Section, UserPath, named_in, require
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

Rules = Iterator[tuple[Any, str, str, Any]]  # fits, the setting, what is expected, what came
GAE = "gae"  # advantages of every token, by a critic; the other modes are of a group's rewards


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
    """When checkpoints are written, and how many stay. A run that ends early writes one, too."""

    every: Count = 0  # steps between checkpoints; 0: by time alone
    every_minutes: float = Field(15, ge=0, le=1e6)  # between checkpoints; 0: by steps alone
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
        for rules in (
            self._distill_rules, self._advantage_rules, self._loss_rules, self._reward_rules,
            self._sampling_rules, self._kl_rules, self._sharding_rules, self._step_rules,
        ):  # fmt: skip
            for fits, name, expected, came in rules():
                require(fits, name, expected, came)
        return self

    def _fit_answers(self) -> None:
        """Give a generated task room for its answer, unless the settings say how much."""
        by_symbol = self.model.tokenizer == "symbols" and self.data.task in ("sort", "arithmetic")
        if by_symbol and "max_new_tokens" not in self.rollout.model_fields_set:
            # A sum may have a digit more than its parts, and ends with an EOS.
            longer = 2 if self.data.task == "arithmetic" else 0
            self.rollout.max_new_tokens = self.data.digits + longer

    def _distill_rules(self) -> Rules:
        if (distill := self.distill) is None:
            return
        came, loss = (self.reference.kind, self.reference.path), self._loss
        own = ("none", None) if distill.asked else ("frozen", distill.teacher)
        fits = distill.teacher is None or came == own
        yield fits, "reference", "none beside distill.teacher", came
        expected = "a teacher, or reference.kind: frozen or synced"
        yield came[0] != "none" or distill.asked, "distill.teacher", expected, "none"
        if distill.asked:
            temperature = float(self.loss_config().temperature)
            expected = "1 beside a teacher's server, whose log-probabilities are those of 1"
            yield temperature == 1, "rollout.temperature", expected, temperature
            expected = "off beside a teacher's server and top_p or top_k"
            yield not self.rollout.wants_kept, "rollout.replay_support", expected, "auto"
            task = self.data.task
            yield task != "traces", "data.task", "prompts beside a teacher's server", task
        expected = "0 beside distill, which weighs the divergence"
        yield not loss.beta, "loss.beta", expected, loss.beta
        fits, expected = loss.kl_estimator not in EXACT, "an estimator beside distill"
        yield fits, "loss.kl_estimator", expected, loss.kl_estimator
        yield self.advantages != GAE, "advantages", "those of a group beside distill", GAE

    def _advantage_rules(self) -> Rules:
        options = self.advantage_options
        if self.advantages == GAE:
            yield not options, "advantage_options", "none, critic has those of gae", options
            expected = "a section (critic={}) beside advantages: gae"
            yield self.critic is not None, "critic", expected, "none"
            expected = "false with a critic: its advantages are no group's"
            yield not self.log.grad_variance, "log.grad_variance", expected, "true"
            return
        yield self.critic is None, "advantages", "gae beside a critic", self.advantages
        with named_in("advantage_options"):
            check_options(self.advantages, split_options(self.advantages, options)[0])
        check_group_size(self.advantages, self.rollout.group_size)

    def _loss_rules(self) -> Rules:
        """Refuse another head rule, corrections without the sampler's logps, logps without any."""
        loss, corrects = self._loss, self.rollout.correct_sampling
        for name in ("softcap", "logit_scale"):
            own = getattr(loss, name)
            fits = own == getattr(LossConfig, name)
            yield fits, f"loss.{name}", "none, the model's own is used", own
        expected = "true beside rollout.ahead, whose completions older weights sampled"
        yield corrects or not self.rollout.ahead, "rollout.correct_sampling", expected, "false"
        # A saved configuration holds every default: this one beside correct_sampling: false.
        is_default = loss.corrections == LossSettings().corrections
        saved = is_default and "correct_sampling" in self.rollout.model_fields_set
        of_sampler = [x for x in loss.corrections if x.ratio != "current/behaviour"]
        fits = corrects or saved or not of_sampler or "corrections" not in loss.model_fields_set
        came = "corrections by the sampler's logps alone"
        yield fits, "loss.corrections", "rollout.correct_sampling: true beside it", came
        fits = loss.corrections or not corrects
        yield fits, "rollout.correct_sampling", "loss.corrections beside it", "none"

    def _reward_rules(self) -> Rules:
        """Ask for a weighed reward; beside recorded rollouts refuse all that would sample."""
        if self.data.task != "traces":
            weighed = any(reward.weight for reward in self.rewards)
            none = "0 for all" if self.rewards else "no reward"
            yield weighed, "rewards", "a weight that is not 0", none
            return
        rollout, aggregation = self.rollout, self._loss.aggregation
        for fits, name, expected, came in (
            (not self.rewards, "rewards", "none, traces have theirs", f"{len(self.rewards)}"),
            (self.advantages != "gdpo", "advantages", "a mode of one reward", "gdpo"),
            (aggregation != "prompt_mean", "loss.aggregation", "one without groups of equal size",
             "prompt_mean"),
            (not rollout.ahead, "rollout.ahead", "0", rollout.ahead),
            (rollout.dynamic is None, "rollout.dynamic", "none", "a section"),
            (self.critic is None, "critic", "none", "a section"),
            (self.warm_start is None, "warm_start", "none", "a section"),
            (not self.log.grad_variance, "log.grad_variance", "false", "true"),
            (self.minibatches == 1, "minibatches", "1", self.minibatches),
            (self.shuffle == "off", "shuffle", "off", self.shuffle),
        ):  # fmt: skip
            yield fits, name, f"{expected} beside data.task: traces", came

    def _sampling_rules(self) -> Rules:
        dynamic, size, samples = self.rollout.dynamic, self.rollout.group_size, self.eval.samples
        if dynamic is not None:
            labels = [reward.label or reward.name.rpartition(":")[2] for reward in self.rewards]
            expected, judge = f"one of the rewards {', '.join(labels)}", dynamic.judged_by
            yield judge in (None, *labels), "rollout.dynamic.judged_by", expected, repr(judge)
            yield size >= 2, "rollout.group_size", "at least 2 beside rollout.dynamic", size
        fits = max(self.eval.k, default=1) <= samples
        yield fits, "eval.k", f"values up to eval.samples = {samples}", self.eval.k

    def _kl_rules(self) -> Rules:
        loss, kl, has_reference = self._loss, self.kl, self.reference.kind != "none"
        uses = self.loss_config().uses_reference  # raises with the argument's name
        if kl.into == "reward":
            came = f"reward, {self.advantages}"
            yield self.advantages == GAE, "kl.into", "loss unless advantages: gae", came
            expected = "an estimator, of the sampled tokens, beside kl.into: reward"
            came = loss.kl_estimator
            yield came not in EXACT, "loss.kl_estimator", expected, came
            fits = not loss.kl_times_ratio and OBJECTIVES[loss.loss_type].reference
            expected = "loss for a loss_type or kl_times_ratio with a KL of its own"
            yield fits, "kl.into", expected, "reward"
            uses = loss.beta != 0
        if kl.into == "reward" or kl.target is not None:
            expected = "a weight > 0 of the KL, beside kl.into: reward or a kl.target"
            yield uses and loss.beta > 0, "loss.beta", expected, loss.beta
        expected = "frozen or synced, loss.beta is not 0"
        yield has_reference or not uses, "reference.kind", expected, "none"
        fits = has_reference or self.max_ref_kl is None
        yield fits, "reference.kind", "frozen or synced beside max_ref_kl", "none"

    def _sharding_rules(self) -> Rules:
        fits = (self.distributed == "hsdp") == (self.distributed_replicas is not None)
        expected = "a number beside distributed: hsdp, and there alone"
        yield fits, "distributed_replicas", expected, self.distributed_replicas
        engine, states = self.rollout.engine, self.optim.states
        for fits, name, expected, came in (
            (not self.log.grad_variance, "log.grad_variance", "false", "true"),
            (engine != "continuous", "rollout.engine", "transformers, or an engine of its own,",
             engine),
            (states == "full", "optim.states", "full", states),
        ):  # fmt: skip
            fits = fits or not self.is_sharded
            yield fits, name, f"{expected} beside sharded weights", came

    def _step_rules(self) -> Rules:
        completions = self.rollout.prompts_per_step * self.rollout.group_size
        states = self.optim.states
        expected = "full beside checkpoint.every: a file cannot hold the others"
        yield not self.checkpoint.every or states == "full", "optim.states", expected, states
        fits = self.reference.kind != "synced" or self.model.lora is None
        expected = "frozen (the adapter switched off) beside model.lora"
        yield fits, "reference.kind", expected, "synced"
        expected = f"a number that divides the {completions} completions of a step"
        yield completions % self.minibatches == 0, "minibatches", expected, self.minibatches

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
