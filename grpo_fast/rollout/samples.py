"""The table of samples that every part of a training step reads and extends, and `generate`.

A sample is a prompt with one completion. The table holds flat tensors without padding:

- Columns per sample have B entries, one for each sample.
- Columns per token have N entries: the tokens of sample 0, then those of sample 1, and so on.
- Columns per completion token have R entries, one for each trained token, in the order of the
  tokens. The loss reads these columns.

`generate` samples completions with an engine. Other functions encode prompts and decode texts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo_fast.attention.layout import concatenated_ranges
from grpo_fast.errors import conflict, reason, require
from grpo_fast.kernels.types import Support
from grpo_fast.rollout.engine import EOS, Completion, Engine, Sampling, Seed
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.own.model import SampledModel

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Values of the column `segment`.
PROMPT = 0
COMPLETION = 1

PER_SAMPLE = ("group", "truncated", "weight_version", "rewards", "advantages")
PER_TOKEN = ("ids", "segment")
PER_COMPLETION_TOKEN = (
    "logps", "mass", "token_advantages", "old_logps", "ref_logps", "ref_hidden",
    "values", "returns",
)  # fmt: skip
COLUMNS = ("cu_seqlens", *PER_SAMPLE, *PER_TOKEN, *PER_COMPLETION_TOKEN)


@dataclass
class Samples:
    """The B samples of a step, with N tokens, of which R are trained completion tokens.

    Optional columns are None until a step of the training loop computes them.

    Attributes:
        ids: (N,) int64, token ids of each prompt and its completion.
        segment: (N,) uint8, `COMPLETION` for trained tokens and `PROMPT` for all other tokens,
            including tokens that a tool wrote between two turns.
        cu_seqlens: (B+1,) int64. Sample b is `ids[cu_seqlens[b] : cu_seqlens[b + 1]]`.
        group: (B,) int64, index of the sample's prompt. Completions of one prompt form a group.
        truncated: (B,) bool, True if the completion was cut off before an EOS.
        weight_version: (B,) int64, version of the weights that sampled the completion.
        logps: (R,) fp32, log-probabilities that the sampler reported.
        support: for each of the R tokens, the ids that the sampler's truncation kept. None if it
            kept the whole vocabulary.
        mass: (R,) fp32, probability of each token's support before truncation. None if an
            engine does not report it for every completion.
        texts: B texts of the completions, without special tokens.
        rewards: (B,) fp32, weighted sum of the reward functions; NaN if they failed.
        scores: reward function name -> (B,) fp32, its unweighted rewards.
        advantages: (B,) fp32; NaN excludes the sample from the loss.
        token_advantages: (R,) fp32. None gives each token the advantage of its sample.
        old_logps: (R,) fp32, log-probabilities of the policy at the start of the step.
        ref_logps: (R,) fp32, log-probabilities of the reference model.
        ref_hidden: (R, H) hidden states of the reference model, for an exact KL divergence.
        values: (R,) fp32, the critic's values.
        returns: (R,) fp32, targets of the critic.
    """

    ids: Tensor
    segment: Tensor
    cu_seqlens: Tensor
    group: Tensor
    truncated: Tensor
    weight_version: Tensor
    logps: Tensor
    support: Support | None = None
    mass: Tensor | None = None
    texts: list[str] = field(default_factory=list)
    rewards: Tensor | None = None
    scores: dict[str, Tensor] = field(default_factory=dict)
    advantages: Tensor | None = None
    token_advantages: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    ref_hidden: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @cached_property
    def rows(self) -> Tensor:
        """The offset of each sample in columns with one entry per completion token, (B+1,) int64.

        The completion tokens of sample b have the indices rows[b] to rows[b + 1] - 1.
        """
        return pad(self.segment.long().cumsum(0), (1, 0))[self.cu_seqlens]

    @cached_property
    def lengths(self) -> list[int]:
        """The number of completion tokens of each sample."""
        return self.rows.diff().tolist()

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """The number of untrained tokens of each sample."""
        return (self.cu_seqlens - self.rows).diff().tolist()

    def prompt(self, i: int) -> Tensor:
        """Return the untrained token ids of sample i, (n,) int64."""
        return self._ids_of(i, PROMPT)

    def completion(self, i: int) -> Tensor:
        """Return the trained token ids of sample i, (n,) int64."""
        return self._ids_of(i, COMPLETION)

    def _ids_of(self, i: int, segment: int) -> Tensor:
        part = slice(*self.cu_seqlens[i : i + 2].tolist())
        return self.ids[part][self.segment[part] == segment]

    def split_ids(self, segment: int) -> tuple[Tensor, ...]:
        """Return the `PROMPT` or `COMPLETION` token ids of each sample, one (n,) int64 tensor each.

        The tensors are views of one new tensor.
        """
        lengths = self.prompt_lengths if segment == PROMPT else self.lengths
        return self.ids[self.segment == segment].split(lengths)

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The untrained token ids of each sample."""
        return [ids.tolist() for ids in self.split_ids(PROMPT)]

    @property
    def completion_ids(self) -> list[list[int]]:
        """The trained token ids of each sample."""
        return [ids.tolist() for ids in self.split_ids(COMPLETION)]

    @property
    def sampling_logps(self) -> tuple[Tensor, ...]:
        """The sampler's log-probabilities, one tensor for each sample."""
        return self.logps.split(self.lengths)

    def __getitem__(self, chosen: Sequence[int] | Tensor) -> Samples:
        """Return a table of the chosen samples, in the given order."""
        at = torch.as_tensor(chosen, dtype=torch.int64)
        index = dict.fromkeys(PER_SAMPLE, at)
        index |= dict.fromkeys(PER_TOKEN, ranges(self.cu_seqlens, at))
        index |= dict.fromkeys(PER_COMPLETION_TOKEN, ranges(self.rows, at))
        columns = {name: getattr(self, name) for name in index}
        selected = {n: x[index[n].to(x.device)] for n, x in columns.items() if x is not None}
        return dataclasses.replace(
            self,
            **selected,
            cu_seqlens=pad(self.cu_seqlens.diff()[at].cumsum(0), (1, 0)),
            support=select_support(self.support, ranges(self.rows, at)),
            texts=[self.texts[i] for i in at.tolist()] if self.texts else [],
            scores={name: values[at] for name, values in self.scores.items()},
        )

    @classmethod
    def cat(cls, parts: Iterable[Samples | None]) -> Samples:
        """Concatenate several tables.

        Args:
            parts: at least one table. Entries that are None are skipped. If a table lacks an
                optional column, the result lacks the column, too.
        """
        tables = [part for part in parts if part is not None]
        if len(tables) == 1:
            return tables[0]
        columns = {name: [getattr(part, name) for part in tables] for name in COLUMNS[1:]}
        joined = {n: torch.cat(x) for n, x in columns.items() if all(y is not None for y in x)}
        lengths = torch.cat([part.cu_seqlens.diff() for part in tables])
        return cls(
            **joined,
            cu_seqlens=pad(lengths.cumsum(0), (1, 0)),
            support=join_supports([(part.support, len(part.logps)) for part in tables]),
            texts=list(itertools.chain.from_iterable(part.texts for part in tables)),
            scores={
                name: torch.cat([part.scores[name] for part in tables]) for name in tables[0].scores
            },  # fmt: skip
        )

    def on(self, device: torch.device | str) -> Samples:
        """Return the table with its per-completion-token columns moved to a device.

        Token ids and support stay on the CPU, where micro-batches are packed.
        """
        columns = {name: getattr(self, name) for name in PER_COMPLETION_TOKEN}
        return dataclasses.replace(
            self, **{name: x.to(device) for name, x in columns.items() if x is not None}
        )

    def write(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Write values into a column with one entry per completion token.

        A missing column is created and filled with zeros.

        Args:
            name: the column, such as "old_logps".
            rows: (r,) int64, indices among the R completion tokens.
            values: (r, ...) values for these tokens, detached before they are written.
        """
        column = getattr(self, name)
        if column is None:
            column = values.new_zeros(len(self.logps), *values.shape[1:])
            setattr(self, name, column)
        column[rows] = values.detach()


# ------------------------------------------------------------------------- Segments of flat tensors
def ranges(offsets: Tensor, chosen: Tensor) -> Tensor:
    """Return the integers from offsets[i] to offsets[i + 1] - 1 for each chosen i, concatenated.

    Args:
        offsets: (n + 1,) int64, not decreasing.
        chosen: (k,) int64 indices i in [0, n).

    Returns:
        The integers, (total,) int64.
    """
    return concatenated_ranges(offsets[:-1][chosen], offsets.diff()[chosen])


def select_support(
    support: Support | None, rows: Tensor, device: torch.device | str = "cpu"
) -> Support | None:
    """Select the support of some completion tokens, and move it to a device.

    Args:
        support: the support of R tokens on the CPU, or None.
        rows: (r,) int64, indices of the tokens to select.
        device: device of the result.

    Returns:
        The support of the r tokens. None if all r tokens were sampled from the full vocabulary.
    """
    if support is None:
        return None
    ids = support.ids[ranges(support.offsets, rows)]
    offsets = pad(support.offsets.diff()[rows].cumsum(0), (1, 0))
    return Support(ids.to(device), offsets.to(device)) if len(ids) else None


def join_supports(parts: Sequence[tuple[Support | None, int]]) -> Support | None:
    """Concatenate the supports of consecutive pieces of a table.

    Args:
        parts: for each piece, its support, or None for the full vocabulary, and its number of
            completion tokens.

    Returns:
        The joined support. None if no piece has a support.
    """
    sets = [support and (support.ids, support.offsets.diff()) for support, _ in parts]
    return Support.join(sets, [count for _, count in parts], "cpu")


Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages or token ids


# ----------------------------------------------------------------------------------------- Sampling
def generate(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Prompt],
    options: Sampling | None = None,
    *,
    group_size: int = 1,
    seed: Seed = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    engine: Engine | None = None,
    places: Sequence[int] | None = None,
    **sampling: Any,
) -> Samples:
    """Sample `group_size` completions of each prompt. The model processes each prompt only once.

    Args:
        model: a transformers causal LM, a peft model around one, or the trainer's `Policy`. Its
            mode, attention implementation and generation config are restored afterwards.
        prompts: texts, chat messages for the tokenizer's chat template, or token ids.
        options: the sampling options. You can pass the fields of `Sampling` as keywords instead.
        group_size: number of completions of each prompt.
        seed: an int, or a tuple such as (seed, step). The random number of a token depends only on
            this seed, the completion's index in the batch and the token's position. It does not
            depend on `batch_size`.
        tokenizer: the model's tokenizer. A `Policy` has one. A `SampledModel` without a tokenizer
            accepts only token ids, and the texts of its result are empty.
        engine: the engine that samples, with the weights that it currently has. None samples with
            `model`.
        places: index of each prompt in the global batch (over all ranks), in increasing order. None
            if `prompts` is the whole batch.
        **sampling: fields of `Sampling`, such as `max_new_tokens=64` or `top_p=0.9`.

    Returns:
        The samples with their texts. The column `group` holds the index of each sample's prompt in
        the batch.

    Raises:
        ValueError: the tokenizer or the model does not accept a prompt, a prompt leaves no room for
            `max_new_tokens`, `places` do not increase, or a sampling option is out of range.
        NonFiniteLogits: the model's logits are NaN or infinite.

    Example:
        >>> done = generate(model, prompts, group_size=8, tokenizer=tokenizer, max_new_tokens=64)
        >>> rewards = [score(text) for text in done.texts]
    """
    # 1. Check the options.
    policy = SampledModel(model, tokenizer) if isinstance(model, nn.Module) else model
    if options is not None and sampling:
        raise conflict("options", f"the keywords {sorted(sampling)}", "pass one of them")
    options = options or Sampling(**sampling)
    require(group_size >= 1, "group_size", "at least 1", group_size)
    if places is not None:
        increase = [*places] == sorted({*places}) and min(places, default=0) >= 0
        fits = increase and len(places) == len(prompts)
        require(fits, "places", f"{len(prompts)} increasing indices from 0", list(places)[:8])
    # 2. Encode the prompts and sample.
    ids = encode_for(policy, prompts, options.max_new_tokens)
    sampler = engine or TransformersEngine(policy, options)
    done = sampler.generate(ids, options, group_size=group_size, seed=seed, places=places)
    # 3. Check the result, because a custom engine may return wrong numbers or shapes.
    name = type(sampler).__name__
    expected = len(prompts) * group_size
    require(len(done) == expected, name, f"{expected} completions", len(done), RuntimeError)
    for one in done:
        fits = one.logps.shape == (len(one.ids),)
        shape = tuple(one.logps.shape)
        require(fits, name, f"logps of shape ({len(one.ids)},)", shape, RuntimeError)
    # 4. Decode the texts, without special tokens.
    texts = [""] * len(done)
    if policy.tokenizer is not None:
        each = [one.ids for one in done]
        texts = policy.tokenizer.batch_decode(each, skip_special_tokens=True)
    return table_of(ids, done, texts, places)


def table_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    texts: Sequence[str] = (),
    groups: Sequence[int] | None = None,
) -> Samples:
    """Build the table of samples from an engine's completions.

    Args:
        prompts: token ids of each prompt.
        completions: the completions, in the order of the prompts. Every prompt has the same number.
        texts: the text of each completion.
        groups: the group number of each prompt. None numbers the groups from 0.
    """
    # 1. Join the token ids of prompts and completions, sample after sample.
    size = len(completions) // max(len(prompts), 1)
    pieces = [torch.zeros(0, dtype=torch.int64)]
    for n, prompt in enumerate(prompts):
        prompt_ids = torch.tensor(prompt, dtype=torch.int64)
        for one in completions[n * size : (n + 1) * size]:
            pieces += [prompt_ids, torch.tensor(one.ids, dtype=torch.int64)]
    lengths = torch.tensor([len(piece) for piece in pieces[1:]], dtype=torch.int64)
    segment = torch.tensor([PROMPT, COMPLETION], dtype=torch.uint8).repeat(len(completions))
    # 2. Compute the other columns.
    numbers = torch.tensor([*range(len(prompts))] if groups is None else [*groups])
    truncated = [one.finish_reason != EOS for one in completions]
    versions = [one.weight_version for one in completions]
    masses = [one.mass for one in completions if one.mass is not None]
    return Samples(
        ids=torch.cat(pieces),
        segment=segment.repeat_interleave(lengths),
        cu_seqlens=pad(lengths.view(-1, 2).sum(1).cumsum(0), (1, 0)),
        group=numbers.to(torch.int64).repeat_interleave(size),
        truncated=torch.tensor(truncated, dtype=torch.bool),
        weight_version=torch.tensor(versions, dtype=torch.int64),
        logps=torch.cat([torch.zeros(0, dtype=torch.float32), *(one.logps for one in completions)]),
        support=join_supports([(one.support, len(one.ids)) for one in completions]),
        mass=torch.cat([torch.zeros(0), *masses]) if len(masses) == len(completions) else None,
        texts=list(texts),
    )


def check_prompts(policy: SampledModel, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Raise a ValueError, before a run starts, if `generate` would refuse one of these prompts.

    To save time, only long prompts are encoded. A prompt is long if its number of bytes exceeds
    half of the tokens that the model has left for it. A shorter prompt fits, because a token has at
    least one byte, and the chat template is assumed to add at most as many tokens again.
    """
    room = policy.positions - max_new_tokens
    long = [p for p in prompts if 2 * len(str(p).encode()) > room]
    encode_for(policy, long, max_new_tokens)


def encode_for(
    policy: SampledModel, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[list[int]]:
    """Return the token ids of each prompt, after checking that the policy's model accepts them.

    Raises:
        ValueError: a prompt is too long for the model or has ids that are not in the vocabulary.
    """
    ids = encode_prompts(policy.tokenizer, prompts, policy.template_kwargs)
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    for prompt, tokens in zip(prompts, ids, strict=True):
        count = len(tokens)
        most = policy.positions
        shown = repr(prompt[:60])
        expected = f"at most {most} tokens (max_position_embeddings of the model)"
        require(count <= most, "prompts", expected, f"{count} in {shown}")
        room = most - count + 1  # the last sampled token is not fed to the model
        expected = f"at most {room} after a prompt of {count} (max_position_embeddings: {most})"
        require(max_new_tokens <= room, "max_new_tokens", expected, max_new_tokens)
        low, high = min(tokens), max(tokens)
        expected = f"token ids below {rows}, the rows of the model's embedding"
        came = f"{high if low >= 0 else low} in {shown}"
        require(0 <= low and high < rows, "prompts", expected, came)
    return ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    template_kwargs: Mapping[str, object] | None = None,
) -> list[list[int]]:
    """Return the token ids of each prompt.

    If the last chat message has the role "assistant", the completion continues this message.

    Args:
        tokenizer: the model's tokenizer. If None, only prompts of token ids are accepted.
        prompts: texts, chat messages or token ids.
        template_kwargs: further arguments of the tokenizer's chat template.

    Raises:
        ValueError: the tokenizer or its chat template refuses a prompt, or a prompt has no token.
    """
    ids: list[list[int]] = []
    for prompt in prompts:
        if tokenizer is None and not _is_encoded(prompt):
            expected = "token ids, because the model has no tokenizer (pass tokenizer=)"
            raise ValueError(f"prompts: expected {expected}, got {str(prompt)[:60]!r}")
        try:
            if _is_encoded(prompt):
                encoded = [*prompt]
            else:
                # A chat template already writes special tokens such as BOS. A text may begin with
                # BOS, too.
                text = _text_of(tokenizer, prompt, template_kwargs)
                bos = tokenizer.bos_token or text
                is_plain = isinstance(prompt, str) and (bos == text or not text.startswith(bos))
                encoded = tokenizer(text, add_special_tokens=is_plain)["input_ids"]
        except Exception as error:  # a template is a program, and tokenizers raise plain Exception
            expected = "expected a prompt that the tokenizer and its chat template accept"
            came = str(prompt)[:60]
            raise ValueError(f"prompts: {expected}, got {came!r}: {reason(error)}") from error
        if not encoded:  # `require` would format even valid prompts
            raise ValueError(f"prompts: expected at least one token, got {prompt!r}")
        ids.append(encoded)
    return ids


def prompt_texts(policy: SampledModel, prompts: Sequence[Prompt]) -> list[str]:
    """Return the text of each prompt. Chat messages are formatted by the chat template.

    Without a tokenizer, the text of a prompt of token ids is "".
    """
    tokenizer = policy.tokenizer
    return [_text_of(tokenizer, prompt, policy.template_kwargs) for prompt in prompts]


def _text_of(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, template_kwargs: Mapping[str, object] | None
) -> str:
    if isinstance(prompt, str):
        return prompt
    if _is_encoded(prompt):
        return "" if tokenizer is None else tokenizer.decode(prompt)
    opens = prompt[-1]["role"] != "assistant"
    return tokenizer.apply_chat_template(
        prompt,
        tokenize=False,
        add_generation_prompt=opens,
        continue_final_message=not opens,
        **(template_kwargs or {}),
    )


def _is_encoded(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)
