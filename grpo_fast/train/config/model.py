"""Configuration sections for the policy, optimizer, reference, critic and warm start."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_fast.objective.value import VALUE_LOSSES
from grpo_fast.train.config.base import Count, Positive, Section, Size, UserPath, require


class LoraConfig(Section):
    """Low-rank adapters (LoRA) on all linear layers, with a scaling factor of 2."""

    r: Positive = 16
    """Rank of the adapter matrices."""


class ModelConfig(Section):
    """The policy, which is either loaded from `path` or built from `config` with random weights."""

    path: UserPath | None = None
    """Hub id or local folder of the model."""
    config: dict[str, Any] | None = None
    """Transformers config as a dict with model_type, for a model with random weights."""
    tokenizer: Literal["bpe", "symbols"] | None = None
    """Kind of tokenizer to build from the data; null loads the tokenizer of `path`."""
    vocab_size: Size = 2048
    """Vocabulary size of the tokenizer `bpe`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """Dtype of the layers' computations with fp32 weights; null computes in `dtype`."""
    device: str = "auto"
    """Torch device; auto uses a GPU if one exists."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights; null trains the weights."""
    gradient_checkpointing: Literal[True, False, "offload"] = False
    """Recompute each layer in the backward pass; offload also moves layer inputs to host memory."""
    tiled_mlp: Positive | None = None
    """Tokens that an MLP processes at a time, for example 2048; null processes all at once."""
    trust_remote_code: bool = False
    """Run the Python code in a model's folder or hub repository."""

    @model_validator(mode="after")
    def _known_type(self) -> ModelConfig:
        known = self.config is None or "model_type" in self.config
        require(known, "config.model_type", "one, for example llama", "none")
        return self


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up; linear and cosine end at 0."""
    warmup: Count = 0
    """Optimizer steps over which the learning rate rises to `lr`; 0 starts at `lr`."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW; 0 switches it off."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Largest gradient norm; larger gradients are scaled down, and .inf switches this off."""


class ReferenceConfig(Section):
    """The reference model of the KL divergence."""

    kind: Literal["none", "frozen", "synced"] = "none"
    """Use no reference, a frozen model, or a copy of the policy that is updated regularly."""
    path: UserPath | None = None
    """Model for kind: frozen, with the policy's vocabulary; null copies the initial policy."""
    sync_every: Positive = 64
    """Steps between updates of a synced reference."""
    mixing: float = Field(0.6, gt=0, le=1)
    """Weight m of the policy in an update: reference = m * policy + (1 - m) * reference."""


class KLConfig(Section):
    """Settings of the KL divergence to the reference. `loss.beta` is its initial weight."""

    into: Literal["loss", "reward"] = "loss"
    """Add beta * KL to the loss, or subtract it from the reward of each token before GAE."""
    target: float | None = Field(None, gt=0)
    """Mean KL per token that the run aims at by adapting beta; null keeps beta constant."""
    horizon: float = Field(10_000.0, gt=0)
    """Number of completions over which an adaptive beta changes by at most 20%."""


class CriticConfig(Section):
    """The value function of PPO, for `advantages: gae`."""

    kind: Literal["shared", "model"] = "shared"
    """Put the value head on the policy's layers (shared) or on a separate model (model)."""
    path: UserPath | None = None
    """Folder or hub id of the separate model; null copies the policy."""
    lr: float | None = Field(None, gt=0)
    """Learning rate of the critic; null means optim.lr."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount factor of GAE."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of GAE for the advantages."""
    lam_returns: float | None = Field(None, ge=0, le=1)
    """Lambda of GAE for the value targets; null uses `lam`."""
    lam_alpha: float | None = Field(None, gt=0)
    """Use 1 - 1 / (lam_alpha * completion length) as lambda of the advantages; null uses `lam`."""
    bootstrap: bool = True
    """After a truncated completion, GAE continues with the critic's value; false uses 0."""
    whiten: bool = True
    """Scale the advantages of a step to mean 0 and standard deviation 1."""
    loss: Literal[tuple(VALUE_LOSSES)] = "clipped"  # type: ignore[valid-type]
    """Loss function of the critic's values; huber changes from quadratic to linear at 1."""
    epsilon: float = Field(0.2, gt=0)
    """Clip range of loss: clipped."""
    coef: float = Field(0.5, ge=0)
    """Weight of the value loss."""


class WarmStartConfig(Section):
    """Supervised training on the data set's solutions before the first rollout."""

    steps: Positive = 200
    """Optimizer steps of the supervised training."""
    batch_size: Positive = 32
    """Solutions per optimizer step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate; it rises in the first 20 steps and falls to 0 along a cosine."""
