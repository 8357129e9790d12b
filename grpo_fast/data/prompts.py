"""Construction of prompts from a template, chat settings and worked examples."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_fast.data import Example, LazySequence, Prompt, text_of
from grpo_fast.data.records import ANSWERS, SOLUTIONS, column_of
from grpo_fast.errors import require

PROMPT_TEMPLATES = {
    "plain": "Question: {question}\nAnswer:",
    "hash": "{question}\nThink step by step, then end with the final answer as: #### <number>\n",
    "answer_tag": "{question}\nThink step by step, then end with: <answer>number</answer>\n",
}

# Text in braces of a template: a LaTeX command with its argument, {{name}} or {name}.
_SLOT = re.compile(r"(\\[A-Za-z]+\{\w*\})|\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
# Tokens that begin a turn in the chat templates of common models.
_TURN = re.compile(
    r"<\|(?:im_start|start_header_id|begin_of_text|start_of_role|user)\|>|<start_of_turn>"
    r"|<｜(?:User|begin▁of▁sentence)｜>|\[INST\]|\n\nAssistant:\s*\Z"
)


class Form(NamedTuple):
    """Template and chat settings that turn a question into a prompt.

    Attributes:
        template: text that contains `{question}`, and possibly names of columns in braces.
        system: system message, or None.
        chat: if True, the text becomes a chat message with the role "user".
    """

    template: str
    system: str | None
    chat: bool

    @classmethod
    def of(cls, data: Any) -> Form:
        """Build a form from the section `data` of a configuration."""
        template = data.prompt_template
        text = "{question}" if template is None else PROMPT_TEMPLATES.get(template, template)
        expected = f"{{question}} in the text, or one of {', '.join(PROMPT_TEMPLATES)}"
        require("{question}" in text, "prompt_template", expected, repr(template))
        gold = {*ANSWERS, *SOLUTIONS, *(data.columns.get(x) for x in ("answer", "solution"))}
        shown = [slot[3] for slot in _SLOT.finditer(text) if slot[3] and slot[3] in gold]
        expected = f"no gold answer in the prompt; {{{{{(*shown, '')[0]}}}}} is the text in braces"
        require(not shown, "prompt_template", expected, shown)
        return cls(text, data.system_prompt, bool(data.chat))

    def fill(self, example: Example) -> str:
        """Insert the question and the columns that the template names. `{{x}}` stands for `{x}`.

        Raises:
            ValueError: the example has no column of this name.
        """

        def insert(slot: re.Match[str]) -> str:
            name = slot[3]
            if slot[1] or slot[2]:  # LaTeX such as \\text{x}, or {{x}}
                return slot[1] or f"{{{slot[2]}}}"
            value = example.prompt if name == "question" else column_of(example.fields, [name])
            expected = f"a column {name!r} in each row; write {{{{{name}}}}} for the text in braces"
            is_column = value is not None or name.lower() in map(str.lower, example.fields)
            require(is_column, "prompt_template", expected, ", ".join(example.fields))
            value = "" if value is None else value  # an empty cell of a table
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return _SLOT.sub(insert, self.template)

    def shot(self, example: Example) -> str:
        """Return a worked example as text: the template with its question, then its solution."""
        worked = example.solution or example.answer
        came = f"none to {repr(str(example.prompt)[:60])}"
        require(worked is not None, "data.shots_tokens", "answers to all shots", came)
        return f"{self.fill(example)} {worked}\n\n"

    def apply(self, example: Example, prefix: str = "") -> Example:
        """Return the example with a prompt that is built from the template and the chat settings.

        If the prompt is already a list of chat messages, only a missing system message is added.

        Args:
            example: an example whose prompt is a question or chat messages.
            prefix: worked examples to insert before the question.

        Raises:
            ValueError: the prompt is a list of messages, but there is a template or a prefix. Or a
                chat template has already written the prompt.
        """
        prompt = example.prompt
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        if not isinstance(prompt, str):
            came = "rows of messages"
            is_plain = self.template == "{question}"
            require(is_plain, "data.prompt_template", "none for messages", came)
            require(not prefix, "data.shots_tokens", "none for rows of messages", came)
            has_system = any(message["role"] == "system" for message in prompt)
            return example if has_system else example._replace(prompt=[*system, *prompt])
        turn = _TURN.search(prompt)
        came = f"{prompt[:60]!r}, which has the token {turn and turn[0]} of a chat template"
        require(turn is None, "data", "questions, or lists of chat messages", came)
        text = prefix + self.fill(example)
        if not system and not self.chat:
            return example._replace(prompt=text)
        return example._replace(prompt=[*system, {"role": "user", "content": text}], text=text)


class Shots:
    """Worked examples (shots) to insert before questions, up to a number of tokens per prompt.

    Args:
        pool: the worked examples to choose from, all from the training split.
        form: the template and the chat settings of prompts and shots.
        budget: maximum number of tokens of all shots in a prompt.
        tokenizer: the tokenizer that counts the tokens of the shots.

    Raises:
        ValueError: not one example of the pool fits into the budget.
    """

    def __init__(self, pool: Sequence[Example], form: Form, budget: int, tokenizer: Any) -> None:
        self.form = form
        self.budget = budget
        self.keys = [question_key(e.prompt) for e in pool]
        self.texts = [form.shot(e) for e in pool]
        self._length = functools.cache(
            lambda i: len(tokenizer(self.texts[i], add_special_tokens=False)["input_ids"])
        )
        if not any(self._length(i) <= budget for i in range(len(pool))):
            none_fits = f"not one of {len(pool)} training examples fits into {budget} tokens"
            raise ValueError(f"data.shots_tokens: {none_fits}")

    def draw(self, prompt: Prompt, seed: str) -> list[int]:
        """Draw the shots of a prompt at random, until the next shot does not fit into the budget.

        No question occurs twice. Questions that differ only in case and whitespace count as equal.

        Args:
            prompt: the question, which must not be one of the shots.
            seed: seed of the random choice.

        Returns:
            Indices of the shots in `pool`, in prompt order.
        """
        chosen: list[int] = []
        seen = {question_key(prompt)}
        room = self.budget
        count = len(self.texts)
        for i in random.Random(seed).sample(range(count), count):
            if self.keys[i] in seen:
                continue
            room -= self._length(i)
            if room < 0:
                break
            chosen.append(i)
            seen.add(self.keys[i])
        return chosen


class ShotPrompts(LazySequence):
    """Examples whose prompts begin with shots, chosen at random.

    The shots of example i depend only on the seed and on i.

    Args:
        examples: the examples to extend.
        shots: the worked examples to choose from.
        seed: seed of the random choice of shots.
    """

    def __init__(self, examples: Sequence[Example], shots: Shots, seed: int | str) -> None:
        self.examples = examples
        self.length = len(examples)
        self.shots = shots
        self.seed = seed

    def make(self, index: int) -> Example:
        example = self.examples[index]
        drawn = self.shots.draw(example.prompt, f"{self.seed}/shots/{index}")
        return self.shots.form.apply(example, "".join(self.shots.texts[i] for i in drawn))


def question_key(prompt: Prompt) -> str:
    """Return a prompt's text in lower case and without whitespace, as a key for equal questions."""
    return "".join(text_of(prompt).split()).casefold()
