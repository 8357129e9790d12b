"""From prompts to completions: encoded, sampled by an engine, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from grpo_fast.rollout.engine import EOS, Engine, Kept, Seed
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.own.model import SampledModel
from grpo_fast.rollout.prompts import Prompt, encode_for
from grpo_fast.rollout.sampler import Sampling
from grpo_fast.rollout.saved import Saved


@dataclass
class Rollout:
    """N·G completions, the G of one prompt side by side."""

    prompts: list[str] = field(default_factory=list)  # of each completion (so each G times)
    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)  # up to and with the first EOS
    sampling_logps: list[Saved] = field(default_factory=list)  # (|completion|,) fp32, see Sampler
    texts: list[str] = field(default_factory=list)  # completions without special tokens
    truncated: list[bool] = field(default_factory=list)  # it did not end with an EOS
    kept: list[Kept | None] = field(default_factory=list)  # what each was drawn from
    weight_versions: list[int] = field(default_factory=list)  # see `Engine.update`
    # Of recorded samples, whose prompt_ids are whole: the places of completion_ids among them.
    trained: list[list[int] | None] = field(default_factory=list)
    credit: list[Saved | None] = field(default_factory=list)  # advantages recorded by token

    def __post_init__(self) -> None:
        count = len(self.completion_ids)
        self.kept = self.kept or [None] * count
        self.weight_versions = self.weight_versions or [0] * count
        self.trained, self.credit = self.trained or [None] * count, self.credit or [None] * count

    def check(self, vocab_size: int) -> None:
        """Raise a ValueError for uneven lists, or for a token id that no model of this size has."""
        count = len(self.texts)
        if any(len(values) != count for values in vars(self).values()):
            raise ValueError(f"rollout: expected lists of one length, {count} as its texts")
        if [len(x) for x in self.sampling_logps] != self.lengths:
            raise ValueError("rollout: expected a sampling_logp for each token of a completion")
        for at, ids, whole in zip(self.trained, self.completion_ids, self.prompt_ids, strict=True):
            if at is not None and [whole[i] for i in at if i < len(whole)] != ids:
                raise ValueError("rollout: expected places of a completion's tokens in its sample")
        for ids in (*self.prompt_ids, *self.completion_ids):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                expected = f"expected token ids from 0 to {vocab_size - 1}"
                raise ValueError(f"rollout: {expected}, got {min(ids)} to {max(ids)}")

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.completion_ids]


def generate(
    model: Any,
    prompts: Sequence[Prompt],
    options: Sampling | None = None,
    *,
    group_size: int = 1,
    seed: Seed = 0,
    tokenizer: Any = None,
    engine: Engine | None = None,
    places: Sequence[int] | None = None,
    **sampling: Any,
) -> Rollout:
    """G = `group_size` completions of each prompt, computed once for all of them::

        done = generate(model, prompts, group_size=8, tokenizer=tokenizer, max_new_tokens=64)
        rewards = [score(text) for text in done.texts]

    Args:
        model: a transformers causal LM, or a peft model around one, which is left as it was; or the
            trainer's `Policy`.
        prompts: texts, chat messages for the tokenizer's template, or token ids.
        options: how they are drawn; or the fields of `Sampling` as keywords.
        seed: an int or a tuple such as (seed, step). The random number of a token depends on it,
            the completion's place and the token's position only, not on `options.batch_size`.
        tokenizer: the model's; a `Policy` has its own.
        engine: who samples, with the weights it has; None: the model itself.
        places: of the prompts in the whole step's batch, rising; None: they are all of it.

    Raises:
        ValueError: a prompt that the tokenizer does not take, without tokens, with unknown ones,
            or with too many for the model and `options.max_new_tokens`; places that do not rise;
            a keyword that `Sampling` does not have, or does not take.
        NonFiniteLogits: the model gives NaN.
    """
    policy = SampledModel(model, tokenizer) if isinstance(model, nn.Module) else model
    if options is not None and sampling:
        raise ValueError(f"options: expected them or keywords, got both: {sorted(sampling)}")
    options = options or Sampling(**sampling)
    if group_size < 1:
        raise ValueError(f"group_size: expected at least 1, got {group_size}")
    if places is not None:
        check_places(places, len(prompts))
    texts, ids = encode_for(policy, prompts, options.max_new_tokens)
    sampler = engine or TransformersEngine(policy, options)
    done = sampler.generate(ids, options, group_size=group_size, seed=seed, places=places)
    expected = len(prompts) * group_size
    if len(done) != expected:
        raise RuntimeError(f"{type(sampler).__name__}: expected {expected} completions, "
                           f"got {len(done)}")  # fmt: skip
    completion_ids = [one.ids for one in done]
    return Rollout(
        prompts=[text for text in texts for _ in range(group_size)],
        prompt_ids=[tokens for tokens in ids for _ in range(group_size)],
        completion_ids=completion_ids,
        sampling_logps=[one.logps for one in done],
        texts=policy.tokenizer.batch_decode(completion_ids, skip_special_tokens=True),
        truncated=[one.finish_reason != EOS for one in done],
        kept=[one.kept for one in done],
        weight_versions=[one.weight_version for one in done],
    )


def check_places(places: Sequence[int], count: int) -> None:
    """Raise a ValueError unless these are rising places of so many prompts."""
    pairs = zip(places, places[1:], strict=False)
    rising = all(a < b for a, b in pairs) and (not places or places[0] >= 0)
    if len(places) != count or not rising:
        expected = f"expected {count} rising places from 0"
        raise ValueError(f"places: {expected}, got {list(places)[:8]}")
