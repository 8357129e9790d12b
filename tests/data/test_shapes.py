"""Tests of public row shapes: what a row of a data set is trained on, or why it is refused."""

import json

import pytest
from tokenizers.processors import TemplateProcessing

from grpo_fast.data.splits import Splits, read_questions
from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import DataConfig
from tests.command_line import invoke


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}
RENDERED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"

# Name, row, prompt and gold answer. A fourth value is a part of the section `data`.
READ = [
    ("AIME", {"ID": "2024-I-1", "Problem": "q", "Solution": "long", "Answer": 204}, "q", "204"),
    ("MATH", {"problem": "q", "type": "Algebra", "solution": r"so \boxed{\frac12}"}, "q",
     r"\frac12"),
    ("MATH-500", {"problem": "q", "solution": r"\boxed{9}", "answer": r"\left( 3 \right)"}, "q",
     r"\left( 3 \right)"),
    ("NuminaMath", {"source": "amc", "problem": "q", "solution": r"\boxed{2}",
                    "messages": [user("q"), reply("2")]}, "q", "2"),
    ("DeepMath", {"question": "q", "final_answer": "0", "r1_solution_1": "long"}, "q", "0"),
    ("OpenMathReasoning", {"expected_answer": "5", "problem": "q"}, "q", "5"),
    ("GSM8K", {"question": "q", "answer": "so <<1+1=2>>2\n#### 2"}, "q", "2"),
    ("MetaMath", {"query": "q", "response": "so\n#### 7\nThe answer is: 7"}, "q", "7"),
    ("GPQA", {"Record ID": "r", "Question": "q", "Correct Answer": "a"}, "q", "a"),
    ("a marked solution", {"problem": "q", "answer": "", "solution": r"\boxed{2}"}, "q", "2"),
    ("Alpaca", {"instruction": "i", "input": "x", "output": "o"}, "x: i", "o",
     {"columns": {"answer": "output"}, "prompt_template": "{input}: {question}"}),
    ("messages", {"messages": [SYSTEM, user("q")], "answer": "a"}, [SYSTEM, user("q")], "a"),
    ("messages of a table", {"prompt": [{**user("q"), "tool_calls": None}], "ground_truth": "4"},
     [user("q")], "4"),
    ("a beginning of the answer", {"prompt": [user("q"), reply("<think>")], "answer": "4"},
     [user("q"), reply("<think>")], "4"),
    ("MBPP", {"text": "q", "code": "def f(): 1", "test_list": ["assert f()"]}, "q", None),
    ("HumanEval", {"prompt": "def f():\n", "canonical_solution": "c", "entry_point": "f",
                   "test": "def check(candidate):\n    assert candidate()"}, "def f():\n", None),
    ("APPS", {"question": "q", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}, "q", None),
    ("KodCode", {"question": "q", "solution": "def f(): 1",
                 "test": "from solution import f\ndef test_f():\n    assert f()"}, "q", None),
    ("LeetCodeDataset", {"prompt": "import math\n", "query": "q", "entry_point": "Solution().f",
                         "test": "def check(candidate):\n    assert candidate(1)"}, "q", None),
    ("an interval", {"question": "q", "answer": "[0,1]"}, "q", "[0,1]"),
    ("Dolly's empty context", {"instruction": "q", "context": None, "response": "r"}, "\nq", None,
     {"prompt_template": "{context}\n{question}"}),
    ("SQuAD", {"context": "c", "question": "q", "answers": {"text": ["a"]}}, "c\nq", "a",
     {"columns": {"answer": "answers.text.0"}, "prompt_template": "{context}\n{question}"}),
    ("BoolQ", {"question": "q", "answer": True, "passage": "p"}, "q", "True",
     {"prompt_template": "{question}"}),
    ("verl", {"prompt": [user("q")], "reward_model": {"style": "rule", "ground_truth": "8"}},
     [user("q")], "8"),
    ("verl with a mapping", {"prompt": [user("q")], "reward_model": {"ground_truth": {"a": 1}}},
     [user("q")], None),
    ("OpenRLHF", {"input": "q", "label": "a"}, "q", "a",
     {"columns": {"prompt": "input", "answer": "label"}}),
    ("a user's own columns", {"question": "q", "answer": "1", "output": {"a": 1}, "tools": "[]",
                              "response": [2], "label": [], "test": False}, "q", "1"),
    ("names by a key", {"title": "q", "target": {"value": "9"}, "question": "x", "why": "w"}, "q",
     "9", {"columns": {"prompt": "title", "answer": "target.value", "solution": "why"}}),
    ("a decimal", {"query": "q", "answer": 2.5}, "q", "2.5"),
    ("an integer of pandas", {"question": "q", "answer": 12.0}, "q", "12"),
    ("a long integer", {"question": "q", "answer": 10**400}, "q", "1" + "0" * 400),
    ("empty columns", {"prompt": None, "question": "q", "answer": None, "ground_truth": "1",
                       "tools": None, "context": ""}, "q", "1"),
    ("an empty answer", {"question": "q", "answer": " "}, "q", None),
    ("an empty text in a named column", {"question": "q", "truth": ""}, "q", None,
     {"columns": {"answer": "truth"}}),
    ("an empty text in a named key", {"question": "q", "extra": {"truth": ""}}, "q", None,
     {"columns": {"answer": "extra.truth"}}),
    ("an empty box", {"question": "q", "answer": r"\boxed{}"}, "q", r"\boxed{}"),
    ("a text that begins with a list", {"question": "q", "answer": '["a"] is first'}, "q",
     '["a"] is first'),
    ("names in two cases", {"prompt": None, "Prompt": "q", "answer": None, "Answer": "5"}, "q",
     "5"),
    ("a currency", {"question": "q", "answer": "$1,080"}, "q", "$1,080"),
    ("a question alone", {"question": "q"}, "q", None),
    ("no JSON", {"prompt": '[{"no JSON'}, '[{"no JSON', None),
]  # fmt: skip

MISSING = "this text in the prompt (add 'data.prompt_template="
REFUSED = [
    ("SQuAD's context", {"context": "c", "question": "q", "answers": {"text": ["a"]}},
     f"field 'context': expected {MISSING}"),
    ("SVAMP's body", {"Body": "b", "Question": "q", "Answer": 3.0}, "field 'Body': expected this"),
    ("Alpaca's input", {"instruction": "i", "input": "x"}, f"field 'input': expected {MISSING}"),
    ("MMLU's choices", {"question": "q", "choices": ["w", "x"], "answer": 1}, "field 'choices'"),
    ("MathQA's options", {"Problem": "q", "options": "a ) 38 , b ) 27", "correct": "a"}, MISSING),
    ("MedMCQA's options", {"question": "q", "opa": "w", "opb": "x", "cop": 1}, "field 'opa'"),
    ("C-Eval's options", {"question": "q", "A": "w", "B": "x", "answer": "B"}, "field 'A'"),
    ("a premise", {"question": "q", "premise": "p", "answer": "B"}, "field 'premise'"),
    ("a paragraph", {"question": "q", "Paragraph": "p", "answer": "B"}, "field 'Paragraph'"),
    ("Orca's system message", {"system_prompt": "s", "question": "q"}, MISSING),
    ("xlam's tools", {"query": "q", "tools": "[{}]", "answers": "[]"}, "field 'tools'"),
    ("images", {"question": "q", "images": ["x.png"], "answer": "1"}, "field 'images'"),
    ("HH-RLHF", {"chosen": "Human: q", "rejected": "Human: q"}, "data.columns={prompt: COLUMN"),
    ("a column that is missing", {"title": "q"}, "expected a field 'body', got 'title'",
     {"columns": {"prompt": "body"}}),
    ("ShareGPT", {"conversations": [{"from": "human", "value": "q"}]}, "texts 'role' and 'content'",
     {"columns": {"prompt": "conversations"}}),
    ("messages that end with the answer", {"messages": [user("q"), reply("a")]},
     "messages that end with the user's; put the assistant's into the column answer"),
    ("parts of a message", {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
     "'role' and 'content'"),
    ("messages as text", {"prompt": "[{'role': 'user', 'content': 'q'}]", "answer": "1"},
     "expected chat messages as a list, not as text"),
    ("an unknown column", {"question": "q", "answer": "1"}, "expected a column 'context'",
     {"prompt_template": "{context} {question}"}),
    ("the gold answer in a prompt", {"question": "q", "answer": "1"},
     "no gold answer in the prompt; {{answer}} is the text",
     {"prompt_template": "{question}{answer}"}),
    ("a rendered prompt", {"prompt": RENDERED, "answer": "1"},
     "expected questions, or lists of chat messages, got '<|im_start|>user"),
    ("a template for messages", {"prompt": [user("q")], "answer": "1"},
     "data.prompt_template: expected none for messages", {"prompt_template": "plain"}),
    ("Skywork-OR1's answer", {"question": "q", "answer": '["4"]'}, "expected one answer as text"),
    ("a list with blanks", {"question": "q", "answer": ' [ "4"]'}, "expected one answer as text"),
    ("an empty prompt", {"question": None, "answer": "1"}, "data.drop_unusable=true skips"),
    ("an empty text", {"Question": " ", "answer": "1"}, "expected a prompt, got an empty field"),
    ("a number as a prompt", {"prompt": 3.5}, "a non-empty text or a list of chat messages"),
    ("an unknown key", {"question": "q", "extra": {"truth": ""}}, "expected a field 'extra.true'",
     {"columns": {"answer": "extra.true"}}),
    ("GSM8K without an answer", {"question": "q", "label": "#### 1"},
     "expected an answer, got none in the fields 'question', 'label'; data.drop_unusable=true",
     {"task": "gsm8k"}),
    ("an answer of GSM8K without its mark", {"question": "q", "answer": "18"},
     "answer: expected '#### <number>'", {"task": "gsm8k"}),
]  # fmt: skip


def read(folder, row, config):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    data = DataConfig(**{"task": "jsonl", "path": str(path), **config})
    (example,) = Splits(data, 0, whole=True).test
    return example


@pytest.mark.parametrize("case", READ, ids=lambda case: case[0])
def test_what_a_row_is_trained_on(tmp_path, case):
    _, row, prompt, answer, *config = case
    example = read(tmp_path, row, *(config or [{}]))
    assert (example.prompt, example.answer) == (prompt, answer)
    # A reward function receives every column unchanged.
    assert example.fields == {name: value for name, value in row.items() if name != "prompt"}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_why_a_row_is_refused(tmp_path, case):
    _, row, message, *config = case
    with pytest.raises(ValueError) as error:
        read(tmp_path, row, *(config or [{}]))
    assert message in str(error.value)


@pytest.mark.parametrize("row", ["SQuAD's context", "SVAMP's body"])
def test_the_proposed_template_can_be_copied(tmp_path, row):
    path = tmp_path / "d.jsonl"
    (fields,) = (case[1] for case in REFUSED if case[0] == row)
    path.write_text(f"{json.dumps(fields)}\n" * 2)
    message = invoke("data", str(path)).stderr
    word = message.partition("(add '")[2].partition("'")[0]
    shown = invoke("data", str(path), word)
    assert shown.exit_code == 0 and "\n  | \n  | " in shown.stdout, shown.output


def test_the_proposed_columns_can_be_copied(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"a": f"q{i}", "b": i}) for i in range(4)))
    message = invoke("data", str(path)).stderr
    words = message.partition("which column it is: data.")[2].partition("  (")[0]
    words = words.replace("COLUMN", "a", 1).replace("COLUMN", "b")
    assert invoke("data", str(path), words).exit_code == 0


@pytest.mark.parametrize("name", ["MBPP", "HumanEval", "APPS", "KodCode"])
def test_the_tests_of_code_rows(tmp_path, name):
    """Check that `grpo-fast data` finds the tests of a row, and checks them as code_tests does."""
    path = tmp_path / "d.jsonl"
    (row,) = (case[1] for case in READ if case[0] == name)
    path.write_text(json.dumps(row))
    assert "2 judged by code_tests\n" in invoke("data", str(path)).stdout
    path.write_text(json.dumps({"question": "q", "cases": ["assert f("]}))
    shown = invoke("data", str(path), "columns={tests: cases}").stdout
    assert "2 with tests that code_tests refuses\nthe first tests that code_tests refuses:" in shown


@pytest.mark.parametrize("other", ["Test", "holdout"])
def test_the_split_of_a_row_is_refused_in_a_single_file(tmp_path, other):
    path = tmp_path / "d.jsonl"
    rows = [{"question": f"q{i}", "Split": name} for i, name in enumerate(("train", other))]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="column 'split': expected a file for each split"):
        read_questions(DataConfig(task="jsonl", path=str(path)))


def test_rows_that_are_skipped_are_counted(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    answers = ["1", "", None, "4", "5"]
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
    rows.append({"question": " ", "answer": "6"})
    path.write_text("\n".join(map(json.dumps, rows)))
    assert invoke("data", str(path), "drop_unusable=true").stdout.startswith(
        f"{path}: 2 training and 1"
    )
    assert "3 rows without a prompt or an answer are skipped" in caplog.text
    path.write_text("\n".join(json.dumps(row).replace('"4"', '"#### 4"') for row in rows[1:4] * 2))
    shown = invoke("data", str(path), "task=gsm8k", "drop_unusable=true").stdout
    assert "gold answers: 2 judged as numbers" in shown
    code = [{"question": f"q{i}", "tests": "assert f() == 1"} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, code)))
    shown = invoke("data", str(path), "drop_unusable=true").stdout
    assert "3 judged by code_tests" in shown  # rows with tests need no answer
    path.write_text("\n".join(map(json.dumps, [rows[0], rows[2], rows[3]])))
    assert "1 without an answer" in invoke("data", str(path)).stdout
    said = f"1 rows have no answer, first {path}:2; data.drop_unusable=true skips them"
    assert said in caplog.text


def test_a_text_with_a_bos_gets_no_second_one():
    """Check that the tokenizer adds BOS to a text, but not if the text begins with BOS."""
    tokenizer = build_bpe_tokenizer([], 258)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    parts = {"single": "<s> $A", "special_tokens": [("<s>", tokenizer.bos_token_id)]}
    tokenizer._tokenizer.post_processor = TemplateProcessing(**parts)
    tokenizer.chat_template = "{{ bos_token }}[u]{{ messages[0]['content'] }}"
    ids = encode_prompts(tokenizer, ["q", "<s>q", [user("q")]])
    assert [each.count(tokenizer.bos_token_id) for each in ids] == [1, 1, 1]
    assert ids[0] == ids[1]
