"""Repairs and checks for Triton's interpreter: bf16, memory accesses and program order.

Import this module in a process with TRITON_INTERPRET=1, before any kernel runs. The interpreter
stores bf16 as uint16 bit patterns, and wrongly uses these integers in arithmetic. The repaired
arithmetic converts each bf16 operand to fp32, computes, and rounds the result to nearest even.
`tl.sum` of bf16 is not repaired, so kernels must reduce in fp32.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widen(handle: TensorHandle) -> TensorHandle:
    """Convert a bf16 handle to fp32, and return other handles unchanged."""
    if not is_bf16(handle):
        return handle
    bits = np.asarray(handle.data).astype(np.uint32) << np.uint32(16)
    return TensorHandle(bits.view(np.float32), tl.float32)


def narrow(values: np.ndarray) -> TensorHandle:
    """Return fp32 values rounded to bf16 (to nearest even). NaN remains NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    bias = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits.astype(np.uint64) + bias) >> np.uint64(16)).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(values), np.uint16(0x7FC0), rounded), tl.bfloat16)


def _replace(name: str, make: Any) -> None:
    setattr(InterpreterBuilder, name, make(getattr(InterpreterBuilder, name)))


def _repaired_cast(original: Any) -> Any:
    def cast(self, source, target, *rest):
        if is_bf16(source) and target.scalar == tl.bfloat16:
            return source
        if is_bf16(source):
            source = widen(source)
            return source if target.scalar == tl.float32 else cast_impl(self, source, target)
        if target.scalar == tl.bfloat16:
            return narrow(np.asarray(source.data).astype(np.float32))
        return original(self, source, target, *rest)

    return cast


def _repaired_arithmetic(original: Any) -> Any:
    def apply(self, *arguments):
        *handles, operation = arguments
        if not any(isinstance(handle, TensorHandle) and is_bf16(handle) for handle in handles):
            return original(self, *arguments)
        values = operation(*(widen(handle).data for handle in handles))
        return TensorHandle(values, tl.int1) if values.dtype == np.bool_ else narrow(values)

    return apply


def _repaired_dot(original: Any) -> Any:
    def dot(self, a, b, accumulator, *rest):
        # Multiply in fp64. In a BLAS fp32 product, the bits of a row depend on the position of the
        # row in the tile, unlike on tensor cores.
        product = np.matmul(widen(a).data.astype(np.float64), widen(b).data.astype(np.float64))
        total = (product + accumulator.data).astype(accumulator.data.dtype)
        return TensorHandle(total, accumulator.dtype.scalar)

    return dot


cast_impl = InterpreterBuilder.cast_impl
_replace("cast_impl", _repaired_cast)
_replace("create_fp_to_fp", _repaired_cast)
_replace("binary_op", _repaired_arithmetic)
_replace("unary_op", _repaired_arithmetic)
_replace("create_dot", _repaired_dot)
# If one operand is NaN, tl.maximum and tl.minimum return the other operand on every GPU (maxnum,
# minnum). The interpreter of Triton 3.6 returns NaN instead, so replace its versions of these two
# functions.
InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def _with_index(original: Any) -> Any:
    def patch(tensor, scope):
        result = original(tensor, scope)
        # Triton 3.6 calls int() on the bounds of range(). With numpy >= 2.4, int() raises an error
        # for an array of one element, so convert the bounds here.
        scope.set_attr(
            tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        )
        return result

    return patch


interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


def _once_per_launch(original: Any) -> Any:
    """Wrap the function that patches `triton.language`, so that nested calls do not patch it again.

    Otherwise, the interpreter would spend half of its time on patching.
    """
    patched: list[Any] = []

    def patch(function):
        modules = [
            value for value in function.__globals__.values() if value is tl or value is tl.core
        ]
        if patched and all(module in patched for module in modules):
            return None  # the outermost call restores the scope
        scope = original(function)
        restore = scope.restore
        outermost = not patched

        def restore_and_forget() -> None:
            if outermost:
                patched.clear()
            restore()

        scope.restore = restore_and_forget
        patched.extend(modules)
        return scope

    return patch


interpreter._patch_lang = _once_per_launch(interpreter._patch_lang)


# ---- memory check and program order
_allowed: list[tuple[int, int]] | None = None
_reverse = False
_grid = (1, 1, 1)


def _check(kind: str, pointers: Any, mask: Any) -> None:
    if _allowed is None:
        return
    width = pointers.get_element_ty().primitive_bitwidth // 8
    addresses = np.asarray(pointers.data)
    active = np.broadcast_to(
        True if mask is None else np.asarray(mask.data).astype(bool), addresses.shape
    )
    addresses = addresses[active].astype(np.int64)
    inside = np.zeros(addresses.shape, dtype=bool)
    for begin, end in _allowed:
        inside |= (addresses >= begin) & (addresses + width <= end)
    if not inside.all():
        raise IndexError(f"{kind} out of bounds in {int((~inside).sum())} of {inside.size} lanes")


def _checked(kind: str, position: int | None) -> Any:
    def make(original: Any) -> Any:
        def access(self, pointers, *rest, **keywords):
            _check(kind, pointers, None if position is None else rest[position])
            return original(self, pointers, *rest, **keywords)

        return access

    return make


# Patch only the masked functions. Unmasked loads and stores call them, so all accesses are checked.
# The kernels use no atomics.
_replace("create_masked_load", _checked("load", 0))
_replace("create_masked_store", _checked("store", 1))


def _remember_grid(original: Any) -> Any:
    def set_grid_dim(self, *dims):
        global _grid
        _grid = dims
        return original(self, *dims)

    return set_grid_dim


def _reorder(original: Any) -> Any:
    def set_grid_idx(self, *index):
        if _reverse:
            index = tuple(size - 1 - i for size, i in zip(_grid, index, strict=True))
        return original(self, *index)

    return set_grid_idx


_replace("set_grid_dim", _remember_grid)
_replace("set_grid_idx", _reorder)


@contextlib.contextmanager
def only_memory_of(*tensors: Any) -> Iterator[None]:
    """Inside the block, raise IndexError for loads and stores outside these tensors.

    Arguments that are not tensors are ignored. Tensors that a function allocates with `torch.empty`
    or `torch.empty_like` are allowed, too. Inside the block, these two functions fill them with
    NaN.
    """
    global _allowed
    originals = torch.empty, torch.empty_like

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in axes)
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    def watched(original: Any) -> Any:
        def make(*args: Any, **keywords: Any) -> torch.Tensor:
            tensor = original(*args, **keywords)
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            if tensor.numel():
                _allowed.append(span(tensor))
            return tensor

        return make

    _allowed = [span(x) for x in tensors if isinstance(x, torch.Tensor) and x.numel()]
    torch.empty, torch.empty_like = map(watched, originals)
    try:
        yield
    finally:
        (torch.empty, torch.empty_like), _allowed = originals, None


@contextlib.contextmanager
def reversed_programs() -> Iterator[None]:
    """Run the programs of a grid from last to first inside the block.

    This reveals results that depend on the order of the programs.
    """
    global _reverse
    _reverse = True
    try:
        yield
    finally:
        _reverse = False
