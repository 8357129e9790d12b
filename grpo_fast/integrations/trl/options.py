"""TRL's GRPO options: which of them take the fast path, by which `LossConfig`; a probe of both.

An option is computed by the fast path, or the trainer says by name which part of the work stays
with TRL's own code, which honours it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_fast import Correction, LossConfig, grpo_loss
from grpo_fast.attention import shared_prompt_supported
from grpo_fast.integrations.trl.originals import is_compiled

# What TRL divides each loss type by: completions or tokens of the micro-batch, and then the
# accumulation steps; or the tokens of the generation batch.
NORMALISERS = {
    **dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), "completions"), "bnpo": "tokens",
    **dict.fromkeys(("dapo", "cispo", "vespo"), "items"),
}  # fmt: skip
# The options that TRL reads for one of these losses only; the others read delta.
READ: dict[str, tuple[str, ...]] = {
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"), "cispo": (), "vespo": (),
}  # fmt: skip
# TRL's attributes that have the names of ours.
SAME_NAME = (
    "loss_type", "epsilon_low", "epsilon_high", "beta", "importance_sampling_level",
    "max_completion_length", "top_entropy_quantile",
)  # fmt: skip
PROBE_TOLERANCE = 1e-4
COMPILED = "torch_compile: our forward is not compiled"
STATE = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")


def forward_reason(trainer: Any, lm: Any) -> str | None:
    """Why the forward stays TRL's own padded one, by the option's name; None: it is packed."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    noise = bool(trainer.args.neftune_noise_alpha)
    known = {
        "router_aux_loss_coef: its loss counts padded tokens": trainer.aux_loss_enabled,
        "deepspeed: ZeRO-3 shards the head": plugin is not None and plugin.zero_stage == 3,
        "neftune_noise_alpha: noise is scaled by a row's length": noise,
    }
    reason = next((reason for reason, holds in known.items() if holds), None)
    reason = reason or unusual_model(trainer, lm) or _attention_dropout(lm)
    return reason or shared_prompt_supported(lm)


def unusual_model(trainer: Any, lm: Any) -> str | None:
    """The option that neither our forward nor our sampler supports, by name; None: all are."""
    head = lm.get_output_embeddings()
    peft_configs = list(getattr(trainer.model, "peft_config", {}).values())
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    devices = set(getattr(lm, "hf_device_map", {"": 0}).values())
    by_sequence = [getattr(parallel, name, 1) or 1 for name in ("cp_size", "sp_size")]
    known = {
        "processing_class: images need TRL's own inputs": trainer._is_vlm,
        COMPILED: trainer.args.torch_compile or is_compiled(trainer.model),
        "tp_size: tensor parallelism shards the head": (getattr(lm, "tp_size", None) or 1) > 1,
        "device_map: the model is split across devices": len(devices) > 1,
        "peft: prompt learning changes the inputs": any(c.is_prompt_learning for c in peft_configs),
        "peft: the adapter looks at whole inputs": any(map(looks_at_inputs, peft_configs)),
        f"lm_head: {type(head).__name__} is no plain linear layer": not _is_plain_linear(head),
        "parallelism_config: context or sequence parallelism": max(by_sequence) > 1,
    }
    return next((reason for reason, holds in known.items() if holds), None)


def looks_at_inputs(peft_config: Any) -> bool:
    """Return whether an adapter depends on the rows of a batch: aLoRA, X-LoRA and Poly."""
    is_alora = getattr(peft_config, "alora_invocation_tokens", None) is not None
    return is_alora or peft_config.peft_type in ("XLORA", "POLY")


def _is_plain_linear(layer: nn.Module) -> bool:
    """Whether this is torch's own linear layer, also in the class that `fully_shard` gives it."""
    return type(layer) is nn.Linear or type(layer).__bases__ == (FSDPModule, nn.Linear)


def _attention_dropout(lm: nn.Module) -> str | None:
    for module in lm.modules():
        for name in ("attention_dropout", "attn_dropout"):
            rate = getattr(module, name, 0.0)
            remedy = "config.attention_dropout=0 (disable_dropout does not)"
            if isinstance(rate, nn.Dropout):
                rate, remedy = rate.p, "disable_dropout=True"
            if isinstance(rate, float) and rate > 0:
                where = f"{type(module).__name__}.{name} is {rate}"
                return f"attention dropout: {where}; {remedy} switches it off"
    return None


class SinglePass(NamedTuple):
    """One micro-batch for `linear_grpo_loss`; per-token tensors are (B, K)."""

    config: LossConfig
    advantages: Tensor  # (B,) or (B, K)
    old_logps: Tensor | None
    ref_logps: Tensor | None
    num_items: Tensor | None  # 0-d
    divisor: float  # of the loss, afterwards


def single_pass_reason(trainer: Any) -> str | None:
    """Why the objective stays TRL's own on our logps; None where one pass gives all."""
    if trainer.aux_loss_enabled:
        return "router_aux_loss_coef"
    try:
        config = loss_config(trainer)
    except ValueError as error:
        return f"loss_type {trainer.loss_type!r}: {error}"
    if not config.is_token_local:
        needs = "needs whole completions before its gradient"
        return f"loss_type {trainer.loss_type!r} with these options {needs}"
    return None


def loss_config(trainer: Any, entropy_coef: float = 0.0, **head: Any) -> LossConfig:
    """The LossConfig that equals TRL's options; `head`: its rule of the logits, as keywords."""
    if NORMALISERS.get(trainer.loss_type) is None:
        raise ValueError(f"expected one of {list(NORMALISERS)}")
    args = trainer.args
    own = {name: getattr(trainer, name) for name in SAME_NAME}
    read = {name: getattr(args, name) for name in READ.get(trainer.loss_type, ("delta",))}
    return LossConfig(
        **own, **read, **head, kl_times_ratio=args.use_bias_correction_kl, compute_entropy=True,
        corrections=_off_policy_mask(trainer.off_policy_mask_threshold), entropy_coef=entropy_coef,
    )  # fmt: skip


def _off_policy_mask(threshold: float | None) -> tuple[Correction, ...]:
    """TRL's mask of completions with A < 0 whose mean(behaviour logp - logp) is above it."""
    if threshold is None:
        return ()
    low, ratio = math.exp(-threshold), "current/behaviour"
    return (Correction("reject", low, None, "geometric", ratio, advantages="negative"),)


def single_pass(trainer: Any, inputs: dict[str, Any], num_scored: int, **head: Any) -> SinglePass:
    accumulation = float(trainer.current_gradient_accumulation_steps)
    advantages = inputs["advantages"]
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        # Token-level objectives are homogeneous in the advantage: a weight >= 0 moves into it.
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        advantages = advantages * inputs["importance_sampling_ratio"]
        advantages = advantages.expand(inputs["completion_ids"].shape)
    num_items, divisor = None, accumulation
    coefficient = applied_entropy_coef(trainer)
    if NORMALISERS[trainer.loss_type] == "items":
        share = accumulation / trainer.args.steps_per_generation / trainer.accelerator.num_processes
        num_items, divisor = inputs["num_items_in_batch"].clamp(min=1.0) * share, 1.0
        if coefficient:
            # The bonus is a mean over this micro-batch, whatever the policy term is divided by.
            coefficient *= float(num_items) / (max(num_scored, 1) * accumulation)
    config = loss_config(trainer, coefficient, **head)
    old, ref = inputs.get("old_per_token_logps"), inputs.get("ref_per_token_logps")
    ref = ref if trainer.beta != 0 else None
    return SinglePass(config, advantages, old, ref, num_items, divisor)


def applied_entropy_coef(trainer: Any) -> float:
    if not trainer._entropy_bonus_enabled:
        return 0.0
    entropy, target = trainer._last_world_entropy, trainer.args.entropy_target
    is_gated = trainer.use_adaptive_entropy and entropy > target
    return 0.0 if is_gated else trainer.entropy_coef


def probe(trainer: Any, theirs: Any) -> str | None:
    """Compare our objective with the installed TRL's on made-up tokens; say what differs, or None.

    Ratios lie on both sides of every bound, advantages have both signs, one completion is empty and
    one has a tool's tokens: what a release of TRL changes, or a subclass adds, shows before the
    first step.

    Args:
        trainer: a GRPOTrainer in train mode.
        theirs: (inputs, logps, entropies) → the loss that TRL's own `_compute_loss` makes of them.
    """
    device = trainer.accelerator.device
    inputs, logps, entropies = _made_up(trainer, device)
    saved = {name: getattr(trainer, name, None) for name in STATE}
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    expected = theirs(inputs, logps, entropies)
    trainer._metrics["train"].clear()
    trainer._metrics["train"].update(metrics)
    for name, value in saved.items():
        if hasattr(trainer, name):
            setattr(trainer, name, value)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    job = single_pass(trainer, inputs, int(mask.sum()))
    ours = grpo_loss(
        logps, job.advantages, job.config, completion_mask=mask, old_logps=job.old_logps,
        ref_logps=job.ref_logps, entropy=entropies, num_items_in_batch=job.num_items,
    )  # fmt: skip
    loss = ours.loss / job.divisor
    theirs_gradients = torch.autograd.grad(expected, (logps, entropies), allow_unused=True)
    our_gradients = torch.autograd.grad(loss, (logps, entropies), allow_unused=True)
    names = "loss", "d loss/d logps", "d loss/d entropy"
    pairs = (expected.detach(), *theirs_gradients), (loss.detach(), *our_gradients)
    for name, a, b in zip(names, *pairs, strict=True):
        a, b = (torch.zeros(()) if x is None else x.float().cpu() for x in (a, b))
        if not (a - b).abs().max() <= PROBE_TOLERANCE * max(float(a.abs().max()), 1e-3):
            gap = float((a - b).abs().max())
            return f"{name} of loss_type {trainer.loss_type!r} differs from TRL's by {gap:.2g}"
    return None


def _made_up(trainer: Any, device: torch.device) -> tuple[dict[str, Any], Tensor, Tensor]:
    completions, length = 6, 9
    random = torch.Generator().manual_seed(0)
    shape = (completions, length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device)

    logps = (normal(*shape) - 2).clamp(max=-0.05)
    mask = torch.ones(shape, dtype=torch.int64, device=device)
    mask[1, 4:] = mask[2] = 0
    tool = torch.ones_like(mask)
    tool[3, 2:5] = 0
    inputs = {
        "prompt_ids": mask[:, :2], "prompt_mask": mask[:, :2],
        "completion_ids": mask, "completion_mask": mask, "tool_mask": tool,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], device=device),
        "num_items_in_batch": torch.tensor(float(mask.sum() * 3), device=device),
        # Steps of the ratio from 0.3 to 3: both clip bounds, delta, and the inside of each.
        "old_per_token_logps": logps + torch.linspace(-1.1, 1.2, length, device=device),
        "ref_per_token_logps": logps + 0.5 * normal(*shape),
    }  # fmt: skip
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        inputs["importance_sampling_ratio"] = normal(*shape).abs()
    inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"]
    return inputs, logps.requires_grad_(), normal(*shape).abs().requires_grad_()
