"""Fast CPU layers, with first-order reverse-mode gradients, and their installation in a model.

`fast_layers` assigns a new `forward` to each module for which a fast layer exists. The module's
class, weights, names, hooks and submodules do not change. The attributes of a module must fit the
fast layer, and `Pair` must find no difference between the outputs and gradients of both layers for
random inputs and weights. Each later call only checks for hooks and a replaced activation.

Linear layers use the csrc matrix product, except in fp32 on Intel CPUs, where torch's is faster.
RMSNorm, SwiGLU and rotary embeddings run in C++. They read and write each tensor once in the
forward and once in the backward pass. The corresponding layers of transformers make 5 to 12 passes
over their tensors.

Under autocast to bf16, linear layers multiply in bf16, but sum the gradient of the fp32 weight in
fp32. Norms and SwiGLU compute in fp32, and round their result to bf16 once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, autograd, nn

from grpo_fast.kernels import route
from grpo_fast.kernels.agree import Pair, draw, in_fresh_thread
from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.kernels.types import contiguous_rows

# Minimum number of rows for the csrc product. With fewer rows, packing the weight takes longer than
# the faster product saves.
LEAST_ROWS = 24
BF16 = torch.bfloat16
CLOSE = 1e-5  # largest relative difference of two fp32 results of the same formula
# Name of the function that rotates queries and keys in the attention modules of transformers.
ROTARY = "apply_rotary_pos_emb"
MLP = "gate_proj", "up_proj", "down_proj"  # linear layers of a SwiGLU MLP
# Scales of the random input rows of a comparison. In the smallest rows, the eps of a norm is
# larger than the mean square. The largest rows reach the bounds of an MLP that clamps.
SCALES = (0.0, 1e-4, 1e-2, 1.0, 100.0)

_operator = partial(loader.operator, "layers")


# ---- formulas


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
    narrow = in_bf16() and is_plain(weight) and (is_plain(x) or is_plain(x, dtype=BF16))
    # Check the cheapest conditions first. In a rollout, a product takes only tens of microseconds.
    if not narrow and (
        x.numel() < LEAST_ROWS * weight.shape[-1]
        or not is_plain(x, weight)
        or x.shape[-1] != weight.shape[-1]
        or torch.is_autocast_enabled("cpu")
        or not route.layers_use_csrc_gemm(weight)
    ):
        return F.linear(x, weight, bias)
    shape, dtype = x.shape, x.dtype
    learns_bias = bias is not None and bias.requires_grad

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        rows = x.reshape(-1, shape[-1]).to(BF16 if narrow else dtype)
        stored = gemm.narrow_copy(weight) if narrow else weight
        # An autograd Function must not return a view, because models may modify it in place. The
        # bias is added in fp32 before the result is rounded.
        wide = rows.dtype if bias is None else torch.float32
        out = gemm.product(rows, stored.t(), wide, shape[:-1])
        if bias is not None:
            out = out.add_(bias.to(rows.dtype)).to(rows.dtype)
        return out, (rows if weight.requires_grad else None, stored if x.requires_grad else None)

    def backward(grad: Tensor, rows: Tensor | None, weight: Tensor | None) -> Any:
        grad = grad.reshape(-1, grad.shape[-1])
        dx = None if weight is None else gemm.product(grad, weight, dtype, shape[:-1])
        dw = None if rows is None else gemm.product(grad.t(), rows, torch.float32, grad.shape[1:])
        return dx, dw, grad.float().sum(0) if learns_bias else None

    return _run(forward, backward, x, weight, bias)


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

    def forward(x: Tensor, weight: Tensor) -> Any:
        y, scales = _operator("rms_norm")(_rows(x), weight.detach(), eps, in_bf16())
        return y, (x, weight, scales)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Any:
        dx, dw = _operator("rms_norm_backward")(_rows(grad), _rows(x), weight.detach(), scales)
        return dx.view(x.shape), dw

    return _run(forward, backward, x, weight).view(x.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate)·up, in one C++ pass if possible and otherwise with torch.

    The C++ pass needs CPU tensors of equal shape, both in fp32 or both in bf16.
    """
    is_supported = is_plain(gate, up) or is_plain(gate, up, dtype=BF16)
    if not is_supported or gate.shape != up.shape or loader.unavailable("layers"):
        return F.silu(gate) * up

    def forward(gate: Tensor, up: Tensor) -> Any:
        return _operator("swiglu")(_rows(gate), _rows(up)), (gate, up)

    def backward(grad: Tensor, gate: Tensor, up: Tensor) -> Any:
        found = _operator("swiglu_backward")(_rows(grad), _rows(gate), _rows(up))
        return tuple(d.view(gate.shape) for d in found)

    return _run(forward, backward, gate, up).view(gate.shape)


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

    def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Any:
        # The kernel requires that the heads of a token are adjacent, so move the token axis to the
        # front. Models compute q and k in this layout, so usually nothing is copied.
        by_token = [contiguous_rows(x.transpose(1, 2).flatten(0, 1)) for x in (q, k)]
        angles = [_rows(x.expand(len(q), -1, -1)) for x in (cos, sin)]
        rotated = _operator("rotary")(*by_token, *angles, inverse)
        return tuple(x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in rotated), (cos, sin)

    def backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return *forward(dq, dk, cos, sin, inverse=True)[0], None, None

    return _run(forward, backward, q, k, cos, sin)


def can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether `rotary` accepts the tensors.

    They must satisfy `is_plain`, have matching shapes and an even head size, and the angles `cos`
    and `sin` must not require gradients.
    """
    if not is_plain(q, k, cos, sin) or cos.requires_grad or sin.requires_grad or q.dim() != 4:
        return False
    batch, _, *rest = q.shape
    fits = cos.shape in ((1, *rest), (batch, *rest)) and k.shape == (batch, *k.shape[1:2], *rest)
    return fits and cos.shape == sin.shape and rest[1] % 2 == 0


def is_plain(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the C++ operators accept these tensors: non-empty CPU tensors of this dtype.

    The result is False for subclasses of Tensor, in compiled graphs, under `torch.func` and under
    forward-mode AD.
    """
    kinds = Tensor, nn.Parameter  # excludes DTensor, fake tensors and other subclasses
    plain = (type(x) in kinds and x.is_cpu and x.dtype == dtype and x.numel() for x in tensors)
    return all(plain) and not (torch.compiler.is_compiling() or _in_transform())


def in_bf16() -> bool:
    """Return whether the fast layers of fp32 models multiply in bf16.

    They do so under autocast to bf16, if our bf16 matrix product runs on this CPU and is enabled.
    Otherwise, a model under autocast uses its original layers.
    """
    is_on = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == BF16
    return is_on and route.gemm_choice() != "vendor" and gemm.unavailable(BF16) is None


def _in_transform() -> bool:
    """Return whether tensors may be batched by vmap or carry forward-mode tangents.

    The C++ operators would ignore the batch dimension and the tangents.
    """
    # `torch.func` wraps tensors, and custom operators do not handle the wrappers.
    return torch._C._are_functorch_transforms_active() or autograd.forward_ad._current_level >= 0


def _rows(x: Tensor) -> Tensor:
    return contiguous_rows(x.reshape(-1, x.shape[-1]))


def _run(forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """Return the outputs of a layer.

    Args:
        forward: function of the inputs. It returns the outputs, and the tensors for `backward`.
        backward: function of the outputs' gradients and these tensors. It returns the gradients
            of the inputs.
    """
    # If no gradient is needed, skip the overhead of an autograd Function.
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Fused.apply(forward, backward, *inputs)
    return forward(*inputs)[0]


class _Fused(autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *inputs: Tensor | None) -> Any:
        outputs, saved = forward(*inputs)
        ctx.save_for_backward(*saved)
        ctx.gradients = backward
        return outputs

    @staticmethod
    @autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if _in_transform() or any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):
            expected = "the fast CPU layers expect one plain gradient, got batched ones or tangents"
            raise RuntimeError(f"grad: {expected}; call torch.autograd.grad once for each gradient")
        return None, None, *ctx.gradients(*grads, *ctx.saved_tensors)


# ---- installation


def fast_layers(model: nn.Module) -> None:
    """Replace layers of a CPU model with fast layers, except modules with a patched forward.

    Call this function after the weights are loaded. Modules on the meta device keep their forward.
    """

    def install() -> None:
        for module in model.modules():
            # Skip a module whose `forward` attribute was set by the user, and a module whose
            # weights are not on the CPU.
            if "forward" in vars(module) or {x.is_cpu for x in module.parameters()} != {True}:
                continue
            # The module keeps its forward if a comparison raises an error. For example, FSDP2's
            # classes cannot be copied.
            with suppress(Exception):
                if layer := _layer_of(module):
                    vars(module)["forward"] = partial(_forward, layer, module)

    if loader.unavailable("layers") is None:
        with torch.random.fork_rng(devices=[]):  # a forward of the model may draw numbers
            in_fresh_thread(install)


def _layer_of(module: Any) -> Callable[..., Any] | None:
    """Return the fast layer of a module, or None if its attributes or its results do not fit.

    A comparison takes about a millisecond.
    """
    kind = type(module)
    # Leave out the linear layers of an MLP, which the fast layer calls.
    parts = [m for n, m in module.named_modules() if n.partition(".")[0] not in MLP]
    # Include entries that are None, because they may be set later. A learnable activation may equal
    # SiLU with its initial weights, but training changes them.
    own = [x for m in parts for x in (*m._parameters, *m._buffers)]
    rotate: Any = getattr(inspect.unwrap(kind.forward), "__globals__", {}).get(ROTARY)
    if kind is nn.Linear:  # not a subclass, which may override forward
        return _linear_layer
    if kind.__name__.endswith("Attention") and rotate is not None:
        _with_our_rotary(kind.forward)  # raises an error if the forward cannot be copied
        return _attention if _rotates_halves(rotate) else None
    if own == ["weight"] and not module._modules and module.weight.dim() == 1:
        layer: Callable[..., Any] = _norm_layer
    elif not own and module._modules.keys() == {*MLP, "act_fn"} and is_untouched(module.act_fn):
        layer = partial(_swiglu_mlp, module.act_fn)
    else:
        return None
    return layer if _fits(module, layer) else None


def _fits(module: Any, layer: Callable[..., Any]) -> bool:
    """Return whether a norm or an MLP has the results of a fast layer."""
    weights = [draw(len(x), seed=9) for x in module.parameters(recurse=False)]  # of a norm
    width = len(weights[0]) if weights else 8
    # Replace the linear layers of an MLP by small ones, which have no hooks.
    small = {x: partial(F.linear, weight=draw(8, 8, seed=i)) for i, x in enumerate(MLP)}

    def run(forward: Callable[..., Any], x: Tensor, *weights: Tensor) -> Any:
        twin = copy.copy(module)  # so that the parameters of the original module do not change
        own = dict(zip(module._parameters, weights, strict=True))
        vars(twin).update(_parameters=own, _modules=module._modules | small, training=True)
        return forward(twin, x)

    x = torch.cat([scale * draw(2, width, seed=i) for i, scale in enumerate(SCALES)])
    ours, theirs = (partial(run, forward) for forward in (layer, type(module).forward))
    return Pair(ours, theirs, [x, *weights], CLOSE, gradients=True).difference() is None


@cache
def _rotates_halves(rotate: Callable[..., Any]) -> bool:
    """Return whether a model's rotary embedding has the results of `rotary`."""
    angles = draw(1, 3, 8, seed=3), draw(1, 3, 8, seed=4)
    # Pass the angles by position, because the order of cos and sin may differ.
    ours, theirs = (lambda q, k, f=f: f(q, k, *angles) for f in (rotary, rotate))
    inputs = [draw(1, heads, 3, 8, seed=heads) for heads in (2, 1)]
    return Pair(ours, theirs, inputs, CLOSE, gradients=True).difference() is None


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module has no hooks and no `forward` that the user patched."""
    # A fused layer does not call its submodules, so it would skip their hooks.
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    is_hooked = any(vars(module)[x] for x in hooks) or nn.modules.module._has_any_global_hook()
    forward = vars(module).get("forward")
    return not is_hooked and (forward is None or getattr(forward, "func", None) is _forward)


def epsilon_of(norm: nn.Module) -> Any:
    """Return the attribute `variance_epsilon` or `eps` of a norm, or None if it has neither."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


# ---- forward functions of modules


def _forward(layer: Callable[..., Any], module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Call a fast layer, or the original forward if the layer returns None for these inputs.

    torch.compile traces the original forward, and fuses it. It cannot trace the check of an
    activation, and cannot guard an attention whose globals do not belong to a Python module.
    """
    # The module may have been pickled on a machine where the C++ kernels work.
    is_off = torch.compiler.is_compiling() or loader.unavailable("layers")
    out = None if is_off else layer(module, *inputs, **options)
    return type(module).forward(module, *inputs, **options) if out is None else out


def _linear_layer(module: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias)


def _norm_layer(module: Any, x: Tensor, *rest: Any, **options: Any) -> Tensor | None:
    if rest or options or x.shape[-1:] != module.weight.shape or not is_plain(x, module.weight):
        return None
    return rms_norm(x, module.weight, epsilon_of(module))


def _swiglu_mlp(act: nn.Module, module: Any, *inputs: Any, **options: Any) -> Tensor | None:
    if options or len(inputs) != 1 or module.act_fn is not act or not is_untouched(act):
        return None
    return module.down_proj(swiglu(module.gate_proj(*inputs), module.up_proj(*inputs)))


def _attention(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    return _with_our_rotary(type(module).forward)(module, *inputs, **options)


@cache
def _with_our_rotary(forward: Any) -> Callable[..., Any]:
    """Return a copy of an attention's forward whose global rotary function is `rotary`.

    Decorators stay, for example the one that renames an argument in transformers 5.24.
    """
    names = forward.__globals__
    cells = forward.__closure__
    if inner := getattr(forward, "__wrapped__", None):
        assert any(cell.cell_contents is inner for cell in cells), "the decorator hides the forward"
        ours = CellType(_with_our_rotary(inner))
        cells = tuple(ours if cell.cell_contents is inner else cell for cell in cells)
    else:
        names = {**names, ROTARY: partial(_rotate, names[ROTARY])}
    copied = FunctionType(forward.__code__, names, None, forward.__defaults__, cells)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _rotate(theirs: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Rotate q and k with `rotary`, or with the model's own function if it does not fit."""
    if options or len(inputs) != 4:
        return theirs(*inputs, **options)
    q, k, *angles = inputs
    if in_bf16():  # the angles are fp32, so the formula computes in fp32
        q, k = q.float(), k.float()
    return (rotary if can_rotate(q, k, *angles) else theirs)(q, k, *angles)
