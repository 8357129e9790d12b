"""Reward functions with TRL's signatures. `test_reward_functions.py` runs them in two trainers.

tests/rewards/test_conventions.py tests coroutines, and the types that a function may return.
"""

import functools


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def every_argument(prompts, completions, completion_ids, answer, level, trainer_state, **others):
    sizes = zip(prompts, completions, completion_ids, answer, strict=True)
    of_others = len(others["answers"][0])
    return [trainer_state.global_step + len(p) + len(text_of(c)) + len(i) + len(a) + of_others
            for p, c, i, a in sizes]  # fmt: skip


def some_do_not_apply(completions, level, **kwargs):
    return [None if level_ % 2 else 1.0 for level_ in level]


class Scaled:
    """Reward with state. Each trainer gets an instance of this class."""

    def __init__(self, scale=3.0):
        self.scale = scale
        self.__name__ = "scaled"

    def __call__(self, completions, **kwargs):
        return [len(text_of(c)) * self.scale for c in completions]


scaled = Scaled(2.0)


def _weighted(completions, weight, **kwargs):
    return [weight * text_of(c).count("e") for c in completions]


partial = functools.partial(_weighted, weight=0.5)


class FromTheTrainer:
    """Reward that uses the trainer's state.

    TRL gets an instance of this class, and our trainer gets the class itself.
    """

    __name__ = "FromTheTrainer"

    def __call__(self, trainer_state, completions, **kwargs):
        return [10.0 * trainer_state.global_step + trainer_state.max_steps] * len(completions)


def last_message(prompts, completions, **kwargs):
    said = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
    roles = [float(not isinstance(c, str) and c[0]["role"] == "assistant") for c in completions]
    return [len(s) + role for s, role in zip(said, roles, strict=True)]


NAMES = (
    "every_argument", "some_do_not_apply", "scaled", "partial", "FromTheTrainer", "last_message",
)  # fmt: skip
