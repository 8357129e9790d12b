"""The run configuration: one pydantic tree, read from a recipe, changed by `key=value`, refused when a key is unknown.

A recipe is plain YAML (`yaml_file`). Every default exists once: the loss's in `LossConfig`, from
which `LossSettings` is made, the rest here. Nothing here loads a model, so a typo is refused at once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from grpo_fast.objective.advantages import MODES, check_group_size, check_options
from grpo_fast.objective.config import LossConfig, choice
from grpo_fast.train.explain import explain
from grpo_fast.train.folders import UserPath
from grpo_fast.train.overrides import apply_override
from grpo_fast.train.recipes import read_recipe
from grpo_fast.train.recipes import recipe_names as recipe_names


class Section(BaseModel):
    """A part of the configuration: no unknown keys, finite numbers, checks on assignment too."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


def _loss_settings() -> type[Section]:
    hints = get_type_hints(LossConfig)
    hints["temperature"] = float  # a tensor, one value per token, makes no sense in a file
    fields: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in dataclasses.fields(LossConfig)}
    return create_model("LossSettings", __base__=Section, **fields)


# Every field and default of LossConfig; `LossConfig(**dict(settings))` checks the values.
LossSettings = _loss_settings()


class LoraConfig(Section):
    """Low-rank adapters through peft; the reference model is then the same model with the adapter switched off."""

    r: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    target_modules: str | list[str] = "all-linear"


class ModelConfig(Section):
    """The policy: a hub id or local folder (`path`), or a random start from a transformers config (`config`)."""

    path: UserPath | None = None
    config: dict[str, Any] | None = None  # model_type and the fields of that transformers config
    tokenizer: Literal["bpe", "symbols"] | None = None  # built on the spot; None: loaded from `path`
    vocab_size: int = Field(2048, ge=1)  # of the "bpe" tokenizer
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights
    autocast: Literal["bfloat16", "float16"] | None = None  # run the trunk in this dtype over fp32 weights
    attn: str = "auto"  # attention used by the rollout; training always uses the packed attention
    device: str = "auto"
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False  # recompute each layer in the backward pass
    checkpoint_every: int = Field(1, ge=1)  # only every n-th layer; the others keep their activations
    checkpoint_offload: bool = False  # what checkpointed layers keep lies in host memory
    tiled_mlp: int | None = Field(None, ge=1)  # MLPs run this many rows at a time, for example 2048
    frozen: list[str] = Field(default_factory=list)  # parameters not trained: patterns such as "*embed_tokens*"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError("model: exactly one of path (hub id or folder) and config (random start) is needed")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config: model_type is missing, for example model_type: llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("model.tokenizer: a model made from a config needs tokenizer: bpe or symbols")
        if not self.gradient_checkpointing and (self.checkpoint_offload or self.checkpoint_every != 1):
            raise ValueError(
                "model.gradient_checkpointing: checkpoint_every and checkpoint_offload need it, came false"
            )
        return self


class DataConfig(Section):
    """Where prompts come from: a generated task, a local jsonl file or folder (`path`), or a hub data set (`name`)."""

    task: Literal["sort", "arithmetic", "gsm8k", "jsonl"]
    path: UserPath | None = None  # jsonl file, or a folder with train.jsonl and test.jsonl
    name: str | None = None  # hub id, for example openai/gsm8k
    prompt_template: str | None = None  # text with {question}, or a name of data.files.PROMPT_TEMPLATES
    system_prompt: str | None = None
    chat: bool = False  # send the prompt through the tokenizer's chat template
    shots: int = Field(0, ge=0)  # worked examples before the question, the same ones for all
    shots_tokens: int | None = Field(None, ge=1)  # instead: as many as this many tokens hold, others for each question
    n_train: int | None = Field(None, ge=1)  # None: all
    n_test: int | None = Field(None, ge=1)
    digits: int = Field(5, ge=1)  # generated tasks: length of a prompt
    symbols: int = Field(10, ge=2)  # sort: how many different symbols

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.task in ("gsm8k", "jsonl") and (self.path is None) == (self.name is None):
            raise ValueError(f"data: task {self.task} needs exactly one of path and name")
        if self.shots_tokens is not None and (self.shots or self.task not in ("gsm8k", "jsonl")):
            raise ValueError("data.shots_tokens: expected task gsm8k or jsonl and no data.shots beside it")
        for name in ("path", "name", "prompt_template", "system_prompt", "chat", "shots"):
            if self.task in ("sort", "arithmetic") and getattr(self, name):
                raise ValueError(f"data.{name}: task {self.task} makes its own prompts, came {getattr(self, name)!r}")
        return self


class RewardConfig(Section):
    """One reward function: a built-in name or `package.module:function`, and its weight in the sum."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)


class SamplingConfig(Section):
    """What `grpo_fast.rollout.generate` reads."""

    group_size: int = Field(8, ge=1)  # G completions per prompt
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, ge=0)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: off
    batch_size: int | None = Field(None, ge=1)  # completions per generate call; None: all at once


class RolloutConfig(SamplingConfig):
    """How completions are sampled in training."""

    temperature: float = Field(1.0, gt=0)
    prompts_per_step: int = Field(8, ge=1)
    mask_truncated: bool = False  # a completion without an EOS does not count in the loss
    correct_sampling: bool = False  # give the sampler's logps to the loss (train/inference ratio)


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(0, ge=0)  # steps
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)  # .inf: no clipping
    states: Literal["full", "8bit", "offload"] = "full"  # Adam's moments: the weights' dtype, 8 bits, on the host


class ReferenceConfig(Section):
    """The model the KL term pulls towards. synced: every `sync_every` steps ref = mixing·policy + (1−mixing)·ref."""

    kind: Literal["none", "frozen", "synced"] = "none"
    sync_every: int = Field(64, ge=1)
    mixing: float = Field(0.6, gt=0, le=1)


class WarmStartConfig(Section):
    """A short supervised start on the gold solutions, before the first rollout."""

    steps: int = Field(200, ge=1)
    batch_size: int = Field(32, ge=1)
    lr: float = Field(1e-3, gt=0)
    warmup: int = Field(20, ge=0)


class EvalConfig(Section):
    """Evaluation on held-out prompts: before, every `every` steps (0: only before and after), and after."""

    every: int = Field(0, ge=0)
    n: int | None = Field(None, ge=1)  # prompts; None: all of the test split
    samples: int = Field(1, ge=1)  # per prompt
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    k: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)  # pass@k and maj@k, each at most `samples`
    max_new_tokens: int | None = Field(None, ge=1)  # None: the rollout's
    batch_size: int = Field(256, ge=1)  # completions per generate call


class LogConfig(Section):
    """What is written while the run goes on."""

    completions_every: int = Field(10, ge=0)  # steps between readable samples; 0: none
    completions: int = Field(8, ge=1)  # how many in each
    progress: bool = True  # live progress bar
    save_model: bool = True


class RunConfig(Section):
    """Everything a run depends on; saved resolved as config.yaml beside its results."""

    seed: int = 0
    output_dir: UserPath = "runs/default"
    model: ModelConfig
    data: DataConfig
    loss: LossSettings = Field(default_factory=LossSettings)  # type: ignore[valid-type]
    advantages: str = "normalized"
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    rewards: list[RewardConfig] = Field(min_length=1)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    steps: int = Field(100, ge=0)
    inner_iterations: int = Field(1, ge=1)  # μ: passes over one batch of completions
    minibatches: int = Field(1, ge=1)  # optimizer steps per pass
    tokens_per_microbatch: int | None = Field(None, ge=1)  # None: what the memory model finds room for
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
                raise ValueError(f"loss.{name}: expected none, the model's own is used, came {came}")
        self._check_sampling_correction()
        if max(self.eval.k, default=1) > self.eval.samples:
            raise ValueError(f"eval.k: expected values up to eval.samples = {self.eval.samples}, came {self.eval.k}")
        needs_reference = self.loss_config().uses_reference  # raises with the argument's name
        if needs_reference and self.reference.kind == "none":
            raise ValueError("reference.kind: loss.beta is not 0, so it must be frozen or synced, came none")
        if self.reference.kind == "synced" and self.model.lora is not None:
            raise ValueError("reference.kind: with model.lora use frozen (the adapter switched off), came synced")
        completions = self.rollout.prompts_per_step * self.rollout.group_size
        if completions % self.minibatches:
            raise ValueError(f"minibatches: {self.minibatches} must divide the {completions} completions of a step")
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


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe shipped in the package (by name) or a YAML file (by path) and apply ``key=value`` overrides.

    Keys are dotted (``optim.lr=1e-4``, ``rewards.0.weight=2``); values are read as YAML. Raises ValueError that names
    the unknown key and the nearest known one, or the value that does not fit.
    """
    settings = read_recipe(name_or_path)
    if not isinstance(settings, dict):
        raise ValueError(f"recipe {name_or_path}: expected a mapping of keys, came {type(settings).__name__}")
    for override in overrides or []:
        apply_override(settings, override)
    return parse_config(settings)


def parse_config(settings: dict[str, Any]) -> RunConfig:
    """Validate a plain mapping; every problem becomes one readable line of a ValueError."""
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        lines = [explain(e, RunConfig) for e in error.errors()]
        raise ValueError("\n".join(["configuration refused:", *lines])) from None


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved configuration as YAML that `load_recipe` reads back to an equal one."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    Path(path).write_text(text, encoding="utf-8")
