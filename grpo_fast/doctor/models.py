"""The models that an engine may run in place of the trainer's: other numbers, another config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_fast.doctor.view import OWN
from grpo_fast.train.policy import Policy

PREVIOUS = "the weights of `previous`"
THETAS = (1e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
FACTORS = (2.0, 4.0, 8.0, 32.0)
ROPE, WINDOW, CONFIG = "positions (RoPE)", "attention window", "model configuration"
STALE, ADAPTER, FORWARD = "stale weights", "LoRA adapter", "the trainer's forward pass"
DTYPE, QUANTIZED = "dtype of the model", "quantized weights"


class Variant(NamedTuple):
    """A model that an engine may run."""

    cause: str
    build: Callable[[], Policy]


def variants(policy: Policy, previous: Policy | None) -> dict[str, Variant]:
    """Name → model, for each that can differ from this policy."""
    found = {OWN: Variant(FORWARD, lambda: policy)}
    if previous is not None:
        found[PREVIOUS] = Variant(STALE, lambda: previous)
    if policy.model is not policy.lm:
        found["the model without its adapter"] = Variant(ADAPTER, partial(_plain, policy, False))
    for dtype in (torch.bfloat16, torch.float16):
        if (policy.autocast or policy.head.weight.dtype) not in (dtype, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            found[name] = Variant(DTYPE, partial(cast, policy, dtype))
    found["int8"] = Variant(QUANTIZED, partial(_quantized, policy, _int8))
    found["fp8"] = Variant(QUANTIZED, partial(_quantized, policy, _fp8))
    for cause, name, fields in _settings(policy.lm.config.get_text_config()):
        found[name] = Variant(cause, partial(with_config, policy, fields))
    return found


def with_config(policy: Policy, fields: dict[str, Any]) -> Policy:
    """The policy's weights in a model of another configuration; no weight is copied.

    Raises whatever transformers raises for such a configuration.
    """
    plain = policy if policy.model is policy.lm else _plain(policy, True)
    config = copy.deepcopy(plain.lm.config)
    for name, value in fields.items():
        setattr(config.get_text_config(), name, value)
    with torch.device("meta"):
        model = policy.kind(config)
    model.load_state_dict(plain.lm.state_dict(), assign=True)
    buffers = dict(plain.lm.named_buffers())
    for path, module in model.named_modules():
        if hasattr(module, "inv_freq"):  # made from the configuration, and in no state_dict
            with policy.device:
                module.__init__(config=module.config)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, buffers[f"{path}.{name}"], persistent=False)
    return _around(policy, model.eval())


def _settings(config: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(cause, name, fields) of configurations that servers are started with by mistake."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        if rope["rope_type"] != "default":
            yield ROPE, "no RoPE scaling", _rope(config, rope_type="default")
        for value in THETAS:
            if rope["rope_theta"] != value:
                yield ROPE, f"rope_theta {value:g}", _rope(config, rope_theta=value)
        room = config.max_position_embeddings
        for factor in FACTORS:
            for kind in ("linear", "yarn", "llama3"):
                more = {"original_max_position_embeddings": room} if kind != "linear" else {}
                more |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
                name = f"RoPE scaling {kind} by {factor:g}"
                yield ROPE, name, _rope(config, rope_type=kind, factor=factor, **more)
    window = getattr(config, "sliding_window", None)
    if window:
        for name, size in (("none", 1 << 30), ("one less", window - 1), ("one more", window + 1)):
            yield WINDOW, f"attention window: {name}", {"sliding_window": size}
    if getattr(config, "attn_logit_softcapping", None):
        yield CONFIG, "no attn_logit_softcapping", {"attn_logit_softcapping": None}
    for eps in (1e-5, 1e-6):
        if getattr(config, "rms_norm_eps", eps) != eps:
            yield CONFIG, f"rms_norm_eps {eps:g}", {"rms_norm_eps": eps}


def _rope(config: Any, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**config.rope_parameters, **changes}}


def _around(policy: Policy, model: Any) -> Policy:
    twin = copy.copy(policy)
    twin.model = twin.lm = model
    return twin


def _plain(policy: Policy, merged: bool) -> Policy:
    """With the adapter merged into the weights, or without it."""
    model = copy.deepcopy(policy.model)
    return _around(policy, model.merge_and_unload() if merged else model.unload())


def cast(policy: Policy, dtype: torch.dtype) -> Policy:
    """A copy that computes everything in this dtype."""
    twin = policy.frozen_copy()
    twin.autocast = None
    twin.lm.to(dtype)
    return twin


@torch.no_grad()
def _quantized(policy: Policy, rounded: Callable[[Tensor], Tensor]) -> Policy:
    """The products but the head's with rounded weights, as vLLM's quantization= has them."""
    twin = policy.frozen_copy()
    head = twin.lm.get_output_embeddings()
    for module in twin.lm.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.copy_(rounded(module.weight.float()))
    return twin


def _int8(weight: Tensor) -> Tensor:  # (out, in), a scale for each row
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scale).round() * scale


def _fp8(weight: Tensor) -> Tensor:  # one scale
    scale = weight.abs().amax().clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale
