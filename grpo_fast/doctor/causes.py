"""The names of causes, and for each a sentence that says what to change."""

from __future__ import annotations

from typing import Any, NamedTuple

from grpo_fast.doctor import models
from grpo_fast.doctor.prompts import LEFT, REORDERED, RIGHT, TEMPLATES
from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.rows import BIAS, FREQUENCY, NO_EOS, PRESENCE, REPETITION, SOFTCAP
from grpo_fast.doctor.view import EMBEDDING, View
from grpo_fast.rollout import Sampling

RAW, TEMPERATURE, TRUNCATION = "raw log-probabilities", "temperature", "truncation"
PENALTY, LOGIT_BIAS, ENDS = "penalties", "logit bias", "end of completions"
SHIFTED, HEAD, TIED, CAP = "shifted log-probabilities", "dtype of the head", "tied head", "softcap"
TOKENS, TEMPLATE, PADDING = "tokens of the prompt", "chat template", "padding"
ORDER, STALE, ADAPTER = "order of the answers", models.STALE, models.ADAPTER
MODEL, QUANTIZED, FORWARD = models.DTYPE, models.QUANTIZED, models.FORWARD
ROPE, WINDOW, CONFIG = models.ROPE, models.WINDOW, models.CONFIG
EDITS = {REPETITION: PENALTY, PRESENCE: PENALTY, FREQUENCY: PENALTY, BIAS: LOGIT_BIAS,
         NO_EOS: ENDS, SOFTCAP: CAP}  # fmt: skip
READINGS = {LEFT: PADDING, RIGHT: PADDING, REORDERED: ORDER} | dict.fromkeys(TEMPLATES, TEMPLATE)
SURE = 3.0  # log-likelihood ratio from which tokens were drawn at one temperature, not another

ADVICE = {
    RAW: "the engine reports log-probabilities from before its temperature or truncation: ask for "
         "processed ones (vLLM: --logprobs-mode processed_logprobs)",
    PENALTY: "the engine samples with {}: switch it off (vLLM: --generation-config vllm)",
    LOGIT_BIAS: "the engine adds to the logit of one token {}: take its logit_bias away",
    ENDS: "the engine forbids EOS before {} tokens: set min_tokens to 0 and ignore_eos to false",
    CAP: "the engine's logits have the softcap {}: compare final_logit_softcapping of both",
    SHIFTED: "the engine reports for a token the log-probability of the one {} it: take them from "
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
    """One cause: its name, what to change, and the mean difference with it and without it."""

    name: str
    advice: str
    before: float  # nats per token
    after: float  # the same as `before` where there is no view without the cause


def name_of(recomputed: Recomputed, view: View, field: str) -> str:
    """The cause that a field of the engine's view stands for."""
    value = getattr(view, field)
    if field == "truncation":
        return RAW if value is None else TRUNCATION
    if field == "edit":
        return EDITS[value[0]]
    if field == "reading":
        return READINGS.get(value, TOKENS)
    if field == "model":
        return recomputed.models[value].cause
    if field == "head":
        return TIED if value == EMBEDDING else HEAD
    return {"temperature": TEMPERATURE, "shift": SHIFTED}[field]


def told(
    recomputed: Recomputed, base: View, view: View, field: str, sampling: Sampling
) -> tuple[str, str]:
    """The name of the cause that a field of the engine's view stands for, and what to change."""
    name, value = name_of(recomputed, view, field), getattr(view, field)
    what: Any = str(value).removeprefix("torch.")
    if name == TEMPERATURE:
        return _about_temperature(recomputed, base, view, sampling)
    if name == TRUNCATION and sampling.truncates:
        known = "" if recomputed.drawn.kept is None else ", which the engine names"
        return name, ASKED.format(sampling.top_k, sampling.top_p, known)
    if name == TRUNCATION:
        named = () if isinstance(value, str) else value._asdict().items()
        what = " ".join(f"{k}={x:.4g}" for k, x in named) or "to tokens that it names"
    elif name == PENALTY:
        what = "{}={:.4g}".format(*value)
    elif name == LOGIT_BIAS:
        what = "(id {}) {:.4g}".format(*value[1])
    elif name in (CAP, ENDS):
        what = value[1]
    elif name == SHIFTED:
        what = "behind" if value > 0 else "before"
    return name, ADVICE[name].format(what)


def _about_temperature(
    recomputed: Recomputed, base: View, view: View, sampling: Sampling
) -> tuple[str, str]:
    asked, came = sampling.temperature, view.temperature
    if came == asked:
        return TEMPERATURE, LOSS.format(base.temperature, asked)
    gain = recomputed.logps(view._replace(temperature=asked)) - recomputed.logps(view)
    ratio = float(gain.nansum())  # log-likelihood of the drawn tokens, as asked over as told
    if came == 1 and ratio > SURE:
        return RAW, ADVICE[RAW]
    does = "reports log-probabilities of" if ratio > SURE else "samples at"
    if abs(ratio) <= SURE:
        does = "samples at, or only reports (more tokens would tell),"
    return TEMPERATURE, ADVICE[TEMPERATURE].format(does, came, asked)
