"""Tasks that need no data files: sorting digits, and a list of open prompts."""

from __future__ import annotations

import random

from grpo_fast.data import Example, LazySequence
from grpo_fast.errors import require

TRAINING_EXAMPLES = 1 << 16
USUAL_TEST = 256  # default number of test prompts, if at least twice as many prompts exist
HELD_OUT_SEED = "grpo_fast held-out prompts"


class SortTask(LazySequence[Example]):
    """One split of the sorting task from the CS336 lecture. `3 1 2 =` has the answer `1 2 3`.

    Training example i depends only on the seed and on i. The test prompts do not depend on the
    seed. They are excluded from training, unless the test split contains all possible prompts.

    Args:
        digits: number of digits in a prompt.
        split: "train" or "test".
        seed: seed of the training examples.
        n_test: number of test prompts. By default 256, or half of all prompts if that is less.

    Raises:
        ValueError: fewer than `n_test` different prompts exist.
    """

    vocabulary = (*map(str, range(10)), "=")  # all words of prompts and answers

    def __init__(self, digits: int, *, split: str, seed: int, n_test: int | None = None) -> None:
        self.digits = digits
        self.split = split
        self.seed = seed
        space = 10**digits
        n_test = min(USUAL_TEST, space // 2) if n_test is None else n_test
        longer = f"{n_test}; make the prompts longer or the test split smaller"
        most = f"at most the {space} different prompts of this task"
        require(n_test <= space, "data.n_test", most, longer)
        rng = random.Random(HELD_OUT_SEED)
        chosen = dict[tuple[int, ...], None]()
        while len(chosen) < n_test:
            chosen[self.draw(rng)] = None
        self.test_prompts = list(chosen)
        self._not_trained = frozenset(self.test_prompts if n_test < space else ())
        self.length = n_test if split == "test" else TRAINING_EXAMPLES

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randrange(10) for _ in range(self.digits))

    def make(self, index: int) -> Example:
        if self.split == "test":
            content = self.test_prompts[index]
        else:
            # Seed the generator with a string. Python hashes a string seed with SHA-512, so all
            # processes draw the same numbers.
            rng = random.Random(f"{self.seed}/{index}")
            content = self.draw(rng)
            while content in self._not_trained:
                content = self.draw(rng)
        answer = " ".join(map(str, sorted(content)))
        return Example(prompt=" ".join([*map(str, content), "="]), answer=answer, solution=answer)


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
