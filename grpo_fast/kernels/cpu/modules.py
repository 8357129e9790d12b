"""Replace a model's CPU layers with the fast layers of layers.py.

`fast_layers` assigns a new `forward` to each module for which a fast layer exists. The module's
class, weights, names, hooks and submodules do not change.

A fast layer is used only after a trial has shown that it gives the module's outputs and gradients
for random inputs and weights. The trial runs once for each combination of class, forward function
and settings (attributes such as eps). Every call of a fast layer checks that this combination is
unchanged. If hooks, replaced submodules or patched classes were added later, the call uses the
original forward.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_fast.kernels.cpu import autocast, layers, loader
from grpo_fast.kernels.self_test import in_fresh_thread

CLOSE = 1e-5  # relative tolerance of a trial, for two fp32 results of the same formula
# Name of the function that rotates queries and keys in the attention modules of transformers.
ROTARY = "apply_rotary_pos_emb"
# Attributes of these types are the settings of a module. They may change its formula.
SETTINGS = frozenset((bool, int, float, str, type(None)))
# Scales of the random input rows with which a norm is tested. In the smallest rows, eps is larger
# than the mean square, so these rows show whether eps is used as in `layers.rms_norm`.
SCALES = (0.0, 1e-4, 1e-2, 1.0, 100.0)

LINEAR_FORWARD = nn.Linear.forward
_verdicts: dict[Hashable, bool] = {}


class OurForward(functools.partial):
    """The `forward` that `fast_layers` assigned to a module.

    Its type distinguishes this `forward` from one that the user assigned.
    """


class Observer(functools.partial):
    """Forward pre-hook that does not change the module or its inputs.

    Code that evaluates a module without calling it, such as the C++ decoder, may call the hook
    directly.
    """


def fast_layers(model: nn.Module) -> None:
    """Replace layers of a CPU model with fast layers, except modules with a patched forward."""
    for module in model.modules():
        first = next(module.parameters(), None)
        # Skip a module whose `forward` attribute was set by the user, and a module on a GPU. Accept
        # the meta device, because the weights of the module are loaded later.
        if "forward" in vars(module) or first is None or first.device.type not in ("cpu", "meta"):
            continue
        ours = _layer_of(module)
        if ours is not None:
            vars(module)["forward"] = OurForward(_forward, ours, module)


def _forward(ours: Callable[..., Any], module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Call the fast layer `ours`, or the original forward while torch.compile traces the module.

    torch.compile fuses the original layers. It cannot trace the check of an activation, and cannot
    guard an attention whose globals do not belong to a Python module.
    """
    forward = type(module).forward if torch.compiler.is_compiling() else ours
    return forward(module, *inputs, **options)


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module has no hooks and no `forward` that the user patched."""
    forward = vars(module).get("forward")
    # A fused layer does not call its submodules, so it would skip their hooks.
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
        module._backward_pre_hooks,
    )  # fmt: skip
    if any(hooks) or nn.modules.module._has_any_global_hook():
        return False
    return forward is None or isinstance(forward, OurForward)


def settings_of(module: nn.Module) -> Hashable:
    """Return the key of a module's cached trial: its class, forward function and settings."""
    kind = type(module)
    return kind, kind.forward, *[v for v in vars(module).values() if type(v) in SETTINGS]


def _layer_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the fast `forward` for a module, or None if no fast layer exists for its class."""
    kind = type(module)
    # Compare the exact type, because a subclass may override forward.
    if kind is nn.Linear:
        return _linear_layer
    if kind.__name__.endswith("RMSNorm") and getattr(module, "weight", torch.empty(())).dim() == 1:
        return _norm_layer
    if _is_swiglu(kind.forward) and is_silu(getattr(module, "act_fn", None)):
        return _swiglu_mlp
    return None if _rotated_by_ours(kind.forward) is None else _attention


# ---- trials


def _verdict(key: Hashable, trial: Callable[[], bool]) -> bool:
    """Return whether the trial of a fast layer passes. The result is cached under `key`."""
    if key not in _verdicts:
        try:
            _verdicts[key] = loader.unavailable("layers") is None and in_fresh_thread(trial)
        # The forward of an unknown class may raise any exception for the inputs of the trial. The
        # trial then fails, and the original layer is used.
        except Exception:
            _verdicts[key] = False
    return _verdicts[key]


def _draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers without changing the state of torch's generators."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _agree(
    ours: Callable[..., Any], theirs: Callable[..., Any], inputs: Sequence[Tensor], *rest: Any
) -> bool:
    """Return whether two functions give nearly the same outputs and gradients.

    Outputs are compared row by row, because the rows have different scales.
    """
    results: list[list[Tensor]] = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, *rest)
        outputs = [out] if isinstance(out, Tensor) else list(out)
        # Use a random upstream gradient, so that every output element influences the gradients.
        ups = [_draw(*x.shape, seed=7) for x in outputs]
        gradients = torch.autograd.grad(outputs, leaves, ups)
        # Rows of a gradient may cancel to almost 0, so compare each gradient as one flat vector.
        results.append([*(x.detach() for x in outputs), *(x.flatten() for x in gradients)])
    return all(map(_are_close, *results))


def _are_close(ours: Tensor, theirs: Tensor) -> bool:
    errors, sizes = (ours - theirs).abs().amax(-1), theirs.abs().amax(-1)
    return ours.shape == theirs.shape and bool((errors <= CLOSE * sizes).all())


# ---- linear layers and norms


def _linear_layer(module: nn.Linear, input: Tensor) -> Tensor:
    if type(module).forward is not LINEAR_FORWARD:  # the class was patched
        return type(module).forward(module, input)
    return layers.linear(input, module.weight, module.bias)


def epsilon_of(norm: nn.Module) -> float | None:
    """Return the attribute `variance_epsilon` or `eps` of a norm, or None if it has neither."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm_layer(module: nn.Module, x: Tensor, *rest: Any, **options: Any) -> Any:
    eps: Any = epsilon_of(module)
    weight: Any = module.weight
    is_plain_call = not rest and not options and isinstance(eps, float)
    if is_plain_call and layers.is_plain(x, weight) and x.shape[-1:] == weight.shape:
        # The key contains the settings, so a changed eps triggers a new trial.
        if _verdict(settings_of(module), lambda: _is_plain_norm(module, len(weight), eps)):
            return layers.rms_norm(x, weight, eps)
    return type(module).forward(module, x, *rest, **options)


def _is_plain_norm(norm: nn.Module, width: int, eps: float) -> bool:
    """Return whether a norm and `layers.rms_norm` give the same outputs and gradients.

    Both get the same random weights, and random inputs of several scales.
    """
    # Test a shallow copy, so that the parameters of the original module do not change.
    twin = copy.copy(norm)
    fields = vars(twin)
    extras = fields["_buffers"] or fields["_modules"]
    # Reject a module that has buffers, submodules, or attributes of types that are not in SETTINGS.
    # These could change the formula without changing the key under which the trial is cached.
    known = (*SETTINGS, OurForward, *(type(v) for v in vars(nn.Module()).values()))
    if extras or not all(type(value) in known for value in fields.values()):
        return False
    # Small rows show whether eps is inside or outside the square root.
    x = torch.cat([scale * _draw(2, width, seed=i) for i, scale in enumerate(SCALES)])

    def theirs(x: Tensor, weight: Tensor) -> Any:
        fields["_parameters"] = {"weight": weight}
        return type(norm).forward(twin, x)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return layers.rms_norm(x, weight, eps)

    return _agree(ours, theirs, [x, _draw(width, seed=9)])


# ---- MLPs


# The bytecode of an MLP's forward is compared with the bytecode of this function. A trial is not
# possible, because it would call the submodules and their hooks.
def _plain_mlp(self: Any, x: Any) -> Any:
    # This is a copy of LlamaMLP.forward in transformers. Keep the assignment, because a direct
    # return would compile to different bytecode.
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


@functools.cache
def _is_swiglu(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    names = "co_code", "co_names", "co_consts", "co_argcount"
    return all(getattr(code, n, None) == getattr(_plain_mlp.__code__, n) for n in names)


def is_silu(act: Any) -> bool:
    """Return whether an activation module is an unmodified SiLU without hooks."""
    if not isinstance(act, nn.Module) or not is_untouched(act):
        return False
    return _verdict(settings_of(act), lambda: _agree(F.silu, act.forward, [3 * _draw(8, 16)]))


def _swiglu_mlp(module: Any, *inputs: Any, **options: Any) -> Any:
    forward = type(module).forward
    is_plain_call = len(inputs) == 1 and not options
    if not (is_plain_call and _is_swiglu(forward) and is_silu(module.act_fn)):
        return forward(module, *inputs, **options)
    return module.down_proj(layers.swiglu(module.gate_proj(*inputs), module.up_proj(*inputs)))


# ---- rotary embeddings


class _Rotated(NamedTuple):
    """A copy of an attention module's forward that calls `layers.rotary`.

    Attributes:
        forward: the copy.
        theirs: all global variables of the original forward, with their current values.
        names: the global variables that the original forward uses, with their values at the time
            of the copy.
    """

    forward: Callable[..., Any]
    theirs: dict[str, Any]
    names: dict[str, Any]


def _attention(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    forward = type(module).forward
    ours = _rotated_by_ours(forward)
    # The copy does not see a global variable that was patched later, so use it only if the globals
    # of the original are unchanged.
    if ours is not None and all(ours.theirs.get(n) is value for n, value in ours.names.items()):
        forward = ours.forward
    return forward(module, *inputs, **options)


@functools.cache
def _rotated_by_ours(forward: Any) -> _Rotated | None:
    """Return a copy of an attention forward that calls `layers.rotary`.

    The result is None if the module's rotary function uses a different formula.
    """
    # Since transformers 5.24, a decorator for deprecated arguments wraps the forward of a model.
    inner = inspect.unwrap(forward)
    code = getattr(inner, "__code__", None)
    theirs = getattr(inner, "__globals__", {}).get(ROTARY)
    if code is None or theirs is None or ROTARY not in code.co_names:
        return None
    if not _verdict(theirs, lambda: _rotates_halves(theirs)):
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        if autocast.in_bf16():  # the angles are fp32, so the formula computes in fp32
            q, k = q.float(), k.float()
        if rest or options or not layers.can_rotate(q, k, cos, sin):
            return theirs(q, k, cos, sin, *rest, **options)
        return layers.rotary(q, k, cos, sin)

    # Replace the rotary function in the globals of the copy. The original forward is unchanged.
    names = {**inner.__globals__, ROTARY: rotate}
    used = {n: inner.__globals__[n] for n in code.co_names if n in inner.__globals__}
    ours = _rewrapped(forward, _copy_of(inner, names, inner.__closure__))
    return None if ours is None else _Rotated(ours, inner.__globals__, used)


def _copy_of(function: Any, names: dict[str, Any], closure: Any) -> Callable[..., Any]:
    """Return a copy of a Python function with other global variables and another closure."""
    copied = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _rewrapped(function: Any, ours: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a copy of a decorated function whose decorators call `ours` as the innermost function.

    Return None if the closure of a decorator does not contain the function that it wraps.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return ours
    wrapped = _rewrapped(inner, ours)
    cells = getattr(function, "__closure__", None) or ()
    # Compare cells, because reading an empty cell raises an error.
    is_inner = [cell == types.CellType(inner) for cell in cells]
    if wrapped is None or not any(is_inner):
        return None
    closure = tuple(
        types.CellType(wrapped) if found else cell
        for cell, found in zip(cells, is_inner, strict=True)
    )
    return _copy_of(function, function.__globals__, closure)


def _rotates_halves(theirs: Callable[..., Any]) -> bool:
    """Return whether `theirs` and `layers.rotary` give nearly the same outputs and gradients."""
    q, k, cos, sin = (_draw(1, n, 3, 8, seed=n) for n in (2, 1, 3, 4))
    return _agree(layers.rotary, theirs, [q, k], cos[:, 0], sin[:, 0])
