"""Rollouts of `FastGRPOTrainer`: our loop draws where TRL would call transformers' `generate`.

What is drawn is what `GRPOConfig`, `generation_kwargs` and the model's generation config say
together; a setting that our sampler does not read leaves the rollout with TRL.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_fast.integrations.trl.options import unusual_model
from grpo_fast.integrations.trl.replay import Replay, Replayed
from grpo_fast.rollout import SampledModel, Sampling, build_engine

# Fields of a generation config that `sampling_of` reads, and those that change no token.
READ = {
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id",
    "pad_token_id", "bos_token_id", "max_length", "use_cache", "disable_compile",
    "transformers_version",
}  # fmt: skip
SUPPORT, VOCABULARY = "the sampler's", "the vocabulary"
log = logging.getLogger(__name__)
OFF = "fast_rollouts is False"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forgetful(Sampling):
    """Sampling for a loss over the whole vocabulary: no engine reports the tokens that it kept."""

    @property
    def wants_kept(self) -> bool:
        return False


class OwnRollouts:
    """A mixin that lets our loop draw the text of a TRL trainer; it stands first among the bases.

    `fast_rollouts = False` leaves the sampling to TRL; `replay_support = False` the loss over the
    whole vocabulary. Completions are drawn without dropout, as vLLM's are.
    """

    fast_rollouts = replay_support = True
    fast_path: dict[str, str]
    _packs = False  # rows in which a token's support finds its place

    def _start_rollouts(self: Any, lm: Any) -> None:
        self._lm, self._replay = lm, {mode: Replay() for mode in ("train", "eval")}
        self._drawn_at, self._replayed_logps, self._truncates = None, None, False
        self.fast_path |= {"rollouts": "ours", "support": VOCABULARY}
        self._unsuited = unsuited(self, lm)
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
            self._say_rollouts(self._unsuited or OFF)

    def _say_rollouts(self, reason: str) -> None:
        if self.fast_path["rollouts"] != f"TRL's: {reason}":
            self.fast_path["rollouts"] = f"TRL's: {reason}"
            log.warning("%s: rollouts by TRL's own way: %s", type(self).__name__, reason)

    @property
    def _mode(self: Any) -> str:
        return "train" if self.model.training else "eval"

    @property
    def replays(self) -> bool:
        return self.replay_support and self._packs

    def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
        """As TRL's; forgets what the batch before was drawn from."""
        self._replay[self._mode] = Replay()
        return super()._generate_and_score_completions(inputs)  # type: ignore[misc]

    def _generate_single_turn(self: Any, prompt_ids: Any, *others: Any, **more: Any) -> Any:
        sampling = self._sampling()
        # Of the settings alone: all processes log, or none does.
        self._truncates = isinstance(sampling, Sampling) and sampling.wants_kept
        if any(others[:2]):  # images, multimodal_fields
            sampling = "images need TRL's own inputs"
        elif not all(map(len, prompt_ids)):
            sampling = "a prompt has no token"
        if isinstance(sampling, str):
            self._say_rollouts(sampling)
            return super()._generate_single_turn(prompt_ids, *others, **more)  # type: ignore[misc]
        self.fast_path["rollouts"] = "ours"
        self._sampled.eos_ids = frozenset(self.eos_token_ids)
        drawn = self._engine.generate(prompt_ids, sampling, group_size=1, seed=self._seed())
        self._replay[self._mode].remember(prompt_ids, drawn)
        return [one.ids for one in drawn], None

    def _sampling(self: Any) -> Sampling | str:
        if not self.fast_rollouts:
            return OFF
        if self._unsuited is not None:
            return str(self._unsuited)
        return sampling_of(self, self._lm)

    def _seed(self: Any) -> tuple[int | str, ...]:
        when = self._mode, self.state.global_step
        known, turn = self._drawn_at or (None, 0)
        turn = turn + 1 if known == when else 0
        self._drawn_at = when, turn
        return ("trl", self.args.seed, *when, turn, self.accelerator.process_index)

    # ----------------------------------------------------------------------------------------------
    # replay

    def _replayed(self: Any, pack: Any, input_ids: Tensor, mask: Tensor) -> Replayed | None:
        """The sets that the scored tokens of these rows were drawn from; None: unknown."""
        replay = self._replay[self._mode]
        known = replay(input_ids, mask, pack.shape, pack.slots) if self.replays else None
        self.fast_path["support"] = VOCABULARY if known is None else SUPPORT
        return known

    def compute_loss(self: Any, *args: Any, **options: Any) -> Any:
        """As TRL's; logs how far the sampler is from the policy where it left tokens out."""
        loss = super().compute_loss(*args, **options)  # type: ignore[misc]
        if self._truncates:
            self._log_replay()
        self._replayed_logps = None
        return loss

    @torch.no_grad()
    def _log_replay(self: Any) -> None:
        """Means over the drawn tokens of all processes: ratio to the sampler, what it kept."""
        sums = torch.zeros(4, device=self.accelerator.device)
        if self._replayed_logps is not None:
            known, logps = self._replayed_logps
            drawn = ~known.logps.isnan()
            sizes = known.support.offsets.diff()
            values = (logps - known.logps).exp(), sizes, known.mass, drawn
            sums = torch.stack([value[drawn].float().sum() for value in values])
        *totals, count = self.accelerator.reduce(sums).tolist()
        names = "importance_sampling_ratio", "support_size", "kept_mass"
        for name, total in zip(names, totals, strict=True):
            self._metrics[self._mode][f"sampling/{name}/mean"].append(total / max(count, 1.0))


def unsuited(trainer: Any, lm: Any) -> str | None:
    """Why this trainer's rollouts stay TRL's, by the option's name; None: they may be ours."""
    known = {
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "rollout_func": trainer.rollout_func is not None,
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp: the model is sharded": trainer.is_fsdp_enabled
        or any(isinstance(module, FSDPModule) for module in lm.modules()),
    }
    return next((reason for reason, holds in known.items() if holds), unusual_model(trainer, lm))


def sampling_of(trainer: Any, lm: Any) -> Sampling | str:
    """How completions are drawn, or the name of a setting that our sampler does not read."""
    from transformers.generation import GenerationMixin

    model = trainer.accelerator.unwrap_model(trainer.model)
    if any("generate" in vars(x) for x in (model, lm)) or (
        type(lm).generate is not GenerationMixin.generate
    ):
        return "model.generate is not transformers' own"
    # As `generate` does: what is None in the trainer's config is the model's own.
    config = lm._prepare_generation_config(trainer.generation_config)[0]
    for name, value in vars(config).items():
        is_usual = value is None or value is False or value == usual().get(name)
        if not (is_usual or name in READ or name.startswith("_")):
            return f"generation_kwargs: {name}={value!r} is not read by our sampler"
    eos = config.eos_token_id
    if {*(eos if isinstance(eos, list) else [eos])} != {*trainer.eos_token_ids}:
        return f"generation_kwargs: eos_token_id={eos!r} beside {trainer.eos_token_ids}"
    settings = {name: getattr(config, name) for name in ("max_new_tokens", "top_k", "top_p")}
    settings["temperature"] = config.temperature if config.do_sample else 0
    try:
        kind = Sampling if trainer.replays else Forgetful
        return kind(**settings, min_p=config.min_p or 0)
    except ValueError as error:
        return f"generation_kwargs: {' '.join(str(error).split())}"


@functools.cache
def usual() -> dict[str, Any]:
    from transformers import GenerationConfig

    plain = GenerationConfig()
    named: dict[str, Any] = getattr(plain, "_get_default_generation_params", dict)()
    return {**vars(plain), **named}
