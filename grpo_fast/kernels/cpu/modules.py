"""Replace a model's CPU layers with the fast layers of layers.py.

`fast_layers` assigns a new `forward` to each module for which a fast layer exists. The module's
class, weights, names, hooks and submodules do not change. The attributes of a module must fit the
fast layer, and `agree` must find no difference between the outputs and gradients of both layers for
random inputs and weights. Each later call only checks for hooks and a replaced activation.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_fast.kernels.agree import agree, draw, in_fresh_thread
from grpo_fast.kernels.cpu import layers, loader

CLOSE = 1e-5  # largest relative difference of two fp32 results of the same formula
# Name of the function that rotates queries and keys in the attention modules of transformers.
ROTARY = "apply_rotary_pos_emb"
# Linear layers of a SwiGLU MLP, with the shapes of their weights in the comparison.
MLP_SHAPES = {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}
FIELDS = vars(nn.Module()).keys()  # attributes of every module
# Attributes of these types are the settings of a module. They may change its formula.
SETTINGS = frozenset((bool, int, float, str, type(None)))
# Scales of the random input rows of a comparison. In the smallest rows, the eps of a norm is
# larger than the mean square. The largest rows reach the bounds of an MLP that clamps.
SCALES = (0.0, 1e-4, 1e-2, 1.0, 100.0)


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
    verdicts: dict[Hashable, bool] = {}
    for module in model.modules():
        first = next(module.parameters(), None)
        # Skip a module whose `forward` attribute was set by the user, and a module on a GPU. Accept
        # the meta device, because the weights of the module are loaded later.
        if "forward" in vars(module) or first is None or first.device.type not in ("cpu", "meta"):
            continue
        ours, pair = _layer_of(module)
        if ours is None:
            continue
        # Modules of one class with equal attributes share a comparison.
        fields = [(n, v) for n, v in vars(module).items() if n not in FIELDS]
        key = type(module), *((n, v if type(v) in SETTINGS else id(v)) for n, v in fields)
        if key not in verdicts:
            verdicts[key] = _passes(pair)
        if verdicts[key]:
            vars(module)["forward"] = OurForward(_forward, ours, module)


def _layer_of(module: Any) -> tuple[Callable[..., Any] | None, Callable[[], str | None]]:
    """Return the fast `forward` that fits a module's attributes, or None, and its comparison."""
    kind = type(module)
    children = module._modules
    own = {*module._parameters, *module._buffers}
    if kind is nn.Linear:  # not a subclass, which may override forward
        return _linear_layer, lambda: None
    if own == {"weight"} and not children and module.weight.dim() == 1:
        return _norm_layer, functools.partial(_norm_pair, module)
    if not own and children.keys() == {*MLP_SHAPES, "act_fn"} and is_untouched(module.act_fn):
        act = module.act_fn
        return functools.partial(_swiglu_mlp, act), functools.partial(_swiglu_pair, module, act)
    # A decorated forward has the global variables of its decorator, and keeps its own rotary.
    theirs = getattr(kind.forward, "__globals__", {}).get(ROTARY)
    if kind.__name__.endswith("Attention") and theirs is not None:
        return _attention, functools.partial(_rotary_pair, theirs)
    return None, lambda: None


def _forward(ours: Callable[..., Any], module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Call the fast layer `ours`, or the original forward while torch.compile traces the module.

    torch.compile fuses the original layers. It cannot trace the check of an activation, and cannot
    guard an attention whose globals do not belong to a Python module.
    """
    forward = type(module).forward if torch.compiler.is_compiling() else ours
    return forward(module, *inputs, **options)


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module has no hooks and no `forward` that the user patched."""
    # A fused layer does not call its submodules, so it would skip their hooks.
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
        module._backward_pre_hooks,
    )  # fmt: skip
    forward = vars(module).get("forward")
    is_ours = forward is None or isinstance(forward, OurForward)
    return is_ours and not (any(hooks) or nn.modules.module._has_any_global_hook())


def settings_of(module: nn.Module) -> Hashable:
    """Return the class, the forward function and the settings of a module."""
    kind = type(module)
    return kind, kind.forward, *[v for v in vars(module).values() if type(v) in SETTINGS]


def epsilon_of(norm: nn.Module) -> float | None:
    """Return the attribute `variance_epsilon` or `eps` of a norm, or None if it has neither."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


# ---- fast layers


def _linear_layer(module: nn.Linear, input: Tensor) -> Tensor:
    return layers.linear(input, module.weight, module.bias)


def _norm_layer(module: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
    weight = module.weight
    eps: Any = epsilon_of(module)
    has_more = rest or options or x.shape[-1:] != weight.shape
    if has_more or not layers.is_plain(x, weight):
        return type(module).forward(module, x, *rest, **options)
    return layers.rms_norm(x, weight, eps)


def _swiglu_mlp(act: nn.Module, module: Any, *inputs: Any, **options: Any) -> Any:
    is_changed = module.act_fn is not act or not is_untouched(act)
    if is_changed or options or len(inputs) != 1:
        return type(module).forward(module, *inputs, **options)
    return module.down_proj(layers.swiglu(module.gate_proj(*inputs), module.up_proj(*inputs)))


def _attention(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    return _with_our_rotary(type(module).forward)(module, *inputs, **options)


@functools.cache
def _with_our_rotary(forward: Any) -> Callable[..., Any]:
    """Return a copy of an attention's forward whose global rotary function is `layers.rotary`."""
    theirs = forward.__globals__[ROTARY]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        if layers.in_bf16():  # the angles are fp32, so the formula computes in fp32
            q, k = q.float(), k.float()
        if rest or options or not layers.can_rotate(q, k, cos, sin):
            return theirs(q, k, cos, sin, *rest, **options)
        return layers.rotary(q, k, cos, sin)

    names = {**forward.__globals__, ROTARY: rotate}
    rest = forward.__name__, forward.__defaults__, forward.__closure__
    ours = types.FunctionType(forward.__code__, names, *rest)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


# ---- pairs


def _agree(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> str | None:
    return agree(ours, theirs, inputs, CLOSE, gradients=True)


def _passes(pair: Callable[[], str | None]) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):  # a forward of the model may draw numbers
            return loader.unavailable("layers") is None and in_fresh_thread(pair) is None
    except Exception:  # not every class can be copied; FSDP2's, for example, cannot
        return False


def _norm_pair(norm: Any) -> str | None:
    eps: Any = epsilon_of(norm)
    twin = copy.copy(norm)  # so that the parameters of the original module do not change

    def theirs(x: Tensor, weight: Tensor) -> Any:
        vars(twin).update(_parameters={"weight": weight}, training=True)
        return type(norm).forward(twin, x)

    width = norm.weight.numel()
    weight = draw(width, seed=9)
    return _agree(lambda x, w: layers.rms_norm(x, w, eps), theirs, _rows_of(width), weight)


def _swiglu_pair(mlp: nn.Module, act: nn.Module) -> str | None:
    # Replace the linear layers by small ones, which have no hooks.
    twin = copy.copy(mlp)
    children: dict[str, Any] = {"act_fn": act}
    for seed, (name, shape) in enumerate(MLP_SHAPES.items()):
        weight, bias = draw(*shape, seed=seed), draw(shape[0], seed=seed + 3)
        children[name] = functools.partial(F.linear, weight=weight, bias=bias)
    vars(twin).update(_modules=children, training=True)
    ours = functools.partial(_swiglu_mlp, act, twin)
    return _agree(ours, functools.partial(type(mlp).forward, twin), _rows_of(8))


def _rotary_pair(theirs: Callable[..., Any]) -> str | None:
    q, k, cos, sin = (draw(1, n, 3, 8, seed=n) for n in (2, 1, 3, 4))
    angles = cos[:, 0], sin[:, 0]
    return _agree(
        lambda q, k: layers.rotary(q, k, *angles), lambda q, k: theirs(q, k, *angles), q, k
    )


def _rows_of(width: int) -> Tensor:
    """Return ten random rows of different scales."""
    return torch.cat([scale * draw(2, width, seed=i) for i, scale in enumerate(SCALES)])
