"""k-shot prompts by a token budget: worked examples from the training split in front of each question.

They make real long contexts: 8k tokens are about 50 solved GSM8K questions, which all completions of a group share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import overload

from grpo_fast.data.example import DatasetError, Example, Prompt


class ShotPrompts(Sequence[Example]):
    """Examples whose prompts begin with worked examples, made when asked for.

    The shots of number i depend on (seed, i) only. A question never occurs among its own shots, and no question occurs
    twice among them (compared without case and blanks).

    Args:
        examples: the questions.
        pool: the worked examples to draw from; they must come from the training split.
        budget: tokens the shots of a prompt may hold together, by `count_tokens` of each. Shots are drawn until the
            next one does not fit.
        count_tokens: tokens of a text.
        shot: the text of one worked example.
        dress: puts the shots before an example's question.
        seed: decides the draws.

    Raises:
        DatasetError: a pool that is empty, or in which not one shot fits into the budget.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        pool: Sequence[Example],
        *,
        budget: int,
        count_tokens: Callable[[str], int],
        shot: Callable[[Example], str],
        dress: Callable[[Example, str], Example],
        seed: int | str,
    ) -> None:
        self.examples, self.budget, self.count_tokens = examples, budget, count_tokens
        self.dress, self.seed = dress, seed
        self.keys = [question_key(e.prompt) for e in pool]
        self.texts = [shot(e) for e in pool]
        self.lengths: dict[int, int] = {}  # tokens of the shots drawn so far
        if not pool or min(map(self._length, sorted(range(len(pool)), key=lambda i: len(self.texts[i]))[:8])) > budget:
            raise DatasetError(f"data.shots_tokens: not one of {len(pool)} training examples fits into {budget} tokens")

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        example = self.examples[index]
        return self.dress(example, "".join(self.texts[i] for i in self.shots(index)))

    def shots(self, index: int) -> list[int]:
        """Places in the pool of the shots of question `index`, in their order in the prompt."""
        taken, seen, left = [], {question_key(self.examples[index].prompt)}, self.budget
        for i in random.Random(f"{self.seed}/shots/{index}").sample(range(len(self.texts)), len(self.texts)):
            if self.keys[i] in seen:
                continue
            left -= self._length(i)
            if left < 0:
                break
            taken.append(i)
            seen.add(self.keys[i])
        return taken

    def _length(self, i: int) -> int:
        if i not in self.lengths:
            self.lengths[i] = self.count_tokens(self.texts[i])
        return self.lengths[i]


def question_key(prompt: Prompt) -> str:
    """What makes two questions the same: their text without case and blanks."""
    text = prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)
    return "".join(text.split()).casefold()
