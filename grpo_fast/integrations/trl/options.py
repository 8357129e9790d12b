"""Translation of TRL's GRPO options into a `LossConfig` and into settings of our sampler.

No option is ignored. If our code does not support an option, the code of TRL computes everything
that the option affects, and the trainer's `fast_path` names the option.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_fast import Correction, LossConfig, grpo_loss
from grpo_fast.attention import Pair, shared_prompt_supported
from grpo_fast.rollout import Sampling

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

# Options that TRL reads for these loss types. For all other loss types, TRL reads `delta` instead.
READ: dict[str, tuple[str, ...]] = {
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"), "cispo": (), "vespo": (),
}  # fmt: skip
# Attributes of TRL's trainer that are copied to the LossConfig field of the same name.
SAME_NAME = (
    "loss_type", "epsilon_low", "epsilon_high", "beta", "importance_sampling_level",
    "max_completion_length", "top_entropy_quantile",
)  # fmt: skip
PROBE_TOLERANCE = 1e-4
COMPILED = "torch_compile: our forward is not compiled"


def reason_of(attempt: Callable[..., object], *arguments: object) -> str | None:
    """Call `attempt`, and return its result if it is a text, else None.

    If `attempt` raises an error, return the error as text. A new release of TRL may cause an error.
    """
    try:
        found = attempt(*arguments)
    except Exception as error:
        return f"trl {version('trl')}: {type(error).__name__}: {error}"
    return found if isinstance(found, str) else None


def forward_reason(trainer: GRPOTrainer, lm: PreTrainedModel) -> str | None:
    """Return an option of the trainer or the model that needs TRL's padded forward, or None."""
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


def unusual_model(trainer: GRPOTrainer, lm: PreTrainedModel) -> str | None:
    """Return an option of the model that neither our forward nor our sampler supports, or None."""
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


def is_compiled(model: nn.Module) -> bool:
    """Return True if `torch.compile` or `Module.compile` compiled the model or a submodule."""
    return any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def looks_at_inputs(peft_config: PeftConfig) -> bool:
    """Return True for adapters whose effect depends on the complete input: aLoRA, X-LoRA, Poly."""
    is_alora = getattr(peft_config, "alora_invocation_tokens", None) is not None
    return is_alora or peft_config.peft_type in ("XLORA", "POLY")


def _is_plain_linear(layer: nn.Module) -> bool:
    """Return True for `nn.Linear` and for its subclass that FSDP2's `fully_shard` creates."""
    return type(layer) is nn.Linear or type(layer).__bases__ == (FSDPModule, nn.Linear)


def _attention_dropout(lm: nn.Module) -> str | None:
    """Return a text that names a layer with attention dropout, which we do not support, or None."""
    for module in lm.modules():
        for name in ("attention_dropout", "attn_dropout"):
            rate = getattr(getattr(module, name, None), "p", getattr(module, name, None))
            if isinstance(rate, float) and rate > 0:
                return f"attention dropout: {type(module).__name__}.{name} is {rate}"
    return None


def single_pass_reason(trainer: GRPOTrainer) -> str | None:
    """Return why one pass over the logits cannot compute loss and gradient, or None if it can."""
    if loss_config(trainer).is_token_local:
        return None
    needs = "needs whole completions before its gradient"
    return f"loss_type {trainer.loss_type!r} with these options {needs}"


def loss_config(trainer: GRPOTrainer, **head: Any) -> LossConfig:
    """Return the LossConfig that has the same meaning as the trainer's options.

    Args:
        trainer: A TRL GRPOTrainer.
        **head: Temperature, softcap and logit_scale of the LM head.

    Raises:
        ValueError: LossConfig does not know the loss type, or refuses an option's value.
    """
    args = trainer.args
    own = {name: getattr(trainer, name) for name in SAME_NAME}
    read = {name: getattr(args, name) for name in READ.get(trainer.loss_type, ("delta",))}
    corrections: tuple[Correction, ...] = ()
    if trainer.off_policy_mask_threshold is not None:
        # TRL drops a completion with a negative advantage if the mean of (behaviour logp - current
        # logp) over its tokens exceeds the threshold.
        low = math.exp(-trainer.off_policy_mask_threshold)
        ratio = "current/behaviour"
        corrections = (Correction("reject", low, None, "geometric", ratio, advantages="negative"),)
    return LossConfig(
        **own, **read, **head, kl_times_ratio=args.use_bias_correction_kl, compute_entropy=True,
        corrections=corrections,
    )  # fmt: skip


def single_pass(
    trainer: GRPOTrainer, inputs: dict[str, Tensor], num_scored: int, **head: Any
) -> tuple[dict[str, Any], float]:
    """Return the arguments of `linear_grpo_loss` for one micro-batch of B completions.

    Per-token values are padded to K tokens.

    Args:
        trainer: A TRL GRPOTrainer.
        inputs: The inputs that TRL passes to `_compute_loss`.
        num_scored: Number of tokens that the loss counts in the micro-batch.
        **head: Temperature, softcap and logit_scale of the LM head.

    Returns:
        The arguments, with old_logps and ref_logps of shape (B, K) and advantages of shape (B,) or
        (B, K), and the number by which the caller must divide the loss.
    """
    accumulation = float(trainer.current_gradient_accumulation_steps)
    advantages = inputs["advantages"]
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        # Multiply the advantages by the importance weights. TRL multiplies the token losses
        # instead. The effect is the same, because the loss of a token is proportional to its
        # advantage, and the weights do not change the sign of an advantage.
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        advantages = advantages * inputs["importance_sampling_ratio"]
        advantages = advantages.expand(inputs["completion_ids"].shape)
    num_items = None
    divisor = accumulation
    is_above = trainer._last_world_entropy > trainer.args.entropy_target
    coefficient = 0.0 if trainer.use_adaptive_entropy and is_above else trainer.entropy_coef
    config = loss_config(trainer, **head)
    # With a global token mean, TRL divides the summed loss by the tokens of the generation batch.
    # With other aggregations, TRL divides by a count of the micro-batch and by the accumulation
    # steps.
    if config.aggregation == "token_mean_global":
        share = accumulation / trainer.args.steps_per_generation / trainer.accelerator.num_processes
        num_items = inputs["num_items_in_batch"].clamp(min=1.0) * share
        divisor = 1.0
        if coefficient:
            # Scale the coefficient of the entropy bonus. `linear_grpo_loss` divides the sum of the
            # entropies by num_items. TRL divides it by the tokens of the micro-batch and by the
            # accumulation steps.
            coefficient *= float(num_items) / (max(num_scored, 1) * accumulation)
    given = {
        "config": config.replace(entropy_coef=coefficient), "advantages": advantages,
        "old_logps": inputs.get("old_per_token_logps"), "num_items_in_batch": num_items,
        "ref_logps": inputs.get("ref_per_token_logps") if trainer.beta != 0 else None,
    }  # fmt: skip
    return given, divisor


def probe(trainer: GRPOTrainer) -> str | None:
    """Compare our objective with the objective of the installed TRL on random tokens.

    A new release of TRL, or a subclass, may change the objective. The tokens reach every branch of
    the objective: ratios on both sides of every bound, advantages of both signs, an empty
    completion, and tool tokens.

    Args:
        trainer: A FastGRPOTrainer in train mode.

    Returns:
        A sentence that describes the difference, or None if the objectives are equal.
    """
    inputs, logps, entropies = _random_inputs(trainer.accelerator.device)
    # Compute TRL's loss in a copy of the trainer, because the loss function changes the metrics and
    # the state of the adaptive entropy bonus.
    twin = copy.copy(trainer)
    twin._metrics = copy.deepcopy(trainer._metrics)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    options, divisor = single_pass(trainer, inputs, int(mask.sum()))

    def ours(logps: Tensor, entropies: Tensor) -> Tensor:
        found = grpo_loss(logps, completion_mask=mask, entropy=entropies, **options)
        return found.loss / divisor

    theirs = functools.partial(twin._their_loss, inputs)
    given = ours, theirs, (logps, entropies), PROBE_TOLERANCE
    for what, gradients in (("the loss", False), ("its gradient", True)):
        gap = Pair(*given, gradients=gradients, floor=1e-3).gap()
        if not gap <= PROBE_TOLERANCE:
            return f"loss_type {trainer.loss_type!r}: {what} differs from TRL's by {gap:.2g}"
    return None


def _random_inputs(device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return random inputs of TRL's `_compute_loss`, with their logps and entropies.

    The inputs have six completions.
    """
    random = torch.Generator().manual_seed(0)
    shape = (6, 9)
    noise, spread, entropies, weights = torch.randn(4, *shape, generator=random).to(device)
    logps = (noise - 2).clamp(max=-0.05)
    mask = torch.ones(shape, dtype=torch.int64, device=device)
    mask[1, 4:] = mask[2] = 0
    tool = torch.ones_like(mask)
    tool[3, 2:5] = 0
    # The importance ratios range from 0.3 to 3, so that some of them exceed each clip bound and
    # `delta`.
    old = logps + torch.linspace(-1.1, 1.2, 9, device=device)
    inputs = {
        "prompt_ids": mask[:, :2], "prompt_mask": mask[:, :2],
        "completion_ids": mask, "completion_mask": mask, "tool_mask": tool,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], device=device),
        "num_items_in_batch": torch.tensor(float(mask.sum() * 3), device=device),
        "old_per_token_logps": old, "sampling_per_token_logps": old,
        "ref_per_token_logps": logps + 0.5 * spread, "importance_sampling_ratio": weights.abs(),
    }  # fmt: skip
    return inputs, logps, entropies.abs()


# ------------------------------------------------------------------- What our sampler supports
# Fields of a generation config that our sampler supports, or that do not affect the sampled tokens.
# If any other field differs from its default, sampling is left to TRL.
SAMPLER_READS = {
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id",
    "pad_token_id", "bos_token_id", "max_length", "use_cache", "disable_compile",
    "transformers_version",
}  # fmt: skip
# Packages whose hooks are known not to change the logits of a model.
KNOWN = ("transformers", "torch", "accelerate", "peft", "trl", "grpo_fast")


class SamplingWithoutSupport(Sampling):
    """Sampling settings for which the sampler does not record which tokens it kept.

    TRL computes log-probabilities over the full vocabulary, so nothing reads the record.
    """

    @property
    def needs_support(self) -> bool:
        return False


def foreign_hooks(model: nn.Module) -> list[Callable[..., object]]:
    """Return the forward hooks that are not from a package in `KNOWN`."""
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if getattr(getattr(hook, "func", hook), "__module__", "").split(".")[0] not in KNOWN
    ]


def unsuited(trainer: GRPOTrainer, lm: PreTrainedModel) -> str | None:
    """Return an option of the trainer or the model that our sampler does not support, or None."""
    known = {
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "rollout_func": trainer.rollout_func is not None,
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp: the model is sharded": trainer.is_fsdp_enabled
        or any(isinstance(module, FSDPModule) for module in lm.modules()),
    }
    return next((reason for reason, holds in known.items() if holds), unusual_model(trainer, lm))


def sampling_of(trainer: GRPOTrainer, lm: PreTrainedModel) -> Sampling | str:
    """Return the sampling settings, or a sentence that names an unsupported setting."""
    # As in `generate`, the model's generation config fills in the values that are None in the
    # trainer's generation config.
    config = lm._prepare_generation_config(trainer.generation_config)[0]
    for name, value in vars(config).items():
        is_usual = value is None or value is False or value == usual().get(name)
        if not (is_usual or name in SAMPLER_READS or name.startswith("_")):
            return f"generation_kwargs: {name}={value!r} is not read by our sampler"
    eos = config.eos_token_id
    if {*(eos if isinstance(eos, list) else [eos])} != {*trainer.eos_token_ids}:
        return f"generation_kwargs: eos_token_id={eos!r} differs from {trainer.eos_token_ids}"
    settings = {name: getattr(config, name) for name in ("max_new_tokens", "top_k", "top_p")}
    settings["temperature"] = config.temperature if config.do_sample else 0
    try:
        return SamplingWithoutSupport(**settings, min_p=config.min_p or 0)
    except ValueError as error:
        return f"generation_kwargs: {' '.join(str(error).split())}"


@functools.cache
def usual() -> dict[str, object]:
    """Return the names and default values of all fields of a generation config."""
    from transformers import GenerationConfig

    plain = GenerationConfig()
    named: dict[str, object] = getattr(plain, "_get_default_generation_params", dict)()
    return {**vars(plain), **named}
