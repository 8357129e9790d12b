"""Types for a distillation term: the teacher, and the student's divergence from the teacher."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from grpo_fast.kernels.types import LogitTransform


class TeacherHead(NamedTuple):
    """A teacher, given by its hidden states and its LM head.

    The teacher must have the vocabulary of the student. If the vocabularies differ only in padding,
    slice both heads to the shared ids. No gradient flows to the teacher.

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
        """Return the transform from the teacher's raw logits to the logits of its distribution."""
        return LogitTransform.of(self.logit_scale, self.softcap, self.temperature)

    def rows(self, rows: Tensor | slice) -> TeacherHead:
        """Return a teacher with only the given rows of hidden states."""
        return self._replace(hidden=self.hidden[rows])


class TeacherTopK(NamedTuple):
    """A teacher, given by K ids and their log-probabilities for every row.

    Inference servers return this form. The log-probabilities must be computed at the temperature of
    the student. Otherwise the divergence is wrong, for example by 0.1 to 0.2 nats if the server
    uses temperature 1 and the student uses 0.7.

    A row in which all log-probabilities are -inf contributes 0, which is useful for masked tokens.
    In every other row, the largest log-probability must be at least -1000, and the probabilities
    must sum to 1 if K = V.

    Attributes:
        ids: (N, K) or (B, L, K), int64 or int32. The ids. An id may occur only once in a row,
            except where the log-probability is -inf.
        logps: (N, K) or (B, L, K), float. The log-probabilities of the ids. -inf marks an unused
            entry.
        has_tail: if True, all other ids form one more category with the remaining probability. If
            False, the logps must be renormalised over the K ids, and the student is renormalised
            as well.
        floor: smallest probability of the tail category, in (0, 1). The teacher's tail is 1 - Σ
            exp(logps). Choose `floor` about as large as the rounding error of this sum, because a
            smaller tail is only noise. If `floor` raises the tail, the teacher's K + 1
            probabilities are divided by their sum.

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
        """Return a teacher with only the given rows."""
        return self._replace(ids=self.ids[rows], logps=self.logps[rows])


Teacher = TeacherHead | TeacherTopK


class DivergenceTerm(NamedTuple):
    """A divergence term that `linear_grpo_loss(divergence=...)` adds to the loss.

    The term is coef·Σ_t w_t·D_t, where w_t are the token weights of the loss.

    Attributes:
        teacher: a `TeacherHead` or `TeacherTopK` with one row for each target, in the layout of
            target_ids.
        kind: "forward_kl", "reverse_kl" or "jsd" (see `linear_divergence`).
        coef: weight of the term, a number >= 0.
        beta: weight of the teacher in the mixture of "jsd", in (0, 1).

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


class DivergenceRows(NamedTuple):
    """Results of a divergence kernel for every row, (C,) fp64 each."""

    values: Tensor
    centers: Tensor  # Σ_j slope_j, the factor of p in the gradient
    lse: Tensor  # logsumexp of the student's transformed logits
    teacher_lse: Tensor  # logsumexp of the teacher's transformed logits
