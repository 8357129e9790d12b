"""hidden → loss and gradients of a small batch on the host in one C++ call (csrc/head_loss.h).

Same pieces, same bits as the long way through linear.py; what that takes in Python is, at (64, 64, 512), more than all
of the work. For token-level losses of an fp32 head for which the row kernels run (linear_cpu.fuses), in one chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels import gemm_cpu, linear_cpu
from grpo_fast.kernels.gemm_cpu import detached
from grpo_fast.kernels.gradient_sums import GATHER_BELOW, Wanted
from grpo_fast.kernels.memory import give_back_workspace, take_workspace, workspace_bytes
from grpo_fast.kernels.rows_cpu import door, leaf_arguments, vector


class HeadLoss(NamedTuple):
    """Zeros where a row is not active; empty where something is not wanted."""

    loss: float
    least_logp: float
    logps: Tensor  # (N,)
    entropy: Tensor  # (N,)
    d_hidden: Tensor  # (N, H)
    d_weight: Tensor  # (V, H)


def takes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether tensors of the cpu backend are for this file."""
    rows, columns = hidden.shape[0], weight.shape[0]
    return (
        hidden.dtype == torch.float32
        and hidden.stride(1) == weight.stride(1) == 1
        and rows * columns * 4 <= workspace_bytes(hidden.device)
        and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
        and gemm_cpu.multiplies(weight)
        and not linear_cpu.fuses(weight)
    )


@functools.lru_cache(maxsize=256)
def _options(key: str) -> tuple | None:
    """What the door wants to know of the config with this key; None where its loss looks at more than a row."""
    config = LossConfig.from_key(key)
    if not config.is_token_local or config.entropy_coef:
        return None
    rule = config.logit_scale, config.softcap, config.temperature
    beta = config.beta if config.uses_reference else None
    return beta, *leaf_arguments(key), *rule, config.needs_entropy


def head_loss(
    hidden: Tensor,  # (N, H) fp32
    weight: Tensor,  # (V, H) fp32
    bias: Tensor | None,  # (V,) fp32
    tokens: tuple[Any, ...],  # target_ids … ref_logps and temperature of `grpo_fast.prepare.TokenInputs`
    total: float | None,  # of the aggregation, None: the number of active tokens
    by_length: bool,
    config: LossConfig,
    wanted: Wanted,
) -> HeadLoss | None:
    """None for a loss that looks at more than a row; where a value is odd or of another dtype; without an active token.

    Raises:
        CsrcUnavailable: the library can neither be found nor compiled.
        RuntimeError: a dtype, shape or stride that it does not take.
    """
    options = _options(config.key)
    if options is None:
        return None
    logits = take_workspace(hidden.shape[0], weight.shape[0], hidden, torch.float32)
    status, *results = door("head_loss")(
        detached(hidden),
        detached(weight),
        vector(bias),
        logits,
        wanted.hidden,
        wanted.weight,
        GATHER_BELOW,
        *tokens,
        total,
        by_length,
        *options,
    )
    give_back_workspace(logits)
    return HeadLoss(*results) if status else None
