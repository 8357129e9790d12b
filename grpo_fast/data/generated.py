"""Tasks whose data needs no download: sorting symbols, adding two numbers, and open prompts.

In the sorting and adding tasks, training example i depends only on the run's seed and on i. The
test prompts do not depend on the seed.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import Any, ClassVar

from grpo_fast.data.example import Example, LazySequence, need

USUAL_TEST = 256  # default number of test prompts, if at least twice as many prompts exist
HELD_OUT_SEED = "grpo_fast held-out prompts"


class GeneratedTask(LazySequence[Example]):
    """Base class for one split of a generated task.

    Test prompts are excluded from training, unless the test split contains all possible prompts.

    Args:
        split: "train" or "test".
        seed: seed of the training examples.
        n_train: number of training examples.
        n_test: number of test prompts. By default 256, or half of all prompts if that is less.

    Raises:
        DatasetError: the task has fewer than `n_test` different prompts.
    """

    options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *, split: str, seed: int, n_train: int = 1 << 16, n_test: int | None = None
    ) -> None:
        space = self.space_size()
        n_test = min(USUAL_TEST, space // 2) if n_test is None else n_test
        longer = f"{n_test}; make the prompts longer or the test split smaller"
        most = f"at most the {space} different prompts of this task"
        need(n_test <= space, "data.n_test", most, longer)
        self.split = split
        self.seed = seed
        rng = random.Random(HELD_OUT_SEED)
        chosen = dict[tuple[int, ...], None]()
        while len(chosen) < n_test:
            chosen[self.draw(rng)] = None
        self.test_prompts = list(chosen)
        self._not_trained = frozenset(self.test_prompts if n_test < space else ())
        self.length = n_test if split == "test" else n_train

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """Draw a random prompt and return the numbers that it contains."""

    @abstractmethod
    def space_size(self) -> int:
        """Return the number of different prompts that the task can generate."""

    @abstractmethod
    def render(self, content: tuple[int, ...]) -> Example:
        """Build the example whose prompt contains these numbers."""

    def make(self, index: int) -> Example:
        if self.split == "test":
            return self.render(self.test_prompts[index])
        # Seed with a string. Python hashes it with SHA-512, so all processes draw the same numbers.
        rng = random.Random(f"{self.seed}/{index}")
        content = self.draw(rng)
        while content in self._not_trained:
            content = self.draw(rng)
        return self.render(content)


class SortTask(GeneratedTask):
    """Sorting task from the CS336 lecture. For example, `3 1 2 =` has the answer `1 2 3`.

    Args:
        digits: number of symbols in a prompt.
        symbols: number of different symbols. The symbols are 0 to symbols - 1, one token each.
        **split: arguments of `GeneratedTask`.
    """

    options = ("digits", "symbols")

    def __init__(self, *, digits: int = 5, symbols: int = 10, **split: Any) -> None:
        self.digits = digits
        self.symbols = symbols
        super().__init__(**split)

    @property
    def vocabulary(self) -> list[str]:
        """Return all words of prompts and answers."""
        return [*map(str, range(self.symbols)), "="]

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randrange(self.symbols) for _ in range(self.digits))

    def space_size(self) -> int:
        return int(self.symbols**self.digits)

    def render(self, content: tuple[int, ...]) -> Example:
        answer = " ".join(map(str, sorted(content)))
        return Example(prompt=" ".join([*map(str, content), "="]), answer=answer, solution=answer)


class ArithmeticTask(GeneratedTask):
    """Addition of two numbers, one token per digit. `1 7 + 5 =` has the answer `2 2`.

    Args:
        digits: largest number of digits of each summand.
        **split: arguments of `GeneratedTask`.
    """

    options = ("digits",)

    def __init__(self, *, digits: int = 2, **split: Any) -> None:
        self.digits = digits
        super().__init__(**split)

    @property
    def vocabulary(self) -> list[str]:
        """Return all words of prompts and answers."""
        return [*map(str, range(10)), "+", "="]

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return rng.randrange(10**self.digits), rng.randrange(10**self.digits)

    def space_size(self) -> int:
        return int(100**self.digits)

    def render(self, content: tuple[int, ...]) -> Example:
        first, second = content
        answer = " ".join(str(first + second))
        prompt = f"{' '.join(str(first))} + {' '.join(str(second))} ="
        return Example(prompt=prompt, answer=answer, solution=answer)


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


def open_examples() -> list[Example]:
    """Return the examples of the task `open`. They have prompts, but no answers."""
    return [Example(prompt, answer=None, solution=None) for prompt in OPEN]
