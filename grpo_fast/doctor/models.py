"""The models that an engine may run in place of the trainer's: other numbers, another config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from grpo_fast.doctor.causes import ADAPTER, CONFIG, FORWARD, MODEL, QUANTIZED, ROPE, STALE, WINDOW
from grpo_fast.doctor.view import OWN
from grpo_fast.train.models.policy import Policy

THETAS = (1e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
FACTORS = (2.0, 4.0, 8.0, 32.0)
MORE = {"linear": {}, "yarn": {}, "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}


class Variant(NamedTuple):
    cause: str
    build: Callable[[], Policy]


def variants(policy: Policy, previous: Policy | None) -> dict[str, Variant]:
    """Name → model, for every model that an engine may run in place of this policy."""
    models = {OWN: Variant(FORWARD, lambda: policy)}
    if previous is not None:
        models["the weights of `previous`"] = Variant(STALE, lambda: previous)
    if policy.model is not policy.lm:
        models["the model without its adapter"] = Variant(ADAPTER, partial(_plain, policy, False))
    if (policy.autocast or policy.head.weight.dtype) == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            models[str(dtype)] = Variant(MODEL, partial(cast, policy, dtype))
    for name, rounded in (("int8", _int8), ("fp8", _fp8)):
        models[name] = Variant(QUANTIZED, partial(_quantized, policy, rounded))
    for cause, name, fields in _settings(policy.lm.config.get_text_config()):
        models[name] = Variant(cause, partial(with_config, policy, fields))
    return models


def cast(policy: Policy, dtype: torch.dtype) -> Policy:
    twin = policy.frozen_copy()
    twin.autocast = None
    twin.lm.to(dtype)
    return twin


def with_config(policy: Policy, fields: dict[str, Any]) -> Policy:
    """The policy's weights in a model of another configuration; no weight is copied."""
    plain = policy.lm if policy.model is policy.lm else _plain(policy, True).lm
    config = copy.deepcopy(plain.config)
    for name, value in fields.items():
        setattr(config.get_text_config(), name, value)
    with policy.device, init_empty_weights(include_buffers=False):  # buffers: of the configuration
        model = policy.kind(config).eval()
    model.load_state_dict(plain.state_dict(), assign=True)
    twin = copy.copy(policy)
    twin.model = twin.lm = model
    return twin


def _settings(config: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(cause, name, fields) of configurations that servers are started with by mistake."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        room = {"original_max_position_embeddings": config.max_position_embeddings}
        others = {f"rope_theta {x:g}": {**rope, "rope_theta": x} for x in THETAS}
        others["no RoPE scaling"] = {**rope, "rope_type": "default"}
        for kind, more in MORE.items():
            for x in FACTORS:
                scaled = {**room, **rope, **more, "rope_type": kind, "factor": x}
                others[f"RoPE scaling {kind} by {x:g}"] = scaled
        yield from ((ROPE, k, {"rope_parameters": v}) for k, v in others.items() if v != rope)
    window = getattr(config, "sliding_window", None)
    if window:
        for name, size in (("none", 1 << 30), ("one less", window - 1), ("one more", window + 1)):
            yield WINDOW, f"attention window ({name})", {"sliding_window": size}
    if getattr(config, "attn_logit_softcapping", None):
        yield CONFIG, "no attn_logit_softcapping", {"attn_logit_softcapping": None}
    if hasattr(config, "rms_norm_eps"):
        yield from ((CONFIG, f"rms_norm_eps {x:g}", {"rms_norm_eps": x}) for x in (1e-5, 1e-6))


def _plain(policy: Policy, merged: bool) -> Policy:
    twin, model = copy.copy(policy), copy.deepcopy(policy.model)
    twin.model = twin.lm = model.merge_and_unload() if merged else model.unload()
    return twin


@torch.no_grad()
def _quantized(policy: Policy, rounded: Callable[[Tensor], Tensor]) -> Policy:
    twin = policy.frozen_copy()
    for module in twin.lm.base_model.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(rounded(module.weight.float()))
    return twin


def _int8(weight: Tensor) -> Tensor:  # (out, in), a scale for each row
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scale).round() * scale


def _fp8(weight: Tensor) -> Tensor:  # one scale
    scale = weight.abs().amax().clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale
