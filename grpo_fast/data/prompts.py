"""The form of a prompt: template, chat messages, worked examples in front of the question."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_fast.data.example import DatasetError, Example, Made, Prompt, need

PROMPT_TEMPLATES = {
    "plain": "Question: {question}\nAnswer:",
    "hash": "{question}\nThink step by step, then end with the final answer as: #### <number>\n",
    "answer_tag": "{question}\nThink step by step, then end with: <answer>number</answer>\n",
}


class Form(NamedTuple):
    """A template with `{question}` in it, and whether the text is sent as chat messages."""

    template: str
    system: str | None
    chat: bool

    @classmethod
    def of(cls, template: str | None, system: str | None = None, chat: bool = False) -> Form:
        """By a name in PROMPT_TEMPLATES, or by a text with `{question}`; None: no template."""
        text = "{question}" if template is None else PROMPT_TEMPLATES.get(template, template)
        expected = f"{{question}} in the text, or one of {', '.join(PROMPT_TEMPLATES)}"
        need("{question}" in text, "prompt_template", expected, repr(template))
        return cls(text, system, chat)

    def fill(self, question: str) -> str:
        """The template with the question in it; braces in either are left alone."""
        return self.template.replace("{question}", question)

    def shot(self, example: Example) -> str:
        """A worked example: the prompt as the question has it, and its solution."""
        worked = example.solution or example.answer
        asked = repr(str(example.prompt)[:60])
        need(worked is not None, "data.shots", "an answer to every shot", f"none to {asked}")
        return f"{self.fill(str(example.prompt))} {worked}\n\n"

    def dress(self, example: Example, prefix: str = "") -> Example:
        """Return the example with its prompt in this form.

        Messages get the system prompt if they have none. A template is refused: it is of texts.
        """
        if not isinstance(example.prompt, str):
            came = "rows of messages"
            need(self.template == "{question}", "data.prompt_template", "none for messages", came)
            need(not prefix, "data.shots", "none for rows of messages", came)
            if self.system is None or any(m["role"] == "system" for m in example.prompt):
                return example
            return example._replace(prompt=[self.system_message, *example.prompt])
        text = prefix + self.fill(example.prompt)
        if self.system is None and not self.chat:
            return example._replace(prompt=text)
        messages = [] if self.system is None else [self.system_message]
        return example._replace(prompt=[*messages, {"role": "user", "content": text}])

    @property
    def system_message(self) -> dict[str, str]:
        return {"role": "system", "content": str(self.system)}


def in_chat(example: Example) -> Example:
    """Return the example with a prompt of plain text as a user's message."""
    if not isinstance(example.prompt, str):
        return example
    return example._replace(prompt=[{"role": "user", "content": example.prompt}])


class ShotPrompts(Made[Example]):
    """Examples whose prompts begin with worked examples, which are drawn when one is read.

    The shots of number i depend on (seed, i) only. A question never occurs among its own shots, and
    no question occurs twice among them (compared without case and blanks).

    Args:
        pool: the worked examples to draw from; they must come from the training split.
        budget: tokens that the shots of a prompt may hold together; the first that does not fit
        ends them.

    Raises DatasetError for a pool that is empty, or in which not one shot fits into the budget.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        pool: Sequence[Example],
        form: Form,
        *,
        budget: int,
        count_tokens: Callable[[str], int],
        seed: int | str,
    ) -> None:
        self.examples, self.form, self.budget, self.length = examples, form, budget, len(examples)
        self.seed = seed
        self.keys = [question_key(e.prompt) for e in pool]
        self.texts = [form.shot(e) for e in pool]
        self._length = functools.cache(lambda i: count_tokens(self.texts[i]))
        shortest = sorted(range(len(pool)), key=lambda i: len(self.texts[i]))[:8]
        if not any(self._length(i) <= budget for i in shortest):
            none_fits = f"not one of {len(pool)} training examples fits into {budget} tokens"
            raise DatasetError(f"data.shots_tokens: {none_fits}")

    def make(self, index: int) -> Example:
        prefix = "".join(self.texts[i] for i in self.shots(index))
        return self.form.dress(self.examples[index], prefix)

    def shots(self, index: int) -> list[int]:
        """Places in the pool of the shots of question `index`, in their order in the prompt."""
        taken, seen, room = [], {question_key(self.examples[index].prompt)}, self.budget
        count = len(self.texts)
        for i in random.Random(f"{self.seed}/shots/{index}").sample(range(count), count):
            if self.keys[i] in seen:
                continue
            room -= self._length(i)
            if room < 0:
                break
            taken.append(i)
            seen.add(self.keys[i])
        return taken


def question_key(prompt: Prompt) -> str:
    """The text of a question without case and blanks: equal keys are equal questions."""
    text = prompt if isinstance(prompt, str) else " ".join(part["content"] for part in prompt)
    return "".join(text.split()).casefold()
