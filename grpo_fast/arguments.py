"""Checked and flat: the arguments of the public functions as the operators take them."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast import validation
from grpo_fast.config import LossConfig, choice, number
from grpo_fast.kernels.backends import BACKENDS


def logit_rows(logits: Tensor) -> Tensor:
    """(N, V) rows that lie contiguous, as the kernels read them; a copy only where the view does not."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def row_arguments(
    target_ids: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    entropy: bool,
    backend: str,
) -> tuple:
    """The arguments that the two logps operators share, checked and flat."""
    choice("backend", backend, BACKENDS)
    number("logit_scale", logit_scale, "a finite number, not 0", lambda x: x != 0)
    if softcap is not None:
        number("softcap", softcap, "None or a finite number > 0", lambda x: x > 0)
    temperatures = None
    if isinstance(temperature, Tensor):
        validation.per_token("temperature", temperature, target_ids)
        temperatures, temperature = temperature.reshape(-1), 1.0
    else:
        number("temperature", temperature, "a finite number > 0", lambda x: x > 0)
    softcap = None if softcap is None else float(softcap)
    return target_ids.reshape(-1), temperatures, float(temperature), softcap, float(logit_scale), entropy, backend


def token_arguments(
    like: Tensor,
    target_ids: Tensor | None,
    advantages: Tensor,
    config: LossConfig,
    completion_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    sampling_logps: Tensor | None,
    num_items_in_batch: float | Tensor | None,
    num_completions_in_batch: float | Tensor | None,
) -> tuple:
    """Check everything per token and flatten it to the operators' `TOKEN_ARGS`."""
    validation.is_config(config)
    validation.mask_and_segments(completion_mask, cu_seqlens, like)
    num_completions = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    validation.advantages_of(advantages, num_completions, like)
    for name, x in (("old_logps", old_logps), ("ref_logps", ref_logps), ("sampling_logps", sampling_logps)):
        validation.per_token(name, x, like)
    validation.reference(config, ref_logps)
    temperature = config.temperature if isinstance(config.temperature, Tensor) and target_ids is not None else None
    validation.per_token("temperature", temperature, like)
    totals = []
    for name, value in (
        ("num_items_in_batch", num_items_in_batch),
        ("num_completions_in_batch", num_completions_in_batch),
    ):
        validation.normaliser(name, value)
        totals.append(total(value, like))
    if advantages.dim() == 2:
        advantages = advantages.reshape(-1)
    per_token = (completion_mask, old_logps, ref_logps, sampling_logps, temperature)
    return (
        flat(target_ids),
        advantages,
        cu_seqlens,
        num_completions,
        *[flat(x) for x in per_token],
        *totals,
        config.key,
    )


def flat(x: Tensor | None) -> Tensor | None:
    """(B, L) or (T,) → (N,)."""
    return x if x is None or x.dim() == 1 else x.reshape(-1)


def total(value: float | Tensor | None, like: Tensor) -> float | Tensor | None:
    """A number, or a 0-d tensor; in a compiled step always a tensor, as the operators' schemas have it."""
    if isinstance(value, Tensor):
        return value.reshape(()).to(like.device)
    if value is None or not torch.compiler.is_compiling():
        return value
    return torch.full((), float(value), dtype=torch.float64, device=like.device)
