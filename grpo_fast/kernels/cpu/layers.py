"""Fast CPU layers of a model, with first-order reverse-mode gradients.

Linear layers use the csrc matrix product, except in fp32 on Intel CPUs, where torch's is faster.
RMSNorm, SwiGLU and rotary embeddings run in C++. They read and write each tensor once in the
forward and once in the backward pass. The corresponding layers of transformers make 5 to 12 passes
over their tensors.

Under autocast to bf16, linear layers multiply in bf16, but sum the gradient of the fp32 weight in
fp32. Norms and SwiGLU compute in fp32, and round their result to bf16 once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.kernels.cpu.autocast import BF16, in_bf16, narrow_copy
from grpo_fast.kernels.types import Context, contiguous_rows

# Minimum number of rows for the csrc product. With fewer rows, packing the weight takes longer than
# the faster product saves.
LEAST_ROWS = 24
PLAIN = (Tensor, nn.Parameter)  # excludes DTensor, fake tensors and other subclasses


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`, with the csrc matrix product if it is faster (fp32 on a CPU).

    If `in_bf16` is true, the csrc product is used for any number of rows. Torch's bf16 product
    would compile and cache kernels for each number of rows that occurs. In a model of 135M
    parameters, the kernels for one number of rows take about 6 MiB.

    Args:
        x: (…, K).
        weight: (N, K).
        bias: (N,) or None.

    Returns:
        (…, N).
    """
    if in_bf16() and is_plain(weight) and (is_plain(x) or is_plain(x, dtype=BF16)):
        return _Linear16.apply(x, weight, bias)
    # Check the cheapest conditions first. In a rollout, a product takes only tens of microseconds.
    if (
        x.numel() < LEAST_ROWS * weight.shape[-1]
        or not is_plain(x, weight)
        or x.shape[-1] != weight.shape[-1]
        or torch.is_autocast_enabled("cpu")
        or not route.layers_use_csrc_gemm(weight)
    ):
        return F.linear(x, weight, bias)
    # If no gradient is needed, skip the overhead of an autograd Function.
    needs_grad = _needs_grad(x, weight) or (bias is not None and _needs_grad(bias))
    return (_Linear.apply if needs_grad else _product)(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight · x / √(mean(x²) + eps) over the last dimension.

    The tensors must satisfy `is_plain`. Under autocast to bf16, the result is bf16, because the
    next linear layers would convert it to bf16 anyway.

    Args:
        x: (…, H).
        weight: (H,).
        eps: added to the mean square.

    Raises:
        CsrcUnavailable: the C++ kernels cannot be loaded.
    """
    return _RmsNorm.apply(x, weight, eps) if _needs_grad(x, weight) else _norm(x, weight, eps)[0]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate)·up, in one C++ pass if possible and otherwise with torch.

    The C++ pass needs CPU tensors of equal shape, both in fp32 or both in bf16.
    """
    is_supported = is_plain(gate, up) or is_plain(gate, up, dtype=BF16)
    if not is_supported or gate.shape != up.shape or loader.unavailable("layers"):
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up) if _needs_grad(gate, up) else _gated(gate, up)


def rotary(
    q: Tensor,  # (B, heads, T, D)
    k: Tensor,  # (B, key heads, T, D)
    cos: Tensor,  # (B or 1, T, D)
    sin: Tensor,  # (B or 1, T, D)
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to q and k as transformers does: x·cos + (−x_high, x_low)·sin.

    The tensors must satisfy `can_rotate`.

    Raises:
        CsrcUnavailable: the C++ kernels cannot be loaded.
    """
    return _Rotary.apply(q, k, cos, sin) if _needs_grad(q, k) else _rotated(q, k, cos, sin, False)


def can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether `rotary` accepts the tensors.

    They must satisfy `is_plain`, have matching shapes and an even head size, and the angles `cos`
    and `sin` must not require gradients.
    """
    return (
        is_plain(q, k, cos, sin)
        and q.dim() == k.dim() == 4
        and cos.shape == sin.shape
        and cos.shape in ((1, *q.shape[2:]), (q.shape[0], *q.shape[2:]))
        and k.shape == (q.shape[0], k.shape[1], *q.shape[2:])
        and q.shape[3] % 2 == 0
        and not cos.requires_grad
        and not sin.requires_grad
    )


def is_plain(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the C++ operators accept these tensors: non-empty CPU tensors of this dtype.

    The result is False for subclasses of Tensor, in compiled graphs, under `torch.func` and under
    forward-mode AD.
    """
    for x in tensors:
        if type(x) not in PLAIN or not x.is_cpu or x.dtype != dtype or x.numel() == 0:
            return False
    return not (torch.compiler.is_compiling() or _in_transform())


def _in_transform() -> bool:
    """Return whether tensors may be batched by vmap or carry forward-mode tangents.

    The C++ operators would ignore the batch dimension and the tangents.
    """
    # `torch.func` wraps tensors, and custom operators do not handle the wrappers.
    in_func: bool = torch._C._are_functorch_transforms_active()
    return in_func or forward_ad._current_level >= 0


def _refuse_transforms(*grads: Tensor) -> None:
    """Raise RuntimeError if upstream gradients are batched or carry forward-mode tangents."""
    if _in_transform() or any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):
        raise RuntimeError(
            "grad: the fast CPU layers expect one plain gradient, got batched gradients or "
            "tangents (is_grads_batched, torch.func, forward-mode AD); "
            "call torch.autograd.grad once for each gradient"
        )


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _rows(x: Tensor) -> Tensor:
    return contiguous_rows(x.reshape(-1, x.shape[-1]))


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return gemm.mm_(a, b, a.new_empty(a.shape[0], b.shape[1], dtype=dtype))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = _mm(x.reshape(-1, x.shape[-1]), weight.t(), dtype=torch.float32)
    out = out if bias is None else out.add_(bias)
    return out.view(*x.shape[:-1], len(weight))


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, scales = loader.operator("layers", "rms_norm")(_rows(x), weight.detach(), eps, in_bf16())
    return y.view(x.shape), scales


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    y: Tensor = loader.operator("layers", "swiglu")(_rows(gate), _rows(up))
    return y.view(gate.shape)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    # The kernel requires that the heads of a token are adjacent, so move the token axis to the
    # front. Models compute q and k in this layout, so usually nothing is copied.
    by_token = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k)]
    by_token = [x if x.stride(2) == 1 else x.contiguous() for x in by_token]
    angles = [_rows(x.expand(len(q), -1, -1)) for x in (cos, sin)]
    rotated = loader.operator("layers", "rotary")(*by_token, *angles, inverse)
    out_q, out_k = (x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in rotated)
    return out_q, out_k


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        _refuse_transforms(grad)
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = None
        if weight is not None:
            dx = _mm(rows, weight, ctx.dtype).view(ctx.shape)
        if x is not None:
            dw = _mm(rows.t(), x.reshape(-1, x.shape[-1]), torch.float32)
        return dx, dw, rows.float().sum(0) if ctx.needs_input_grad[2] else None


class _Linear16(_Linear):
    """Linear layer that multiplies in bf16 with fp32 weights.

    The gradients of weight and bias are summed in fp32. Only the forward pass differs from
    `_Linear`.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        rows = x.reshape(-1, x.shape[-1]).to(BF16)
        narrow = narrow_copy(weight)
        ctx.save_for_backward(rows if needs_dw else None, narrow if needs_dx else None)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        if bias is None:
            return _mm(rows, narrow.t()).view(*x.shape[:-1], len(weight))
        return _product(rows, narrow, bias.to(BF16)).to(BF16).view(*x.shape[:-1], len(weight))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scales = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scales = ctx.saved_tensors
        _refuse_transforms(grad)
        operator = loader.operator("layers", "rms_norm_backward")
        dx, dw = operator(_rows(grad), _rows(x), weight.detach(), scales)
        return dx.view(x.shape), dw if ctx.needs_input_grad[1] else None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        _refuse_transforms(grad)
        operator = loader.operator("layers", "swiglu_backward")
        dgate, dup = operator(*map(_rows, (grad, gate, up)))
        return dgate.view(gate.shape), dup.view(up.shape)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(q, k, cos, sin, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        _refuse_transforms(dq, dk)
        return *_rotated(dq, dk, cos, sin, True), None, None
