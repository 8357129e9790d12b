"""`FastGRPOTrainer`: TRL's GRPOTrainer with our rollouts, packed forward and single-pass loss.

    from grpo_fast.integrations.trl import FastGRPOTrainer as GRPOTrainer

Rewards, tools, advantages, metrics, logging and checkpoints are TRL's own code. What is replaced:

- Text is sampled by our loop (rollouts.py). Where the sampler left tokens out, loss and logps are
  over those that it kept.
- The padded forward becomes a packed one: no padding, shared prompts once, the head on completion
  tokens only. It runs inside the wrapped module's forward, so DDP and FSDP hooks fire.
- Where a token's gradient follows from that token alone, loss and gradient come from one pass over
  the logits; TRL's `_compute_loss` then runs on the logps for its metrics. Elsewhere `linear_logps`
  gives TRL's own objective differentiable logps and entropies.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_fast.attention import check_tolerance, fast_layers, small_windows
from grpo_fast.integrations.fast_head import reshard
from grpo_fast.integrations.trl import options
from grpo_fast.integrations.trl.head import base_model, fused_head, use_fast_head
from grpo_fast.integrations.trl.packed import (
    PackedCall,
    own_attention,
    pack_padded,
    packed_forward,
    take_packed_rows,
)
from grpo_fast.integrations.trl.rollouts import OwnRollouts

log = logging.getLogger(__name__)

# Why a single micro-batch goes another way.
NO_PROMPT = "a completion of this micro-batch has no prompt to predict its first token"
AMBIGUOUS = "advantages per token, and this micro-batch has as many tokens as completions"


class FastGRPOTrainer(OwnRollouts, GRPOTrainer):
    """TRL's `GRPOTrainer`, the same constructor and the same numbers, faster; see this module.

    Attributes:
        fast_path: {"forward": "packed" or "TRL's: <reason>",
            "loss": "single pass", "TRL's on our logps: <reason>" or "TRL's: <reason>",
            "rollouts": "ours" or "TRL's: <reason>",
            "support": "the sampler's" or "the vocabulary"};
            of the last micro-batch, and before the first one what is planned.
        fast_rollouts, replay_support: see `OwnRollouts`.
    """

    @functools.wraps(GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Finished logps and entropies, for TRL's metrics.
        self._finished: tuple[Tensor, Tensor] | None = None
        self._probed = False
        self.fast_path = {"forward": "packed", "loss": "single pass"}
        self._packs = self._in_one_pass = True
        lm = base_model(self.accelerator.unwrap_model(self.model))
        self._own_attention = lm.config._attn_implementation  # before packed rows replace it
        fast_layers(lm.base_model)
        reason = options.forward_reason(self, lm) or self._prepare_models(lm)
        if reason is not None:
            self.fast_path = {"forward": f"TRL's: {reason}", "loss": f"TRL's: {reason}"}
            self._packs = self._in_one_pass = False
            log.warning("FastGRPOTrainer: the forward pass stays TRL's, with our head: %s", reason)
        elif (reason := options.single_pass_reason(self)) is not None:
            self._their_objective(reason)
        use_fast_head(self)  # for what the packed forward leaves to TRL, be it one micro-batch
        self._start_rollouts(lm)
        said = "FastGRPOTrainer: forward %(forward)s, loss %(loss)s, rollouts %(rollouts)s"
        log.info(said, self.fast_path)

    def _their_objective(self, reason: str) -> None:
        self.fast_path["loss"], self._in_one_pass = f"TRL's on our logps: {reason}", False

    # ----------------------------------------------------------------------------------------------
    # set-up

    def _prepare_models(self, lm: Any) -> str | None:
        """Let policy and reference take packed rows; returns why not, where that changes logps."""
        take_packed_rows(lm)
        self._head = fused_head(lm)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        reason = None if sharded else self._self_check(lm)
        if reason is not None:
            lm.set_attn_implementation(self._own_attention)
        elif self.ref_model is not None:
            take_packed_rows(base_model(self.accelerator.unwrap_model(self.ref_model)))
        return reason

    @torch.no_grad()
    def _self_check(self, lm: Any) -> str | None:
        """Returns how the packed forward differs from TRL's own on two short sequences, or None.

        Finds attention sinks, positions that are not RoPE's, a head with an unknown rule.
        """
        weight = lm.get_output_embeddings().weight
        device, vocabulary = weight.device, weight.shape[0]
        first = torch.tensor([[3], [3]], device=device)
        ids = (torch.arange(12, device=device) * 7 + first) % vocabulary
        ids[1, 7:] = (ids[1, 7:] + 5) % vocabulary
        real = torch.ones_like(ids)
        real[:, :2] = real[1, 10:] = 0
        modes = [(module, module.training) for module in lm.modules()]
        lm.eval()
        try:
            with small_windows(lm):
                theirs, _, _ = super()._get_per_token_logps_and_entropies(lm, ids, real, 5)
                pack = pack_padded(ids, real, real[:, -5:])
                ours = pack.padded(self._run(lm, PackedCall(pack, self._head, False))["logps"])
        except (ValueError, TypeError, AttributeError) as error:
            return str(error)
        finally:
            for module, training in modes:
                module.training = training
            reshard(lm)
        difference = float((ours - theirs).abs().max())
        dtypes = {parameter.dtype for parameter in lm.parameters()}  # the narrowest decides
        if self.accelerator.mixed_precision in ("bf16", "fp16"):
            dtypes = {torch.bfloat16}
        if not difference <= max(map(check_tolerance, dtypes)):
            kind = lm.config.model_type
            return f"model_type {kind}: packed logps differ from TRL's by {difference:.2g} nats"
        return None

    # ----------------------------------------------------------------------------------------------
    # forward

    def _run(self, model: Any, call: PackedCall) -> dict[str, Tensor]:
        run, ids = functools.partial(packed_forward, call=call), call.pack.inputs["input_ids"]
        with self.accelerator.autocast():
            return model(input_ids=ids, run=run)  # the ids are for hooks that look at them

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None,
        compute_entropy=False, **kwargs,
    ):  # fmt: skip
        """As TRL's, from packed rows: (logps, entropies or None, aux loss or None), (B, K) each."""
        if self._finished is not None:
            return *self._finished, None
        theirs = functools.partial(
            super()._get_per_token_logps_and_entropies, model, input_ids, attention_mask,
            logits_to_keep, batch_size, compute_entropy, **kwargs,
        )  # fmt: skip
        if not self._packs:
            return theirs()
        logps, entropies = [], []
        for start in range(0, input_ids.shape[0], batch_size or input_ids.shape[0]):
            rows = slice(start, start + (batch_size or input_ids.shape[0]))
            ids, real = input_ids[rows], attention_mask[rows]
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

    # ----------------------------------------------------------------------------------------------
    # loss

    def _compute_loss(self, model, inputs):
        """TRL's loss and metrics of one micro-batch; the gradient comes from the single pass."""
        if not (self._in_one_pass and torch.is_grad_enabled() and self.model.training):
            return super()._compute_loss(model, inputs)
        if not self._probed:
            self._probed = True
            if (gap := options.probe(self, self._their_loss)) is not None:
                log.warning("FastGRPOTrainer: %s; TRL's own objective is used on our logps", gap)
                self._their_objective(gap)
                return super()._compute_loss(model, inputs)
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
        self.fast_path |= {"forward": "packed", "loss": "single pass"}
        known = self._replayed(pack, input_ids, attention_mask)
        result = self._run(model, PackedCall(pack, self._head, True, job, known and known.support))
        self._replayed_logps = known and (known, result["logps"].detach())
        with torch.no_grad():
            self._their_loss(inputs, pack.padded(result["logps"]), pack.padded(result["entropy"]))
        return result["loss"] / job.divisor

    def _their_loss(self, inputs: dict[str, Any], logps: Tensor, entropies: Tensor) -> Tensor:
        self._finished = (logps, entropies)
        try:
            return super()._compute_loss(self.model, inputs)
        finally:
            self._finished = None
