"""Tasks that need no download: sort a few symbols, add two numbers, or answer listed prompts.

Example i of the training split of the first two is a function of (seed, i) alone. Held-out prompts
do not depend on the run's seed, and are trained on only where there are no others.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import Any, ClassVar

from grpo_fast.data.example import Example, Made, need

USUAL_TEST = 256  # test prompts where nobody says how many, at most half of those that there are
HELD_OUT_SEED = "grpo_fast held-out prompts"


class GeneratedTask(Made[Example]):
    """One split of a task. Test prompts are kept out of training, unless there are no others."""

    options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *, split: str, seed: int, n_train: int = 1 << 16, n_test: int | None = None
    ) -> None:
        space = self.space_size()
        n_test = min(USUAL_TEST, space // 2) if n_test is None else n_test
        longer = f"{n_test}; make the prompts longer or the test split smaller"
        most = f"at most the {space} different prompts of this task"
        need(n_test <= space, "data.n_test", most, longer)
        self.split, self.seed = split, seed
        rng, chosen = random.Random(HELD_OUT_SEED), dict[tuple[int, ...], None]()
        while len(chosen) < n_test:
            chosen[self.draw(rng)] = None
        self.held_out = list(chosen)  # in the order of drawing
        self._not_trained = frozenset(self.held_out if n_test < space else ())
        self.length = n_test if split == "test" else n_train

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """One random prompt, as the numbers it is made of."""

    @abstractmethod
    def space_size(self) -> int:
        """How many different prompts there are."""

    @abstractmethod
    def render(self, content: tuple[int, ...]) -> Example:
        """The text of a drawn prompt and its answer."""

    def make(self, index: int) -> Example:
        if self.split == "test":
            return self.render(self.held_out[index])
        # A text is hashed by SHA-512, not by `hash`, which differs from process to process.
        rng = random.Random(f"{self.seed}/{index}")
        content = self.draw(rng)
        while content in self._not_trained:
            content = self.draw(rng)
        return self.render(content)


class SortTask(GeneratedTask):
    """The CS336 lecture's task: n random symbols, the answer is the same symbols sorted.

    `3 1 2 =` → `1 2 3`. Symbols are the numbers 0…symbols−1 separated by blanks, one token each.
    """

    options = ("digits", "symbols")

    def __init__(self, *, digits: int = 5, symbols: int = 10, **split: Any) -> None:
        self.digits, self.symbols = digits, symbols
        super().__init__(**split)

    @property
    def vocabulary(self) -> list[str]:
        return [*map(str, range(self.symbols)), "="]

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randrange(self.symbols) for _ in range(self.digits))

    def space_size(self) -> int:
        return int(self.symbols**self.digits)

    def render(self, content: tuple[int, ...]) -> Example:
        answer = " ".join(map(str, sorted(content)))
        return Example(prompt=" ".join([*map(str, content), "="]), answer=answer, solution=answer)


class ArithmeticTask(GeneratedTask):
    """Addition of two numbers of up to `digits` digits: `1 7 + 5 =` → `2 2`, a token per digit."""

    options = ("digits",)

    def __init__(self, *, digits: int = 2, **split: Any) -> None:
        self.digits = digits
        super().__init__(**split)

    @property
    def vocabulary(self) -> list[str]:
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
    """Return the prompts of the task "open", which have no answer."""
    return [Example(prompt, answer=None, solution=None) for prompt in OPEN]
