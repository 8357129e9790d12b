"""Types that describe the teacher of a distillation term and the divergence to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from grpo_fast.errors import names_nearest
from grpo_fast.kernels.types import LogitTransform
from grpo_fast.objective.divergences import DIVERGENCES


@names_nearest
class TeacherHead(NamedTuple):
    """A teacher given by its hidden states and LM head, over the student's vocabulary.

    No gradient flows to a teacher. If the two vocabularies differ in padding only, slice both heads
    to the ids that they share.

    Attributes:
        hidden: (N, H') or (B, L, H'), float. The teacher's hidden states, one row for each row of
            the student. H' and the dtype may differ from the student's.
        weight: (V, H'), float. The weight of the teacher's LM head.
        bias: (V,), float. The bias of the LM head. None: no bias.
        temperature: temperature of the teacher, a number > 0.
        softcap: bound of the logits, a number > 0. None: no bound.
        logit_scale: factor of the logits, not 0.

    Example:
        >>> import torch
        >>> from grpo_fast import TeacherHead
        >>> teacher = TeacherHead(torch.randn(6, 32), torch.randn(100, 32), temperature=0.7)
        >>> teacher.weight.shape
        torch.Size([100, 32])
    """

    hidden: Tensor  # (N, H')
    weight: Tensor  # (V, H')
    bias: Tensor | None = None  # (V,)
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def transform(self) -> LogitTransform:
        """The transform from the teacher's raw logits to its distribution."""
        return LogitTransform(self.logit_scale, self.softcap, self.temperature)

    def rows(self, rows: Tensor | slice) -> TeacherHead:
        """Return the teacher with the given rows of hidden states only."""
        return self._replace(hidden=self.hidden[rows])


@names_nearest
class TeacherTopK(NamedTuple):
    """A teacher given by an inference server: K ids with log-probabilities for every row.

    The log-probabilities must be at the student's temperature. A server at temperature 1 with a
    student at 0.7 adds 0.1 to 0.2 nats without meaning.

    A row of -inf only contributes 0, for example at a masked token. Every other row needs a largest
    log-probability of at least -1000, and must sum to 1 if K = V.

    Attributes:
        ids: (N, K) or (B, L, K), int64 or int32. The ids; none may repeat in a row, except where
            the log-probability is -inf.
        logps: (N, K) or (B, L, K), float. Their log-probabilities; -inf marks an unused place.
        has_tail: if True, all other ids form one more category, with the mass that the K ids leave.
            If False, the logps must be renormalised over the K ids, and the student is
            renormalised, too.
        floor: smallest mass of the tail, in (0, 1): the resolution of a sum of the server's
            numbers.

    Example:
        >>> import torch
        >>> from grpo_fast import TeacherTopK
        >>> logps = torch.log(torch.tensor([[0.6, 0.3], [0.5, 0.2]]))
        >>> teacher = TeacherTopK(ids=torch.tensor([[4, 9], [0, 7]]), logps=logps)
    """

    ids: Tensor  # (N, K) int64; unique in a row, except where the logp is -inf
    logps: Tensor  # (N, K); -inf marks an unused entry
    has_tail: bool = True
    floor: float = 1e-7

    def rows(self, rows: Tensor | slice) -> TeacherTopK:
        """Return the teacher with the given rows only."""
        return self._replace(ids=self.ids[rows], logps=self.logps[rows])


Teacher = TeacherHead | TeacherTopK


@names_nearest
class DivergenceTerm(NamedTuple):
    """The term of `linear_grpo_loss(divergence=...)`: coef·Σ_t w_t·D_t, with the token weights of
    the loss.

    Attributes:
        teacher: a `TeacherHead` or `TeacherTopK` with one row for each target, in the layout of
            target_ids.
        kind: "forward_kl", "reverse_kl" or "jsd" (see `linear_divergence`).
        coef: weight of the term, a number >= 0.
        beta: the teacher's share in the mixture of "jsd", in (0, 1).

    Example:
        >>> import torch
        >>> from grpo_fast import DivergenceTerm, LossConfig, TeacherHead, linear_grpo_loss
        >>> hidden, weight = torch.randn(6, 16), torch.randn(100, 16)
        >>> teacher = TeacherHead(torch.randn(6, 32), torch.randn(100, 32))
        >>> out = linear_grpo_loss(
        ...     hidden, weight, torch.randint(100, (6,)), torch.ones(2), LossConfig(),
        ...     cu_seqlens=torch.tensor([0, 4, 6]), divergence=DivergenceTerm(teacher, coef=0.1),
        ... )
        >>> out.divergence.shape
        torch.Size([6])
    """

    teacher: Teacher
    kind: str = "reverse_kl"
    coef: float = 1.0
    beta: float = 0.5


class Divergence(NamedTuple):
    """A divergence of `DIVERGENCES`, with its parameter.

    Attributes:
        kind: "forward_kl", "reverse_kl" or "jsd".
        beta: the teacher's share in the mixture of "jsd".
    """

    kind: str
    beta: float = 0.5

    @property
    def function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The elementwise function of this divergence, with `beta` bound."""
        return partial(DIVERGENCES[self.kind], beta=self.beta)


class DivergenceRows(NamedTuple):
    """Results of a divergence kernel for every row, (C,) fp64 each."""

    values: Tensor
    centers: Tensor  # Σ_j slope_j
    lse: Tensor  # logsumexp of the student's transformed logits
    teacher_lse: Tensor  # logsumexp of the teacher's transformed logits
