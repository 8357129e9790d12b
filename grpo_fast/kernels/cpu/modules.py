"""The modules of a model that compute by layers.py: those of transformers whose formula is known.

Such a module gets a `forward` of its own; its class, weights, names, hooks and submodules stay. A
class is judged when it is first met: norms and rotary embeddings by a trial, MLPs by bytecode.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.kernels.cpu import layers, loader

CLOSE = 1e-5  # relative: the same formula in fp32
ROTARY = "apply_rotary_pos_emb"  # the function by which attention modules turn queries and keys


class OurForward(functools.partial):
    """The `forward` that a module got from here."""


_agreeing: dict[type, bool] = {}  # classes of norms: whether ours runs, and is their formula


def fast_layers(model: nn.Module) -> None:
    """Let a model's layers on a CPU compute by layers.py, but for a `forward` of somebody else."""
    for module in model.modules():
        first = next(module.parameters(), None)
        if "forward" in vars(module) or first is None or first.device.type not in ("cpu", "meta"):
            continue
        ours = _layer_of(module)
        if ours is not None:
            vars(module)["forward"] = OurForward(ours, module)


def _layer_of(module: nn.Module) -> Callable[..., Any] | None:
    kind = type(module)
    if kind is nn.Linear:
        return _linear_layer
    if kind.__name__.endswith("RMSNorm") and getattr(module, "weight", torch.empty(())).dim() == 1:
        return _norm_layer
    if _is_swiglu(module):
        return _swiglu_mlp
    return _turned_by_ours(kind.forward)


# ---- linear layers and norms ----


def _linear_layer(module: nn.Linear, input: Tensor) -> Tensor:
    return layers.linear(input, module.weight, module.bias)


def epsilon_of(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm_layer(module: nn.Module, x: Tensor, *rest: Any, **options: Any) -> Any:
    theirs: Callable[..., Any] = functools.partial(type(module).forward, module)
    eps = epsilon_of(module)
    weight: Any = module.weight
    is_plain = layers.is_plain(x, weight) and x.shape[-1] == weight.shape[-1]
    if rest or options or not isinstance(eps, float) or not is_plain:
        return theirs(x, *rest, **options)
    if type(module) not in _agreeing:
        _agreeing[type(module)] = loader.unavailable("layers") is None and _agrees(
            theirs, x, weight, eps
        )
    return layers.rms_norm(x, weight, eps) if _agreeing[type(module)] else theirs(x)


@torch.no_grad()
def _agrees(theirs: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, eps: float) -> bool:
    few = x.detach().reshape(-1, x.shape[-1])[:4]
    return _are_close(layers.rms_norm(few, weight, eps), theirs(few))


def _are_close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= CLOSE * theirs.abs().max())


# ---- MLPs: running one on trial would call the hooks of its submodules ----


def _plain_mlp(self: Any, x: Any) -> Any:
    # transformers' source of Llama's MLP: other names of local variables make another bytecode.
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _is_swiglu(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    same = all(
        getattr(code, name, None) == getattr(_plain_mlp.__code__, name)
        for name in ("co_code", "co_names", "co_consts")
    )
    return same and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def _swiglu_mlp(module: Any, x: Tensor) -> Any:
    return module.down_proj(layers.swiglu(module.gate_proj(x), module.up_proj(x)))


# ---- rotary embeddings ----


@functools.cache
def _turned_by_ours(forward: Any) -> Callable[..., Any] | None:
    """An attention's forward with our `rotary` in place of its file's; None of another formula."""
    code = getattr(forward, "__code__", None)
    theirs = getattr(forward, "__globals__", {}).get(ROTARY)
    if (
        code is None
        or theirs is None
        or ROTARY not in code.co_names
        or loader.unavailable("layers")
    ):
        return None
    if not _turns_halves(theirs):
        return None

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        if rest or options or not layers.can_turn(q, k, cos, sin):
            return theirs(q, k, cos, sin, *rest, **options)
        return layers.rotary(q, k, cos, sin)

    names = {**forward.__globals__, ROTARY: turn}
    ours = types.FunctionType(code, names, code.co_name, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


@torch.no_grad()
def _turns_halves(theirs: Callable[..., Any]) -> bool:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, cos, sin = draw(1, 2, 3, 8), draw(1, 1, 3, 8), draw(1, 3, 8), draw(1, 3, 8)
    try:
        expected = theirs(q, k, cos, sin)
        return all(map(_are_close, layers.rotary(q, k, cos, sin), expected))
    except (TypeError, ValueError, RuntimeError):  # other arguments, or other shapes
        return False
