"""Search for hooks and replaced functions that change the tokens that `generate` samples.

`FastGRPOTrainer` samples with our loop instead of `model.generate` of transformers. Our loop would
ignore a user's hook, or a user's replacement of a function that `generate` calls. If this module
finds a hook or a replacement, TRL samples with `generate`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# Methods of GenerationMixin that choose tokens. If a model overrides one of them, TRL must sample.
# The other methods only prepare inputs. Some transformers models override them, but this does not
# change the tokens.
CHOOSES_TOKENS = {
    "generate", "_sample", "_prefill", "_get_logits_processor", "_get_stopping_criteria",
}  # fmt: skip
# Classes with which `generate` applies the sampling settings that our sampler supports. If one of
# their methods was replaced, TRL must sample.
PARTS = (
    "LogitsProcessorList", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    "MinPLogitsWarper", "StoppingCriteriaList", "MaxLengthCriteria", "EosTokenCriteria",
)  # fmt: skip
# Packages whose wrappers and hooks are known not to change the logits of a model.
KNOWN = ("transformers", "torch", "accelerate", "peft", "trl", "grpo_fast")


def replaced_part(model: PreTrainedModel | PeftModel, lm: PreTrainedModel) -> str | None:
    """Return the name of a replaced function or of a hook that may change the sampled tokens.

    Return None if there is neither.

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


def foreign_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., object]]]:
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


def is_defined_in(function: object, *packages: str) -> bool:
    """Return True if a function, and every function that it wraps, is defined in these packages.

    The file name of the function's code object tells where it is defined. The name and the module
    of the function do not, because `functools.wraps` copies them from the wrapped function.
    """
    # Also accept wrappers defined in contextlib. The loop checks the functions that they wrap.
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


def _unbound(function: object) -> object:
    return getattr(function, "__func__", function)  # of methods, classmethods and staticmethods


def _wrapped_by(function: object) -> Iterator[object]:
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # the cell is empty
            continue
        if isinstance(content, (types.FunctionType, types.MethodType, functools.partial)):
            yield content
