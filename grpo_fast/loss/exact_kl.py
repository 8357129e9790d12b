"""The KL divergence of two heads over the whole vocabulary, row by row: nothing of it is estimated.

KL_t = Σ_j p_tj·(log p_tj − log q_tj) reads both distributions of a row, p the policy's and q the
reference's, so it is a door of its own beside `linear_grpo_loss`. Rows go through in chunks: both
heads' logits of a chunk are formed, reduced, and formed again in the backward pass, where
d z_j = g·p_j·(log p_j − log q_j − KL). 4·R·V·H flops forward and 8·R·V·H backward for heads of one
width; workspace: one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.head.gradients import ChunkGradients, GradientSums
from grpo_fast.kernels.head.products import matmul_wide
from grpo_fast.kernels.reference import final_logits
from grpo_fast.kernels.support import Support
from grpo_fast.kernels.types import LogitRule, Wanted, pad_rows, padded
from grpo_fast.kernels.workspace import unset, workspace_bytes
from grpo_fast.loss import checks
from grpo_fast.loss.autograd import NO_DOUBLE_BACKWARD
from grpo_fast.objective.config import number

BUFFERS = 10  # of a chunk's size in fp32 that are alive together, at most


class Side(NamedTuple):
    """One model's rows and head, and the sets that both models' distributions are over."""

    hidden: Tensor  # (R, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    rule: LogitRule  # temperature: a float
    support: Support | None  # of the R rows

    def padded(self, chunk: slice) -> Tensor:
        """(padded C, H): the hidden rows of a chunk."""
        return pad_rows(self.hidden[chunk]).contiguous()

    def log_probs(self, chunk: slice, h: Tensor) -> tuple[Tensor, Tensor | float]:
        """(C, V) log-probabilities of the chunk, whose padded rows are h, in fp32, and dz/draw."""
        count = chunk.stop - chunk.start
        dtype = torch.promote_types(h.dtype, torch.float32)
        raw = unset(h.new_empty, (h.shape[0], self.weight.shape[0]), dtype=dtype)
        matmul_wide(h, self.weight, out=raw)
        raw = raw[:count] if self.bias is None else raw[:count].add_(self.bias)
        z, slope = final_logits(raw, self.rule)
        if self.support is not None:
            z = z.masked_fill(~_kept(self.support, chunk, z.shape[1]), float("-inf"))
        return z.log_softmax(-1), slope


def _kept(support: Support, chunk: slice, vocab_size: int) -> Tensor:
    """(C, V) bool: what the rows of a chunk are over; an empty set is the whole vocabulary."""
    bounds = support.offsets[chunk.start : chunk.stop + 1]
    counts = bounds.diff()
    kept = (counts == 0)[:, None].repeat(1, vocab_size)
    rows = torch.arange(len(counts), device=kept.device).repeat_interleave(counts)
    kept[rows, support.ids[int(bounds[0]) : int(bounds[-1])].long()] = True
    return kept


def linear_exact_kl(
    hidden: Tensor,  # (R, H)
    lm_head_weight: Tensor,  # (V, H)
    ref_hidden: Tensor,  # (R, H')
    ref_lm_head_weight: Tensor,  # (V, H')
    *,
    bias: Tensor | None = None,  # (V,)
    ref_bias: Tensor | None = None,  # (V,)
    rule: LogitRule | None = None,
    ref_rule: LogitRule | None = None,
    support: Support | None = None,
) -> Tensor:  # (R,)
    """KL(policy ‖ reference) of every row, with a gradient to hidden, lm_head_weight and bias.

    The same, with all logits in memory:

        lp = final_logits(hidden @ lm_head_weight.T).log_softmax(-1)
        ref_lp = final_logits(ref_hidden @ ref_lm_head_weight.T).log_softmax(-1)
        (lp.exp() * (lp - ref_lp)).sum(-1)  # by terms that cancel nothing: exact KLs of 1e-9, too

    Args:
        hidden, ref_hidden: the rows that predict the same R tokens, of either model.
        rule, ref_rule: logit scale, softcap and temperature (a float) of either head; None: the
            plain softmax for the policy, the policy's rule for the reference.
        support: of the R rows, as in `linear_logps`: both distributions are over the same sets.

    Returns:
        (R,) fp32. A token that the policy never gives (probability 0 in fp32) adds 0; one that only
        the reference excludes makes the row infinite.

    Raises:
        ValueError: shapes, dtypes, devices or vocabularies that do not fit, naming the argument.
    """
    rule = LogitRule() if rule is None else rule
    policy = Side(hidden, lm_head_weight, bias, rule, support)
    reference = Side(ref_hidden, ref_lm_head_weight, ref_bias, ref_rule or rule, support)
    _check(policy, reference)
    return _ExactKL.apply(hidden, lm_head_weight, bias, policy.rule, reference)


def _check(policy: Side, reference: Side) -> None:
    for side, prefix in ((policy, ""), (reference, "ref_")):
        checks.head(side.hidden, side.weight, side.bias, prefix=prefix)
        if side.hidden.dim() != 2:
            raise checks.wrong(f"{prefix}hidden", "shape (R, H)", tuple(side.hidden.shape))
        scale, softcap, temperature = side.rule
        number(f"{prefix}rule.logit_scale", scale, "a finite number, not 0", lambda x: x != 0)
        if softcap is not None:
            expected = "None or a finite number > 0"
            number(f"{prefix}rule.softcap", softcap, expected, lambda x: x > 0)
        number(f"{prefix}rule.temperature", temperature, "a finite number > 0", lambda x: x > 0)
    if reference.hidden.shape[0] != policy.hidden.shape[0]:
        expected = f"the {policy.hidden.shape[0]} rows of hidden"
        raise checks.wrong("ref_hidden", expected, reference.hidden.shape[0])
    if reference.weight.shape[0] != policy.weight.shape[0]:
        expected = f"the {policy.weight.shape[0]} vocabulary rows of lm_head_weight"
        raise checks.wrong("ref_lm_head_weight", expected, reference.weight.shape[0])
    if reference.hidden.device != policy.hidden.device:
        expected = f"the device of hidden, {policy.hidden.device}"
        raise checks.wrong("ref_hidden", expected, reference.hidden.device)
    support, rows = policy.support, policy.hidden.shape[0]
    if support is not None and len(support.offsets) != rows + 1:
        raise checks.wrong("support.offsets", f"{rows + 1} of {rows} rows", len(support.offsets))


def _chunks(policy: Side) -> Iterator[slice]:
    """Slices of the rows, in order: as many as the workspace has room for."""
    row_bytes = BUFFERS * 4 * policy.weight.shape[0]
    rows = padded(max(workspace_bytes(policy.hidden.device) // row_bytes, 1))
    for start in range(0, policy.hidden.shape[0], rows):
        yield slice(start, min(start + rows, policy.hidden.shape[0]))


def _gap(lp: Tensor, p: Tensor, reference: Side, chunk: slice) -> Tensor:
    """(C, V) log p − log q, 0 where p is."""
    ref_lp, _ = reference.log_probs(chunk, reference.padded(chunk))
    return (lp - ref_lp.to(lp.dtype)).masked_fill_(p == 0, 0.0)


def _terms(lp: Tensor, reference: Side, chunk: slice) -> Tensor:
    """(C, V) p·(log p − log q) + q − p, each ≥ 0: without Σ(q − p), which is 0, fp32 cancels."""
    ref_lp, _ = reference.log_probs(chunk, reference.padded(chunk))
    ref_lp = ref_lp.to(lp.dtype)
    p, d, q = lp.exp(), lp - ref_lp, ref_lp.exp()
    step = d.abs().neg_().expm1_().mul_(torch.where(d >= 0, p, -q))  # q − p: nothing cancels
    return torch.where(p == 0, q, d.mul_(p).add_(step))


class _ExactKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rule, reference):
        policy = Side(hidden, weight, bias, rule, reference.support)
        kl = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(policy):
                lp, _ = policy.log_probs(chunk, policy.padded(chunk))
                kl[chunk] = _terms(lp, reference, chunk).sum(-1, dtype=torch.float64)
        ctx.save_for_backward(hidden, weight, bias, kl)
        ctx.rule, ctx.reference = rule, reference
        return kl

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        hidden, weight, bias, kl = ctx.saved_tensors
        policy = Side(hidden, weight, bias, ctx.rule, ctx.reference.support)
        wanted = Wanted(*ctx.needs_input_grad[:3])
        chunks = list(_chunks(policy))
        with torch.autocast(hidden.device.type, enabled=False):
            sums = GradientSums(hidden, weight, bias, wanted, is_only=len(chunks) == 1)
            for chunk in chunks:
                h, count = policy.padded(chunk), chunk.stop - chunk.start
                lp, slope = policy.log_probs(chunk, h)
                p = lp.exp()
                d = _gap(lp, p, ctx.reference, chunk).sub_(kl[chunk, None]).mul_(p).mul_(slope)
                g = grad[chunk, None].to(d.dtype)
                d = torch.where(g == 0, 0.0, d.mul_(g))
                sums.add(chunk, h, ChunkGradients(pad_rows(d)), count, None)
            found = zip(sums.finish(), wanted, strict=True)
        return *(x if is_wanted else None for x, is_wanted in found), None, None
