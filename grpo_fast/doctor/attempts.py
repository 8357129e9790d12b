"""Attempts to explain a difference: the same tokens with one thing computed differently."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers.generation import logits_process as library

from grpo_fast import logits_logps
from grpo_fast.data import Prompt
from grpo_fast.doctor import causes
from grpo_fast.doctor.recompute import Row, cast, own_logps
from grpo_fast.rollout import Samples, Sampling
from grpo_fast.train.models.policy import Policy

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# A field of the configuration -> the cause if an engine ignores it.
CAUSES = {
    "attn_logit_softcapping": causes.ATTENTION, "final_logit_softcapping": causes.SOFTCAP,
    "logit_scale": causes.SOFTCAP, "logits_scaling": causes.SOFTCAP, "sliding_window": causes.ROPE,
}  # fmt: skip
IGNORED = {"logit_scale": 1.0, "logits_scaling": 1.0, "sliding_window": 1 << 30}  # others: None


@dataclass(frozen=True)
class Case:
    """What is to be explained."""

    policy: Policy
    samples: Samples
    prompts: Sequence[Prompt]  # as they were given, one for each group of samples
    sampling: Sampling  # what the engine was asked for
    temperature: float  # of the loss
    uses_kept: bool  # the loss is over the tokens that the engine names

    def logps(self, row: Row) -> Tensor:
        """Return (n,) logps of the trainer's distribution."""
        support = row.support if self.uses_kept else None
        return logits_logps(row.logits, row.targets, temperature=self.temperature, support=support)


class Attempt(NamedTuple):
    """One thing that an engine may do differently, and how to compute log-probabilities so."""

    cause: str
    what: str
    logps: Callable[[Row], Tensor]
    prompts: Sequence[Sequence[int]] = ()  # empty: as they were sent
    build: Callable[[], Policy] | None = None  # None: the policy itself


def attempts(case: Case) -> Iterator[tuple[Attempt, Tensor]]:
    """Yield attempts, each with its (R,) logps.

    Attempts that this model cannot compute, or that change nothing here, are left out.
    """
    own = own_logps(case.policy, case.samples, case.logps)
    what = "the model's own forward pass agrees with the engine"
    yield Attempt(causes.ATTENTION, what, case.logps), own
    for attempt in [*sampling_attempts(case), *prompt_attempts(case), *model_attempts(case)]:
        try:
            policy = attempt.build() if attempt.build else case.policy
            logps = own_logps(policy, case.samples, attempt.logps, attempt.prompts)
        except Exception:  # transformers raises any type for a model that it cannot run
            continue
        if not torch.allclose(logps, own):  # a window may be longer than the sequences
            yield attempt, logps


def sampling_attempts(case: Case) -> Iterator[Attempt]:
    """Yield other temperatures, truncations and penalties."""
    # 1. Temperatures: none ("raw"), the requested one, and the model's default.
    shipped = shipped_settings(case.policy)
    if case.uses_kept or case.temperature != 1:
        raw = replace(case, temperature=1.0, uses_kept=False)
        yield Attempt(causes.TEMPERATURE, "the engine reports raw log-probabilities", raw.logps)
    for value in {case.sampling.temperature, shipped.get("temperature", 1.0)} - {case.temperature}:
        what = f"the engine uses temperature={value:g}"
        yield Attempt(causes.TEMPERATURE, what, replace(case, temperature=value).logps)
    # 2. The tokens that the engine names, the requested truncation, and the model's defaults.
    if case.samples.support is not None:
        kept = replace(case, uses_kept=True)
        yield Attempt(causes.TRUNCATION, "the engine uses the tokens that it names", kept.logps)
    requested = {"top_k": case.sampling.top_k, "top_p": case.sampling.top_p}
    sent = {"temperature", *requested}
    unsent = {name: value for name, value in shipped.items() if name not in sent}
    for changes in (requested, shipped, unsent):
        settings: dict[str, Any] = {"temperature": case.temperature, **changes}
        if any(settings[name] != OFF[name] for name in changes):
            differ = [name for name in settings if settings[name] != OFF[name]]
            words = " ".join(f"{name}={settings[name]:g}" for name in differ)
            logps = partial(sampled_logps, **settings)
            yield Attempt(causes.TRUNCATION, f"the engine uses {words}", logps)


def shipped_settings(policy: Policy) -> dict[str, float]:
    """Return the sampling settings of the model's generation_config.json that change something."""
    values = {name: getattr(policy.lm.generation_config, name, None) for name in OFF}
    return {name: value for name, value in values.items() if value not in (None, OFF[name])}


def sampled_logps(
    row: Row,
    *,
    temperature: float,
    top_k: float = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Return (n,) logps of a sampler with these settings: -inf if it cannot draw the token."""
    penalize = library.RepetitionPenaltyLogitsProcessor(float(repetition_penalty))
    logits = penalize(row.context, row.logits) / temperature
    logits = library.MinPLogitsWarper(min_p)(row.context, logits)
    if top_k:
        logits = library.TopKLogitsWarper(int(top_k))(row.context, logits)
    logits = library.TopPLogitsWarper(top_p)(row.context, logits)
    return logits.log_softmax(-1).gather(-1, row.targets[:, None])[:, 0]


def prompt_attempts(case: Case) -> Iterator[Attempt]:
    """Yield other token ids of the prompts."""
    readings = [case.samples.prompt_ids]
    tokenizer = case.policy.tokenizer

    def chat(prompt: Prompt, is_open: bool) -> list[int]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_open
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def plain(prompt: Prompt) -> list[int]:
        parts = [prompt] if isinstance(prompt, str) else [part["content"] for part in prompt]
        return tokenizer("\n".join(parts))["input_ids"]

    ways: dict[str, Callable[[Prompt, list[int]], list[Any]]] = {
        "adds BOS once more": lambda _, ids: [tokenizer.bos_token_id, *ids],
        "loses the first token (BOS)": lambda _, ids: ids[1:],
        "loses the last token": lambda _, ids: ids[:-1],
        "tokenizes the text again": lambda _, ids: tokenizer(tokenizer.decode(ids))["input_ids"],
        "applies the chat template": lambda prompt, _: chat(prompt, is_open=True),
        "adds no generation prompt": lambda prompt, _: chat(prompt, is_open=False),
        "applies no chat template": lambda prompt, _: plain(prompt),
    }
    given = [case.prompts[group] for group in case.samples.group.tolist()]
    for name, read in ways.items():
        try:
            ids = [read(*pair) for pair in zip(given, readings[0], strict=True)]
        except Exception:  # a chat template is a program, which may raise anything
            continue
        if ids not in readings and all(tokens and None not in tokens for tokens in ids):
            readings.append(ids)
            yield Attempt(causes.PROMPT, f"the engine {name}", case.logps, ids)


def model_attempts(case: Case) -> Iterator[Attempt]:
    """Yield other models: the dtype, the adapter, and fields of the configuration."""
    policy = case.policy
    if policy.model is not policy.lm:
        build = partial(without_adapter, policy)
        yield Attempt(causes.ADAPTER, "the engine has no adapter", case.logps, build=build)
    for dtype in (torch.bfloat16, torch.float16):
        build = partial(cast, policy, dtype)
        yield Attempt(causes.DTYPE, f"the engine computes in {dtype}", case.logps, build=build)
    config = policy.lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    changes: dict[str, dict[str, Any]] = {
        "the scaling of RoPE": {"rope_parameters": {**rope, "rope_type": "default"}},
        "rope_theta": {"rope_parameters": {**rope, "rope_theta": 10000.0}},
    }
    changes |= {name: {name: IGNORED.get(name)} for name in CAUSES if getattr(config, name, None)}
    for name, fields in changes.items():
        build = partial(with_config, policy, fields)
        cause = CAUSES.get(name, causes.ROPE)
        yield Attempt(cause, f"the engine ignores {name}", case.logps, build=build)


def with_config(policy: Policy, fields: dict[str, Any]) -> Policy:
    """Return the policy's weights in a model of a different configuration. Copies no weight."""
    plain = policy.lm
    if policy.model is not policy.lm:
        plain = copy.deepcopy(policy.model).merge_and_unload()
    config = copy.deepcopy(plain.config)
    for name, value in fields.items():
        setattr(config.get_text_config(), name, value)
    # Buffers follow from the configuration; weights are assigned.
    with policy.device, init_empty_weights(include_buffers=False):
        model = policy.kind(config).eval()
    model.load_state_dict(plain.state_dict(), assign=True)
    return with_model(policy, model)


def without_adapter(policy: Policy) -> Policy:
    """Return the model below a LoRA adapter."""
    return with_model(policy, copy.deepcopy(policy.model).unload())


def with_model(policy: Policy, model: Any) -> Policy:
    """Return a policy with a different model."""
    twin = copy.copy(policy)
    twin.model = model
    twin.lm = model
    return twin
