"""The causes of a difference: the name of each, and a sentence that says what to change."""

from __future__ import annotations

from typing import NamedTuple

RAW, TEMPERATURE, TRUNCATION = "raw log-probabilities", "temperature", "truncation"
DEFAULTS = "defaults of the model"
PENALTY, LOGIT_BIAS, ENDS = "penalties", "logit bias", "end of completions"
SHIFTED, HEAD, TIED, CAP = "shifted log-probabilities", "dtype of the head", "tied head", "softcap"
TOKENS, TEMPLATE, PADDING = "tokens of the prompt", "chat template", "padding"
ORDER, STALE, ADAPTER = "order of the answers", "stale weights", "LoRA adapter"
ROPE, WINDOW, CONFIG = "positions (RoPE)", "attention window", "model configuration"
MODEL, QUANTIZED = "dtype of the model", "quantized weights"
FORWARD = "the trainer's forward pass"

ADVICE = {  # {} are the values that the engine's view has in the fields of the cause
    RAW: "the engine reports log-probabilities from before its temperature or truncation: ask for "
         "processed ones (vLLM: --logprobs-mode processed_logprobs)",
    PENALTY: "the engine samples with {0[0]}={0[1]:.4g}: switch it off (vLLM: --generation-config "
             "vllm)",
    LOGIT_BIAS: "the engine adds to the logit of one token (id {0[1][0]}) {0[1][1]:.4g}: take its "
                "logit_bias away",
    ENDS: "the engine forbids EOS before {0[1]} tokens: set min_tokens to 0 and ignore_eos to "
          "false",
    CAP: "the engine's logits have the softcap {0[1]}: compare final_logit_softcapping of both",
    SHIFTED: "the engine reports for token t the log-probability of token t{:+d}: take them from "
             "the position that predicts the token",
    HEAD: "the engine rounds its logits to {}; the trainer keeps fp32: let its head compute in "
          "fp32 (vLLM: the model's head_dtype)",
    TIED: "the engine makes logits by the embedding's weight: compare tie_word_embeddings",
    TOKENS: "the engine read the prompts otherwise ({}): send it token ids, or text with "
            "add_special_tokens as the template leaves it",
    TEMPERATURE: "the engine {} temperature {:.4g}, it was asked for {:.4g}: see that its own "
                 "defaults (generation_config.json) do not win",
    TRUNCATION: "the engine truncates ({}) though it was not asked to: its own defaults win (vLLM: "
                "--generation-config vllm)",
    DEFAULTS: "the engine samples with temperature {:.4g} and {}, the defaults that the model is "
              "shipped with: see that they do not win (vLLM: --generation-config vllm)",
    TEMPLATE: "the engine read the prompts with {}: send it token ids, or use one template",
    PADDING: "the engine reads {} as part of the prompt: give it the attention mask, or do not pad",
    ORDER: "the engine's answers belong to other prompts: match them by index, not by arrival",
    STALE: "the engine has {}: its update did not arrive or was not waited for",
    ADAPTER: "the engine has {}: load or merge it there",
    MODEL: "the engine computes in {}: give both one dtype (vLLM: --dtype; here: model.dtype)",
    QUANTIZED: "the engine rounds its weights to {}: serve them without quantization",
    ROPE: "the engine's model has {}: compare rope_parameters of both configurations",
    WINDOW: "the engine's model has another {}: compare sliding_window and layer_types",
    CONFIG: "the engine's model has {}: compare both configurations",
    FORWARD: "the model's own forward pass agrees with the engine, the trainer's packed rows or "
             "fused head do not: a bug here, worth a report with this table",
}  # fmt: skip
LOSS = "the loss is computed at temperature {:.4g}, the engine samples at {:.4g} as it was asked " \
       "to: leave loss.temperature out"  # fmt: skip
ASKED = "top_k={} top_p={:g} leave a part of the vocabulary, the loss looks at all of it: hand " \
        "it the kept tokens{} (rollout.replay_support: auto), or do not truncate"  # fmt: skip
VERSIONS = "{} of {} completions carry another version of the weights than the engine was given: " \
           "wait for its update before it samples"  # fmt: skip
CUT_OFF = "{} of {} completions stop early without an EOS, or go on behind one: give the engine " \
          "the trainer's EOS ids and no other stop words"  # fmt: skip
IGNORES = "the engine's answers stay the same when it is sent other weights: updates do not arrive"
BEHIND = "the engine samples with the weights before the last update: wait for it"


class Cause(NamedTuple):
    name: str
    advice: str
    before: float  # nats per token
    after: float  # the same as `before` where there is no view without the cause
