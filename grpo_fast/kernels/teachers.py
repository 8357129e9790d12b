"""Whom a student is compared with, row by row, and by which divergence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from grpo_fast.errors import names_nearest
from grpo_fast.kernels.types import LogitRule
from grpo_fast.objective.divergences import DIVERGENCES


class TeacherHead(NamedTuple):
    """A teacher's hidden states of the student's rows, and its head over the same vocabulary.

    Nothing here gets a gradient. H' need not be the student's H, the dtype neither. Where the two
    vocabularies differ in padding alone, slice both heads to the ids that they share.
    """

    hidden: Tensor  # (N, H')
    weight: Tensor  # (V, H')
    bias: Tensor | None = None  # (V,)
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def rule(self) -> LogitRule:
        return LogitRule(self.logit_scale, self.softcap, self.temperature)

    def rows(self, rows: Tensor | slice) -> TeacherHead:
        return self._replace(hidden=self.hidden[rows])


class TeacherTopK(NamedTuple):
    """An inference server's answer for every row: K ids and their log-probabilities.

    With `has_tail` all other ids are one more category: its mass is what the K leave of 1, but no
    less than `floor`, the resolution of a sum of the server's numbers. Without it the logps must
    be renormalised over the K ids, and so is the student. The logps belong to the student's
    temperature: a server at 1 beside a student at 0.7 adds 0.1 to 0.2 nats that mean nothing.

    A row of -inf alone knows nothing of the teacher and adds 0, for example at a masked token.
    Every other row has a largest log-probability of at least -1000, and sums to 1 where K = V.
    """

    ids: Tensor  # (N, K) int64; no id twice in a row, but where its log-probability is -inf
    logps: Tensor  # (N, K); -inf: nothing is in this place
    has_tail: bool = True
    floor: float = 1e-7

    def rows(self, rows: Tensor | slice) -> TeacherTopK:
        return self._replace(ids=self.ids[rows], logps=self.logps[rows])


Teacher = TeacherHead | TeacherTopK


@names_nearest
class DivergenceTerm(NamedTuple):
    """The term of `linear_grpo_loss(divergence=)`: coef·Σ_t w_t·D_t, by the loss's own weights.

    The teacher has one row for each target, in the layout of target_ids; `coef` is a number >= 0.
    """

    teacher: Teacher
    kind: str = "reverse_kl"
    coef: float = 1.0
    beta: float = 0.5


class Divergence(NamedTuple):
    """A kind of `DIVERGENCES`, and the teacher's share in the mixture of "jsd"."""

    kind: str
    beta: float = 0.5

    @property
    def function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return partial(DIVERGENCES[self.kind], beta=self.beta)


class DivergenceRows(NamedTuple):
    """A row kernel's sums over every row, (C,) fp64."""

    values: Tensor
    centers: Tensor  # Σ_j slope_j
    lse: Tensor  # of the student's final logits
    teacher_lse: Tensor
