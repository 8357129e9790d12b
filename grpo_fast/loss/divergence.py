"""`linear_divergence`: exact divergence of a student from a teacher, for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.errors import LEAST_LOGP, argument_error, conflict, require
from grpo_fast.kernels.divergence import DivergenceTerm, Teacher, TeacherHead, TeacherTopK
from grpo_fast.loss import checks, entry
from grpo_fast.loss.autograd import apply_loss, loss_from_logits
from grpo_fast.loss.call import Call
from grpo_fast.loss.checks import ValueChecks, check_numbers, raise_pending
from grpo_fast.loss.ranks import Agreement, local_rows

# Largest sum of a teacher's K probabilities that is accepted. It is slightly more than 1, because
# inference servers round log-probabilities to 16 bits.
MAX_PROBABILITY_SUM = 1 + 1e-3


class DivergenceOutput(NamedTuple):
    """Result of `linear_divergence`.

    Attributes:
        loss: 0-d, Σ_t weights_t·D_t. It is differentiable with respect to `hidden`, `weight` and
            `bias`.
        values: (N,) or (B, L), detached. The divergence D_t of each row.
    """

    loss: Tensor  # 0-d
    values: Tensor  # (N,) or (B, L)


@entry.public
def linear_divergence(
    hidden: Tensor,  # (N, H) or (B, L, H)
    lm_head_weight: Tensor,  # (V, H)
    teacher: Teacher,
    kind: str,
    *,
    beta: float = 0.5,
    weights: Tensor | None = None,  # (N,) or (B, L)
    bias: Tensor | None = None,  # (V,)
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    hidden_rows: Tensor | None = None,  # (N,) or (B, L)
    group: object = None,
    backend: str = "auto",
) -> DivergenceOutput:
    """Compute the divergence of a student from a teacher for each row without storing all logits.

    The divergence is an exact sum over the full vocabulary, or over the ids that a server returned.
    Let z be the student's logits, as in `linear_logps`, and y the teacher's logits. In exact
    arithmetic, the result equals::

        lp = z.log_softmax(-1)
        lq = y.log_softmax(-1)
        p, q = lp.exp(), lq.exp()
        m = (1 - beta) * p + beta * q
        values = (q * (lq - lp)).sum(-1)                        # "forward_kl", KL(q ‖ p)
        values = (p * (lp - lq)).sum(-1)                        # "reverse_kl", KL(p ‖ q)
        values = beta * KL(q ‖ m) + (1 - beta) * KL(p ‖ m)      # "jsd"
        loss = (weights * values).sum()                         # weights None: values.mean()

    Values are never negative, and exactly 0 if teacher and student have the same logits. The
    reverse KL is infinite if an id has q = 0 and p > 0. The forward KL is infinite if an id has
    p = 0 and q > 0.

    Gradients are computed in the forward pass. The call costs 8·N·V·H flops, or 6·N·V·H with a
    `TeacherTopK`. Double backward raises an error.

    The Jensen-Shannon divergence follows GKD (https://arxiv.org/abs/2306.13649).

    Args:
        hidden: (N, H) or (B, L, H), in fp32, bf16 or fp16 (fp64 with the torch backend). The
            student's hidden states.
        lm_head_weight: (V, H), in the dtype and on the device of `hidden`. The weight of the
            student's LM head. A parameter sharded by FSDP2 is gathered by a collective call, and
            its gradient is averaged over the ranks.
        teacher: a `TeacherHead`, or a `TeacherTopK` with the log-probabilities that an inference
            server returned. It has one row for each row of the student, and its tensors must not
            require grad.
        kind: "forward_kl", "reverse_kl" or "jsd".
        beta: the teacher's share in the mixture of "jsd", in (0, 1).
        weights: (N,) or (B, L), finite. Weight of each row in the loss. A row of weight 0 is
            skipped in the matrix products of the gradient. None: 1/N.
        bias: (V,), any float dtype, on the device of `hidden`. The bias of the student's LM head.
            None: no bias.
        temperature: temperature of the student, a number > 0.
        softcap: bound of the student's logits, a number > 0. None: no bound.
        logit_scale: factor by which the student's logits are multiplied, not 0.
        hidden_rows: (N,) or (B, L), int64 or int32. For each row of the teacher, the index of the
            student's row in `hidden` (R, H). None: row t of `hidden` is compared with row t of the
            teacher.
        group: process group, or one-dimensional device mesh, of the tensor-parallel ranks that
            share the vocabulary (see `linear_logps`). The teacher's weight and bias must be sharded
            in the same way. None: the head is not split over ranks.
        backend: "auto", "torch", "cpu" (C++) or "triton". If you name a backend, it is used or an
            error is raised; there is no fallback.

    Returns:
        DivergenceOutput(loss, values), in fp32 (fp64 for fp64 tensors).

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. The message names the
            argument.

    Example:
        >>> import torch
        >>> from grpo_fast import TeacherHead, linear_divergence
        >>> hidden = torch.randn(6, 16, requires_grad=True)
        >>> lm_head_weight = torch.randn(100, 16, requires_grad=True)
        >>> teacher = TeacherHead(torch.randn(6, 32), torch.randn(100, 32))
        >>> out = linear_divergence(hidden, lm_head_weight, teacher, "reverse_kl")
        >>> out.loss.backward()
        >>> out.values.shape
        torch.Size([6])
    """
    with Agreement(group) as ranks:
        raise_pending()
        # 1. Check the student, the teacher and the options.
        tensors = entry.head_tensors(hidden, lm_head_weight, bias, ranks)
        like = hidden[..., 0].detach() if hidden_rows is None else hidden_rows
        # Pass `like` in place of target_ids, because only its shape and device matter here.
        checks.hidden_layout(hidden, like.long(), hidden_rows)
        checks.options(logit_scale=logit_scale, softcap=softcap, temperature=temperature)
        term = DivergenceTerm(teacher, kind, beta=beta)
        call = Call(
            tensors=tensors, like=like, backend=backend, hidden_rows=hidden_rows,
            divergence=checked_term(term, tensors[1], like, ranks),
            shard=ranks.shard(tensors[1]), temperature=temperature, softcap=softcap,
            logit_scale=logit_scale,
        )  # fmt: skip
        entry.check_options(call)
        # 2. Prepare the rows, and check that the other ranks make the same call.
        call.find_all_rows(_weights(weights, like, hidden.dtype))
        ranks.check_agreement(call)
        # 3. Compute the divergence with autograd.
        call.tensors = ()
        loss = apply_loss(loss_from_logits, call, *tensors)
        return DivergenceOutput(loss, call.outputs[0].reshape(like.shape))


def checked_term(
    term: object, weight: Tensor, target_ids: Tensor, ranks: Agreement
) -> DivergenceTerm | None:
    """Check the divergence term of a loss.

    Returns:
        None if the loss has no divergence term. Otherwise the term, with the rows of its teacher
        flattened to one row for each target.
    """
    if term is None:
        return None
    if not isinstance(term, DivergenceTerm):
        raise argument_error("divergence", "None or a DivergenceTerm", type(term).__name__)
    checks.options(kind=term.kind, beta=term.beta, coef=term.coef)
    return term._replace(teacher=_checked_teacher(term.teacher, weight, target_ids, ranks))


def _checked_teacher(teacher: object, weight: Tensor, like: Tensor, ranks: Agreement) -> Teacher:
    """Check a teacher, and return it with one row for each element of `like`."""
    is_shard = ranks.group is not None
    if isinstance(teacher, TeacherTopK):
        if is_shard:
            why = "only a TeacherHead gives the logits of every id"
            raise conflict("teacher, a TeacherTopK", "group", why)
        return _checked_topk(teacher, weight.shape[0], like)
    if not isinstance(teacher, TeacherHead):
        raise argument_error("teacher", "a TeacherHead or a TeacherTopK", type(teacher).__name__)
    # 1. Check that no teacher tensor requires grad, because no gradient would reach it.
    for name, x in zip(("hidden", "weight", "bias"), teacher, strict=False):
        checks.constant(f"teacher.{name}", x)
    teacher = teacher._replace(
        # Use this rank's rows of the teacher's weight, which must be sharded like the student's
        # weight.
        weight=local_rows("teacher.weight", teacher.weight, ranks.group),
        bias=local_rows("teacher.bias", teacher.bias, ranks.group),
    )
    names = ("teacher.hidden", "teacher.weight", "teacher.bias")
    checks.head(teacher.hidden, teacher.weight, teacher.bias, names, is_shard=is_shard)
    # 2. Check that teacher and student have the same vocabulary.
    expected = f"the {len(weight)} rows of lm_head_weight"
    came = f"{len(teacher.weight)}; slice both heads to the ids that the two tokenizers share"
    require(len(teacher.weight) == len(weight), "teacher.weight", expected, came)
    # 3. Check that the teacher has one row per student row.
    hidden = _rows_like("teacher.hidden", teacher.hidden, checks.FLOATING, like)
    numbers = ("logit_scale", "softcap", "temperature")
    checks.options(**{f"teacher.{name}": getattr(teacher, name) for name in numbers})
    return teacher._replace(hidden=hidden)


def _checked_topk(teacher: TeacherTopK, vocab: int, like: Tensor) -> TeacherTopK:
    # 1. Check dtypes and shapes.
    checks.constant("teacher.logps", teacher.logps)
    checks.options(**{"teacher.floor": teacher.floor})
    logps = _rows_like("teacher.logps", teacher.logps, checks.FLOATING, like)
    ids = _rows_like("teacher.ids", teacher.ids, checks.IDS, like).long()
    K = logps.shape[1]
    expected = f"the {K} ids of teacher.logps a row, from 1 to V = {vocab}"
    require(ids.shape == logps.shape and 0 < K <= vocab, "teacher.ids", expected, ids.shape[1])
    # 2. Check that the ids are valid, and that the probabilities of a row can be part of a
    # distribution. A log-probability of -inf marks an unused entry.
    has_id = logps > -torch.inf
    is_whole = has_id.all(1) if K == vocab else has_id.new_zeros(len(logps))
    largest = logps.amax(1)
    sums = logps.double().exp().sum(1)
    # Give unused entries distinct negative ids, so that they do not count as duplicates.
    places = torch.where(has_id, ids, -1 - torch.arange(K, device=ids.device)).sort(1).values
    outside = has_id & ((ids < 0) | (ids >= vocab))
    twice = (places.diff() == 0).any()
    is_used = largest > -torch.inf
    few = is_used & (sums < 2 - MAX_PROBABILITY_SUM)
    found = ValueChecks("auto", "torch")
    logps_expected = "teacher.logps: expected"
    for is_wrong, message in (
        (outside.any(), f"teacher.ids: expected ids in [0, {vocab}), got others"),
        (twice, "teacher.ids: expected no id twice in a row, got a repeated one"),
        (~(sums <= MAX_PROBABILITY_SUM).all(),
         f"{logps_expected} log-probabilities, whose probabilities sum to at most "
         f"{MAX_PROBABILITY_SUM}, got a row with more, or NaN"),
        ((is_used & (largest < LEAST_LOGP)).any(),
         f"{logps_expected} a largest log-probability of at least {LEAST_LOGP:g} in each row "
         "(servers write -9999 for -inf), got a smaller one"),
        ((few & (is_whole | (not teacher.has_tail))).any(),
         f"{logps_expected} rows to sum to 1 that have all {vocab} ids or no tail "
         "(has_tail=False: pass logps - logps.logsumexp(-1, keepdim=True)), got one that does not"),
    ):  # fmt: skip
        found.add_flag(is_wrong, message)
    found.send()
    # 3. Replace the ids of unused entries with a valid id, because the kernels use ids as memory
    # indices.
    ids = torch.where(has_id, ids, 0).clamp(0, vocab - 1)
    return teacher._replace(ids=ids, logps=logps)


def _rows_like(name: str, x: Tensor, kind: str, like: Tensor) -> Tensor:
    """Check that a teacher tensor has one row per element of `like`, and return it as (N, K)."""
    checks.tensor(name, x, kind, same_device=("hidden", like))
    expected = f"one row for each of the student's, {tuple(like.shape)}"
    require(x.shape[:-1] == like.shape, name, expected, tuple(x.shape))
    return x.reshape(-1, x.shape[-1])


def _weights(weights: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each row, (N,). If `weights` is None, every weight is 1/N."""
    count = like.numel()
    dtype = torch.promote_types(dtype, torch.float32)
    if weights is None:
        return torch.full((count,), 1 / max(count, 1), dtype=dtype, device=like.device)
    checks.like_logps("weights", weights, like)
    checks.constant("weights", weights)
    copy = weights.detach().reshape(-1).to(dtype, copy=True)
    check_numbers(ValueChecks("auto", "torch"), weights=copy).send()
    return copy
