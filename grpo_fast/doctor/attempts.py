"""Attempts to explain a difference: the same tokens with one thing computed differently."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
CAPS: dict[str, str] = {  # a field of the configuration -> the cause if an engine ignores it
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
    previous: Policy | None  # weights that the engine may still have

    def logps(self, row: Row) -> Tensor:
        """Return (n,) logps of the trainer's distribution."""
        support = row.support if self.uses_kept else None
        return logits_logps(row.logits, row.targets, temperature=self.temperature, support=support)


@dataclass(frozen=True)
class Attempt:
    """Log-probabilities that the engine reports if the cause is the right one."""

    cause: str
    what: str
    logps: Tensor  # (R,) fp32


def attempts(case: Case) -> Iterator[Attempt]:
    """Try the causes one at a time. An attempt that this model cannot compute is left out."""
    yield from sampling_attempts(case)
    policy = case.policy
    tries = [(causes.PROMPT, what, lambda: policy, ids) for what, ids in prompt_readings(case)]
    tries += [(*variant, ()) for variant in model_variants(policy, case.previous)]
    for cause, what, build, prompts in tries:
        try:
            logps = own_logps(build(), case.samples, {"": case.logps}, prompts)[""]
        except Exception:  # transformers raises any type for a model that it cannot build or run
            continue
        yield Attempt(cause, what, logps)


def sampling_attempts(case: Case) -> Iterator[Attempt]:
    """Try other temperatures, truncations and penalties. All use the same logits."""
    # 1. Temperatures: none ("raw"), the requested one, and the model's default.
    shipped = shipped_settings(case.policy)
    functions: dict[str, Callable[[Row], Tensor]] = {}
    if case.uses_kept or case.temperature != 1:
        raw = dataclasses.replace(case, temperature=1.0, uses_kept=False)
        functions["raw log-probabilities"] = raw.logps
    for value in {case.sampling.temperature, shipped.get("temperature", 1.0)} - {case.temperature}:
        functions[f"temperature={value:g}"] = dataclasses.replace(case, temperature=value).logps
    names = dict.fromkeys(functions, causes.TEMPERATURE)
    # 2. The tokens that the engine names, the requested truncation, and the model's defaults.
    if case.samples.support is not None:
        functions["the kept tokens"] = dataclasses.replace(case, uses_kept=True).logps
    requested = {"top_k": case.sampling.top_k, "top_p": case.sampling.top_p}
    sent = {"temperature", *requested}
    unsent = {name: value for name, value in shipped.items() if name not in sent}
    for changes in (requested, shipped, unsent):
        settings = {"temperature": case.temperature, **changes}
        if any(settings[name] != OFF[name] for name in changes):
            what = " ".join(f"{name}={value:g}" for name, value in settings.items())
            functions[what] = partial(sampled_logps, **settings)
    # 3. One forward pass for all of them.
    for name, logps in own_logps(case.policy, case.samples, functions).items():
        cause = names.get(name, causes.TRUNCATION)
        yield Attempt(cause, f"the engine uses {name}", logps)


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


def prompt_readings(case: Case) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield what an engine may do to a prompt, and the token ids of each sample's prompt then."""
    sent = case.samples.prompt_ids
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
            each = [read(prompt, ids) for prompt, ids in zip(given, sent, strict=True)]
        except Exception:  # a chat template is a program, which may raise anything
            continue
        if each != sent and all(ids and None not in ids for ids in each):
            yield f"the engine {name}", each


def model_variants(
    policy: Policy, previous: Policy | None
) -> Iterator[tuple[str, str, Callable[[], Policy]]]:
    """Yield (cause, what, function that builds the model) for models that the engine may run."""
    yield causes.ATTENTION, "the engine agrees with the model's own forward pass", lambda: policy
    if previous is not None:
        yield causes.STALE, "the engine has the weights of `previous`", lambda: previous
    if policy.model is not policy.lm:
        unload = lambda: with_model(policy, copy.deepcopy(policy.model).unload())  # noqa: E731
        yield causes.ADAPTER, "the engine has no adapter", unload
    for dtype in (torch.bfloat16, torch.float16):
        yield causes.DTYPE, f"the engine computes in {dtype}", partial(cast, policy, dtype)
    config = policy.lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
    for what, changed in (("scaling", plain), ("rope_theta", {**rope, "rope_theta": 10000.0})):
        if "rope_theta" in rope and changed != rope:
            fields = {"rope_parameters": changed}
            yield (
                causes.ROPE,
                f"the engine ignores RoPE's {what}",
                partial(with_config, policy, fields),
            )
    for name, cause in CAPS.items():
        if getattr(config, name, None):
            fields = {name: IGNORED.get(name)}
            yield cause, f"the engine ignores {name}", partial(with_config, policy, fields)


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


def with_model(policy: Policy, model: Any) -> Policy:
    """Return a policy with a different model."""
    twin = copy.copy(policy)
    twin.model = model
    twin.lm = model
    return twin
