"""The run configuration: one pydantic tree, read from a recipe and changed by `key=value`.

Every default exists once: the loss's in `LossConfig`, from which `LossSettings` is made, the rest
here. Nothing here loads a model, so a typo is refused at once.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any, Literal, cast, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from grpo_fast.objective.advantages import MODES, check_group_size, check_options
from grpo_fast.objective.config import LossConfig, choice
from grpo_fast.rollout import Sampling


def home_path(path: str) -> str:
    """`path` with its `~` written out. Raises ValueError where that stands for no home folder."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("expected the home folder of a known user behind ~ (./~ is a file's name)")
    return expanded


UserPath = Annotated[str, AfterValidator(home_path)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]  # of what is made in memory before a run begins
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: no unknown keys, finite numbers, checks on assignment too."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False
    )


def _loss_settings() -> type[Section]:
    hints = get_type_hints(LossConfig)
    hints["temperature"] = float  # a tensor, one value per token, makes no sense in a file
    fields: Any = {f.name: (hints[f.name], f.default) for f in dataclasses.fields(LossConfig)}
    return create_model("LossSettings", __base__=Section, **fields)


# Every field and default of LossConfig; `LossConfig(**dict(settings))` checks the values.
LossSettings = _loss_settings()


class LoraConfig(Section):
    """Low-rank adapters through peft; the reference is then the model without its adapter."""

    r: Positive = 16
    alpha: Positive = 32
    target_modules: str | list[str] = "all-linear"


class ModelConfig(Section):
    """The policy: loaded (`path`), or a random start (`config`)."""

    path: UserPath | None = None  # hub id or local folder
    config: dict[str, Any] | None = None  # model_type and the fields of that transformers config
    tokenizer: Literal["bpe", "symbols"] | None = None  # built here; None: loaded from `path`
    vocab_size: Size = 2048  # of the "bpe" tokenizer
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights
    autocast: Literal["bfloat16", "float16"] | None = None  # the trunk's, over fp32 weights
    attn: str = "auto"  # attention of the rollout; training always uses the packed attention
    device: str = "auto"
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False  # recompute each layer in the backward pass
    checkpoint_every: Positive = 1  # only every n-th layer; the others keep their activations
    checkpoint_offload: bool = False  # what checkpointed layers keep lies in host memory
    tiled_mlp: Positive | None = None  # MLPs run this many rows at a time, say 2048
    frozen: list[str] = Field(default_factory=list)  # not trained: patterns as "*embed_tokens*"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "model: exactly one of path (hub id or folder) and config (random start) is needed"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config: model_type is missing, for example model_type: llama")
        if self.config is not None and self.tokenizer is None:
            needed = "a model made from a config needs tokenizer: bpe or symbols"
            raise ValueError(f"model.tokenizer: {needed}")
        checkpoints = self.checkpoint_offload or self.checkpoint_every != 1
        if checkpoints and not self.gradient_checkpointing:
            needed = "checkpoint_every and checkpoint_offload need it"
            raise ValueError(f"model.gradient_checkpointing: {needed}, came false")
        return self


class DataConfig(Section):
    """Where prompts come from: a generated task, a local file or folder, or a hub data set."""

    task: Literal["sort", "arithmetic", "gsm8k", "jsonl"]
    path: UserPath | None = None  # jsonl file, or a folder with train.jsonl and test.jsonl
    name: str | None = None  # hub id, for example openai/gsm8k
    prompt_template: str | None = None  # text with {question}, or a name of PROMPT_TEMPLATES
    system_prompt: str | None = None
    chat: bool = False  # send the prompt through the tokenizer's chat template
    shots: Count = 0  # worked examples before the question, the same ones for all
    shots_tokens: Positive | None = None  # instead: as many as fit, others for each question
    n_train: Positive | None = None  # None: all
    n_test: Size | None = None
    digits: int = Field(5, ge=1, le=4096)  # generated tasks: length of a prompt
    symbols: int = Field(10, ge=2, le=1 << 20)  # sort: how many different symbols

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.task in ("gsm8k", "jsonl") and (self.path is None) == (self.name is None):
            raise ValueError(f"data: task {self.task} needs exactly one of path and name")
        if self.shots_tokens is not None and (self.shots or self.task not in ("gsm8k", "jsonl")):
            needed = "expected task gsm8k or jsonl and no data.shots beside it"
            raise ValueError(f"data.shots_tokens: {needed}")
        for name in ("path", "name", "prompt_template", "system_prompt", "chat", "shots"):
            came = getattr(self, name)
            if self.task in ("sort", "arithmetic") and came:
                made = f"task {self.task} makes its own prompts"
                raise ValueError(f"data.{name}: {made}, came {came!r}")
        return self


class RewardConfig(Section):
    """One reward function and its weight in the sum."""

    name: str  # a built-in one's, or package.module:function
    weight: float = Field(1.0, ge=-1e30, le=1e30)  # sums are fp32
    options: dict[str, Any] = Field(default_factory=dict)


class RolloutConfig(Section, Sampling):
    """How completions are sampled in training."""

    temperature: float = Field(1.0, gt=0)
    group_size: Positive = 8  # G completions per prompt
    prompts_per_step: Positive = 8
    mask_truncated: bool = False  # a completion without an EOS does not count in the loss
    correct_sampling: bool = False  # give the sampler's logps to the loss (train/inference ratio)


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Count = 0  # steps
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)  # .inf: no clipping
    states: Literal["full", "8bit", "offload"] = "full"  # moments: weights' dtype, 8 bits, on host


class ReferenceConfig(Section):
    """The model the KL term pulls towards."""

    kind: Literal["none", "frozen", "synced"] = "none"
    # synced: every `sync_every` steps reference = mixing·policy + (1 − mixing)·reference
    sync_every: Positive = 64
    mixing: float = Field(0.6, gt=0, le=1)


class WarmStartConfig(Section):
    """A short supervised start on the gold solutions, before the first rollout."""

    steps: Positive = 200
    batch_size: Positive = 32
    lr: float = Field(1e-3, gt=0)
    warmup: Count = 20


class HeldOut(Section, Sampling):
    """How held-out prompts are asked."""

    n: Positive | None = None  # prompts; None: all
    samples: Positive = 1  # per prompt
    max_new_tokens: Size | None = None  # None: the rollout's


class EvalConfig(HeldOut):
    """Evaluation on held-out prompts: before the run, on the way and after it."""

    every: Count = 0  # steps; 0: only before and after
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    batch_size: Positive = 256
    k: list[Positive] = Field(default_factory=list)  # pass@k, maj@k; ≤ samples


class LogConfig(Section):
    """What is written while the run goes on."""

    completions_every: Count = 10  # steps between readable samples; 0: none
    completions: Positive = 8  # how many in each
    progress: bool = True  # live progress bar
    save_model: bool = True


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
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    steps: Count = 100
    inner_iterations: Positive = 1  # μ: passes over one batch of completions
    minibatches: Positive = 1  # optimizer steps per pass
    tokens_per_microbatch: Positive | None = None  # None: what the memory model finds room for
    shared_prompt: bool = True  # the completions of a group share one copy of their prompt
    max_approx_kl: float | None = Field(None, gt=0)  # ends the inner passes of a batch early
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    warm_start: WarmStartConfig | None = None
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        choice("advantages", self.advantages, MODES)
        check_options(self.advantages, self.advantage_options)
        check_group_size(self.advantages, self.rollout.group_size)
        for name in ("softcap", "logit_scale"):
            came = getattr(self.loss, name)
            if came != getattr(LossConfig, name):
                expected = "expected none, the model's own is used"
                raise ValueError(f"loss.{name}: {expected}, came {came}")
        self._check_sampling_correction()
        if not any(reward.weight for reward in self.rewards):
            raise ValueError("rewards: expected a weight that is not 0, came 0 for all")
        if max(self.eval.k, default=1) > self.eval.samples:
            expected = f"expected values up to eval.samples = {self.eval.samples}"
            raise ValueError(f"eval.k: {expected}, came {self.eval.k}")
        needs_reference = self.loss_config().uses_reference  # raises with the argument's name
        if needs_reference and self.reference.kind == "none":
            expected = "loss.beta is not 0, so it must be frozen or synced"
            raise ValueError(f"reference.kind: {expected}, came none")
        if self.reference.kind == "synced" and self.model.lora is not None:
            expected = "with model.lora use frozen (the adapter switched off)"
            raise ValueError(f"reference.kind: {expected}, came synced")
        completions = self.rollout.prompts_per_step * self.rollout.group_size
        if completions % self.minibatches:
            needed = f"must divide the {completions} completions of a step"
            raise ValueError(f"minibatches: {self.minibatches} {needed}")
        return self

    def _check_sampling_correction(self) -> None:
        """Refuse a correction by logps that the loss is not given, and logps it does not read."""
        given, loss = self.rollout.correct_sampling, cast(Any, self.loss)
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
        """The loss's own frozen configuration, with the sampling temperature unless one was set."""
        settings: dict[str, Any] = dict(self.loss)
        if "temperature" not in self.loss.model_fields_set:  # type: ignore[attr-defined]
            settings["temperature"] = self.rollout.temperature
        if settings["max_completion_length"] is None:
            settings["max_completion_length"] = self.rollout.max_new_tokens
        return LossConfig(**settings)
