"""Types that describe the teacher of a distillation term and the divergence to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from grpo_fast.errors import names_nearest
from grpo_fast.kernels.types import LogitTransform
from grpo_fast.objective.divergences import DIVERGENCES


class TeacherHead(NamedTuple):
    """A teacher given by hidden states for the student's rows and an LM head over the same
    vocabulary.

    The teacher receives no gradient. If the two vocabularies differ only in padding, slice both
    heads to their common ids.

    Attributes:
        hidden: (N, H') hidden states for the student's rows. H' and the dtype may differ from the
            student's.
        weight: (V, H') weight of the teacher's LM head.
        bias: (V,) bias of the LM head, or None.
        temperature: temperature of the teacher's distribution.
        softcap: soft cap of the teacher's logits, or None.
        logit_scale: factor of the teacher's raw logits.
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


class TeacherTopK(NamedTuple):
    """A teacher given by K ids and log-probabilities per row, as inference servers return them.

    The logps must be computed at the student's temperature: a server at 1.0 with a student at 0.7
    adds a spurious 0.1 to 0.2 nats. A row that consists of -inf only carries no information and
    contributes 0, for example at a masked token. In every other row the largest log-probability is
    at least -1000, and the probabilities sum to 1 if K = V.

    Attributes:
        ids: (N, K) int64 token ids, unique in a row except where the logp is -inf.
        logps: (N, K) log-probabilities; -inf marks an unused entry.
        has_tail: if True, all other ids form one more category with the remaining mass. If False,
            the logps must be renormalised over the K ids, and the student is renormalised as well.
        floor: lower limit of the tail's mass, the precision of a sum of the server's numbers.
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
    """The distillation term of `linear_grpo_loss(divergence=)`: coef·Σ_t w_t·D_t.

    The weights w_t are the token weights of the loss.

    Attributes:
        teacher: a teacher with one row for each target, in the layout of target_ids.
        kind: "forward_kl", "reverse_kl" or "jsd".
        coef: coefficient of the term, non-negative.
        beta: the teacher's share in the mixture of "jsd".
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
