"""Containers for the arguments of a loss or logps call.

The modules checks, batch, passes and operators receive the arguments in these containers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from grpo_fast.kernels.head.vocabulary import VocabularyShard
from grpo_fast.kernels.support import Support
from grpo_fast.kernels.teachers import DivergenceTerm
from grpo_fast.kernels.types import LogitTransform
from grpo_fast.objective.aggregation import Total


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


def support_fields(support: Support | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids and offsets of a support, or (None, None) without a support."""
    return support or (None, None)


class Options(NamedTuple):
    """Options of a loss call that are not part of `LossConfig`.

    A torch.compile graph can carry only the fields that are listed in `schema.TYPES`. All other
    fields must have their default values when a graph is traced.
    """

    wanted: list[bool]  # for each differentiable tensor, whether it needs a gradient
    backend: str = "auto"
    validate: str = "auto"
    hidden_rows: Tensor | None = None  # the shape of target_ids
    grad_filter: float | None = None
    support_ids: Tensor | None = None
    support_offsets: Tensor | None = None
    shard: VocabularyShard | None = None  # this rank's part of the vocabulary
    inplace: bool = False  # write the gradient over the logits
    divergence: DivergenceTerm | None = None  # its teacher has one row for each of the N targets


class RowOptions(NamedTuple):
    """Options of a logps call.

    A torch.compile graph can carry only the fields that are listed in `schema.TYPES`.
    """

    hidden_rows: Tensor | None  # the shape of target_ids
    target_ids: Tensor  # (B, L) or (T,)
    temperatures: Tensor | None  # the shape of target_ids
    temperature: float
    softcap: float | None
    logit_scale: float
    return_entropy: bool
    entropy_over_vocabulary: bool  # entropies over all ids, even with a support
    backend: str
    support_ids: Tensor | None = None
    support_offsets: Tensor | None = None
    shard: VocabularyShard | None = None  # this rank's part of the vocabulary

    @property
    def transform(self) -> LogitTransform:
        """The transform from raw logits to the logits of the softmax."""
        temperature = self.temperature if self.temperatures is None else self.temperatures
        return LogitTransform(self.logit_scale, self.softcap, temperature)


class Targets(NamedTuple):
    """Vocabulary size of a call, and the hidden row and the support of each target."""

    vocab_size: int
    hidden_rows: Tensor | None = None  # the shape of target_ids; None: row t predicts target t
    num_hidden: int = 0  # rows of `hidden`
    support: Support | None = None

    @classmethod
    def of(cls, columns: int, num_hidden: int, options: Options | RowOptions) -> Targets:
        """Collect the targets of a call.

        Args:
            columns: number of vocabulary columns of the tensors on this rank.
            num_hidden: number of rows of `hidden`.
            options: the options of the call.
        """
        vocabulary = columns if options.shard is None else options.shard.vocabulary
        ids = options.support_ids
        offsets = options.support_offsets
        support = None if ids is None or offsets is None else Support(ids, offsets)
        return cls(vocabulary, options.hidden_rows, num_hidden, support)
