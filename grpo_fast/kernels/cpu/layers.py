"""Linear layers of a model through our matrix product, on the CPUs where it beats the vendor's.

An AMD core multiplies fp32 at half its speed through MKL, and most of a small model's step are the
products of its layers. `route.own_product` says where ours is taken.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm
from grpo_fast.kernels.workspace import unset

LEAST_ROWS = 24  # with fewer, arranging the weight costs more time than the product saves
PLAIN = (Tensor, nn.Parameter)  # no shards of one, no fake tensor


class FastLinear(nn.Linear):
    """A linear layer whose products are `linear`'s."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def fast_linear_layers(model: nn.Module) -> None:
    """Let the model's linear layers multiply by `linear`. Weights, names and hooks stay.

    Layers of other classes than `nn.Linear` itself, and those on an accelerator, stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type in ("cpu", "meta"):
            module.__class__ = FastLinear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, (…, K) · (N, K) → (…, N), by our product where that is faster: plain fp32 tensors
    on a CPU, outside of autocast and compiled graphs, in 24 rows or more.
    """
    if not _is_faster(x, weight):
        return F.linear(x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return result
    return _product(x, weight, bias)


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and x.numel() >= LEAST_ROWS * x.shape[-1] > 0
        and x.shape[-1] == weight.shape[-1]
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and route.own_product(weight)
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = gemm.mm_(rows, weight.t(), unset(x.new_empty, len(rows), len(weight)))
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = None
        if weight is not None:
            dx = gemm.mm_(rows, weight, unset(grad.new_empty, len(rows), weight.shape[1]))
            dx = dx.view(*grad.shape[:-1], weight.shape[1])
        if x is not None:
            x = x.reshape(-1, x.shape[-1])
            dw = gemm.mm_(rows.t(), x, unset(grad.new_empty, rows.shape[1], x.shape[1]))
        return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None
