"""Rollouts of `FastGRPOTrainer`, in which our sampling loop replaces `generate` of transformers.

The sampling settings come from `GRPOConfig`, `generation_kwargs` and the model's generation config,
as in `generate`. If our sampler does not support a setting, if the model has its own `generate`, or
if a forward hook was added, the trainer uses TRL's sampling code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationMixin
from trl import GRPOTrainer

from grpo_fast.integrations.trl.options import COMPILED, is_compiled, unusual_model
from grpo_fast.rollout import SampledModel, Sampling, build_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Fields of a generation config that our sampler supports, or that do not affect the sampled tokens.
# If any other field differs from its default, sampling is left to TRL.
READ = {
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id",
    "pad_token_id", "bos_token_id", "max_length", "use_cache", "disable_compile",
    "transformers_version",
}  # fmt: skip
log = logging.getLogger(__name__)
OFF = "fast_rollouts is False"
# Packages whose hooks are known not to change the logits of a model.
KNOWN = ("transformers", "torch", "accelerate", "peft", "trl", "grpo_fast")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SamplingWithoutSupport(Sampling):
    """Sampling settings for which the sampler does not record which tokens it kept.

    TRL computes log-probabilities over the full vocabulary, so nothing reads the record.
    """

    @property
    def needs_support(self) -> bool:
        return False


class OwnRollouts(GRPOTrainer):
    """TRL's trainer, but our loop samples the completions, without dropout.

    Attributes:
        fast_rollouts: True samples with our loop if it supports all settings. False always samples
            with the code of TRL.
    """

    fast_rollouts = True
    # The derived class sets these attributes.
    fast_path: dict[str, str]
    _lm: PreTrainedModel
    _own_attention: str  # the attention of the model before packed rows replaced it
    _logged: set[tuple[str, str]]  # parts and reasons that were logged

    def _start_rollouts(self) -> None:
        """Build our sampling engine, or record why TRL must sample."""
        self._drawn_at: tuple[tuple[str, int], int] | None = None
        self._known_hooks = foreign_hooks(self.model)
        self.fast_path["rollouts"] = "ours"
        self._unsuited = unsuited(self, self._lm)
        if self._unsuited is None:
            accelerator = self.accelerator
            self._sampled = SampledModel(
                accelerator.unwrap_model(self.model), eos_ids=self.eos_token_ids,
                attn=self._own_attention,
                autocast=DTYPES.get(accelerator.native_amp and accelerator.mixed_precision),
            )  # fmt: skip
            self._engine = build_engine(self._sampled)
            self._unsuited = self._engine.fallback
        if self._unsuited is not None or not self.fast_rollouts:
            self._record("rollouts", self._unsuited or OFF)

    def _record(self, part: str, reason: str) -> None:
        """Record in `fast_path` why TRL computes a part of the step. Log each reason once."""
        said = f"TRL's: {reason}"
        self.fast_path[part] = said
        if (part, said) not in self._logged:
            self._logged.add((part, said))
            log.warning("%s: %s %s", type(self).__name__, part, said)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *others: object, **more: object
    ) -> tuple[object, ...]:
        sampling = self._sampling()
        if any(others[:2]):  # images, multimodal_fields
            sampling = "images need TRL's own inputs"
        elif not all(map(len, prompt_ids)):
            sampling = "a prompt has no token"
        if isinstance(sampling, str):
            self._record("rollouts", sampling)
            # Sample with the model's original attention. transformers' `generate` checks the name
            # of the attention, for example to detect flash attention, and does not know our name.
            prepared = self._lm.config._attn_implementation
            self._lm.set_attn_implementation(self._own_attention)
            try:
                return super()._generate_single_turn(prompt_ids, *others, **more)
            finally:
                self._lm.set_attn_implementation(prepared)
        self.fast_path["rollouts"] = "ours"
        self._sampled.eos_ids = frozenset(self.eos_token_ids)
        drawn = self._engine.generate(prompt_ids, sampling, group_size=1, seed=self._seed())
        return [one.ids for one in drawn], None

    def _sampling(self) -> Sampling | str:
        """Return the settings of our sampler, or the reason why TRL must sample."""
        if not self.fast_rollouts:
            return OFF
        if self._unsuited is not None:
            return str(self._unsuited)
        model = self.accelerator.unwrap_model(self.model)
        own = getattr(self._lm.generate, "__func__", None) is GenerationMixin.generate
        if "generate" in vars(model) or not own:
            return "model.generate is not transformers' own"
        return self._changed() or sampling_of(self, self._lm)

    def _changed(self) -> str | None:
        """Return a change of the model since the trainer was built, or None if there is none."""
        model = self.accelerator.unwrap_model(self.model)
        if is_compiled(model):
            return COMPILED
        if any(hook not in self._known_hooks for hook in foreign_hooks(model)):
            return "a forward hook was added after the trainer was built"
        return None

    def _seed(self) -> tuple[int | str, ...]:
        """Return a seed that differs between steps, between turns of a step, and between ranks."""
        when = "train" if self.model.training else "eval", self.state.global_step
        known, turn = self._drawn_at or (None, 0)
        turn = turn + 1 if known == when else 0
        self._drawn_at = when, turn
        return ("trl", self.args.seed, *when, turn, self.accelerator.process_index)


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
        if not (is_usual or name in READ or name.startswith("_")):
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
