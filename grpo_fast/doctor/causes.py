"""Possible causes of a difference between engine and trainer, and attempts to reproduce each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from grpo_fast import logits_logps
from grpo_fast.data import Prompt
from grpo_fast.rollout import Samples, Sampling
from grpo_fast.rollout.samples import select_support
from grpo_fast.train.policy import Policy

ADVICE = {
    "temperature": "request processed log-probabilities at the temperature of the loss (vLLM: "
    "--logprobs-mode processed_logprobs --generation-config vllm; here: no loss.temperature)",
    "truncation or penalty": "switch it off (vLLM: --generation-config vllm), or compute the loss "
    "over the tokens that the sampler kept (rollout.replay_support: auto)",
    "end of completions": "give the engine the trainer's EOS ids and no other stop words",
    "prompt tokens": "send token ids, or tokenize the text once (add_special_tokens=False)",
    "dtype": "use one dtype (vLLM: --dtype; here: model.dtype)",
    "attention": "only the trainer's forward pass differs, so report this as a bug of grpo_fast",
    "stale weights": "wait for the weight update before sampling, and check that it arrives",
    "LoRA adapter": "load the adapter in the engine, or merge it before the weights are sent",
}
(TEMPERATURE, TRUNCATION, EOS, PROMPT, DTYPE, ATTENTION, STALE, ADAPTER) = ADVICE


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


# Sampling settings in the order in which samplers apply them. Each maps to the transformers class
# that applies it and to its neutral value.
SAMPLERS: dict[str, tuple[Any, float]] = {
    "repetition_penalty": (library.RepetitionPenaltyLogitsProcessor, 1.0),
    "temperature": (library.TemperatureLogitsWarper, 1.0),
    "min_p": (library.MinPLogitsWarper, 0.0),
    "top_k": (library.TopKLogitsWarper, 0),
    "top_p": (library.TopPLogitsWarper, 1.0),
}
# Maps the description of a mistake that an engine may make with a prompt to a function that makes
# the mistake. The function gets the tokenizer, the chat messages and the correct ids.
PROMPT_CHANGES: dict[str, Callable[[Any, Any, list[int]], list[int]]] = {
    "adds BOS once more": lambda t, _, ids: [t.bos_token_id, *ids],
    "loses the first token (BOS)": lambda t, _, ids: ids[1:],
    "loses the last token": lambda t, _, ids: ids[:-1],
    "tokenizes the text again": lambda t, _, ids: t(t.decode(ids))["input_ids"],
    "adds no generation prompt": lambda t, chat, _: t.apply_chat_template(chat, return_dict=False),
    "uses no chat template": lambda t, c, _: t("\n".join(x["content"] for x in c))["input_ids"],
}

# The name of a cause, the description of a mistake, and the arguments of `Case.recompute`.
Attempt = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Samples whose log-probabilities differ between engine and trainer, and their settings."""

    policy: Policy
    samples: Samples  # with the tokens that the sampler kept, if the loss uses them
    prompts: Sequence[Prompt]  # strings or chat messages, one for each group of samples
    sampling: Sampling  # settings that were requested from the engine
    temperature: float  # temperature of the loss

    def recompute(
        self,
        *,
        build: Callable[[], Policy] | None = None,
        samples: Samples | None = None,
        settings: dict[str, float] | None = None,
        change: Callable[[Any, Any, list[int]], list[int]] | None = None,
    ) -> Tensor:
        """Recompute log-probabilities with the model's own forward pass, optionally with a change.

        Args:
            build: Function that returns the policy to use. Default: the trainer's policy.
            samples: The samples to recompute, with or without the sets of tokens that the sampler
                kept. Default: the samples of the loss.
            settings: Sampling settings to apply to the logits. Default: the temperature of the
                loss.
            change: Function that changes the ids of a prompt. Default: the ids stay unchanged.

        Returns:
            Log-probabilities of all R tokens in fp32 on the CPU, shape (R,). A token that the
            settings exclude has -inf.
        """
        policy = build() if build else self.policy
        samples = samples or self.samples
        settings = {"temperature": self.temperature} if settings is None else settings
        found = []
        with policy.generation():
            for i, prompt in enumerate(samples.prompt_ids):
                # 1. Compute the logits that predict the completion.
                if change is not None:
                    chat: Any = self.prompts[int(samples.group[i])]
                    if isinstance(chat, str):
                        chat = [{"role": "user", "content": chat}]
                    prompt = change(self.policy.tokenizer, chat, prompt)
                ids = torch.cat([torch.tensor(prompt), samples.completion(i)]).to(policy.device)
                output = policy.lm(input_ids=ids[None, :-1], use_cache=False)
                logits = output.logits[0, len(prompt) - 1 :].float()
                # 2. Apply the sampling settings. Row t of `context` has the ids that a repetition
                # penalty sees at completion token t. They must not include token t or later ones,
                # so replace those with the first prompt id, which is penalized anyway.
                places = torch.arange(len(ids), device=ids.device)
                context = torch.where(places < places[len(prompt) :, None], ids, ids[0])
                for name, (sampler, _) in SAMPLERS.items():
                    if name in settings:
                        logits = sampler(settings[name])(context, logits)
                # 3. If the samples record which tokens the sampler kept, restrict the distribution
                # to them.
                rows = torch.arange(*samples.rows[i : i + 2])
                support = select_support(samples.support, rows, policy.device)
                found.append(logits_logps(logits, ids[len(prompt) :], support=support).cpu())
        return torch.cat(found)


def attempts(case: Case, kept: Samples, own: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Run every attempt to explain a difference between engine and trainer.

    Attempts that fail for this model, or that change no log-probability, are skipped.

    Args:
        case: The difference to explain.
        kept: The samples with the tokens that the sampler kept, if the engine reports them.
        own: `case.recompute()`, the log-probabilities of the model's own forward pass, shape (R,).

    Yields:
        The name of the cause, a description of the engine's mistake, and the log-probabilities
        (R,) that the engine would report with this mistake.
    """
    yield ATTENTION, "the model's own forward pass agrees with the engine", own
    for cause, what, changes in [*sampling_attempts(case, kept), *other_attempts(case.policy)]:
        try:
            logps = case.recompute(**changes)
        except Exception:  # transformers and chat templates raise errors of any type
            continue
        if not torch.allclose(logps, own):  # skip a change without any effect
            yield cause, f"the engine {what}", logps


def sampling_attempts(case: Case, kept: Samples) -> Iterator[Attempt]:
    """Yield attempts with different temperatures, truncations and penalties."""
    # 1. Try the log-probabilities that the engine reports if it applies no temperature ("raw"), the
    # requested temperature, or the temperature in the model's generation config.
    raw = {"samples": replace(case.samples, support=None), "settings": {}}
    yield TEMPERATURE, "reports raw log-probabilities", raw
    shipped = shipped_settings(case.policy)
    for value in (case.sampling.temperature, shipped.get("temperature", 1.0)):
        yield TEMPERATURE, f"uses temperature={value:g}", {"settings": {"temperature": value}}
    # 2. Try the tokens that the engine reports as kept, the requested truncation, and the
    # truncation in the model's generation config.
    yield TRUNCATION, "uses the tokens that it names", {"samples": kept}
    requested = case.sampling.model_dump(include={"top_k", "top_p", "min_p"})
    # vLLM uses the model's generation config for every setting that a request does not contain.
    unsent = {k: v for k, v in shipped.items() if k not in {"temperature", *requested}}
    for chosen in (requested, shipped, unsent):
        settings = {"temperature": case.temperature, **chosen}
        settings = {k: v for k, v in settings.items() if v != SAMPLERS[k][1]}
        if settings.keys() - {"temperature"}:
            words = " ".join(f"{name}={value:g}" for name, value in settings.items())
            yield TRUNCATION, f"uses {words}", {**raw, "settings": settings}


def shipped_settings(policy: Policy) -> dict[str, float]:
    """Return the sampling settings in the model's generation_config.json.

    Settings with a neutral value are left out.
    """
    config = policy.lm.generation_config
    shipped = {name: getattr(config, name, None) for name in SAMPLERS}
    return {k: v for k, v in shipped.items() if v not in (None, SAMPLERS[k][1])}


def other_attempts(policy: Policy) -> Iterator[Attempt]:
    """Yield attempts that change the prompt or the model.

    A changed model has no adapter, or computes in 16 bits.
    """
    for name, change in PROMPT_CHANGES.items():
        yield PROMPT, name, {"change": change}
    if policy.model is not policy.lm:
        yield ADAPTER, "has no adapter", {"build": partial(without_adapter, policy)}
    for dtype in (torch.bfloat16, torch.float16):
        yield DTYPE, f"computes in {dtype}", {"build": partial(cast, policy, dtype)}


def without_adapter(policy: Policy) -> Policy:
    """Return a copy of the policy without its LoRA adapter."""
    twin = copy.copy(policy)
    twin.model = twin.lm = copy.deepcopy(policy.model).unload()
    return twin


def cast(policy: Policy, dtype: torch.dtype) -> Policy:
    """Return a copy of the policy that computes in `dtype` without autocast."""
    twin = policy.frozen_copy()
    twin.autocast = None
    twin.lm.to(dtype)
    return twin
