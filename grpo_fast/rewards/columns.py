"""Columns that reward functions receive. A function requests a column by naming a parameter.

Each column has one entry per completion:

- `prompts` (texts, or lists of messages if the rows of the data have messages), `completions`
  (strings) and `answers`.
- `completion_ids` (tokens, with EOS if the completion ended) and `completion_lengths`.
- `prefills`: the beginning of the assistant's turn that the prompt contains, such as `<think>`.
- Every other field of the examples, under its name.
"""

from __future__ import annotations

import ast
import functools
import itertools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_fast.data import Example, Prompt
from grpo_fast.errors import argument_error, require
from grpo_fast.rewards.conventions import OPENRLHF, OURS, SAMPLED, TRAINER_STATE, TRL, VERL
from grpo_fast.rewards.reward_set import RewardResult, RewardSet
from grpo_fast.rewards.workers import unit_tests

log = logging.getLogger(__name__)

# GOLD: the parameter that receives the gold answer, for each convention. GIVEN: the parameters that
# this package fills, so that the data needs no column for them.
GOLD = {OURS: "answers", TRL: "answer", VERL: "ground_truth", OPENRLHF: "labels"}
GIVEN = {OURS: SAMPLED, TRL: (*SAMPLED, TRAINER_STATE), OPENRLHF: ("queries", "prompts"),
         VERL: ("data_source", "solution_str", "extra_info")}  # fmt: skip
# Parameters that only functions of other libraries have, with the library.
OTHERS = {name: library for library in (TRL, VERL, OPENRLHF)
          for name in (GOLD[library], *GIVEN[library]) if name not in SAMPLED}  # fmt: skip
_OPENED = re.compile(r"<(\w+)>\s*(?:</\1>\s*)?\Z")
LONGEST_OPENED = 200  # number of characters at a prompt's end that are searched for a tag


def score(
    rewards: RewardSet,
    examples: Sequence[Example],
    completions: Sequence[str],
    completion_ids: Sequence[list[int]] | None = None,
    prompt_texts: Sequence[str] | None = None,
) -> RewardResult:
    """Compute the rewards of completions.

    Args:
        rewards: the reward functions.
        examples: N examples. `completions[i]` is the completion of `examples[i]`.
        completions: N strings.
        completion_ids: N lists of token ids.
        prompt_texts: N prompts as the model received them, after the chat template was applied.

    Raises:
        ValueError: the lists differ in length.
    """
    # 1. Check the lengths. Collect the columns of the data, and what the model has sampled.
    given = {"completions": completions, "completion_ids": completion_ids,
             "prompt_texts": prompt_texts}  # fmt: skip
    for name, values in given.items():
        count = len(examples) if values is None else len(values)
        require(count == len(examples), name, f"{len(examples)}, one for each example", count)
    names = dict.fromkeys(name for e in examples for name in e.fields)
    columns: dict[str, Any] = {name: [e.fields.get(name) for e in examples] for name in names}
    needs = {name for reward in rewards.rewards for name in reward.function.signature.needs}
    if "tests" in needs and "tests" not in names:
        columns["tests"] = [tests_of(e) for e in examples]
    if completion_ids is not None:
        columns["completion_ids"] = completion_ids
        columns["completion_lengths"] = [len(ids) for ids in completion_ids]
    sent = prompt_texts or [""] * len(examples)
    pairs = zip(examples, sent, strict=True)
    columns["prefills"] = [prefill_of(e.prompt, text) for e, text in pairs]
    # 2. Arrange them for the functions of each convention. For a chat prompt, TRL passes the
    # completion as a list with one message. As in TRL, a column of the data replaces our column of
    # the same name.
    prompts = [_row_prompt(e) for e in examples]
    answers = [e.answer for e in examples]
    labels = [label_of(e) for e in examples]
    none = [None] * len(examples)
    turns = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    lists: dict[str, Mapping[str, Sequence[Any]]] = {
        OURS: {**columns, "prompts": prompts, "completions": completions, "answers": answers},
        TRL: {"answers": answers, "answer": labels, **columns,
              "prompts": prompts, "completions": turns},
        VERL: {"data_source": columns.get("data_source", none), "solution_str": completions,
               "ground_truth": labels,
               "extra_info": [info or {} for info in columns.get("extra_info", none)]},
        OPENRLHF: {"queries": [a + b for a, b in zip(sent, completions, strict=True)],
                   "prompts": sent, "labels": labels},
    }  # fmt: skip
    return rewards(lists, len(completions))


def _row_prompt(example: Example) -> Prompt:
    """Return the prompt of the data, before a chat template turned it into messages."""
    return example.prompt if example.text is None else example.text


def label_of(example: Example) -> Any:
    """Return the gold answer as it appears in the data row, before parsing."""
    return example.answer if example.label is None else example.label


def prefill_of(prompt: Prompt, text: str) -> str:
    """Return the beginning of the assistant's turn that a prompt contains, or "".

    Args:
        prompt: a string or a list of messages. The last message may have the role "assistant".
        text: the prompt as the model received it. The chat template may have added `<think>`.
    """
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"]
    opened = _OPENED.search(text[-LONGEST_OPENED:])
    return "" if opened is None else opened[0]


def check_examples(rewards: RewardSet, examples: Sequence[Example], split: str) -> None:
    """Check that all examples have the columns that the reward functions require.

    Args:
        rewards: the reward functions.
        examples: the examples of a split.
        split: name of the split, for error messages.

    Raises:
        ValueError: an example lacks a column.
    """
    for reward in rewards.rewards:
        convention = reward.function.convention
        for name in reward.function.signature.needs:
            is_gold = name == GOLD[convention]
            missing = [e for e in examples if not _has(e, name, is_gold, convention)]
            if missing and name not in GIVEN[convention]:
                field = "an answer" if is_gold else f"a field {name!r}"
                got = f"{len(missing)} of {len(examples)} without"
                first = f"first {str(missing[0].prompt)[:60]!r}"
                if name in OTHERS:
                    first += f"; a function of {OTHERS[name]} needs convention: {OTHERS[name]}"
                argument = f"rewards: {reward.name} asks for {name}"
                expected = f"{field} in every {split} example"
                raise argument_error(argument, expected, f"{got}, {first}")


def usable(rewards: RewardSet, drop: bool, examples: Sequence[Example]) -> Sequence[Example]:
    """Return the examples whose tests `code_tests` can run.

    Args:
        rewards: the reward functions. Without `code_tests`, all examples are usable.
        drop: the setting `data.drop_unusable`. If True, the other examples are dropped, and their
            number is logged with the reasons.
        examples: the examples.

    Raises:
        ValueError: `drop` is False, and `code_tests` refuses the tests of an example.
    """
    paths = [getattr(reward.function, "path", "") for reward in rewards.rewards]
    if not any(path.endswith("code_tests.py:code_tests") for path in paths):
        return examples
    errors = [tests_error(example) for example in examples]
    kept = [example for example, error in zip(examples, errors, strict=True) if not error]
    count = len(examples) - len(kept)
    # Count the part of each message that does not quote the row.
    starts = [error.partition(", got ")[0] for error in errors if error]
    found = Counter(start.removeprefix("tests: expected ") for start in starts)
    reasons = "; ".join(f"{reason} ({number})" for reason, number in found.most_common())
    if count and not drop:
        expected = "tests that the README of rewards lists in every example"
        place = next(place for place, error in enumerate(errors) if error)
        first = f"first {str(examples[place].prompt)[:60]!r}: {errors[place]}; reasons: {reasons}"
        got = f"{count} of {len(examples)} without, {first}"
        remedy = "data.drop_unusable=true skips such rows"
        raise argument_error("rewards: code_tests", expected, f"{got}; {remedy}")
    if count:
        text = "data: %d rows with tests that code_tests refuses are skipped: %s"
        log.warning(text, count, reasons)
    return kept


def tests_error(example: Example) -> str:
    """Return why `code_tests` refuses the tests of an example, or "" if it can run them."""
    try:
        unit_tests.check(tests_of(example))
    except ValueError as error:
        return str(error)
    return ""


def tests_of(example: Example) -> Any:
    """Return the unit tests of an example in the form that `code_tests` accepts, or None.

    The example has a field `tests`, or the fields of a published data set: `test_list` (MBPP),
    `test` and `entry_point` (HumanEval, LeetCode), `test` (KodCode) or `input_output` (programs of
    APPS and TACO).
    """
    given = {name: value for name, value in example.fields.items() if value is not None}
    if "tests" in given:
        return given["tests"]
    if "test_list" in given:
        lists = [given.get("test_imports", []), given["test_list"]]
        lists = [x if isinstance(x, list) else [x] for x in lists]
        return [given.get("test_setup_code", ""), *itertools.chain(*lists)]
    if isinstance(given.get("test"), str):
        prompt = _row_prompt(example)
        code = prompt if isinstance(prompt, str) else ""
        return _with_entry_point(given["test"], str(given.get("entry_point", "")), code)
    return given.get("test", given.get("input_output"))


@functools.lru_cache(maxsize=256)
def _with_entry_point(tests: str, entry_point: str, prompt: str) -> str:
    """Return tests that call `check(entry_point)`, with the helpers of a HumanEval prompt.

    Without the prompt's helpers, an answer could define a helper that accepts every result.
    """
    parts = [tests]
    try:
        body = ast.parse(prompt).body
    except (SyntaxError, ValueError):  # the prompt is not code
        body = []
    helpers = [node for node in body if isinstance(node, ast.FunctionDef)
               and node.name != entry_point and f"{node.name}(" in tests]  # fmt: skip
    if helpers:
        imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        parts += map(ast.unparse, [*imports, *helpers])
    if entry_point.isidentifier():
        parts.append(f"from solution import {entry_point}")
    if entry_point and "def check(" in tests and "\ncheck(" not in tests:
        parts.append(f"check({entry_point})")
    return "\n".join(parts)


def _has(example: Example, name: str, is_gold: bool, convention: str) -> bool:
    if is_gold and convention == OURS:
        return example.answer is not None  # our functions get the parsed answer, not the row's
    if name == "tests":
        return tests_of(example) is not None
    return name in example.fields or (is_gold and label_of(example) is not None)
