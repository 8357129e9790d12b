"""Fast CPU layers of a model, with first-order reverse-mode gradients.

Linear layers use the csrc matrix product, except in fp32 on Intel CPUs, where torch's is faster.
RMSNorm, SwiGLU and rotary embeddings run in C++. They read and write each tensor once in the
forward and once in the backward pass. The corresponding layers of transformers make 5 to 12 passes
over their tensors.

Under autocast to bf16, linear layers multiply in bf16, but sum the gradient of the fp32 weight in
fp32. Norms and SwiGLU compute in fp32, and round their result to bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.kernels.types import Context, contiguous_rows

# Minimum number of rows for the csrc product. With fewer rows, packing the weight takes longer than
# the faster product saves.
LEAST_ROWS = 24
BF16 = torch.bfloat16
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
        return _Linear.apply(x, weight, bias, True)
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
    if _needs_grad(x, weight, bias):
        return _Linear.apply(x, weight, bias, False)
    return _product(x, weight, bias, narrow=False)[0]


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
    y: Tensor = _run(_norm, _norm_gradients, x, weight, eps)
    return y.view(x.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate)·up, in one C++ pass if possible and otherwise with torch.

    The C++ pass needs CPU tensors of equal shape, both in fp32 or both in bf16.
    """
    is_supported = is_plain(gate, up) or is_plain(gate, up, dtype=BF16)
    if not is_supported or gate.shape != up.shape or loader.unavailable("layers"):
        return F.silu(gate) * up
    y: Tensor = _run(_gated, _gated_gradients, gate, up)
    return y.view(gate.shape)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to q and k as transformers does: x·cos + (−x_high, x_low)·sin.

    The tensors must satisfy `can_rotate`.

    Args:
        q: (B, heads, T, D).
        k: (B, key heads, T, D).
        cos: (B or 1, T, D).
        sin: (B or 1, T, D).

    Raises:
        CsrcUnavailable: the C++ kernels cannot be loaded.
    """
    return _run(_rotated, _rotated_gradients, q, k, cos, sin)


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
        and not (cos.requires_grad or sin.requires_grad)
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


def _needs_grad(*inputs: Any) -> bool:
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)


def _rows(x: Tensor) -> Tensor:
    return contiguous_rows(x.reshape(-1, x.shape[-1]))


# ---- RMSNorm, SwiGLU and rotary embeddings: a forward function returns the outputs and the tensors
# ---- that the backward function needs.


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, scales = loader.operator("layers", "rms_norm")(_rows(x), weight.detach(), eps, in_bf16())
    return y, (x, weight, scales)


def _norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, None]:
    operator = loader.operator("layers", "rms_norm_backward")
    dx, dw = operator(_rows(grad), _rows(x), weight.detach(), scales)
    return dx.view(x.shape), dw, None


def _gated(gate: Tensor, up: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    y = loader.operator("layers", "swiglu")(_rows(gate), _rows(up))
    return y, (gate, up)


def _gated_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    found = loader.operator("layers", "swiglu_backward")(_rows(grad), _rows(gate), _rows(up))
    return tuple(d.view(gate.shape) for d in found)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    # The kernel requires that the heads of a token are adjacent, so move the token axis to the
    # front. Models compute q and k in this layout, so usually nothing is copied.
    by_token = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k)]
    by_token = [x if x.stride(2) == 1 else x.contiguous() for x in by_token]
    angles = [_rows(x.expand(len(q), -1, -1)) for x in (cos, sin)]
    rotated = loader.operator("layers", "rotary")(*by_token, *angles, inverse)
    return tuple(x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in rotated), (cos, sin)


def _rotated_gradients(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
    return *_rotated(dq, dk, cos, sin, inverse=True)[0], None, None


def _run(forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Any) -> Any:
    if _needs_grad(*inputs):
        return _Fused.apply(forward, backward, *inputs)
    return forward(*inputs)[0]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Any
    ) -> Any:
        outputs, saved = forward(*inputs)
        ctx.save_for_backward(*saved)
        ctx.gradients = backward
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        _refuse_transforms(*grads)
        return None, None, *ctx.gradients(*grads, *ctx.saved_tensors)


# ---- linear layers


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    return gemm.mm_(a, b, a.new_empty(a.shape[0], b.shape[1], dtype=dtype))


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, narrow: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x·weightᵀ + bias with the operands of the product, in bf16 if `narrow` is True.

    The bias is added in fp32 before the result is rounded.
    """
    rows = x.reshape(-1, x.shape[-1])
    if narrow:
        rows, weight = rows.to(BF16), narrow_copy(weight)
    # An autograd Function must not return a view, because models may modify the output in place.
    dtype = rows.dtype if bias is None else torch.float32
    out = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
    gemm.mm_(rows, weight.t(), out.view(-1, len(weight)))
    if bias is not None:
        out = out.add_(bias.to(rows.dtype)).to(rows.dtype)
    return out, rows, weight


class _Linear(torch.autograd.Function):
    """Linear layer of fp32 or bf16 inputs. The gradients of weight and bias are summed in fp32."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, narrow: bool
    ) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        out, rows, weight = _product(x, weight, bias, narrow)
        ctx.save_for_backward(rows if needs_dw else None, weight if needs_dx else None)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _refuse_transforms(grad)
        rows = grad.reshape(-1, grad.shape[-1])
        dx = None if weight is None else _mm(rows, weight, ctx.dtype).view(ctx.shape)
        dw = None if x is None else _mm(rows.t(), x, torch.float32)
        return dx, dw, rows.float().sum(0) if ctx.needs_input_grad[2] else None, None


# ---- bf16 autocast

# Cached bf16 copies. The dict maps id(weight) to (weight, (version, address), copy). Outside
# `shared_copies`, the variable is None and no copies are cached.
_copies: ContextVar[dict[int, tuple[Tensor, tuple[int, int], Tensor]] | None]
_copies = ContextVar("_copies", default=None)


@contextmanager
def shared_copies() -> Iterator[None]:
    """Convert each weight to bf16 only once while this context is open.

    The copies take 2 bytes per element until the context ends. Do not write to `weight.data` while
    the context is open, because the layers would still use the old copies.
    """
    token = _copies.set({})
    try:
        yield
    finally:
        _copies.reset(token)


def in_bf16() -> bool:
    """Return whether the fast layers of fp32 models multiply in bf16.

    They do so under autocast to bf16, if our bf16 matrix product runs on this CPU and is enabled.
    Otherwise, a model under autocast uses its original layers.
    """
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == BF16
        and route.gemm_choice() != "vendor"
        and gemm.unavailable(BF16) is None
    )


def narrow_copy(weight: Tensor) -> Tensor:
    """Return a bf16 copy of a weight. Inside `shared_copies`, the copy is cached and reused."""
    stored = _copies.get()
    state = weight._version, weight.data_ptr()
    if stored is not None and id(weight) in stored:
        _, stored_state, copy = stored[id(weight)]
        if stored_state == state:
            return copy
    # Copy outside of inference mode, because autograd cannot save tensors that were created in it.
    with torch.inference_mode(False):
        copy = weight.detach().to(BF16)
    if stored is not None:
        stored[id(weight)] = weight, state, copy
    return copy
