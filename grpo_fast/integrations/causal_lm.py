"""GRPO loss of a transformers causal LM, for batches in the format of supervised fine-tuning.

A batch has input_ids, attention_mask and labels of the same shape (B, L). Labels are not shifted,
and a label of -100 excludes its token from the loss.

The functions call the forward of the model, so the hooks of DDP and FSDP2 fire. To save memory,
they let the model compute logits for the last position only, and compute the loss from the hidden
states of all positions. A model whose LM head is in a separate FSDP2 group is refused. The hooks of
such a head run only when the model calls the head, so the loss would read a sharded weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast import LossConfig, LossOutput, linear_grpo_loss, linear_logps
from grpo_fast.attention import Head, Pair, check_tolerance, head_of
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import reshard

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model inside wrappers such as DDP and PEFT.

    Raises:
        ValueError: The innermost model is not a transformers causal LM.
    """
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_lm = hasattr(lm, "get_output_embeddings")
    require(is_lm, "model", "a transformers causal LM", type(lm).__name__)
    return lm


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Check that a model computes its logits as the fused loss does.

    The fused loss multiplies the last hidden states by the weight of the LM head. A bias, a softcap
    and a logit scale are supported.

    Raises:
        ValueError: The logits differ by more than rounding errors.
    """
    head = head_of(unwrapped(model))
    ids = (torch.arange(6, device=head.weight.device) * 7 + 3)[None] % head.weight.shape[0]
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    reshard(unwrapped(model))
    _check_rule(head, out.hidden_states[-1], out.logits)


@torch.no_grad()
def _check_rule(
    head: Head,
    hidden: Tensor,  # (B, L, H)
    theirs: Tensor,  # (B, L, V) the model's logits
) -> None:
    """Raise a ValueError unless `head` applied to `hidden` gives the model's logits `theirs`."""
    weight, bias = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in head[:2])
    bias = 0.0 if bias is None else bias.float()
    logits = head.logits_of(hidden.float() @ weight.float().T + bias)
    bar = max(check_tolerance(weight.dtype), check_tolerance(theirs.dtype))
    difference = Pair(lambda: logits, lambda: theirs, (), bar, floor=1.0).difference()
    expected = "logits from its last hidden states and linear head"
    require(difference is None, "model", expected, f"others: {difference}")


def _last_rows(
    model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Head]:
    """Run the model and return the operands of the fused loss.

    Returns:
        hidden (B, L-1, H), weight (V, H), targets (B, L-1), bias (V,) or None, and the head.
    """
    for name in ("input_ids", "labels"):
        value = batch.get(name) if isinstance(batch, Mapping) else None
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        came = f"shape {shape}" if isinstance(value, Tensor) else type(value).__name__
        require(len(shape) == 2, "batch", f"a tensor {name} (B, L)", came)
    lm = unwrapped(model)
    head = head_of(lm)
    layer = lm.get_output_embeddings()
    out = model(
        input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"),
        output_hidden_states=True, logits_to_keep=1, use_cache=False,
    )  # fmt: skip
    # If the head has hooks or a replaced forward, check the logits of the last position. The fused
    # loss reads only the weight of the head, so it would ignore a change of the logits.
    if layer._forward_pre_hooks or layer._forward_hooks or "forward" in vars(layer):
        _check_rule(head, out.hidden_states[-1][:, -1:], out.logits)
    hidden = out.hidden_states[-1][:, :-1]
    bias = None if head.bias is None else head.bias.to(hidden.dtype)
    return hidden, head.weight.to(hidden.dtype), batch["labels"][:, 1:], bias, head


def policy_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    advantages: Tensor,  # (B,)
    config: LossConfig,
    *,
    old_logps: Tensor | None = None,  # (B, L-1)
    ref_logps: Tensor | None = None,  # (B, L-1)
    **counts: Any,
) -> LossOutput:
    """Compute the GRPO loss of a batch with a transformers causal LM, without storing logits.

    Args:
        model: A transformers causal LM, possibly inside PEFT, DDP or FSDP2.
        batch: Dictionary with input_ids, attention_mask and labels, each of shape (B, L). Labels
            of -100 exclude their tokens from the loss.
        advantages: Advantage of each completion, shape (B,).
        config: Loss settings. Its softcap and logit scale are replaced by those of the model.
        old_logps: Log-probabilities before the update, shape (B, L-1), fp32. Column t belongs to
            labels[:, t + 1], as in the result of `policy_logps`.
        ref_logps: Log-probabilities of the reference model, shape (B, L-1), fp32.
        **counts: num_items_in_batch or num_completions_in_batch, as in `linear_grpo_loss`.

    Returns:
        The differentiable loss, its metrics, and the log-probabilities (B, L-1).

    Raises:
        ValueError: The batch has no input_ids or labels of shape (B, L), the model is not a causal
            LM with a linear head, or hooks on the head change its logits.

    Example:
        >>> output = policy_loss(model, batch, advantages, LossConfig(loss_type="dapo"))
        >>> output.loss.backward()
    """
    require(isinstance(config, LossConfig), "config", "a LossConfig", type(config).__name__)
    hidden, weight, targets, bias, head = _last_rows(model, batch)
    with torch.autocast(targets.device.type, enabled=False):
        return linear_grpo_loss(
            hidden, weight, targets, advantages, config.replace(**head.logit_kwargs), bias=bias,
            completion_mask=targets != -100, old_logps=old_logps, ref_logps=ref_logps, **counts,
        )  # fmt: skip


@torch.no_grad()
def policy_logps(model: nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> Tensor:
    """Compute the log-probabilities of the labels in a batch, without gradients.

    Args:
        model: A transformers causal LM, possibly inside PEFT, DDP or FSDP2.
        batch: Dictionary with input_ids, attention_mask and labels, each of shape (B, L).
        temperature: Sampling temperature.

    Returns:
        Log-probabilities of labels[:, 1:], shape (B, L-1), fp32. They are 0 where a label is -100.
    """
    hidden, weight, targets, bias, head = _last_rows(model, batch)
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_logps(
            hidden, weight, targets, bias=bias, temperature=temperature, **head.logit_kwargs
        )
