"""Containers in which the arguments of a loss or logps call are passed between modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from grpo_fast.kernels.head.shards import VocabularyShard
from grpo_fast.kernels.support import Support
from grpo_fast.kernels.teachers import DivergenceTerm
from grpo_fast.kernels.types import LogitTransform
from grpo_fast.objective.aggregation import Total

RowTensors = Sequence[Any]  # the differentiable tensors of a call, flattened to N rows


class BatchInputs(NamedTuple):
    """Tensors of a loss call, one value per token or per completion, as the caller passed them."""

    like: Tensor  # (B, L) or (T,): target_ids, or logps in `grpo_loss`
    advantages: Tensor  # (B,), or the shape of like
    completion_mask: Tensor | None = None  # the shape of like
    cu_seqlens: Tensor | None = None  # (B+1,), only for the packed layout
    old_logps: Tensor | None = None  # the shape of like
    ref_logps: Tensor | None = None  # the shape of like
    sampling_logps: Tensor | None = None  # the shape of like
    num_items_in_batch: Total | None = None  # a number or one element; prompt_mean: (B,)
    num_completions_in_batch: Total | None = None  # a number or one element


class Options(NamedTuple):
    """Options of a loss call that are not part of `LossConfig`."""

    wanted: list[bool]  # for each differentiable tensor, whether it needs a gradient
    backend: str = "auto"
    validate: str = "auto"
    hidden_rows: Tensor | None = None  # the shape of target_ids
    grad_filter: float | None = None
    support: Support | None = None  # one set of ids for each target
    shard: VocabularyShard | None = None  # this rank's part of the vocabulary
    inplace: bool = False  # write the gradient over the logits
    divergence: DivergenceTerm | None = None  # its teacher has one row for each of the N targets


class RowOptions(NamedTuple):
    """Options of a logps call."""

    target_ids: Tensor  # (B, L) or (T,)
    temperature: float | Tensor  # a tensor has the shape of target_ids
    softcap: float | None
    logit_scale: float
    return_entropy: bool
    entropy_over: str
    backend: str
    support: Support | None  # one set of ids for each target
    hidden_rows: Tensor | None = None  # the shape of target_ids
    shard: VocabularyShard | None = None  # this rank's part of the vocabulary

    @property
    def transform(self) -> LogitTransform:
        """Return the transform from raw logits to the logits of the softmax."""
        return LogitTransform(self.logit_scale, self.softcap, self.temperature)

    @property
    def entropy_over_vocabulary(self) -> bool:
        """Return whether entropies are computed over the full vocabulary, even with a support."""
        return self.return_entropy and self.entropy_over == "vocabulary"
