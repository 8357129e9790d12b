"""From prompts to completions: encoded, sampled by an engine, decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from grpo_fast.data import reason
from grpo_fast.errors import require
from grpo_fast.rollout.engine import EOS, Engine, Kept, Seed
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.own.model import SampledModel
from grpo_fast.rollout.sampler import Sampling
from grpo_fast.rollout.saved import Saved

Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages or token ids


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
    # Recorded samples only: prompt_ids hold the whole sample, and these are the places in it of
    # completion_ids.
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
        lengths = {len(values) for values in vars(self).values()}
        require(lengths == {count}, "rollout", f"lists of {count}, as its texts", lengths)
        counts = [len(x) for x in self.sampling_logps]
        require(counts == self.lengths, "rollout", "a sampling_logp for each token", "others")
        for at, ids, whole in zip(self.trained, self.completion_ids, self.prompt_ids, strict=True):
            fits = at is None or [whole[i] for i in at if i < len(whole)] == ids
            require(fits, "rollout", "places of a completion's tokens in its sample", "others")
        for ids in filter(None, (*self.prompt_ids, *self.completion_ids)):
            low, high = min(ids), max(ids)
            expected = f"token ids from 0 to {vocab_size - 1}"
            require(0 <= low and high < vocab_size, "rollout", expected, f"{low} to {high}")

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
        engine: the one that samples, with the weights it has; None: the model itself.
        places: index of each prompt in the whole step's batch, rising; None: these are all of it.

    Raises:
        ValueError: a prompt that the tokenizer or the model does not take, or without room for
            `options.max_new_tokens`; places that do not rise; keywords that `Sampling` refuses.
        NonFiniteLogits: the model gives NaN.
    """
    policy = SampledModel(model, tokenizer) if isinstance(model, nn.Module) else model
    is_one = options is None or not sampling
    require(is_one, "options", "them or keywords", f"both: {sorted(sampling)}")
    options = options or Sampling(**sampling)
    require(group_size >= 1, "group_size", "at least 1", group_size)
    if places is not None:
        rising = [*places] == sorted({*places}) and min(places, default=0) >= 0
        fits = rising and len(places) == len(prompts)
        require(fits, "places", f"{len(prompts)} rising places from 0", list(places)[:8])
    texts, ids = encode_for(policy, prompts, options.max_new_tokens)
    sampler = engine or TransformersEngine(policy, options)
    done = sampler.generate(ids, options, group_size=group_size, seed=seed, places=places)
    expected = len(prompts) * group_size
    said = f"{expected} completions"
    require(len(done) == expected, type(sampler).__name__, said, len(done), RuntimeError)
    completion_ids = [one.ids for one in done]
    # A prompt's ids are one list G times: whoever changes it in place changes all of them.
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


# ---- prompts


def check_prompts(policy: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Raise the ValueError for prompts that `generate` would raise, before a run has begun.

    Only those that may be too long are encoded: a token has at least one byte, and a chat template
    adds less than half of what a model has room for.
    """
    room = policy.positions - max_new_tokens
    long = [p for p in prompts if 2 * len(str(p).encode()) > room]
    encode_for(policy, long, max_new_tokens)


def encode_for(
    policy: Any, prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[list[str], list[list[int]]]:
    """`encode_prompts`, with a ValueError for prompts that the policy cannot take."""
    texts, ids = encode_prompts(policy.tokenizer, prompts, policy.template_kwargs)
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    for text, tokens in zip(texts, ids, strict=True):
        count, most, shown = len(tokens), policy.positions, repr(text[:60])
        expected = f"at most {most} tokens (max_position_embeddings of the model)"
        require(count <= most, "prompts", expected, f"{count} in {shown}")
        room = most - count + 1  # the last token is not fed
        expected = f"at most {room} behind a prompt of {count} (max_position_embeddings: {most})"
        require(max_new_tokens <= room, "max_new_tokens", expected, max_new_tokens)
        low, high = min(tokens), max(tokens)
        expected = f"token ids below {rows}, the rows of the model's embedding"
        came = f"{high if low >= 0 else low} in {shown}"
        require(0 <= low and high < rows, "prompts", expected, came)
    return texts, ids


def encode_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[str], list[list[int]]]:
    """Return the text and the token ids of each prompt.

    Chat messages go through the template with its own arguments `template_kwargs`. A last message
    of the assistant is a beginning that the completion continues.
    """
    texts: list[str] = []
    ids: list[list[int]] = []
    for prompt in prompts:
        plain = isinstance(prompt, str)
        text: Any = prompt
        is_encoded = not plain and all(isinstance(token, int) for token in text)
        try:
            if is_encoded:
                encoded, text = [*text], tokenizer.decode(text)
            else:
                if not plain:  # the template writes the special tokens itself
                    opens = text[-1]["role"] != "assistant"
                    text = tokenizer.apply_chat_template(
                        prompt, tokenize=False, add_generation_prompt=opens,
                        continue_final_message=not opens, **(template_kwargs or {}),
                    )  # fmt: skip
                encoded = tokenizer(text, add_special_tokens=plain)["input_ids"]
        except Exception as error:  # a template is a program, and tokenizers raise plain Exception
            taken = "expected what the tokenizer and its chat template take"
            came = str(prompt)[:60]
            raise ValueError(f"prompts: {taken}, got {came!r}: {reason(error)}") from error
        if not encoded:  # `require` would write out every long prompt
            raise ValueError(f"prompts: expected at least one token, got {prompt!r}")
        texts.append(text)
        ids.append(encoded)
    return texts, ids
