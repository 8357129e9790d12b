"""Prompts that are listed here: the lecture's three, and open ones that have no answer.

What is trained on is what is evaluated: there are too few to hold any out.
"""

from __future__ import annotations

from grpo_fast.data.example import Example

# CS336's lecture on policy gradients: three numbers each, to be sorted.
LECTURE = ("1 0 2", "3 2 4", "1 2 3")

OPEN = (
    "The weather today is",
    "Once upon a time",
    "My favourite book is about",
    "In the morning, the city",
    "The most important thing to learn is",
    "She opened the door and",
    "Scientists have found that",
    "When the music stopped,",
)


def listed_examples(task: str) -> list[Example]:
    """The prompts of "lecture", each with its numbers sorted, or of "open", with no answer."""
    if task == "open":
        return [Example(prompt, answer=None, solution=None) for prompt in OPEN]
    answers = (" ".join(sorted(prompt.split())) for prompt in LECTURE)
    return [Example(p, answer=a, solution=a) for p, a in zip(LECTURE, answers, strict=True)]
