"""The columns that a reward function asks for by the names of its parameters, an entry a
completion.

`prompts`, `completions` (texts), `answers`; `completion_ids` (the tokens, with the EOS where there
is one) and `completion_lengths`; `prefills` (the beginning of the assistant's turn that a prompt
holds, as an opened `<think>`, else ""); and under its own name every other field of the examples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_fast.data import Example, Prompt
from grpo_fast.errors import argument_error
from grpo_fast.rewards.conventions import ONLY_TRL, OPENRLHF, OURS, TRL, VERL, VERLS
from grpo_fast.rewards.reward_set import RewardResult, RewardSet

SAMPLED = ("prompts", "completions", "completion_ids", "completion_lengths", "prefills")
# By convention, the parameter that is the gold answer, and those that need no column of the data.
GOLD = {OURS: "answers", TRL: "answer", VERL: "ground_truth", OPENRLHF: "labels"}
GIVEN = {
    OURS: SAMPLED, TRL: (*SAMPLED, *ONLY_TRL), VERL: VERLS, OPENRLHF: ("queries", "prompts"),
}  # fmt: skip
_OPENED = re.compile(r"<(\w+)>\s*(?:</\1>\s*)?\Z")
LONGEST_OPENED = 200  # characters at the end of a prompt


def score(
    rewards: RewardSet,
    examples: Sequence[Example],
    completions: Sequence[str],
    completion_ids: Sequence[list[int]] | None = None,
    prompt_texts: Sequence[str] | None = None,
) -> RewardResult:
    """Return the rewards of completions; `completions[i]` answers `examples[i]`.

    Args:
        prompt_texts: the prompts as the model received them.
    """
    columns: dict[str, Any] = {
        name: [example.fields.get(name) for example in examples]
        for name in dict.fromkeys(name for example in examples for name in example.fields)
    }
    if completion_ids is not None:
        columns["completion_ids"] = completion_ids
        columns["completion_lengths"] = [len(ids) for ids in completion_ids]
    texts = prompt_texts or [""] * len(examples)
    prefills = map(prefill_of, (e.prompt for e in examples), texts)
    columns["prefills"] = list(prefills)
    prompts, answers = [e.prompt for e in examples], [e.answer for e in examples]
    labels = [label_of(example) for example in examples]
    return rewards(prompts, completions, answers, columns, labels=labels, prompt_texts=prompt_texts)


def label_of(example: Example) -> Any:
    """Return the gold answer as its row holds it."""
    return example.answer if example.label is None else example.label


def prefill_of(prompt: Prompt, text: str) -> str:
    """Return the beginning of the assistant's turn that a prompt holds; "" without one.

    Args:
        prompt: messages that end with the assistant's, or another prompt.
        text: the prompt as the model received it; its template may open, or close, a thought.
    """
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"]
    opened = _OPENED.search(text[-LONGEST_OPENED:])
    return "" if opened is None else opened[0]


def check_examples(rewards: RewardSet, examples: Sequence[Example], split: str) -> None:
    """Raise a ValueError where some of the examples lack a column that a function needs."""
    for reward in rewards.rewards:
        if reward.is_unsure and any("answers" in e.fields for e in examples):
            words = "{trl: FUNCTION} or {grpo_fast: FUNCTION}"
            came = "a column 'answers', which TRL passes under this name"
            raise argument_error(f"rewards: {reward.name}", f"to be written as {words}", came)
        given, gold = GIVEN[reward.convention], GOLD[reward.convention]
        for name in [name for name in reward.needs if name == gold or name not in given]:
            is_own = name == "answers" and reward.convention == OURS  # read, not the row's
            has = [
                e.answer is not None if is_own
                else name in e.fields or (name == gold and label_of(e) is not None)
                for e in examples
            ]  # fmt: skip
            if not all(has):
                field = "an answer" if name == gold else f"a field {name!r}"
                came = f"{has.count(False)} of {len(examples)} without"
                first = str(examples[has.index(False)].prompt)[:60]
                raise argument_error(
                    f"rewards: {reward.name} asks for {name}", f"{field} in every {split} example",
                    f"{came}, first {first!r}",
                )  # fmt: skip
