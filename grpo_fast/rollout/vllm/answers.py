"""What both vLLM engines ask for, and what they accept as an answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from grpo_fast.rollout.engine import (
    EOS,
    LENGTH,
    Completion,
    EngineError,
    Kept,
    Seed,
    say_that_kept_is_unknown,
    seed_for,
)
from grpo_fast.rollout.sampler import NonFiniteLogits, Sampling

CLAMPED = -9999.0  # what a server writes for a log-probability that is NaN or -inf


class BadAnswer(EngineError):
    """vLLM answered something that is no completion of what it was asked."""


class Answer(NamedTuple):
    """One completion as vLLM gives it."""

    ids: Sequence[int]
    logps: Sequence[float]
    reason: str | None  # "stop", "length", or another word of vLLM
    kept: Sequence[Sequence[int]] | None  # of each token, what it was drawn from


def parameters(
    sampling: Sampling, eos_ids: Collection[int], *, group_size: int, seed: Seed, place: int
) -> dict[str, Any]:
    """vLLM's SamplingParams for the G completions of one prompt.

    vLLM gives the g-th of them the seed plus g. Greedy completions are all the same: it makes one.
    """
    is_greedy = sampling.temperature == 0
    return {
        "n": 1 if is_greedy else group_size, "seed": seed_for("vllm", seed, place) >> 8,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens, "stop_token_ids": sorted(eos_ids),
        "ignore_eos": True,  # the model's own would come on top of these
        "logprobs": 0, "detokenize": False,
    }  # fmt: skip


def grouped(
    found: Sequence[Sequence[Completion]], sampling: Sampling, group_size: int
) -> list[Completion]:
    """G completions of each prompt, from what vLLM made of `parameters`."""
    copies = group_size if sampling.temperature == 0 else 1
    completions = [one for group in found for _ in range(copies) for one in group]
    if sampling.wants_kept and any(one.kept is None for one in completions):
        say_that_kept_is_unknown("vLLM without --return-sampling-mask (on GPUs only)")
    return completions


def to_completion(
    answer: Answer, sampling: Sampling, eos_ids: Collection[int], version: int
) -> Completion:
    """The completion in an answer.

    Raises:
        BadAnswer: tokens and log-probabilities that do not fit, or an end that is none.
        NonFiniteLogits: a log-probability that is no number.
        ValueError: vLLM's max_model_len cut the completion off.
    """
    ids, limit = list(answer.ids), sampling.max_new_tokens
    ends = [t for t, token in enumerate(ids) if token in eos_ids]
    if len(answer.logps) != len(ids):
        expected = f"expected a log-probability for each of {len(ids)} tokens"
        raise BadAnswer(f"vLLM: {expected}, got {len(answer.logps)}")
    if not ids or len(ids) > limit or ends[:1] not in ([], [len(ids) - 1]):
        expected = f"expected 1 to {limit} tokens up to the first EOS"
        raise BadAnswer(f"vLLM: {expected}, got {len(ids)} with {len(ends)} EOS")
    if (answer.reason == "stop") != bool(ends):
        raise BadAnswer(f"vLLM: finish reason {answer.reason!r} with {len(ends)} EOS")
    if answer.reason == "length" and len(ids) < limit:
        expected = "expected room for a prompt and rollout.max_new_tokens"
        raise ValueError(f"max_model_len of vLLM: {expected}, it cut off after {len(ids)}")
    if not all(math.isfinite(logp) and logp > CLAMPED for logp in answer.logps):
        raise NonFiniteLogits("the policy's logits are NaN or infinite, says vLLM")
    why = EOS if ends else LENGTH if answer.reason == "length" else str(answer.reason)
    logps = torch.tensor(answer.logps, dtype=torch.float32)
    return Completion(ids, logps, why, version, _kept(answer, sampling))


def _kept(answer: Answer, sampling: Sampling) -> Kept | None:
    if answer.kept is None or not sampling.wants_kept:
        return None
    pairs = list(zip(answer.ids, answer.kept, strict=False))
    if len(answer.kept) != len(answer.ids) or any(row and t not in row for t, row in pairs):
        raise BadAnswer("vLLM: expected every token among those that it was drawn from")
    ids = torch.tensor([token for row in answer.kept for token in row], dtype=torch.int32)
    return Kept(ids, torch.tensor([0, *map(len, answer.kept)]).cumsum(0))
