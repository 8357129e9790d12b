"""Check that no function with which transformers samples text has been replaced.

Our sampling loop replaces `model.generate`. Users and libraries may change the sampled tokens with
hooks, or by replacing the model's `forward` or a function that `generate` calls. Our loop would
ignore such a change. If this module finds one, TRL must sample.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# Methods of GenerationMixin that choose tokens. TRL must sample if a model overrides one of them.
# The remaining methods only prepare inputs, and the models of transformers that override them do
# not change tokens.
CHOOSES_TOKENS = {
    "generate", "_sample", "_prefill", "_get_logits_processor", "_get_stopping_criteria",
}  # fmt: skip
# Classes that `generate` uses with the sampling settings that our sampler supports. Replaced
# methods of these classes are detected.
PARTS = (
    "LogitsProcessorList", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    "MinPLogitsWarper", "StoppingCriteriaList", "MaxLengthCriteria", "EosTokenCriteria",
)  # fmt: skip
# Packages whose wrappers and hooks are known not to change the logits of a model.
KNOWN = ("transformers", "torch", "accelerate", "peft", "trl", "grpo_fast")


def replaced_part(model: Any, lm: Any) -> str | None:
    """Find a user's patch or hook that may change the sampled tokens, and return its name.

    Return None if no method is patched and no such hook is registered.

    Args:
        model: The model whose `generate` TRL calls, for example a PEFT model.
        lm: The transformers model inside `model`, or `model` itself.
    """
    from transformers.generation import GenerationMixin, utils

    for name in vars(GenerationMixin):
        method = inspect.getattr_static(lm, name)
        home = "transformers.generation" if name in CHOOSES_TOKENS else "transformers"
        if callable(_unbound(method)) and not is_defined_in(method, home, "torch"):
            return f"model.{name}"
    for name in PARTS:
        methods = [f for f in vars(getattr(utils, name)).values() if callable(_unbound(f))]
        if not methods or not all(is_defined_in(f, "transformers.generation") for f in methods):
            return f"transformers.generation.{name}"
    wrappers = [] if model is lm else [model, model.base_model]
    named = [*(("model", module) for module in wrappers), ("model", lm)]
    for label, module in (*named, ("lm_head", lm.get_output_embeddings())):
        for name in ("generate", "forward"):
            function = inspect.getattr_static(module, name, None)
            if function is not None and not is_defined_in(function, *KNOWN):
                return f"{label}.{name}"
        if any(module is owner for owner, _ in foreign_hooks(module)):
            return f"a forward hook of {label}"
    return None


def foreign_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield (module, hook) for every forward hook that is not from a package in `KNOWN`."""
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not is_defined_in(hook, *KNOWN):
                yield module, hook


def is_compiled(model: nn.Module) -> bool:
    """Return True if `torch.compile` or `Module.compile` compiled the model or a submodule."""
    return any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def is_defined_in(function: Any, *packages: str) -> bool:
    """Return True if one of these packages defines a function and every function that it wraps.

    The check reads the file name of the code object. The function's name and module prove nothing,
    because `functools.wraps` copies them from the wrapped function.
    """
    # Allow wrappers that contextlib defines. The functions that they wrap are checked separately.
    places = [contextlib.__file__]
    for name in packages:
        if name in sys.modules:
            places += [os.path.join(path, "") for path in sys.modules[name].__path__]
    pending = [function]
    seen = set()
    while pending:
        found = _unbound(pending.pop())
        if id(found) in seen:
            continue
        seen.add(id(found))
        code = getattr(found, "__code__", None)
        if code is None:  # an object with `__call__`
            code = getattr(type(found).__call__, "__code__", None)
        if code is None or not code.co_filename.startswith(tuple(places)):
            return False
        pending += _wrapped_by(found)
    return True


def _unbound(function: Any) -> Any:
    return getattr(function, "__func__", function)  # of methods, classmethods and staticmethods


def _wrapped_by(function: Any) -> Iterator[Callable[..., Any]]:
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # the cell is empty
            continue
        if isinstance(content, (types.FunctionType, types.MethodType, functools.partial)):
            yield content
