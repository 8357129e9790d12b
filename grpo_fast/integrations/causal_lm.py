"""The loss of a transformers causal LM on a batch as SFT knows it: input_ids, attention_mask,
labels (-100: no token), which are not shifted.

For trainers that call a model themselves. It runs through its own forward, so that the hooks of a
wrapper fire, and computes one row of logits; the rest comes from its last hidden states. A head in
an FSDP2 group of its own is refused: its hooks would see that row only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast import LossConfig, LossOutput, linear_grpo_loss, linear_logps
from grpo_fast.attention import Head, check_tolerance, head_of
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import reshard


def unwrapped(model: Any) -> Any:
    """The transformers model inside DDP and peft. Raises ValueError where there is none."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_lm = hasattr(lm, "get_output_embeddings")
    require(is_lm, "model", "a transformers causal LM", type(lm).__name__)
    return lm


def last_hidden(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, logits_to_keep: int = 1
) -> Any:
    return model(
        input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True,
        logits_to_keep=logits_to_keep, use_cache=False,
    )  # fmt: skip


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raise a ValueError where logits are not the head's rule on the last hidden states."""
    head = head_of(unwrapped(model))
    ids = (torch.arange(6, device=head.weight.device) * 7 + 3)[None] % head.weight.shape[0]
    out = last_hidden(model, ids, None, logits_to_keep=0)
    reshard(unwrapped(model))
    _check_rule(head, out.hidden_states[-1], out.logits)


@torch.no_grad()
def _check_rule(
    head: Head,
    hidden: Tensor,  # (B, L, H)
    theirs: Tensor,  # (B, L, V) the model's logits
) -> None:
    weight, bias = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in head[:2])
    bias = 0.0 if bias is None else bias.float()
    logits = head.logit_scale * (hidden.float() @ weight.float().T + bias)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    difference = float((logits - theirs.float()).abs().max())
    tolerance = max(check_tolerance(weight.dtype), check_tolerance(theirs.dtype))
    fits = difference <= tolerance * max(1.0, float(logits.abs().max()))
    expected = "logits from its last hidden states and linear head"
    require(fits, "model", expected, f"a difference of {difference:.2g}")


def _last_rows(model: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor, Any, Head]:
    """hidden (B, L-1, H), weight and targets (B, L-1) for the fused functions; bias; the head."""
    for name in ("input_ids", "labels"):
        value = batch.get(name) if isinstance(batch, Mapping) else None
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        came = f"shape {shape}" if isinstance(value, Tensor) else type(value).__name__
        require(len(shape) == 2, "batch", f"a tensor {name} (B, L)", came)
    lm = unwrapped(model)
    head, layer = head_of(lm), lm.get_output_embeddings()
    out = last_hidden(model, batch["input_ids"], batch.get("attention_mask"))
    # Hooks and a forward that was exchanged have changed the row of logits, not the weight.
    if layer._forward_pre_hooks or layer._forward_hooks or "forward" in vars(layer):
        _check_rule(head, out.hidden_states[-1][:, -1:], out.logits)
    hidden = out.hidden_states[-1][:, :-1]
    bias = None if head.bias is None else head.bias.to(hidden.dtype)
    return hidden, head.weight.to(hidden.dtype), batch["labels"][:, 1:], bias, head


def policy_loss(
    model: Any,
    batch: dict[str, Tensor],
    advantages: Tensor,  # (B,)
    config: LossConfig,
    *,
    old_logps: Tensor | None = None,  # (B, L-1)
    ref_logps: Tensor | None = None,  # (B, L-1)
    **counts: Any,
) -> LossOutput:
    """`linear_grpo_loss` of a causal LM.

    Args:
        batch: input_ids, attention_mask and labels, all (B, L).
        old_logps, ref_logps: as an earlier call or `policy_logps` returned them: [:, t] belongs to
            labels[:, t + 1].
        counts: num_items_in_batch, num_completions_in_batch.

    Raises:
        ValueError: a batch or a model that is none; hooks on the head that change its logits.
    """
    require(isinstance(config, LossConfig), "config", "a LossConfig", type(config).__name__)
    hidden, weight, targets, bias, head = _last_rows(model, batch)
    with torch.autocast(targets.device.type, enabled=False):
        return linear_grpo_loss(
            hidden, weight, targets, advantages, config.replace(**head.logit_kwargs), bias=bias,
            completion_mask=targets != -100, old_logps=old_logps, ref_logps=ref_logps, **counts,
        )  # fmt: skip


@torch.no_grad()
def policy_logps(model: Any, batch: dict[str, Tensor], temperature: float | Tensor = 1.0) -> Tensor:
    """(B, L-1) fp32 logps of labels[:, 1:], 0 where a label is -100; temperature: or (B, L-1)."""
    hidden, weight, targets, bias, head = _last_rows(model, batch)
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_logps(
            hidden, weight, targets, bias=bias, temperature=temperature, **head.logit_kwargs
        )
