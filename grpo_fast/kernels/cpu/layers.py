"""Layers of a model on a CPU: linear ones through our matrix product, RMSNorm in one pass (C++).

An AMD core multiplies fp32 at half its speed through MKL (`route.own_product` says where ours is
taken), and the norms of transformers take ten sweeps over the rows where two do. Both are large in
a small model's step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.kernels.types import contiguous_rows

LEAST_ROWS = 24  # with fewer, arranging the weight costs more time than the product saves
PLAIN = (Tensor, nn.Parameter)  # no shards of one, no fake tensor
CLOSE = 1e-5  # relative: norms of the same formula, in fp32

_agreeing: dict[type, bool] = {}  # classes of norms: whether ours runs, and is their formula


def fast_layers(model: nn.Module) -> None:
    """Let the linear layers and RMSNorms of a model on a CPU compute by `linear` and `rms_norm`.

    Their classes, weights, names and hooks stay. A class of norms is compared with its own forward
    when it is first called; where they differ (weights that stand for 1 + w), its own remains.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.device.type not in ("cpu", "meta"):
            continue
        if type(module) is nn.Linear:
            vars(module)["forward"] = functools.partial(_linear_layer, module)
        elif type(module).__name__.endswith("RMSNorm") and weight.dim() == 1:
            vars(module)["forward"] = functools.partial(_norm_layer, module)


def _linear_layer(module: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias)


def _norm_layer(module: nn.Module, x: Tensor, *rest: Any, **options: Any) -> Any:
    theirs: Callable[..., Any] = functools.partial(type(module).forward, module)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight: Any = module.weight
    if rest or options or not isinstance(eps, float) or not _is_plain(x, weight):
        return theirs(x, *rest, **options)
    if type(module) not in _agreeing:
        _agreeing[type(module)] = loader.load("norm") is None and _agrees(theirs, x, weight, eps)
    return rms_norm(x, weight, eps) if _agreeing[type(module)] else theirs(x)


@torch.no_grad()
def _agrees(theirs: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, eps: float) -> bool:
    few = x.detach().reshape(-1, x.shape[-1])[:4]
    expected = theirs(few)
    difference = (rms_norm(few, weight, eps) - expected).abs().max()
    return bool(difference <= CLOSE * expected.abs().max())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, (…, K) · (N, K) → (…, N), by our product where that is faster: plain fp32 tensors
    on a CPU, outside of autocast and compiled graphs, in 24 rows or more.
    """
    is_faster = (
        _is_plain(x, weight)
        and x.numel() >= LEAST_ROWS * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and route.own_product(weight)
    )
    if not is_faster:
        return F.linear(x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return result
    return _product(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / √(mean(x²) + eps) over the last dimension, (…, H) fp32 on a CPU.

    Raises CsrcUnavailable without the C++ kernels.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        result: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return result
    return _norm(x, weight, eps)[0]


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return (
        type(x) in PLAIN
        and type(weight) in PLAIN
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and x.shape[-1] == weight.shape[-1]
        and not torch.compiler.is_compiling()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = gemm.mm_(rows, weight.t(), x.new_empty(len(rows), len(weight)))
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(weight))


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = contiguous_rows(x.reshape(-1, x.shape[-1]))
    y, scales = loader.door("norm", "rms_norm")(rows, weight.detach(), eps)
    return y.view(x.shape), scales


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
            dx = gemm.mm_(rows, weight, grad.new_empty(len(rows), weight.shape[1]))
            dx = dx.view(*grad.shape[:-1], weight.shape[1])
        if x is not None:
            x = x.reshape(-1, x.shape[-1])
            dw = gemm.mm_(rows.t(), x, grad.new_empty(rows.shape[1], x.shape[1]))
        return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scales = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scales = ctx.saved_tensors
        up, rows = (contiguous_rows(t.reshape(-1, x.shape[-1])) for t in (grad, x))
        door = loader.door("norm", "rms_norm_backward")
        dx, dw = door(up, rows, weight.detach(), scales)
        return dx.view(x.shape), dw if ctx.needs_input_grad[1] else None, None
