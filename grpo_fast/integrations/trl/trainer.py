"""`FastGRPOTrainer`: TRL's GRPOTrainer with our rollouts, packed forward and single-pass loss.

    from grpo_fast.integrations.trl import FastGRPOTrainer as GRPOTrainer

Rewards, tools, advantages, metrics, logging and checkpoints are TRL's own code. Three parts are
replaced:

- Our loop samples the completions (rollouts.py).
- A packed forward replaces the padded forward. It computes each shared prompt once and applies the
  LM head to completion tokens only. DDP and FSDP hooks fire, because it runs inside the forward.
- If the gradient of a token depends on that token alone, one pass over the logits computes loss and
  gradient. TRL's `_compute_loss` then computes its metrics from the log-probabilities. For other
  objectives, `linear_logps` passes differentiable logps and entropies to TRL's own code.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_fast.attention import fast_layers, offload_checkpoints, tile_mlps
from grpo_fast.errors import require
from grpo_fast.integrations.trl import options, selfcheck
from grpo_fast.integrations.trl.head import base_model, fused_head, use_fast_head
from grpo_fast.integrations.trl.originals import foreign_hooks, is_compiled
from grpo_fast.integrations.trl.packed import (
    PackedCall,
    own_attention,
    pack_padded,
    packed_forward,
    take_packed_rows,
)
from grpo_fast.integrations.trl.rollouts import OwnRollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.trainer_utils import TrainOutput

log = logging.getLogger(__name__)

# Reasons that `fast_path` gives if TRL's code computes only the current micro-batch.
NO_PROMPT = "a completion of this micro-batch has no prompt to predict its first token"
AMBIGUOUS = "advantages per token, and this micro-batch has as many tokens as completions"


class FastGRPOTrainer(OwnRollouts, GRPOTrainer):
    """Faster version of TRL's `GRPOTrainer` with the same constructor and the same results.

    Args:
        replay_support: True computes logps, entropy and KL over the tokens that a truncating
            sampler (top_k, top_p, min_p) kept, which makes the ratio to the sampler 1 at equal
            weights. False, the default, computes them over the full vocabulary, as TRL does.
        checkpoint_offload: True keeps the inputs of checkpointed layers in host memory until the
            backward pass. It needs `gradient_checkpointing=True` in the GRPOConfig.
        tiled_mlp: Largest number of tokens that a dense MLP computes at a time. Tiled MLPs are
            recomputed in the backward pass. None computes all tokens at once.

    Attributes:
        fast_path: {"forward": "packed" or "TRL's: <reason>",
            "loss": "single pass", "TRL's on our logps: <reason>" or "TRL's: <reason>",
            "rollouts": "ours" or "TRL's: <reason>",
            "support": "the sampler's" or "the vocabulary"}.
            It describes the last micro-batch, or the plan before the first micro-batch.
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
        replay_support: bool = False,
        checkpoint_offload: bool = False,
        tiled_mlp: int | None = None,
        **kwargs: object,
    ) -> None:
        is_bool = isinstance(replay_support, bool)
        require(is_bool, "replay_support", "True or False", repr(replay_support))
        self.replay_support = replay_support
        super().__init__(*args, **kwargs)
        fits = self.args.gradient_checkpointing or not checkpoint_offload
        require(fits, "checkpoint_offload", "gradient_checkpointing=True in the GRPOConfig", False)
        self._offloads = checkpoint_offload
        # Logps and entropies from our single pass, or None. TRL's `_compute_loss` then uses these
        # tensors instead of computing them, so that it can compute its metrics.
        self._finished: tuple[Tensor, Tensor] | None = None
        self._probed = self._learns = False
        self.fast_path = {"forward": "packed", "loss": "single pass"}
        self._packs = self._in_one_pass = True
        lm = base_model(self.accelerator.unwrap_model(self.model))
        self._own_attention = lm.config._attn_implementation  # before packed rows replace it
        fast_layers(lm.base_model)
        if tiled_mlp is not None:
            require(tiled_mlp > 0, "tiled_mlp", "a positive number of tokens", tiled_mlp)
            tile_mlps(lm, tiled_mlp)
        self._checked = self._changes(lm)
        reason = self._prepare_models(lm, options.forward_reason(self, lm))
        if reason is not None:
            self._their_forward(reason)
        elif (reason := options.single_pass_reason(self)) is not None:
            self._their_objective(reason)
        use_fast_head(self)  # for the micro-batches that use TRL's forward
        self._start_rollouts(lm)
        said = "FastGRPOTrainer: forward %(forward)s, loss %(loss)s, rollouts %(rollouts)s"
        log.info(said, self.fast_path)

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train as TRL does. Raise a ValueError if no parameter requires grad."""
        learns = any(parameter.requires_grad for parameter in self.model.parameters())
        hint = "none; load a trained adapter with PeftModel.from_pretrained(..., is_trainable=True)"
        require(learns, "model", "at least one parameter that requires grad", hint)
        return super().train(*args, **kwargs)

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """Run a training step as TRL does.

        Raise a ValueError if no parameter has a gradient after the first step.
        """
        loss = super().training_step(*args, **kwargs)
        if not self._learns and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            trained = any(parameter.grad is not None for parameter in self.model.parameters())
            expected = "a gradient in at least one parameter that requires grad"
            require(trained, "model", expected, "none; is the trained adapter the active one?")
        self._learns = True
        return loss

    def _their_forward(self, reason: str) -> None:
        """Let TRL compute the forward and the objective from now on, and log the reason for it."""
        self.fast_path |= {"forward": f"TRL's: {reason}", "loss": f"TRL's: {reason}"}
        self._packs = self._in_one_pass = False
        log.warning("FastGRPOTrainer: TRL's forward pass is used, with our LM head: %s", reason)

    def _their_objective(self, reason: str) -> None:
        """Let TRL compute the objective from our logps from now on, and record the reason."""
        self.fast_path["loss"] = f"TRL's on our logps: {reason}"
        self._in_one_pass = False

    def _prepare_models(self, lm: PreTrainedModel, reason: str | None) -> str | None:
        """Prepare policy and reference model for packed rows, unless `reason` is a string.

        Returns:
            None if rows are packed, else the reason why they are not packed.
        """
        if reason is None:
            self._head = fused_head(lm)
            try:
                take_packed_rows(lm)
            except ValueError as error:
                reason = str(error)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            difference = self._self_check(lm, packs=reason is None)
            if reason is None and difference is not None:
                lm.set_attn_implementation(self._own_attention)
                return difference
        if reason is None and self.ref_model is not None:
            take_packed_rows(base_model(self.accelerator.unwrap_model(self.ref_model)))
        return reason

    @staticmethod
    def _changes(lm: PreTrainedModel) -> list[object]:
        """Return the compilation state and the hooks, on which the self-check's result depends."""
        return [is_compiled(lm), *(hook for _, hook in foreign_hooks(lm))]

    def _check_again(self) -> None:
        """Repeat the self-check if the model was compiled or got a hook since the last check."""
        lm = base_model(self.accelerator.unwrap_model(self.model))
        changes = self._changes(lm)
        if not self._packs or changes == self._checked:
            return
        self._checked = changes
        reason = options.COMPILED if is_compiled(lm) else None
        if reason is None and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            reason = self._self_check(lm, packs=True)
        if reason is not None:
            lm.set_attn_implementation(self._own_attention)
            self._their_forward(reason)

    def _self_check(self, lm: PreTrainedModel, packs: bool) -> str | None:
        """Compare logps of packed rows and of TRL's padded rows with logps of single rows.

        Log a warning if TRL's padded rows are wrong.

        Returns:
            None if packed rows are right, else a sentence that states the difference.
        """
        score = super()._get_per_token_logps_and_entropies

        def padded(lm: PreTrainedModel, ids: Tensor, real: Tensor) -> Tensor:
            return score(lm, ids, real, selfcheck.SCORED)[0]

        def packed(lm: PreTrainedModel, ids: Tensor, real: Tensor) -> Tensor:
            pack = pack_padded(ids, real, real[:, -selfcheck.SCORED :])
            return pack.padded(self._run(lm, PackedCall(pack, self._head, False))["logps"])

        try:
            gaps = selfcheck.measure_gaps(lm, padded, packed if packs else None)
        except (ValueError, TypeError, AttributeError) as error:
            return str(error)
        kind = f"model_type {lm.config.model_type}"
        most = selfcheck.tolerance(lm, self.accelerator.mixed_precision)
        is_right = gaps.packed <= most
        if not gaps.padded <= most:
            selfcheck.warn_of_padding(kind, gaps.padded, is_packed=packs and is_right)
        if not is_right:
            return f"{kind}: packed logps differ from TRL's by {gaps.packed:.2g} nats"
        return None

    def _run(self, model: PreTrainedModel, call: PackedCall) -> dict[str, Tensor]:
        run = functools.partial(packed_forward, call=call)
        ids = call.pack.inputs["input_ids"]
        with self.accelerator.autocast():
            return model(input_ids=ids, run=run)  # hooks of the model may read the ids

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None,
        compute_entropy=False, **kwargs,
    ):  # fmt: skip
        """Compute the results of TRL's method with this name from packed rows.

        Returns:
            Log-probabilities (B, K), entropies (B, K) or None, and the auxiliary loss or None.
        """
        if self._finished is not None:
            return *self._finished, None
        self._check_again()
        theirs = functools.partial(
            super()._get_per_token_logps_and_entropies, model, input_ids, attention_mask,
            logits_to_keep, batch_size, compute_entropy, **kwargs,
        )  # fmt: skip
        if not self._packs:
            return theirs()
        logps = []
        entropies = []
        for start in range(0, input_ids.shape[0], batch_size or input_ids.shape[0]):
            rows = slice(start, start + (batch_size or input_ids.shape[0]))
            ids = input_ids[rows]
            real = attention_mask[rows]
            pack = pack_padded(ids, real, real[:, -logits_to_keep:])
            if pack is None:
                self.fast_path["forward"] = f"TRL's: {NO_PROMPT}"
                return theirs()
            known = self._replayed(pack, ids, real)
            call = PackedCall(pack, self._head, compute_entropy, None, known and known.support)
            result = self._run(model, call)
            self._replayed_logps = known and (known, result["logps"].detach())
            logps.append(pack.padded(result["logps"]))
            entropies.append(pack.padded(result["entropy"]) if compute_entropy else None)
        self.fast_path["forward"] = "packed"
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _generate_single_turn(self, *args: Any, **kwargs: Any):
        if not self._packs:
            return super()._generate_single_turn(*args, **kwargs)
        lm = base_model(self.accelerator.unwrap_model(self.model))
        with own_attention(lm, self._own_attention):
            return super()._generate_single_turn(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        """Compute the loss of one micro-batch in a single pass, and record TRL's metrics."""
        # 1. Check again whether a single pass is possible. If not, let TRL compute the micro-batch.
        self._check_again()
        if self._offloads:  # TRL enables checkpointing again after each generation
            offload_checkpoints(self.accelerator.unwrap_model(self.model))
        if not (self._in_one_pass and torch.is_grad_enabled() and self.model.training):
            return super()._compute_loss(model, inputs)
        if not self._probed:
            self._probed = True
            if (gap := options.probe(self, self._their_loss)) is not None:
                log.warning("FastGRPOTrainer: %s; TRL's own objective is used on our logps", gap)
                self._their_objective(gap)
                return super()._compute_loss(model, inputs)
        # 2. Pack the rows of the micro-batch.
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        pack = pack_padded(input_ids, attention_mask, mask)
        if pack is None:
            self.fast_path["loss"] = f"TRL's: {NO_PROMPT}"
            return super()._compute_loss(model, inputs)
        rule = self._head.rule._asdict()
        job = options.single_pass(self, inputs, pack.target_ids.shape[0], **rule)
        if job.advantages.dim() == 2 and pack.target_ids.shape[0] == pack.shape[0]:
            self.fast_path["loss"] = f"TRL's on our logps: {AMBIGUOUS}"
            return super()._compute_loss(model, inputs)
        # 3. Compute loss and gradient in a single pass. Then pass its logps and entropies to TRL,
        # which computes its metrics from them.
        self.fast_path |= {"forward": "packed", "loss": "single pass"}
        known = self._replayed(pack, input_ids, attention_mask)
        result = self._run(model, PackedCall(pack, self._head, True, job, known and known.support))
        self._replayed_logps = known and (known, result["logps"].detach())
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
