"""`FastGRPOTrainer`: TRL's GRPOTrainer with our rollouts, our packed forward and our loss.

    from grpo_fast.integrations.trl import FastGRPOTrainer as GRPOTrainer

The code of TRL computes rewards, advantages and metrics, calls tools, and writes logs and
checkpoints. We replace three parts:

- Our loop samples the completions. The sampling settings come from `GRPOConfig`, from
  `generation_kwargs` and from the model's generation config, as in `generate`. If our sampler does
  not support a setting, if the model has its own `generate`, or if a forward hook was added, TRL
  samples.
- A packed forward replaces the padded forward. It computes each shared prompt once and applies the
  LM head to completion tokens only. It runs inside the model's forward, so the hooks of DDP and
  FSDP fire.
- One pass over the logits computes loss and gradient, if the gradient of a token does not depend on
  other tokens. TRL's `_compute_loss` then computes its metrics from the log-probabilities. For
  other objectives, TRL computes the loss from our differentiable logps and entropies.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from trl import GRPOTrainer

from grpo_fast.attention import check_tolerance, fast_layers
from grpo_fast.integrations.trl import options
from grpo_fast.integrations.trl.head import base_model, fused_head, use_fast_head
from grpo_fast.integrations.trl.packed import (
    SCORED,
    Pack,
    largest_gap,
    pack_padded,
    packed_forward,
    take_packed_rows,
)
from grpo_fast.rollout import SampledModel, Sampling, build_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
OFF = "fast_rollouts is False"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FastGRPOTrainer(GRPOTrainer):
    """Faster version of TRL's `GRPOTrainer` with the same constructor and the same results.

    Attributes:
        fast_path: Dictionary that says whether our code or TRL's computed each part of the last
            micro-batch. Before the first micro-batch, it contains the plan. "forward" is "packed"
            or "TRL's: <reason>". "loss" is "single pass", "TRL's on our logps: <reason>" or
            "TRL's: <reason>". "rollouts" is "ours" or "TRL's: <reason>".
        fast_rollouts: True samples with our loop, without dropout, if it supports all settings.
            False always samples with the code of TRL.
    """

    fast_rollouts = True

    @functools.wraps(GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Logps and entropies of our single pass. They are set only while TRL's `_compute_loss`
        # computes its metrics from them.
        self._finished: tuple[Tensor, Tensor] | None = None
        self._probed = False
        self.fast_path = {"forward": "packed", "loss": "single pass"}
        self._packs = self._in_one_pass = True
        self._logged: set[tuple[str, str]] = set()
        self._lm = lm = base_model(self.accelerator.unwrap_model(self.model))
        self._own_attention = lm.config._attn_implementation  # before packed rows replace it
        fast_layers(lm.base_model)
        reason = options.reason_of(options.forward_reason, self, lm)
        if (reason := reason or options.reason_of(self._prepare)) is not None:
            self._their_forward(reason)
        elif (reason := options.reason_of(options.single_pass_reason, self)) is not None:
            self._their_objective(reason)
        # Use our head for the micro-batches that use TRL's forward.
        if (reason := options.reason_of(use_fast_head, self)) is not None:
            log.warning("FastGRPOTrainer: TRL's LM head is used: %s", reason)
        self._start_rollouts()
        log.info("FastGRPOTrainer: %s", self.fast_path)

    def _record(self, part: str, reason: str) -> None:
        """Record in `fast_path` why TRL computes a part of the step. Log each reason once."""
        said = f"TRL's: {reason}"
        self.fast_path[part] = said
        if (part, said) not in self._logged:
            self._logged.add((part, said))
            log.warning("%s: %s %s", type(self).__name__, part, said)

    def _their_forward(self, reason: str) -> None:
        """Let TRL compute the forward and the loss from now on, and log the reason."""
        self._lm.set_attn_implementation(self._own_attention)
        self._packs = self._in_one_pass = False
        self._record("forward", reason)
        self.fast_path["loss"] = self.fast_path["forward"]

    def _their_objective(self, reason: str) -> None:
        """Let TRL compute the loss from our logps from now on, and record the reason."""
        self.fast_path["loss"] = f"TRL's on our logps: {reason}"
        self._in_one_pass = False

    def _prepare(self) -> str | None:
        """Prepare the policy and the reference model for packed rows.

        Returns:
            None if rows are packed. Otherwise the reason why TRL must compute the forward.
        """
        lm = self._lm
        self._head = fused_head(lm)
        take_packed_rows(lm)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            gap = largest_gap(lm, self._packed_logps, self._padded_logps)
            dtypes = {parameter.dtype for parameter in lm.parameters()}
            if self.accelerator.mixed_precision in DTYPES:
                dtypes = {torch.bfloat16}
            if not gap <= max(map(check_tolerance, dtypes)):
                kind = f"model_type {lm.config.model_type}"
                return f"{kind}: packed logps differ from TRL's by {gap:.2g} nats"
        if self.ref_model is not None:
            take_packed_rows(base_model(self.accelerator.unwrap_model(self.ref_model)))
        return None

    def _padded_logps(self, ids: Tensor, real: Tensor) -> Tensor:
        return super()._get_per_token_logps_and_entropies(self._lm, ids, real, SCORED)[0]

    def _packed_logps(self, ids: Tensor, real: Tensor) -> Tensor:
        pack = pack_padded(ids, real, real[:, -SCORED:])
        assert not isinstance(pack, str)
        return pack.padded(self._run(self._lm, pack)["logps"])

    def _check_model(self) -> None:
        """Use TRL's forward from now on if the model was changed after the trainer was built."""
        reason = self._changed() if self._packs else None
        if reason is not None:
            self._their_forward(reason)

    def _run(self, model: PreTrainedModel, pack: Pack, **options: Any) -> dict[str, Tensor]:
        # Bind the tensors to a function, because the hooks of FSDP2 would cast arguments. Also pass
        # the ids, because hooks of the model may read them.
        forward = functools.partial(packed_forward, pack=pack, head=self._head, **options)
        with self.accelerator.autocast():
            return model(input_ids=pack.inputs["input_ids"], run=forward)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None,
        compute_entropy=False, **kwargs,
    ):  # fmt: skip
        """Compute the results of TRL's method of the same name from packed rows.

        Returns:
            A tuple of the log-probabilities (B, K), the entropies (B, K) or None, and the auxiliary
            loss, which is None for packed rows.
        """
        if self._finished is not None:
            return *self._finished, None
        self._check_model()
        theirs = functools.partial(
            super()._get_per_token_logps_and_entropies, model, input_ids, attention_mask,
            logits_to_keep, batch_size, compute_entropy, **kwargs,
        )  # fmt: skip
        if not self._packs:
            return theirs()
        logps = []
        entropies = []
        rows = (x.split(batch_size or x.shape[0]) for x in (input_ids, attention_mask))
        for ids, real in zip(*rows, strict=True):
            pack = pack_padded(ids, real, real[:, -logits_to_keep:])
            if isinstance(pack, str):
                self._record("forward", pack)
                return theirs()
            result = self._run(model, pack, entropy=compute_entropy)
            logps.append(pack.padded(result["logps"]))
            entropies.append(pack.padded(result["entropy"]) if compute_entropy else None)
        self.fast_path["forward"] = "packed"
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _compute_loss(self, model, inputs):
        """Compute the loss of one micro-batch in a single pass, and record TRL's metrics."""
        # 1. Let TRL compute the loss if a single pass is not possible.
        self._check_model()
        if not (self._in_one_pass and torch.is_grad_enabled() and self.model.training):
            return super()._compute_loss(model, inputs)
        if not self._probed:
            self._probed = True
            gap = options.reason_of(options.probe, self)
            if gap is not None:
                log.warning("FastGRPOTrainer: %s; TRL's own objective is used on our logps", gap)
                self._their_objective(gap)
                return super()._compute_loss(model, inputs)
        # 2. Pack the rows of the micro-batch.
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        pack = pack_padded(input_ids, attention_mask, mask)
        if isinstance(pack, str):
            self.fast_path["loss"] = f"TRL's: {pack}"
            return super()._compute_loss(model, inputs)
        given, divisor = options.single_pass(
            self, inputs, pack.target_ids.shape[0], **self._head.rule
        )
        if given["advantages"].dim() == 2 and pack.target_ids.shape[0] == pack.shape[0]:
            why = "advantages per token, and this micro-batch has as many tokens as completions"
            self.fast_path["loss"] = f"TRL's on our logps: {why}"
            return super()._compute_loss(model, inputs)
        # 3. Compute loss and gradient in a single pass. Then let TRL compute its metrics from the
        # logps and entropies of this pass.
        self.fast_path |= {"forward": "packed", "loss": "single pass"}
        result = self._run(model, pack, loss=given)
        with torch.no_grad():
            self._their_loss(inputs, pack.padded(result["logps"]), pack.padded(result["entropy"]))
        return result["loss"] / divisor

    def _their_loss(self, inputs: dict[str, Tensor], logps: Tensor, entropies: Tensor) -> Tensor:
        """Run TRL's `_compute_loss` on the given logps and entropies, each of shape (B, K)."""
        self._finished = (logps, entropies)
        try:
            return super()._compute_loss(self.model, inputs)
        finally:
            self._finished = None

    # ---------------------------------------------------------------------------------- Rollouts
    def _start_rollouts(self) -> None:
        """Build our sampling engine, or record why TRL must sample."""
        self._drawn_at: tuple[tuple[str, int], int] | None = None
        self._known_hooks = options.foreign_hooks(self.model)
        self.fast_path["rollouts"] = "ours"
        self._unsuited = options.unsuited(self, self._lm)
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
        return self._changed() or options.sampling_of(self, self._lm)

    def _changed(self) -> str | None:
        """Return a change of the model since the trainer was built, or None if there is none."""
        model = self.accelerator.unwrap_model(self.model)
        if options.is_compiled(model):
            return options.COMPILED
        if any(hook not in self._known_hooks for hook in options.foreign_hooks(model)):
            return "a forward hook was added after the trainer was built"
        return None

    def _seed(self) -> tuple[int | str, ...]:
        """Return a seed that differs between steps, between turns of a step, and between ranks."""
        when = "train" if self.model.training else "eval", self.state.global_step
        known, turn = self._drawn_at or (None, 0)
        turn = turn + 1 if known == when else 0
        self._drawn_at = when, turn
        return ("trl", self.args.seed, *when, turn, self.accelerator.process_index)
