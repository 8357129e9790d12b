"""`FastGRPOTrainer`: TRL's GRPOTrainer with our rollouts, our packed forward and our loss.

    from grpo_fast.integrations.trl import FastGRPOTrainer as GRPOTrainer

The code of TRL computes rewards, advantages and metrics, calls tools, and writes logs and
checkpoints. We replace three parts:

- Our loop samples the completions (rollouts.py).
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
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_fast.attention import fast_layers, offload_checkpoints, tile_mlps
from grpo_fast.errors import require
from grpo_fast.integrations.trl import options
from grpo_fast.integrations.trl.head import base_model, fused_head, use_fast_head
from grpo_fast.integrations.trl.packed import (
    SCORED,
    PackedCall,
    largest_gap,
    pack_padded,
    take_packed_rows,
    tolerance,
)
from grpo_fast.integrations.trl.rollouts import OwnRollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.trainer_utils import TrainOutput

log = logging.getLogger(__name__)

# Reason in `fast_path` that applies to a single micro-batch, whose loss TRL's code then computes.
AMBIGUOUS = "advantages per token, and this micro-batch has as many tokens as completions"


class FastGRPOTrainer(OwnRollouts):
    """Faster version of TRL's `GRPOTrainer` with the same constructor and the same results.

    Args:
        checkpoint_offload: True keeps the inputs of checkpointed layers in host memory until the
            backward pass. It needs `gradient_checkpointing=True` in the GRPOConfig.
        tiled_mlp: Largest number of tokens that a dense MLP computes at a time. Tiled MLPs are
            recomputed in the backward pass. None computes all tokens at once.

    Attributes:
        fast_path: Dictionary that describes the last micro-batch, or the plan before the first.
            "forward" is "packed" or "TRL's: <reason>". "loss" is "single pass", "TRL's on our
            logps: <reason>" or "TRL's: <reason>". "rollouts" is "ours" or "TRL's: <reason>".
        fast_rollouts: False leaves the sampling to TRL.

    Raises:
        ValueError: `checkpoint_offload` is True without gradient checkpointing, or `tiled_mlp` is
            set and the model has no dense MLP of plain linear layers. LoRA layers are not plain.
            `train` raises this error if no parameter requires grad or none gets a gradient.
    """

    @functools.wraps(GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(
        self,
        *args: object,
        checkpoint_offload: bool = False,
        tiled_mlp: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        fits = self.args.gradient_checkpointing or not checkpoint_offload
        require(fits, "checkpoint_offload", "gradient_checkpointing=True in the GRPOConfig", False)
        self._offloads = checkpoint_offload
        # Logps and entropies of our single pass. They are set only while TRL's `_compute_loss`
        # computes its metrics from them.
        self._finished: tuple[Tensor, Tensor] | None = None
        self._probed = self._learns = False
        self._logged: set[str] = set()
        self.fast_path = {"forward": "packed", "loss": "single pass"}
        self._packs = self._in_one_pass = True
        lm = base_model(self.accelerator.unwrap_model(self.model))
        self._own_attention = lm.config._attn_implementation  # before packed rows replace it
        fast_layers(lm.base_model)
        if tiled_mlp is not None:
            require(tiled_mlp > 0, "tiled_mlp", "a positive number of tokens", tiled_mlp)
            tile_mlps(lm, tiled_mlp)
        if not options.is_tested():
            log.warning(
                "FastGRPOTrainer: trl %s is untested (tested: %s). Logps, loss and gradients are "
                "compared with TRL's before the first step",
                options.RELEASE, ", ".join(options.TESTED),
            )  # fmt: skip
        reason = self._comparable(lambda: self._forward_reason(lm))
        if reason is not None:
            self._their_forward(reason)
        elif (reason := options.single_pass_reason(self)) is not None:
            self._their_objective(reason)
        # Use our head for the micro-batches that use TRL's forward.
        if (reason := self._comparable(self._use_our_head)) is not None:
            log.warning("FastGRPOTrainer: TRL's LM head is used: %s", reason)
        self._start_rollouts(lm)
        said = "FastGRPOTrainer: forward %(forward)s, loss %(loss)s, rollouts %(rollouts)s"
        log.info(said, self.fast_path)

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train as TRL does, but raise a ValueError if no parameter requires grad."""
        learns = any(parameter.requires_grad for parameter in self.model.parameters())
        hint = "none; load a trained adapter with PeftModel.from_pretrained(..., is_trainable=True)"
        require(learns, "model", "at least one parameter that requires grad", hint)
        return super().train(*args, **kwargs)

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """Run a step as TRL does, but raise a ValueError if the first step gives no gradient."""
        loss = super().training_step(*args, **kwargs)
        if not self._learns and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            trained = any(parameter.grad is not None for parameter in self.model.parameters())
            expected = "a gradient in at least one parameter that requires grad"
            require(trained, "model", expected, "none; is the trained adapter the active one?")
        self._learns = True
        return loss

    def _their_forward(self, reason: str) -> None:
        """Let TRL compute the forward and the loss from now on, and log the reason."""
        self.fast_path |= {"forward": f"TRL's: {reason}", "loss": f"TRL's: {reason}"}
        self._packs = self._in_one_pass = False
        log.warning("FastGRPOTrainer: TRL's forward pass is used, with our LM head: %s", reason)

    def _comparable(self, attempt: Callable[[], str | None]) -> str | None:
        """Return the result of `attempt`, or its error if an untested release of TRL causes one."""
        try:
            return attempt()
        except Exception as error:
            if options.is_tested():
                raise
            return f"trl {options.RELEASE}: {type(error).__name__}: {error}"

    def _use_our_head(self) -> None:
        use_fast_head(self)

    def _forward_reason(self, lm: PreTrainedModel) -> str | None:
        return options.forward_reason(self, lm) or self._prepare_models(lm)

    def _record_forward(self, reason: str) -> None:
        """Record why TRL computes the forward of a micro-batch, and log each reason once."""
        self.fast_path["forward"] = f"TRL's: {reason}"
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("FastGRPOTrainer: TRL's forward pass is used: %s", reason)

    def _their_objective(self, reason: str) -> None:
        """Let TRL compute the loss from our logps from now on, and record the reason."""
        self.fast_path["loss"] = f"TRL's on our logps: {reason}"
        self._in_one_pass = False

    def _prepare_models(self, lm: PreTrainedModel) -> str | None:
        """Prepare the policy `lm` and the reference model for packed rows.

        Returns:
            None if rows are packed. Otherwise the reason why they are not packed.
        """
        self._head = fused_head(lm)
        try:
            take_packed_rows(lm)
        except ValueError as error:
            return str(error)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            if not options.is_tested():
                return f"trl {options.RELEASE} is untested, and a sharded model is not compared"
        else:
            difference = self._self_check(lm)
            if difference is not None:
                lm.set_attn_implementation(self._own_attention)
                return difference
        if self.ref_model is not None:
            take_packed_rows(base_model(self.accelerator.unwrap_model(self.ref_model)))
        return None

    def _check_model(self) -> None:
        """Use TRL's forward from now on if the model was changed after the trainer was built."""
        reason = self._changed() if self._packs else None
        if reason is not None:
            self._lm.set_attn_implementation(self._own_attention)
            self._their_forward(reason)

    def _self_check(self, lm: PreTrainedModel) -> str | None:
        """Check the logps of packed rows, and log a warning if TRL's padded rows give wrong logps.

        Returns:
            None if packed rows give correct logps. Otherwise, a sentence that describes the error.
        """
        score = super()._get_per_token_logps_and_entropies

        def padded(ids: Tensor, real: Tensor) -> Tensor:
            return score(lm, ids, real, SCORED)[0]

        def packed(ids: Tensor, real: Tensor) -> Tensor:
            pack = pack_padded(ids, real, real[:, -SCORED:])
            assert not isinstance(pack, str)
            return pack.padded(self._run(lm, PackedCall(pack, self._head))["logps"])

        try:
            gap, theirs = (largest_gap(lm, f, padded) for f in (packed, padded))
        except (ValueError, TypeError, AttributeError) as error:
            return str(error)
        kind = f"model_type {lm.config.model_type}"
        most = tolerance(lm, self.accelerator.mixed_precision)
        if not gap <= most:
            return f"{kind}: packed logps differ from TRL's by {gap:.2g} nats"
        if not theirs <= most:
            log.warning(
                "%s: TRL's logps of left-padded rows differ by %.2g nats from those of the same "
                "rows without padding. TRL passes no position_ids, so absolute positions count the "
                "padding. FastGRPOTrainer packs rows without padding, which is right",
                kind, theirs,
            )  # fmt: skip
        return None

    def _run(self, model: PreTrainedModel, call: PackedCall) -> dict[str, Tensor]:
        # Pass a bound method, because the hooks of FSDP2 would cast the tensors in a tuple. Also
        # pass the ids, because hooks of the model may read them.
        with self.accelerator.autocast():
            return model(input_ids=call.pack.inputs["input_ids"], run=call.forward)

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
                self._record_forward(pack)
                return theirs()
            result = self._run(model, PackedCall(pack, self._head, compute_entropy))
            logps.append(pack.padded(result["logps"]))
            entropies.append(pack.padded(result["entropy"]) if compute_entropy else None)
        self.fast_path["forward"] = "packed"
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _compute_loss(self, model, inputs):
        """Compute the loss of one micro-batch in a single pass, and record TRL's metrics."""
        # 1. Let TRL compute the loss if a single pass is not possible.
        self._check_model()
        if self._offloads:  # TRL enables checkpointing again after each generation
            offload_checkpoints(self.accelerator.unwrap_model(self.model))
        if not (self._in_one_pass and torch.is_grad_enabled() and self.model.training):
            return super()._compute_loss(model, inputs)
        if not self._probed:
            self._probed = True
            try:
                gap = options.probe(self)
            except Exception as error:
                if options.is_tested():
                    raise
                self._their_forward(f"trl {options.RELEASE}: {type(error).__name__}: {error}")
                return super()._compute_loss(model, inputs)
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
        rule = self._head.rule._asdict()
        job = options.single_pass(self, inputs, pack.target_ids.shape[0], **rule)
        if job.advantages.dim() == 2 and pack.target_ids.shape[0] == pack.shape[0]:
            self.fast_path["loss"] = f"TRL's on our logps: {AMBIGUOUS}"
            return super()._compute_loss(model, inputs)
        # 3. Compute loss and gradient in a single pass. Then let TRL compute its metrics from the
        # logps and entropies of this pass.
        self.fast_path |= {"forward": "packed", "loss": "single pass"}
        result = self._run(model, PackedCall(pack, self._head, entropy=True, loss=job))
        with torch.no_grad():
            self._their_loss(inputs, pack.padded(result["logps"]), pack.padded(result["entropy"]))
        return result["loss"] / job.divisor

    def _their_loss(self, inputs: dict[str, Tensor], logps: Tensor, entropies: Tensor) -> Tensor:
        """Run TRL's `_compute_loss` on the given logps and entropies, each of shape (B, K)."""
        self._finished = (logps, entropies)
        try:
            return super()._compute_loss(self.model, inputs)
        finally:
            self._finished = None
