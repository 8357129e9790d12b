"""The ten causes of a difference between engine and trainer that the doctor knows, with advice."""

from __future__ import annotations

from dataclasses import dataclass

ADVICE = {
    "temperature": "request processed log-probabilities at the temperature of the loss (vLLM: "
    "--logprobs-mode processed_logprobs --generation-config vllm; here: no loss.temperature)",
    "truncation or penalty": "switch it off (vLLM: --generation-config vllm), or compute the loss "
    "over the tokens that the sampler kept (rollout.replay_support: auto)",
    "end of completions": "give the engine the trainer's EOS ids and no other stop words",
    "prompt tokens": "send token ids, or text that is tokenized once (add_special_tokens=False "
    "after a chat template)",
    "dtype": "use one dtype (vLLM: --dtype; here: model.dtype)",
    "attention": "if the model's own forward pass agrees with the engine, report this as a bug of "
    "grpo_fast; otherwise choose a different attention backend in the engine",
    "stale weights": "wait for the weight update before sampling, and check that it arrives",
    "LoRA adapter": "load the adapter in the engine, or merge it before the weights are sent",
    "logit softcap or scale": "compare final_logit_softcapping and logit_scale of both "
    "configurations",
    "positions (RoPE) or window": "compare rope_parameters, sliding_window and layer_types of "
    "both configurations",
}
(TEMPERATURE, TRUNCATION, EOS, PROMPT, DTYPE, ATTENTION, STALE, ADAPTER, SOFTCAP, ROPE) = ADVICE


@dataclass(frozen=True)
class Cause:
    """A possible cause of a difference between engine and trainer."""

    name: str  # a key of ADVICE
    what: str  # what the engine does differently
    # Mean difference in nats per token that remains if the trainer makes the same change as the
    # engine. It is NaN if the cause was found by counting completions.
    left: float = float("nan")

    @property
    def advice(self) -> str:
        """Return a description of the cause and of what to do about it."""
        return f"{self.what}: {ADVICE[self.name]}"
