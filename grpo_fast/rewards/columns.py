"""Columns that reward functions receive. A function requests a column by naming a parameter.

Each column has one entry per completion:

- `prompts`, `completions` (strings) and `answers`.
- `completion_ids` (tokens, with EOS if the completion ended) and `completion_lengths`.
- `prefills`: the beginning of the assistant's turn that the prompt contains, such as `<think>`.
- Every other field of the examples, under its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_fast.data import Example, Prompt
from grpo_fast.errors import argument_error
from grpo_fast.rewards.conventions import ONLY_TRL, OPENRLHF, OURS, SAMPLED, TRL, VERL, VERLS
from grpo_fast.rewards.reward_set import RewardResult, RewardSet

# GOLD: the parameter that receives the gold answer, for each convention. GIVEN: the parameters that
# this package fills, so that the data needs no column for them.
GOLD = {OURS: "answers", TRL: "answer", VERL: "ground_truth", OPENRLHF: "labels"}
GIVEN = {
    OURS: SAMPLED, TRL: (*SAMPLED, *ONLY_TRL), VERL: VERLS, OPENRLHF: ("queries", "prompts"),
}  # fmt: skip
_OPENED = re.compile(r"<(\w+)>\s*(?:</\1>\s*)?\Z")
LONGEST_OPENED = 200  # number of characters at a prompt's end that are searched for a tag


def score(
    rewards: RewardSet,
    examples: Sequence[Example],
    completions: Sequence[str],
    completion_ids: Sequence[list[int]] | None = None,
    prompt_texts: Sequence[str] | None = None,
) -> RewardResult:
    """Compute the rewards of completions.

    Args:
        rewards: the reward functions.
        examples: N examples. `completions[i]` is the completion of `examples[i]`.
        completions: N strings.
        completion_ids: N lists of token ids.
        prompt_texts: N prompts as the model received them, after the chat template was applied.
    """
    names = dict.fromkeys(name for example in examples for name in example.fields)
    columns: dict[str, Any] = {
        name: [example.fields.get(name) for example in examples] for name in names
    }
    if completion_ids is not None:
        columns["completion_ids"] = completion_ids
        columns["completion_lengths"] = [len(ids) for ids in completion_ids]
    prompts = [example.prompt for example in examples]
    texts = prompt_texts or [""] * len(examples)
    columns["prefills"] = list(map(prefill_of, prompts, texts))
    answers = [example.answer for example in examples]
    labels = [label_of(example) for example in examples]
    return rewards(prompts, completions, answers, columns, labels=labels, prompt_texts=prompt_texts)


def label_of(example: Example) -> Any:
    """Return the gold answer as it appears in the data row, before parsing."""
    return example.answer if example.label is None else example.label


def prefill_of(prompt: Prompt, text: str) -> str:
    """Return the beginning of the assistant's turn that a prompt contains, or "".

    Args:
        prompt: a string or a list of messages. The last message may have the role "assistant".
        text: the prompt as the model received it. The chat template may have added `<think>`.
    """
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"]
    opened = _OPENED.search(text[-LONGEST_OPENED:])
    return "" if opened is None else opened[0]


def check_examples(rewards: RewardSet, examples: Sequence[Example], split: str) -> None:
    """Check that all examples have the columns that the reward functions require.

    Args:
        rewards: the reward functions.
        examples: the examples of a split.
        split: name of the split, for error messages.

    Raises:
        ValueError: an example lacks a column.
    """
    for reward in rewards.rewards:
        if reward.is_unsure and any("answers" in e.fields for e in examples):
            words = "{trl: FUNCTION} or {grpo_fast: FUNCTION}"
            got = "a column 'answers', which TRL passes under this name"
            raise argument_error(f"rewards: {reward.name}", f"to be written as {words}", got)
        gold = GOLD[reward.convention]
        for name in reward.needs:
            if name in GIVEN[reward.convention] and name != gold:
                continue
            missing = [e for e in examples if not _has(e, name, name == gold, reward.convention)]
            if missing:
                field = "an answer" if name == gold else f"a field {name!r}"
                expected = f"{field} in every {split} example"
                got = f"{len(missing)} of {len(examples)} without"
                first = str(missing[0].prompt)[:60]
                argument = f"rewards: {reward.name} asks for {name}"
                raise argument_error(argument, expected, f"{got}, first {first!r}")


def _has(example: Example, name: str, is_gold: bool, convention: str) -> bool:
    if is_gold and convention == OURS:
        return example.answer is not None  # our functions get the parsed answer, not the row's
    return name in example.fields or (is_gold and label_of(example) is not None)
