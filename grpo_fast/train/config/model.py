"""The policy and what its optimizer, reference and warm start are told."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_fast.errors import conflict
from grpo_fast.objective.divergences import DIVERGENCES
from grpo_fast.objective.value import VALUE_LOSSES
from grpo_fast.train.config.base import Count, Decay, Positive, Section, Size, UserPath, require


class LoraConfig(Section):
    """Low-rank adapters through peft; the reference is then the model without its adapter."""

    r: Positive = 16
    """Rank of the adapter matrices."""
    alpha: Positive = 32
    """Scale of the adapter: its output is multiplied by alpha / r."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter, as peft names them."""


class ModelConfig(Section):
    """Where a model comes from, loaded (`path`) or with random weights (`config`), and its form."""

    path: UserPath | None = None
    """Hub id or local folder of the model."""
    config: dict[str, Any] | None = None
    """model_type and other fields of a transformers config, for a model with random weights."""
    tokenizer: Literal["bpe", "symbols"] | None = None
    """A tokenizer that is built from the data; null loads the tokenizer of `path`."""
    vocab_size: Size = 2048
    """Vocabulary size of the tokenizer `bpe`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """Dtype in which the layers compute over fp32 weights; null computes in `dtype`."""
    attn: str = "auto"
    """Attention of the rollout; training always uses the packed attention."""
    device: str = "auto"
    """Torch device; auto takes a GPU if one exists."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass, which needs less memory."""
    checkpoint_offload: bool = False
    """Store the inputs of checkpointed layers in host memory."""
    tiled_mlp: Positive | None = None
    """Rows that an MLP computes at a time, for example 2048; null computes all rows at once."""
    frozen: list[str] = Field(default_factory=list)
    """Parameters that are not trained, as patterns such as *embed_tokens*."""
    trust_remote_code: bool = False
    """Run the model's Python code from the hub or the folder."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        one = "exactly one of path and config (a random start; model=PATH takes its place)"
        came = "both" if self.path else "neither"
        require((self.path is None) != (self.config is None), "path", one, came)
        if self.config is not None:
            named = "model_type" in self.config
            require(named, "config.model_type", "one, for example llama", "none")
            if self.tokenizer is None:
                why = "a random start has no tokenizer; choose bpe or symbols"
                raise conflict("tokenizer=none", "config", why)
        return self

    @model_validator(mode="after")
    def _checkpoints(self) -> ModelConfig:
        if self.checkpoint_offload and not self.gradient_checkpointing:
            why = "there are no checkpointed layers to offload"
            raise conflict("gradient_checkpointing=false", "checkpoint_offload=true", why)
        return self


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up; linear and cosine end at 0."""
    warmup: Count = 0
    """Optimizer steps of the warm-up; a batch may take several."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Norm to which gradients are clipped; .inf switches clipping off."""
    states: Literal["full", "8bit", "offload"] = "full"
    """How Adam's moments are stored: in the dtype of the weights, in 8 bits, or in host memory."""


class ReferenceConfig(Section):
    """The model the KL term pulls towards."""

    kind: Literal["none", "frozen", "synced"] = "none"
    """No reference, the policy at the start of the run, or a copy that follows the policy."""
    path: UserPath | None = None
    """A different model with the policy's vocabulary; only for kind: frozen."""
    sync_every: Positive = 64
    """Steps between updates of a synced reference."""
    mixing: float = Field(0.6, gt=0, le=1)
    """Weight m of a sync: reference = m * policy + (1 - m) * reference."""

    @model_validator(mode="after")
    def _path_is_frozen(self) -> ReferenceConfig:
        if self.path is not None and self.kind != "frozen":
            why = "only a frozen reference is loaded from a path; set kind: frozen"
            raise conflict(f"path={self.path}", f"kind={self.kind}", why)
        return self


class KLConfig(Section):
    """Where the KL to the reference enters (`loss.beta`, `loss.kl_estimator`), and how much."""

    into: Literal["loss", "reward"] = "loss"
    """Add beta * KL to the loss, or subtract it from the reward of each token before GAE."""
    target: float | None = Field(None, gt=0)
    """Mean KL per token that beta is adapted to; null keeps beta constant."""
    horizon: float = Field(10_000.0, gt=0)
    """A step of n completions changes beta by at most 20% * n / horizon."""


class DistillConfig(Section):
    """A teacher's distribution at the policy's own samples: on-policy distillation."""

    teacher: UserPath | None = None
    """A model's folder or hub id (then it is the frozen reference), or a vLLM server's URL."""
    topk: Positive | None = None
    """Token ids per position that a server reports with form: loss; null means 20."""
    form: Literal["loss", "advantage"] = "loss"
    """Add the divergence to the loss, or log q - log p of the sampled token to its advantage."""
    kind: Literal[tuple(DIVERGENCES)] = "reverse_kl"  # type: ignore[valid-type]
    """The divergence between teacher and policy."""
    beta: float = Field(0.5, gt=0, lt=1)
    """The teacher's share in the mixture of kind: jsd."""
    coef: float = Field(1.0, ge=0)
    """Weight of the teacher."""
    task: float = Field(1.0, ge=0)
    """Weight of the advantages from the rewards; 0 learns from the teacher alone."""

    @property
    def asked(self) -> tuple[str, int] | None:
        """The URL of a server, and how many ids it is asked for beside the token's own."""
        if self.teacher is None or "://" not in self.teacher:
            return None
        return self.teacher, (self.topk or 20) if self.form == "loss" else 0

    @model_validator(mode="after")
    def _advantage_is_a_reverse_kl(self) -> DistillConfig:
        """log q − log p of the sampled token as its advantage estimates the reverse KL."""
        if self.form == "advantage" and self.kind != "reverse_kl":
            why = "the advantage of a sampled token estimates the reverse KL alone"
            raise conflict(f"kind={self.kind}", "form=advantage", why)
        if self.topk is not None and not self.asked:
            why = "only a server is asked for a number of ids"
            raise conflict(f"topk={self.topk}", f"teacher={self.teacher}", why)
        if self.topk is not None and self.form != "loss":
            why = "an advantage reads the sampled token alone"
            raise conflict(f"topk={self.topk}", f"form={self.form}", why)
        return self


class CriticConfig(Section):
    """PPO's value function, and the advantages it gives (`advantages: gae`)."""

    kind: Literal["shared", "model"] = "shared"
    """A value head on the policy's layers, or a separate model."""
    path: UserPath | None = None
    """Folder or hub id of the separate model; null copies the policy."""
    lr: float | None = Field(None, gt=0)
    """Learning rate of the critic; null means optim.lr."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount factor of GAE."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of GAE."""
    lam_returns: float | None = Field(None, ge=0, le=1)
    """Lambda of the value targets; null means `lam`."""
    lam_alpha: float | None = Field(None, gt=0)
    """VAPO: lambda of the advantages is 1 - 1 / (lam_alpha * length)."""
    bootstrap: bool = True
    """Use the value at the end of a truncated completion; false uses 0."""
    whiten: bool = True
    """Scale the advantages of a step to mean 0 and standard deviation 1."""
    loss: Literal[tuple(VALUE_LOSSES)] = "clipped"  # type: ignore[valid-type]
    """The value loss."""
    epsilon: float = Field(0.2, gt=0)
    """Clip range of loss: clipped."""
    delta: float = Field(1.0, gt=0)
    """Threshold of loss: huber."""
    coef: float = Field(0.5, ge=0)
    """Weight of the value loss."""

    @model_validator(mode="after")
    def _consistent(self) -> CriticConfig:
        if self.path is not None and self.kind != "model":
            why = "only a critic with a model of its own is loaded; set kind: model"
            raise conflict(f"kind={self.kind}", f"path={self.path}", why)
        return self


class WarmStartConfig(Section):
    """A short supervised start on the gold solutions, before the first rollout."""

    steps: Positive = 200
    """Optimizer steps of the supervised start."""
    batch_size: Positive = 32
    """Solutions per step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate."""
    warmup: Count = 20
    """Steps of the learning rate's warm-up."""
