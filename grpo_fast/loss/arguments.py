"""The arguments of a call as objects: the same for checks, batches, passes and operators."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from grpo_fast.kernels.head.vocabulary import VocabularyShard
from grpo_fast.kernels.support import Support
from grpo_fast.kernels.teachers import DivergenceTerm
from grpo_fast.kernels.types import LogitRule
from grpo_fast.objective.aggregation import Total


class BatchInputs(NamedTuple):
    like: Tensor  # (B, L) or (T,): target_ids, or logps where there are none
    advantages: Tensor  # (B,), or the shape of like
    completion_mask: Tensor | None = None  # the shape of like
    cu_seqlens: Tensor | None = None  # (B+1,), exactly for the packed layout
    old_logps: Tensor | None = None  # the shape of like
    ref_logps: Tensor | None = None  # the shape of like
    sampling_logps: Tensor | None = None  # the shape of like
    num_items_in_batch: Total | None = None  # a number, or one element; prompt_mean: (B,)
    num_completions_in_batch: Total | None = None  # likewise


def support_fields(support: Support | None) -> tuple[Tensor | None, Tensor | None]:
    """`support_ids` and `support_offsets` of the options below."""
    return support or (None, None)


class Options(NamedTuple):
    """How a loss is computed; a graph of torch.compile carries the fields before `shard`."""

    wanted: list[bool]  # of which differentiable tensors somebody will ask a gradient
    backend: str = "auto"
    validate: str = "auto"
    hidden_rows: Tensor | None = None  # the shape of target_ids
    grad_filter: float | None = None
    support_ids: Tensor | None = None
    support_offsets: Tensor | None = None
    shard: VocabularyShard | None = None  # the head is one rank's part of it
    inplace: bool = False  # the gradient is written over the logits
    divergence: DivergenceTerm | None = None  # its teacher has one flat row for each target


class RowOptions(NamedTuple):
    """How logps are computed; in a graph of torch.compile as `Options`."""

    hidden_rows: Tensor | None  # the shape of target_ids
    target_ids: Tensor  # (B, L) or (T,)
    temperatures: Tensor | None  # the shape of target_ids
    temperature: float
    softcap: float | None
    logit_scale: float
    return_entropy: bool
    entropy_over_vocabulary: bool  # entropies are over the whole vocabulary, whatever the support
    backend: str
    support_ids: Tensor | None = None
    support_offsets: Tensor | None = None
    shard: VocabularyShard | None = None  # the head is one rank's part of it

    @property
    def rule(self) -> LogitRule:
        temperature = self.temperature if self.temperatures is None else self.temperatures
        return LogitRule(self.logit_scale, self.softcap, temperature)


class Targets(NamedTuple):
    """V, which row of hidden predicts which target, and among which ids it was drawn."""

    vocab_size: int
    hidden_rows: Tensor | None = None  # the shape of target_ids; None: row t, target t
    num_hidden: int = 0  # rows of hidden
    support: Support | None = None

    @classmethod
    def of(cls, columns: int, num_hidden: int, options: Options | RowOptions) -> Targets:
        vocabulary = columns if options.shard is None else options.shard.vocabulary
        ids = options.support_ids
        offsets = options.support_offsets
        support = None if ids is None or offsets is None else Support(ids, offsets)
        return cls(vocabulary, options.hidden_rows, num_hidden, support)
