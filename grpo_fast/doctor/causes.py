"""The names of causes, and for each a sentence that says what to change."""

from __future__ import annotations

import math
from typing import NamedTuple

from grpo_fast.doctor.prompts import TEMPLATED, UNPROMPTED, UNTEMPLATED
from grpo_fast.doctor.recompute import Recomputed
from grpo_fast.doctor.rows import Truncation
from grpo_fast.doctor.view import BF16, View
from grpo_fast.rollout import Sampling

RAW, TEMPERATURE, TRUNCATION = "raw log-probabilities", "temperature", "truncation"
TOKENS, TEMPLATE, PADDING = "special tokens", "chat template", "padding"
STALE, OTHER = "stale weights", "other weights"
HEAD, MODEL, FORWARD = "dtype of the head", "dtype of the model", "the trainer's forward pass"

ERRORS = 4.0  # standard errors within which a mean ratio is taken for 1
FAR = 1.0  # nats per token


class Cause(NamedTuple):
    """One cause: its name, what to change, and the mean difference with it and without it."""

    name: str
    advice: str
    before: float  # nats per token
    after: float  # the same as `before` where there is no view without the cause


class Found(NamedTuple):
    """What a sentence is about."""

    recomputed: Recomputed
    base: View  # the trainer's
    view: View  # the engine's
    sampling: Sampling  # what it was asked for

    def follows(self, temperature: float) -> bool:
        """Whether the tokens were rather drawn at this temperature than at the one found."""
        at, found = (
            self.recomputed.logps(self.view._replace(temperature=t))
            for t in (temperature, self.view.temperature)
        )
        return float((at - found).sum()) > 0

    def is_own_distribution(self) -> bool:
        """Whether the engine draws from what it reports, though that is not this model's.

        The mean of p_trainer/p_engine over what an engine draws is then 1. Of distributions that
        have little in common (FAR) no sample shows that.
        """
        gap = (self.recomputed.logps(self.view) - self.recomputed.engine_logps).double()
        ratios = gap.exp()
        error = float(ratios.std()) / math.sqrt(len(ratios))
        return float(gap.mean()) < -FAR or abs(float(ratios.mean()) - 1) <= ERRORS * error

    def only_raises(self, noise: float) -> bool:
        """Whether no token is less likely to the engine than to the trainer."""
        gap = self.recomputed.engine_logps - self.recomputed.logps(self.view)
        return float(gap.min()) >= -noise


def name_of(found: Found, field: str) -> str:
    """The cause that a field of the engine's view stands for."""
    view = found.view
    if field == "temperature":
        return RAW if _is_raw(found) else TEMPERATURE
    if field == "truncation":
        return RAW if view.truncation is None else TRUNCATION
    if field == "reading":
        return TEMPLATE if view.reading in (TEMPLATED, UNTEMPLATED, UNPROMPTED) else TOKENS
    if field == "model":
        return MODEL if view.model == BF16 else STALE
    return {"padding": PADDING, "head": HEAD, "forward": FORWARD}[field]


def advice(found: Found, field: str) -> str:
    """What to change about a field of the engine's view."""
    view = found.view
    if field == "temperature":
        return _about_temperature(found)
    if field == "truncation":
        return _about_truncation(found)
    if field == "reading":
        return (
            f"the engine read the prompts otherwise than the trainer ({view.reading}): send it "
            "token ids, or text with add_special_tokens as the template leaves it"
        )
    if field == "padding":
        return (
            f"the engine reads padding on the {view.padding} as part of the prompt: give it the "
            "attention mask, pad on the left, or do not pad"
        )
    if field == "model" and view.model == BF16:
        return (
            "the engine computes the whole model in bfloat16, the trainer does not: give both one "
            "dtype (vLLM: dtype=; here: model.dtype)"
        )
    if field == "model":
        return (
            "the engine has the weights of `previous`: its update did not arrive or was not waited "
            "for"
        )
    if field == "head":
        name = str(view.head).removeprefix("torch.")
        return (
            f"the engine rounds its logits to {name}; the trainer keeps fp32: let its head compute "
            "in fp32 (vLLM: the model's head_dtype)"
        )
    return (
        "the model's own forward pass agrees with the engine, the trainer's packed rows or fused "
        "head do not: a bug here, worth a report with this table"
    )


def rest_of(found: Found, *, is_noise: bool) -> str:
    """What is left when the causes are taken away."""
    if is_noise:
        return "noise of the kernels"
    if found.is_own_distribution():
        return (
            "unexplained: the engine draws from what it reports, but that is not this model on "
            "these prompts"
        )
    return "unexplained: the engine does not draw from what it reports"


def about_versions(stale: int, count: int) -> str:
    """Of completions that carry another version of the weights than the engine was given."""
    return (
        f"{stale} of {count} completions carry another version of the weights than the engine was "
        "given: wait for its update before it samples"
    )


UNNAMED_ADVICE = (
    "every token is likelier to the engine than to the trainer: it samples from a part of the "
    "vocabulary that it does not name; switch its own top_k, top_p and min_p off"
)
OTHER_ADVICE = (
    "it samples with other weights than the trainer's (stale, quantized, another checkpoint) or "
    "behind other prompts: update it; previous=FOLDER tries the weights it may still have"
)


def _is_raw(found: Found) -> bool:
    return found.view.temperature == 1 != found.sampling.temperature and found.follows(
        found.sampling.temperature
    )


def _about_temperature(found: Found) -> str:
    asked, came = found.sampling.temperature, found.view.temperature
    if came == asked:
        return (
            f"the loss is computed at temperature {found.base.temperature:.4g}, the engine samples "
            f"at {asked:.4g} as it was asked to: leave loss.temperature out"
        )
    if _is_raw(found):
        return (
            f"the engine samples at temperature {asked:.4g} and reports log-probabilities from "
            "before it: ask for processed ones (vLLM: logprobs_mode=processed_logprobs)"
        )
    does = "reports log-probabilities of" if found.follows(asked) else "samples at"
    return (
        f"the engine {does} temperature {came:.4g}, it was asked for {asked:.4g}: see that its "
        "own defaults (generation_config.json) do not win"
    )


def _about_truncation(found: Found) -> str:
    cut, sampling = found.view.truncation, found.sampling
    if cut is None:
        return (
            "the engine truncates and reports log-probabilities over the whole vocabulary, the "
            "loss is over what was kept: ask for processed ones (vLLM: "
            "logprobs_mode=processed_logprobs)"
        )
    was_asked = sampling.top_k > 0 or sampling.top_p < 1
    if was_asked:
        known = "" if found.recomputed.kept is None else ", which the engine names"
        return (
            f"top_k={sampling.top_k} top_p={sampling.top_p:g} leave a part of the vocabulary and "
            "the loss looks at all of it; the difference is the log of the kept mass: hand it the "
            f"kept tokens{known} (rollout.replay_support: auto), or sample without truncation"
        )
    what = ""
    if isinstance(cut, Truncation):
        what = f" (top_k={cut.top_k} top_p={cut.top_p:g})"
    return (
        f"the engine truncates though it was not asked to{what}: its own defaults win (vLLM: "
        "--generation-config vllm)"
    )
