"""The policy and what its optimizer, reference and warm start are told."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_fast.objective.divergences import DIVERGENCES
from grpo_fast.objective.value import VALUE_LOSSES
from grpo_fast.train.config.base import Count, Decay, Positive, Section, Size, UserPath, require


class LoraConfig(Section):
    """Low-rank adapters through peft; the reference is then the model without its adapter."""

    r: Positive = 16
    alpha: Positive = 32
    target_modules: str | list[str] = "all-linear"


class ModelConfig(Section):
    """Where a model comes from, loaded (`path`) or with random weights (`config`), and its form."""

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
    checkpoint_offload: bool = False  # what checkpointed layers keep lies in host memory
    tiled_mlp: Positive | None = None  # MLPs run this many rows at a time, say 2048
    frozen: list[str] = Field(default_factory=list)  # not trained: patterns as "*embed_tokens*"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        one = "exactly one of path and config (a random start; model=PATH takes its place)"
        came = "both" if self.path else "neither"
        require((self.path is None) != (self.config is None), "path", one, came)
        if self.config is not None:
            named = "model_type" in self.config
            require(named, "config.model_type", "one, for example llama", "none")
            require(self.tokenizer, "tokenizer", "bpe or symbols beside config", "none")
        return self

    @model_validator(mode="after")
    def _checkpoints(self) -> ModelConfig:
        fits = self.gradient_checkpointing or not self.checkpoint_offload
        require(fits, "gradient_checkpointing", "true beside checkpoint_offload", "false")
        return self


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Count = 0  # optimizer steps, of which a batch may see several
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)  # .inf: no clipping
    states: Literal["full", "8bit", "offload"] = "full"  # moments: weights' dtype, 8 bits, on host


class ReferenceConfig(Section):
    """The model the KL term pulls towards."""

    kind: Literal["none", "frozen", "synced"] = "none"
    path: UserPath | None = None  # frozen: another model of the policy's vocabulary, not its start
    # synced: every `sync_every` steps reference = mixing·policy + (1 − mixing)·reference
    sync_every: Positive = 64
    mixing: float = Field(0.6, gt=0, le=1)

    @model_validator(mode="after")
    def _path_is_frozen(self) -> ReferenceConfig:
        fits = self.path is None or self.kind == "frozen"
        require(fits, "path", "kind: frozen beside it", self.kind)
        return self


class KLConfig(Section):
    """Where the KL to the reference enters (`loss.beta`, `loss.kl_estimator`), and how much."""

    into: Literal["loss", "reward"] = "loss"  # reward: −beta·kl of each token, before GAE
    target: float | None = Field(None, gt=0)  # beta is led towards this mean kl of a token
    horizon: float = Field(10_000.0, gt=0)  # a step of n completions moves beta by ≤ 20%·n/horizon


class DistillConfig(Section):
    """A teacher's distribution at the policy's own samples: on-policy distillation."""

    # stands for reference: {kind: frozen, path: it}; or a vLLM server, http://host:port
    teacher: UserPath | None = None
    topk: Positive | None = None  # ids that a server says at every token (form: loss); None: 20
    form: Literal["loss", "advantage"] = "loss"  # every token's exact gradient, or its advantage
    kind: Literal[tuple(DIVERGENCES)] = "reverse_kl"  # type: ignore[valid-type]
    beta: float = Field(0.5, gt=0, lt=1)  # jsd: the teacher's share in the mixture
    coef: float = Field(1.0, ge=0)  # weight of the divergence, or of log q − log p as an advantage
    task: float = Field(1.0, ge=0)  # weight of the rewards' advantages; 0: the teacher alone

    @property
    def asked(self) -> tuple[str, int] | None:
        """The URL of a server, and how many ids it is asked for beside the token's own."""
        if self.teacher is None or "://" not in self.teacher:
            return None
        return self.teacher, (self.topk or 20) if self.form == "loss" else 0

    @model_validator(mode="after")
    def _advantage_is_a_reverse_kl(self) -> DistillConfig:
        """log q − log p of the sampled token as its advantage estimates the reverse KL."""
        fits = self.form == "loss" or self.kind == "reverse_kl"
        require(fits, "kind", "reverse_kl beside form: advantage", self.kind)
        fits = self.topk is None or (self.asked and self.form == "loss")
        require(fits, "topk", "none but beside a server and form: loss", self.topk)
        return self


class CriticConfig(Section):
    """PPO's value function, and the advantages it gives (`advantages: gae`)."""

    kind: Literal["shared", "model"] = "shared"  # a head on the policy's trunk, or a model
    path: UserPath | None = None  # of that model; None: a copy of the policy
    lr: float | None = Field(None, gt=0)  # None: optim.lr
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    lam_returns: float | None = Field(None, ge=0, le=1)  # of the values' targets; None: lam
    lam_alpha: float | None = Field(None, gt=0)  # λ of the advantages = 1 − 1/(this·length) (VAPO)
    bootstrap: bool = True  # a completion that was cut off would have gone on: its end has a value
    whiten: bool = True  # advantages get mean 0 and deviation 1 over the step's tokens
    loss: Literal[tuple(VALUE_LOSSES)] = "clipped"  # type: ignore[valid-type]
    epsilon: float = Field(0.2, gt=0)  # of the clipped loss
    delta: float = Field(1.0, gt=0)  # of Huber's
    coef: float = Field(0.5, ge=0)  # weight of the value loss

    @model_validator(mode="after")
    def _consistent(self) -> CriticConfig:
        require(self.path is None or self.kind == "model", "kind", "model beside path", self.kind)
        return self


class WarmStartConfig(Section):
    """A short supervised start on the gold solutions, before the first rollout."""

    steps: Positive = 200
    batch_size: Positive = 32
    lr: float = Field(1e-3, gt=0)
    warmup: Count = 20
