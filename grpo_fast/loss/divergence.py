"""`linear_divergence`: exact divergences of a student's head from a teacher, row by row."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.errors import LEAST_LOGP, argument_error, choice, conflict, number, require
from grpo_fast.kernels.head.divergence import DivergenceHead, supported_divergence, weighted_sum
from grpo_fast.kernels.head.half_range import needs_range, weight_unit
from grpo_fast.kernels.head.vocabulary import VocabularyShard
from grpo_fast.kernels.route import BACKENDS, head_route
from grpo_fast.kernels.support import Support
from grpo_fast.kernels.teachers import Divergence, DivergenceTerm, Teacher, TeacherHead, TeacherTopK
from grpo_fast.kernels.types import ActiveRows, HeadTensors, LogitRule, Wanted
from grpo_fast.loss import autograd, call, checks, values
from grpo_fast.loss.passes import LossResult, in_units, kernel_precision
from grpo_fast.loss.ranks import Agreement, local_rows
from grpo_fast.loss.values import check_values, raise_pending, support_rows
from grpo_fast.objective.divergences import DIVERGENCES

# What the log-probabilities of K ids may sum to: a server's 16 bits exceed 1 by less.
MOST = 1 + 1e-3


class DivergenceOutput(NamedTuple):
    loss: Tensor  # 0-d Σ_t weights_t·D_t, with a gradient to hidden, weight and bias
    values: Tensor  # D_t in the layout of the rows, without a gradient


@call.outside_of_graphs()
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
    support: Support | None = None,
    group: object = None,
    backend: str = "auto",
) -> DivergenceOutput:
    """The divergence of a student from its teacher in every row, over the whole vocabulary, and the
    gradient of their weighted sum: neither's logits ever exist as a whole.

    Equals, in exact arithmetic, with z as in `linear_logps` and y likewise of the teacher::

        lp, lq = z.log_softmax(-1), y.log_softmax(-1)
        p, q, m = lp.exp(), lq.exp(), torch.lerp(lp.exp(), lq.exp(), beta)
        values = (q * (lq - lp)).sum(-1)                        # "forward_kl", KL(q ‖ p)
        values = (p * (lp - lq)).sum(-1)                        # "reverse_kl", KL(p ‖ q)
        values = beta * KL(q ‖ m) + (1 - beta) * KL(p ‖ m)      # "jsd"
        loss = (weights * values).sum()                         # weights None: values.mean()

    Values are never negative, and exactly 0 for a teacher with the student's logits. A column that
    p excludes adds 0 to the reverse KL; one that q alone excludes makes it infinite, and the other
    way round. Gradients are formed in the forward pass (8·N·V·H flops in all, 6 for a top-k); no
    double backward; not in a graph of torch.compile.

    Args:
        teacher: a `TeacherHead`, or a `TeacherTopK` as servers give it; its rows are those of
            `hidden_rows`, else of hidden. Its tensors must not require a gradient.
        weights: finite; a row of weight 0 has a value, and is left out of the gradient's products.
        hidden_rows: the row of a (R, H) hidden that belongs to each row of the teacher.
        support: both distributions are over these sets alone, one for each row (`Support`).
        group: as in `linear_logps`; the teacher's weight and bias are in the same shards.

    Returns:
        DivergenceOutput(loss, values), fp32 (fp64 for fp64 tensors).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    with Agreement(group) as ranks:
        raise_pending()
        # 1. Check the student, the teacher and the options.
        tensors = call.head_tensors(hidden, lm_head_weight, bias, ranks)
        weight = tensors[1]
        is_shard = group is not None
        like = hidden[..., 0].detach() if hidden_rows is None else hidden_rows
        # In place of target ids, of which the shape, kind and device are checked alone.
        checks.hidden_layout(hidden, like.long(), hidden_rows)
        number("temperature", temperature, "a finite number > 0", lambda x: x > 0)
        checks.logit_options(softcap, logit_scale, "support", backend)
        divergence = checked_kind(kind, beta)
        teacher = checked_teacher(teacher, weight, like, ranks, has_support=support is not None)
        rule = LogitRule(float(logit_scale), softcap, float(temperature))
        options = (kind, beta)
        wanted = Wanted(*autograd.needs_gradient(*tensors))
        shard = ranks.shard(weight)
        checks.support(support, like, is_shard=is_shard)
        # 2. Make the pass over all rows, and compare it with those of the other ranks.
        rows = _rows(hidden_rows, like, len(tensors[0]), rule, support, len(weight))
        run = partial(
            form_divergence, rows=rows, teacher=teacher, divergence=divergence,
            weights=_weights(weights, like, hidden.dtype), wanted=wanted, backend=backend,
            shard=shard,
        )  # fmt: skip
        numbers = repr((*options, rule)) if is_shard else ""
        ranks.check_agreement(tensors, rows.target_ids, list(wanted), backend, numbers)
        # 3. Run it with autograd.
        loss, each, *_ = autograd.apply_loss(run, False, *tensors)
        return DivergenceOutput(loss, each.detach().reshape(like.shape))


def form_divergence(
    hidden: Tensor,  # (R, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    *,
    rows: ActiveRows,
    teacher: Teacher,
    divergence: Divergence,
    weights: Tensor,  # (T,)
    wanted: Wanted,
    backend: str,
    shard: VocabularyShard | None,
) -> LossResult:
    """hidden → Σ weights·D; gradients are (dH, dW, db), and the logps' place holds the values."""
    is_half = any(wanted) and needs_range(hidden.dtype)
    unit = weight_unit(weights) if is_half else None
    weights = weights if unit is None else weights * unit
    route = head_route(backend, weight, is_shard=True)
    term: dict[str, Any] = dict(
        teacher=teacher, divergence=divergence, weights=weights, is_wide=is_half
    )
    head = HeadTensors(hidden, weight, bias), rows, route
    with kernel_precision(hidden.device):
        if rows.support is not None:
            each, gradients = supported_divergence(*head, wanted=wanted, **term)
        else:
            term |= dict(has_policy=False, wants_weight=wanted.weight, shard=shard)
            sweep = DivergenceHead(*head, **term)
            gradients = sweep.sweep(wanted)
            each = sweep.values
    result = LossResult(weighted_sum(weights, each).to(weights.dtype), each, None, gradients)
    return result if unit is None else in_units(result, unit, hidden.dtype)


def checked_term(
    term: object,
    weight: Tensor,  # (V, H)
    target_ids: Tensor,
    ranks: Agreement,
    support: Support | None,
    grad_filter: float | None,
) -> DivergenceTerm | None:
    """The divergence term of a loss, checked, with a flat teacher; None of None."""
    if term is None:
        return None
    if not isinstance(term, DivergenceTerm):
        raise argument_error("divergence", "None or a DivergenceTerm", type(term).__name__)
    if grad_filter is not None:
        why = "the gradient of a divergence has no columns to leave out; pass grad_filter=None"
        raise conflict(f"grad_filter={grad_filter}", "divergence", why)
    checked_kind(term.kind, term.beta)
    number("coef", term.coef, "a finite number >= 0", lambda x: x >= 0)
    has_support = support is not None
    teacher = checked_teacher(term.teacher, weight, target_ids, ranks, has_support=has_support)
    return DivergenceTerm(teacher, term.kind, term.coef, term.beta)


def checked_kind(kind: str, beta: float) -> Divergence:
    choice("kind", kind, tuple(DIVERGENCES))
    number("beta", beta, "a number in (0, 1)", lambda x: 0 < x < 1)
    return Divergence(kind, float(beta))


def checked_teacher(
    teacher: object, weight: Tensor, like: Tensor, ranks: Agreement, *, has_support: bool = False
) -> Teacher:
    """A teacher with one flat row for each row of `like`, over the vocabulary of `weight`."""
    is_shard = ranks.group is not None
    if isinstance(teacher, TeacherTopK):
        if has_support or is_shard:
            other = "support" if has_support else "group"
            why = "only a TeacherHead gives the logits of every id"
            raise conflict("teacher, a TeacherTopK", other, why)
        return _checked_topk(teacher, weight.shape[0], like)
    if not isinstance(teacher, TeacherHead):
        raise argument_error("teacher", "a TeacherHead or a TeacherTopK", type(teacher).__name__)
    for name, x in zip(("hidden", "weight", "bias"), teacher, strict=False):
        checks.constant(f"teacher.{name}", x)
    teacher = teacher._replace(
        weight=local_rows("teacher.weight", teacher.weight, ranks.group),
        bias=local_rows("teacher.bias", teacher.bias, ranks.group),
    )
    names = ("teacher.hidden", "teacher.weight", "teacher.bias")
    checks.head(teacher.hidden, teacher.weight, teacher.bias, names, is_shard=is_shard)
    fits = len(teacher.weight) == len(weight)
    expected = f"the {len(weight)} rows of lm_head_weight"
    came = f"{len(teacher.weight)}; slice both heads to the ids that the two tokenizers share"
    require(fits, "teacher.weight", expected, came)
    hidden = _rows_like("teacher.hidden", teacher.hidden, checks.FLOATING, like)
    checks.temperatures(like, teacher.temperature)
    checks.logit_options(teacher.softcap, teacher.logit_scale, "support", BACKENDS[0])
    return teacher._replace(hidden=hidden)


def _checked_topk(teacher: TeacherTopK, vocab: int, like: Tensor) -> TeacherTopK:
    # 1. Check kinds and shapes.
    checks.constant("teacher.logps", teacher.logps)
    number("teacher.floor", teacher.floor, "a number in (0, 1)", lambda x: 0 < x < 1)
    logps = _rows_like("teacher.logps", teacher.logps, checks.FLOATING, like)
    ids = _rows_like("teacher.ids", teacher.ids, checks.IDS, like).long()
    K = logps.shape[1]
    expected = f"the {K} ids of teacher.logps a row, from 1 to V = {vocab}"
    require(ids.shape == logps.shape and 0 < K <= vocab, "teacher.ids", expected, ids.shape[1])
    # 2. Look at the values: ids, sums, and what no softmax gives.
    is_one = logps > -torch.inf
    is_whole = is_one.all(1) if K == vocab else is_one.new_zeros(len(logps))
    largest = logps.amax(1)
    sums = logps.double().exp().sum(1)
    # An empty place stands for no id: each gets a number of its own below 0.
    places = torch.where(is_one, ids, -1 - torch.arange(K, device=ids.device)).sort(1).values
    outside = is_one & ((ids < 0) | (ids >= vocab))
    twice = (places.diff() == 0).any()
    few = sums < 2 - MOST
    flags = [
        (outside.any(), f"teacher.ids: expected ids in [0, {vocab}), got others"),
        (twice, "teacher.ids: expected no id twice in a row, got one that is"),
        (~(sums <= MOST).all(), "teacher.logps: expected log-probabilities, whose probabilities "
         f"sum to at most {MOST}, got a row with more, or NaN"),
        ((is_whole & few).any(), f"teacher.logps: expected rows of all {vocab} ids to sum to 1, "
         "got one that does not"),
        (((largest > -torch.inf) & (largest < LEAST_LOGP)).any(), "teacher.logps: expected a "
         f"largest log-probability of at least {LEAST_LOGP:g} in each row (servers write -9999 "
         "for -inf), got a smaller one"),
    ]  # fmt: skip
    if not teacher.has_tail:
        message = (
            "teacher.logps: expected rows renormalised over their ids where has_tail=False, "
            "logps - logps.logsumexp(-1, keepdim=True), got a row that does not sum to 1"
        )
        flags.append((few.any(), message))
    check_values(flags, "auto")
    # 3. Empty places get an id that the kernels may read.
    ids = torch.where(is_one, ids, 0).clamp(0, vocab - 1)
    return teacher._replace(ids=ids, logps=logps)


def _rows_like(name: str, x: Tensor, kind: str, like: Tensor) -> Tensor:
    checks.tensor(name, x, kind, same_device=("hidden", like))
    fits = x.shape[:-1] == like.shape
    expected = "one row for each of the student's, "
    require(fits, name, f"{expected}{tuple(like.shape)}", tuple(x.shape))
    return x.reshape(-1, x.shape[-1])


def _rows(
    hidden_rows: Tensor | None,
    like: Tensor,
    num_hidden: int,
    rule: LogitRule,
    support: Support | None,
    vocab: int,
) -> ActiveRows:
    """All rows, with targets that nobody reads: a set's first id."""
    count = like.numel()
    index = None
    sets = None
    if hidden_rows is not None:
        index = values.checked_ids(
            "hidden_rows", hidden_rows.reshape(-1).long(), num_hidden, "auto", kind="rows",
            expected=f"rows in [0, {num_hidden})",
        )  # fmt: skip
    targets = torch.zeros(count, dtype=torch.int64, device=like.device)
    if support is not None and len(support.ids):
        targets = support.ids[support.offsets[:-1].clamp(0, len(support.ids) - 1)].long()
        sets = support_rows(support, None, targets, vocab, "auto")
    repeats = index is not None
    return ActiveRows(count, None, targets, rule, index, repeats=repeats, support=sets)


def _weights(weights: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    count = like.numel()
    dtype = torch.promote_types(dtype, torch.float32)
    if weights is None:
        return torch.full((count,), 1 / max(count, 1), dtype=dtype, device=like.device)
    checks.like_logps("weights", weights, like)
    checks.constant("weights", weights)
    own = weights.detach().reshape(-1).to(dtype, copy=True)
    values.check_numbers("auto", weights=own)
    return own
