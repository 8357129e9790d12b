"""`linear_logps` and `logits_logps` as custom operators: differentiable logps and entropy, no logits kept.

Forward keeps (lse, logp, entropy) of every row, and outside of torch.compile the logits of as many rows as the
workspace holds until the first backward, which forms the others again, chunk by chunk: 6 to 8·N·V·H flops in all for
the linear operator, 6 where one chunk holds the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast import validation
from grpo_fast.kernels.capture import is_capturing
from grpo_fast.kernels.linear import LinearHead, RowStats, Wanted
from grpo_fast.kernels.rows_torch import LogitRule
from grpo_fast.ops import library
from grpo_fast.passes import kernel_precision, pick_backend
from grpo_fast.prepare import check_logps, checked_rows

ROWS = (
    "Tensor target_ids, Tensor? temperatures, float temperature, float? softcap, float logit_scale, "
    "bool return_entropy, str backend"
)
STATS = "Tensor logps, Tensor entropy, Tensor lse"
library.define(f"linear_logps(Tensor hidden, Tensor weight, Tensor? bias, Tensor? hidden_rows, {ROWS}) -> ({STATS})")
library.define(
    f"linear_logps_grad(Tensor hidden, Tensor weight, Tensor? bias, Tensor? hidden_rows, {ROWS}, {STATS}, "
    "Tensor? d_logps, Tensor? d_entropy, bool[] wanted) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)
library.define(f"logits_logps(Tensor logits, {ROWS}) -> ({STATS})")
library.define(f"logits_logps_grad(Tensor logits, {ROWS}, {STATS}, Tensor? d_logps, Tensor? d_entropy) -> Tensor")


class Rows:
    """The active rows of a call (target -100 marks the others) and the rule of their logits."""

    def __init__(self, vocab_size: int, target_ids, temperatures, temperature, softcap, logit_scale) -> None:
        self.num_rows = target_ids.shape[0]
        ignored = target_ids == validation.IGNORED_TARGET
        self.index = self.ignored = None
        if is_capturing(target_ids):
            self.ignored = ignored
        else:
            keep = (~ignored).nonzero().squeeze(1)
            self.index = None if keep.shape[0] == self.num_rows else keep
        self.target_ids = self.active(target_ids).long()
        if temperatures is not None:
            temperatures = self.active(temperatures).float()
            bad = ~((temperatures > 0) & torch.isfinite(temperatures))
            expected = "temperature: expected finite numbers > 0"
            validation.check_values([validation.elements(temperatures, bad, expected, "others")], "auto")
        if self.target_ids.numel():
            self._check(vocab_size)
        self.rule = LogitRule(logit_scale, softcap, temperature if temperatures is None else temperatures)

    def _check(self, vocab_size: int) -> None:
        low, high = self.target_ids.aminmax()
        message = (
            f"target_ids: expected ids in [0, {vocab_size}), or {validation.IGNORED_TARGET} for a row without a target"
        )
        if low.device.type == "cpu":
            message += f", got ids from {low.item()} to {high.item()}"
        validation.check_values([((low < 0) | (high >= vocab_size), message)], "auto")
        if self.target_ids.is_cuda or self.ignored is not None:
            self.target_ids = self.target_ids.clamp(0, vocab_size - 1)

    def active(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.index_select(0, self.index)

    def head(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, hidden_rows: Tensor | None, backend: str,
        *, entropy_gradient: bool = False,
    ) -> LinearHead:  # fmt: skip
        """The active rows' pass through the head; `hidden_rows` names the row of hidden that predicts each target."""
        index, rows_repeat = self.index, hidden_rows is not None
        if hidden_rows is not None:
            index = checked_rows(self.active(hidden_rows), hidden.shape[0], "auto")
        return LinearHead(
            hidden, weight, bias, self.target_ids, self.rule, index, pick_backend(backend, hidden),
            rows_repeat=rows_repeat, entropy_gradient=entropy_gradient,
        )  # fmt: skip

    def selected(self, x: Tensor) -> Tensor:
        return x if self.ignored is None else torch.where(self.ignored, 0.0, x)

    def spread(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.new_zeros(self.num_rows).index_copy_(0, self.index, x)

    def coefficients(self, d_logps: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(g, g_H) of the active rows in fp32."""
        g, g_entropy = (None if d is None else self.selected(self.active(d).float()) for d in (d_logps, d_entropy))
        if g is None:
            assert g_entropy is not None
            g = torch.zeros_like(g_entropy)
        return g, g_entropy


def linear_logps(hidden, weight, bias, hidden_rows, *row_args):
    *_, rows, stats = linear_pass(hidden, weight, bias, hidden_rows, *row_args, keep=False)
    return results(rows, stats)


def linear_pass(
    hidden, weight, bias, hidden_rows, target_ids, temperatures, temperature, softcap, logit_scale, entropy, backend,
    *, keep: bool,
) -> tuple[LinearHead, Rows, RowStats]:  # fmt: skip
    """One sweep for logps and entropies; with `keep` as many logits stay as the workspace holds."""
    rows = Rows(weight.shape[0], target_ids, temperatures, temperature, softcap, logit_scale)
    with kernel_precision(hidden.device):
        head = rows.head(hidden, weight, bias, hidden_rows, backend)
        return head, rows, head.logps(return_entropy=entropy, keep=keep)


def logits_logps(logits, target_ids, temperatures, temperature, softcap, logit_scale, entropy, backend):
    rows = Rows(logits.shape[1], target_ids, temperatures, temperature, softcap, logit_scale)
    kernels = pick_backend(backend, logits)
    with kernel_precision(logits.device):
        stats = kernels.row_logps(rows.active(logits), rows.target_ids, rows.rule, return_entropy=entropy)
    return results(rows, stats)


def results(rows: Rows, stats: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    lse, logps, entropy = stats
    check_logps(logps, "auto")
    entropy = lse.new_empty(0) if entropy is None else rows.spread(rows.selected(entropy))
    return rows.spread(rows.selected(logps)), entropy, rows.spread(lse)


def linear_logps_grad(
    hidden, weight, bias, hidden_rows, target_ids, temperatures, temperature, softcap, logit_scale, return_entropy,
    backend, logps, entropy, lse, d_logps, d_entropy, wanted,
):  # fmt: skip
    rows = Rows(weight.shape[0], target_ids, temperatures, temperature, softcap, logit_scale)
    g, g_entropy = rows.coefficients(d_logps, d_entropy)
    known = (rows.active(lse), rows.active(logps), rows.active(entropy) if return_entropy else None)
    with kernel_precision(hidden.device):
        head = rows.head(hidden, weight, bias, hidden_rows, backend, entropy_gradient=g_entropy is not None)
        return head.gradients(g, g_entropy, known, Wanted(*wanted))


def logits_logps_grad(
    logits, target_ids, temperatures, temperature, softcap, logit_scale, return_entropy, backend,
    logps, entropy, lse, d_logps, d_entropy,
):  # fmt: skip
    rows = Rows(logits.shape[1], target_ids, temperatures, temperature, softcap, logit_scale)
    g, g_entropy = rows.coefficients(d_logps, d_entropy)
    h = rows.active(entropy) if return_entropy else None
    with kernel_precision(logits.device):
        active = rows.active(logits)
        out = torch.empty_like(active, memory_format=torch.contiguous_format)
        kernels = pick_backend(backend, logits)
        kernels.row_grad_(
            active, rows.target_ids, rows.active(lse), rows.active(logps), h, g, g_entropy, rows.rule, out=out
        )
    if rows.index is None:
        return out
    return torch.zeros_like(logits, memory_format=torch.contiguous_format).index_copy_(0, rows.index, out)


def fake_stats(x: Tensor, num_rows: Any, return_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    def fp32(count: Any) -> Tensor:
        return x.new_empty((count,), dtype=torch.float32)

    return fp32(num_rows), fp32(num_rows if return_entropy else 0), fp32(num_rows)


def linear_logps_fake(
    hidden, weight, bias, hidden_rows, target_ids, temperatures, temperature, softcap, scale, entropy, backend
):  # fmt: skip
    return fake_stats(hidden, target_ids.shape[0], entropy)


def logits_logps_fake(logits, target_ids, temperatures, temperature, softcap, scale, entropy, backend):
    return fake_stats(logits, logits.shape[0], entropy)


def linear_logps_grad_fake(hidden, weight, bias, *args):
    tensors = (hidden, weight, weight if bias is None else bias)
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) if wanted else hidden.new_empty(0)
        for x, wanted in zip(tensors, args[-1], strict=True)
    )


def logits_logps_grad_fake(logits, *args):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def remember(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *output)


def recall(ctx: Any, grads: tuple) -> tuple[list, tuple] | None:
    """(inputs, stats) of the forward; None when nothing flows back."""
    if torch.is_grad_enabled():
        raise RuntimeError("grpo_fast: linear_logps and logits_logps have no double backward (create_graph=True)")
    if all(x is None for x in grads[:2]):
        return None
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) if other is None else other[0] for other in ctx.others]
    return inputs, tuple(saved)


class EagerLinearLogps(torch.autograd.Function):
    """`linear_logps` outside of torch.compile: the first backward finds logits that are still there."""

    @staticmethod
    def forward(ctx, is_wanted, *inputs):
        head, rows, stats = linear_pass(*inputs, keep=is_wanted)
        output = results(rows, stats)
        ctx.kept = (head, rows, stats) if head.held is not None else None
        remember(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])
        return output

    @staticmethod
    def backward(ctx, *grads):
        recalled = recall(ctx, grads)
        if recalled is None:
            return (None,) * 12
        (inputs, stats), wanted = recalled, ctx.needs_input_grad[1:4]
        kept, ctx.kept = ctx.kept, None
        if kept is not None and grads[1] is not None and not kept[0].has_entropy_gradient:
            kept = None  # 16-bit weights know the logps' gradient only: the logits are formed again
        if kept is None:
            found = linear_logps_grad(*inputs, *stats, grads[0], grads[1], wanted)
        else:
            head, rows, stats = kept
            with kernel_precision(head.hidden.device):
                found = head.gradients(*rows.coefficients(grads[0], grads[1]), stats, Wanted(*wanted))
        return (None, *(x if need else None for x, need in zip(found, wanted, strict=True)), *[None] * 8)


def linear_logps_backward(ctx, *grads):
    recalled = recall(ctx, grads)
    if recalled is None:
        return (None,) * 11
    inputs, stats = recalled
    wanted = [bool(x) for x in ctx.needs_input_grad[:3]]
    found = torch.ops.grpo_fast.linear_logps_grad(*inputs, *stats, grads[0], grads[1], wanted)
    return (*(x if need else None for x, need in zip(found, wanted, strict=True)), *[None] * 8)


def logits_logps_backward(ctx, *grads):
    recalled = recall(ctx, grads)
    if recalled is None:
        return (None,) * 8
    inputs, stats = recalled
    return (torch.ops.grpo_fast.logits_logps_grad(*inputs, *stats, grads[0], grads[1]), *[None] * 7)


for name, function, fake, backward in (
    ("linear_logps", linear_logps, linear_logps_fake, linear_logps_backward),
    ("logits_logps", logits_logps, logits_logps_fake, logits_logps_backward),
    ("linear_logps_grad", linear_logps_grad, linear_logps_grad_fake, None),
    ("logits_logps_grad", logits_logps_grad, logits_logps_grad_fake, None),
):
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"grpo_fast::{name}", fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(f"grpo_fast::{name}", backward, setup_context=remember, lib=library)
