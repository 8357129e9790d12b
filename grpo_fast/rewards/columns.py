"""The columns that a reward function asks for by the names of its parameters, an entry a
completion.

`prompts`, `completions` (texts), `answers`; `completion_ids` (the tokens, with the EOS where there
is one) and `completion_lengths`; and under its own name every other field of the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast.data import Example
from grpo_fast.errors import wrong
from grpo_fast.rewards.reward_set import RewardResult, RewardSet

SAMPLED = ("prompts", "completions", "completion_ids", "completion_lengths")


def score(
    rewards: RewardSet,
    examples: Sequence[Example],
    completions: Sequence[str],
    completion_ids: Sequence[list[int]] | None = None,
) -> RewardResult:
    """The rewards of completions; `completions[i]` answers `examples[i]`."""
    columns: dict[str, Any] = {
        name: [example.fields.get(name) for example in examples]
        for name in dict.fromkeys(name for example in examples for name in example.fields)
    }
    if completion_ids is not None:
        columns["completion_ids"] = completion_ids
        columns["completion_lengths"] = [len(ids) for ids in completion_ids]
    prompts, answers = [e.prompt for e in examples], [e.answer for e in examples]
    return rewards(prompts, completions, answers, columns)


def check_examples(rewards: RewardSet, examples: Sequence[Example], split: str) -> None:
    """Raise a ValueError where some of the examples lack a column that a function needs."""
    for reward in rewards.rewards:
        for name in (name for name in reward.needs if name not in SAMPLED):
            is_answers = name == "answers"
            has = [e.answer is not None if is_answers else name in e.fields for e in examples]
            if not all(has):
                field = "an answer" if is_answers else f"a field {name!r}"
                came = f"{has.count(False)} of {len(examples)} without"
                first = str(examples[has.index(False)].prompt)[:60]
                raise wrong(
                    f"rewards: {reward.name} asks for {name}", f"{field} in every {split} example",
                    f"{came}, first {first!r}",
                )  # fmt: skip
