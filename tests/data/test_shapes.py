"""Tests of public row shapes: what a row of a data set is trained on, or why it is refused."""

import gzip
import json
import logging

import pytest

from grpo_fast.data.readers import _rows_of
from grpo_fast.data.splits import Splits, read_examples, read_questions
from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import DataConfig
from tests.command_line import invoke


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def says(*texts):
    """Return a conversation in the format of ShareGPT."""
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = [
    user("q"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]
ABCD = "\nA. w\nB. x\nC. y\nD. z"
LETTERS = ["w", "x", "y", "z"]
RENDERED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
MCQ = {"question": "q", "choices": LETTERS}

# Name, row, prompt and gold answer. A fourth value is a part of the section `data`.
READ = [
    ("AIME", {"ID": "2024-I-1", "Problem": "q", "Solution": "long", "Answer": 204}, "q", "204"),
    ("AIME 2025", {"id": "0", "problem": "q", "answer": "70"}, "q", "70"),
    ("MATH", {"problem": "q", "level": "Level 1", "type": "Algebra",
              "solution": r"so \boxed{\frac12}"}, "q", "1/2"),
    ("MATH-500", {"problem": "q", "solution": r"\boxed{9}", "answer": r"\left( 3 \right)",
                  "unique_id": "a/1.json"}, "q", r"\left( 3 \right)"),
    ("NuminaMath", {"source": "amc", "problem": "q", "solution": r"\boxed{2}",
                    "messages": [user("q"), {"role": "assistant", "content": "2"}]}, "q", "2"),
    ("DeepMath", {"question": "q", "final_answer": "0", "difficulty": 4.5, "topic": "t",
                  "r1_solution_1": "long"}, "q", "0"),
    ("OpenMathReasoning", {"expected_answer": "5", "problem": "q", "problem_source": "aops",
                           "generated_solution": "long"}, "q", "5"),
    ("GSM8K", {"question": "q", "answer": "so <<1+1=2>>2\n#### 2"}, "q", "2"),
    ("MetaMath", {"query": "q", "response": "so\n#### 7\nThe answer is: 7", "type": "GSM"},
     "q", "7"),
    ("MMLU", {**MCQ, "subject": "s", "answer": 2}, "q" + ABCD, "C"),
    ("MMLU-Pro", {"question_id": 70, "question": "q", "options": LETTERS, "answer": "D",
                  "answer_index": 3, "category": "law"}, "q" + ABCD, "D"),
    ("ARC", {"id": "M_1", "question": "q", "answerKey": "3",
             "choices": {"text": ["w", "x", "y"], "label": ["1", "2", "3"]}},
     "q\n1. w\n2. x\n3. y", "3"),
    ("CommonsenseQA", {"id": "a", "question": "q", "question_concept": "c", "answerKey": "A",
                       "choices": {"label": [*"ABCD"], "text": LETTERS}}, "q" + ABCD, "A"),
    ("MedQA", {"question": "q", "options": dict(zip("ABCD", LETTERS, strict=True)), "answer": "y",
               "answer_idx": "C"}, "q" + ABCD, "C"),
    ("AQuA", {"question": "q", "options": ["A)21", "B)22"], "rationale": "r", "correct": "B"},
     "q\nA)21\nB)22", "B", {"columns": {"answer": "correct"}}),
    ("choices in the question", {**MCQ, "question": "q (A) w (B) x (C) y (D) z", "answer": 0},
     "q (A) w (B) x (C) y (D) z", "A"),
    ("texts of choices in the question", {"question": "1 or 2?", "options": [1, 2], "answer": "A"},
     "1 or 2?\nA. 1\nB. 2", "A"),
    ("choices in the template", {**MCQ, "answer": "x"}, f"q ({ABCD[1:]})", "B",
     {"prompt_template": "{question} ({choices})"}),
    ("MedMCQA", {"id": "1", "question": "q", "opa": "w", "opb": "x", "opc": "y", "opd": "z",
                 "cop": 1, "exp": "e"}, "q" + ABCD, "B"),
    ("C-Eval", {"id": 0, "question": "q", "A": "w", "B": "x", "C": "y", "D": 3, "answer": "D"},
     "q\nA. w\nB. x\nC. y\nD. 3", "D"),
    ("AGIEval", {"passage": None, "question": "q", "options": ["(A)w", "(B)x"], "label": "B",
                 "answer": None}, "q\n(A)w\n(B)x", "B"),
    ("LogiQA", {"context": "c", "query": "q", "options": LETTERS, "correct_option": 1},
     "c: q" + ABCD, "B", {"prompt_template": "{context}: {question}"}),
    ("OpenBookQA", {"id": "7", "question_stem": "q", "answerKey": "x",
                    "choices": [{"label": "a", "text": "w"}, {"label": "b", "text": "x"}]},
     "q\na. w\nb. x", "b"),
    ("GPQA", {"Record ID": "r", "Question": "q", "Correct Answer": "a", "Incorrect Answer 1": "b"},
     "q", "a"),
    ("a marked solution", {"problem": "q", "answer": "", "solution": r"\boxed{2}"}, "q", "2"),
    ("a dialogue as text", {"prompt": "\n\nHuman: q\n\nAssistant: "},
     "\n\nHuman: q\n\nAssistant: ", None, {"chat": True}),
    ("SciQ", {"question": "q", "correct_answer": "a", "distractor1": "b", "support": ""},
     "q", "a"),
    ("ShareGPT", {"id": "x", "conversations": says("q", "a")}, [user("q")], "a"),
    ("ShareGPT with system", {"conversations": [{"from": "system", "value": "s"}, *says("q", "a")]},
     [system("s"), user("q")], "a"),
    ("Alpaca", {"instruction": "i", "input": "x", "output": "o"}, "i\n\nx", None),
    ("Alpaca without input", {"instruction": "i", "input": "", "output": "o"}, "i", "o",
     {"columns": {"answer": "output"}}),
    ("Orca", {"id": "niv.1", "system_prompt": "s", "question": "q", "response": "r"},
     [system("s"), user("q")], None),
    ("Orca's empty system", {"system_prompt": "", "question": "q", "response": "r"}, "q", None),
    ("OpenAI messages", {"messages": [system("s"), user("q"),
                                      {"role": "assistant", "content": "a"}]},
     [system("s"), user("q")], "a"),
    ("OpenAI tool calls", {"messages": CALLS, "answer": "3"},
     [user("q"), {**CALLS[1], "content": ""}, CALLS[2]], "3"),
    ("MBPP", {"task_id": 11, "text": "q", "code": "def f(): 1", "test_list": ["assert f()"],
              "test_setup_code": "", "challenge_test_list": []}, "q", None),
    ("MBPP sanitized", {"source_file": "x", "task_id": 2, "prompt": "q", "code": "c",
                        "test_imports": ["import math"], "test_list": ["assert f()"]}, "q", None),
    ("HumanEval", {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "c",
                   "test": "def check(candidate):\n    assert candidate()", "entry_point": "f"},
     "def f():\n", None),
    ("APPS", {"problem_id": 0, "question": "q", "solutions": '["c"]', "difficulty": "interview",
              "input_output": '{"inputs": ["1"], "outputs": ["2"]}', "url": "u"}, "q", None),
    ("KodCode", {"style": "instruct", "question_id": "k", "question": "q", "solution": "def f(): 1",
                 "test": "from solution import f\ndef test_f():\n    assert f()"}, "q", None),
    ("LeetCodeDataset", {"prompt": "import math\n", "query": "q", "entry_point": "Solution().f",
                         "test": "def check(candidate):\n    assert candidate(1)"}, "q", None),
    ("Skywork-OR1", {"prompt": [user("q")], "reward_model": {"ground_truth": '["4"]'}},
     [user("q")], "4"),
    ("two answers as JSON", {"question": "q", "answer": '["4", "5"]'}, "q", None),
    ("an interval", {"question": "q", "answer": "[0,1]"}, "q", "[0,1]"),
    ("Dolly's empty context", {"instruction": "q", "context": None, "response": "r"}, "\nq", None,
     {"prompt_template": "{context}\n{question}"}),
    ("TriviaQA", {"question": "q", "question_id": "tc_2",
                  "answer": {"value": "a", "aliases": ["b"]}}, "q", "a",
     {"columns": {"answer": "answer.value"}}),
    ("NQ-open", {"question": "q", "answer": ["a", "b"]}, "q", "a",
     {"columns": {"answer": "answer.0"}}),
    ("SQuAD", {"id": "5", "title": "t", "context": "c", "question": "q",
               "answers": {"text": ["a"], "answer_start": [0]}}, "c\nq", "a",
     {"columns": {"answer": "answers.text.0"}, "prompt_template": "{context}\n{question}"}),
    ("BoolQ", {"question": "q", "answer": True, "passage": "p"}, "q", "True",
     {"prompt_template": "{question}"}),
    ("preference pair", {"prompt": "q", "chosen": "a", "rejected": "b"}, "q", None),
    ("UltraFeedback", {"prompt": "q", "prompt_id": "x", "score_chosen": 8.5,
                       "chosen": [user("q")], "rejected": [user("q")]}, "q", None),
    ("KTO", {"prompt": "q", "completion": "a", "label": False}, "q", None),
    ("verl", {"data_source": "gsm8k", "prompt": [user("q")], "ability": "math",
              "reward_model": {"style": "rule", "ground_truth": "8"},
              "extra_info": {"index": 0}}, [user("q")], "8"),
    ("verl with a mapping", {"prompt": [user("q")], "reward_model": {"ground_truth": {"a": 1}}},
     [user("q")], None),
    ("OpenRLHF", {"input": "q", "label": "a"}, "q", "a",
     {"columns": {"prompt": "input", "answer": "label"}}),
    ("TRL's prompt", {"prompt": [user("q")], "ground_truth": "4"}, [user("q")], "4"),
    ("rendered prompt", {"prompt": RENDERED, "answer": "1"}, RENDERED, "1", {"chat": True}),
    ("messages in a cell", {"prompt": "[{'role': 'user', 'content': 'q'}]", "answer": "1"},
     [user("q")], "1"),
    ("a user's own columns", {"question": "q", "answer": "1", "output": {"a": 1}, "tools": "[]",
                              "response": [2], "label": [], "test": False}, "q", "1"),
    ("answer of pandas", {"question": "q", "answer": 12.0}, "q", "12"),
]  # fmt: skip

REFUSED = [
    ("SQuAD's context", {"context": "c", "question": "q", "answers": {"text": ["a"]}},
     "field 'context': expected this text in the prompt (add 'data.prompt_template="),
    ("SVAMP's body", {"Body": "b", "Question": "q", "Answer": 3.0}, "field 'Body': expected this"),
    ("COPA", {"premise": "p", "choice1": "w", "choice2": "x", "question": "effect", "label": 0},
     "field 'premise': expected this text in the prompt"),
    ("MathQA's options", {"Problem": "q", "options": "a ) 38 , b ) 27", "correct": "a"},
     'data.prompt_template="{question}\\n\\n{options}"'),
    ("a system message as a mapping", {"question": "q", "system": {"a": 1}}, "column 'system'"),
    ("xlam", {"query": "q", "tools": "[{}]", "answers": "[]"}, "field 'tools': expected none"),
    ("images", {"question": "q", "images": ["x.png"], "answer": "1"}, "field 'images'"),
    ("HH-RLHF", {"chosen": "Human: q", "rejected": "Human: q"}, "data.columns={prompt: COLUMN"),
    ("MMLU's wrong index", {**MCQ, "answer": 4}, "or an index below 4, got 4"),
    ("messages with choices", {"messages": [user("q")], "choices": LETTERS, "answer": "A"},
     "choices: expected a text prompt, to which the choices can"),
    ("a cell of numpy", {"prompt": "[{'role': 'user', 'content': 'q'}\n {'role': 'user'}]"},
     "expected messages as JSON text"),
    ("an unknown column", {"question": "q", "answer": "1"}, "expected a column 'context'",
     {"prompt_template": "{context} {question}"}),
    ("the gold answer in a prompt", {"question": "q", "answer": "1"},
     "no gold answer in the prompt; {{answer}} is the text",
     {"prompt_template": "{question}{answer}"}),
    ("a template around a rendered prompt", {"prompt": RENDERED, "answer": "1"},
     "expected none for messages, got a rendered prompt", {"prompt_template": "plain"}),
    ("an empty answer", {"question": "q", "answer": ""}, "data.drop_unusable=true skips such rows"),
    ("an empty prompt", {"question": None, "answer": "1"}, "expected a prompt, got an empty field"),
]  # fmt: skip


def read(folder, row, config):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    (example,) = read_examples(DataConfig(task="jsonl", path=str(path), **config))
    return example


@pytest.mark.parametrize("case", READ, ids=lambda case: case[0])
def test_what_a_row_is_trained_on(tmp_path, case):
    _, row, prompt, answer, *config = case
    example = read(tmp_path, row, *(config or [{}]))
    assert (example.prompt, example.answer) == (prompt, answer)
    # A reward function receives every column unchanged.
    assert {**row, **example.fields} == {**example.fields, **row}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_why_a_row_is_refused(tmp_path, case):
    _, row, message, *config = case
    with pytest.raises(ValueError) as error:
        read(tmp_path, row, *(config or [{}]))
    assert message in str(error.value)


@pytest.mark.parametrize("row", ["SQuAD's context", "SVAMP's body", "COPA", "MathQA's options"])
def test_the_proposed_template_can_be_copied(tmp_path, row):
    path = tmp_path / "d.jsonl"
    (fields,) = (case[1] for case in REFUSED if case[0] == row)
    path.write_text(f"{json.dumps(fields)}\n" * 2)
    message = invoke("data", str(path)).stderr
    word = message.partition("(add '")[2].partition("'")[0]
    shown = invoke("data", str(path), word)
    assert shown.exit_code == 0 and "\n  | \n  | " in shown.stdout, shown.output


@pytest.mark.parametrize("name", ["MBPP", "MBPP sanitized", "HumanEval", "APPS", "KodCode"])
def test_the_tests_of_code_rows(tmp_path, name):
    """Check that `grpo-fast data` finds the tests of a row, and checks them as code_tests does."""
    path = tmp_path / "d.jsonl"
    (row,) = (case[1] for case in READ if case[0] == name)
    path.write_text(json.dumps(row))
    assert "2 judged by code_tests\n" in invoke("data", str(path)).stdout
    path.write_text(json.dumps({"question": "q", "cases": ["assert f("]}))
    shown = invoke("data", str(path), "columns={tests: cases}").stdout
    assert "2 with tests that code_tests refuses\nthe first tests that code_tests refuses:" in shown


# ------------------------------------------------------------------------------------------- Tables
TABLES = [
    ("comma", "d.csv", "question,answer\nq,18\n"),
    ("semicolons of Excel", "d.csv", "question;answer\r\nq;18\r\n"),
    ("UTF-16 of Excel", "d.csv", "question\tanswer\r\nq\t18\r\n".encode("utf-16")),
    ("cp1252 of Excel", "d.csv", "question;answer;n\r\nq;18;ä\r\n".encode("cp1252"),
     {"encoding": "cp1252"}),
    ("bars and spaces", "d.CSV", " question | answer\nq|18\n"),
    ("a BOM and zipped", "d.csv.gz", gzip.compress(b"\xef\xbb\xbfquestion,answer\nq,18\n")),
    ("tabs", "d.tsv", "question\tanswer\nq\t18\n"),
    ("an array in a .jsonl file", "d.jsonl", '[{"question": "q",\n "answer": 18}]'),
    ("an array in one line", "d.json", '[{"question": "q", "answer": 18}]'),
    ("an object around the rows", "d.json", '{"v": 1, "data": [{"question": "q", "answer": 18}]}'),
    ("one indented row", "d.json", '{\n "question": "q",\n "answer": 18\n}\n'),
    ("one row of choices", "d.json", '{"question": "q", "answer": 18, "x": ["w", "x"]}'),
    ("UTF-16 lines", "d.jsonl", '{"question": "q", "answer": 18}\n'.encode("utf-16")),
    ("columns without a value", "d.jsonl",
     '{"question": "q", "answer": 18, "tools": null, "context": ""}'),
]  # fmt: skip


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case[0])
def test_files_in_the_forms_that_people_have(tmp_path, case):
    _, name, content, *config = case
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = DataConfig(task="jsonl", path=str(path), **dict(*config))
    (example,) = read_examples(data)
    assert (example.prompt, example.answer, example.label) == ("q", "18", 18)


TWO = [{"question": "q", "answer": 1}, {"question": "p", "answer": 2}]
COLUMNS = {"question": ["q", "p"], "answer": [1, 2]}  # as Dataset.to_dict writes a table
NUMBERED = {name: {"0": x[0], "1": x[1]} for name, x in COLUMNS.items()}  # as DataFrame.to_json


@pytest.mark.parametrize(
    "text",
    [*(json.dumps(rows, indent=1) for rows in (TWO, {"data": TWO, "v": 1}, COLUMNS, NUMBERED)),
     json.dumps(TWO), "\n".join(map(json.dumps, TWO))],
)  # fmt: skip
def test_a_json_file_of_two_rows(tmp_path, text):
    path = tmp_path / "d.json"
    path.write_text(text)
    found = read_examples(DataConfig(task="jsonl", path=str(path)))
    assert [(e.prompt, e.answer) for e in found] == [("q", "1"), ("p", "2")]


@pytest.mark.parametrize(
    "content",
    [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
      "answer": ["1", "2"]},
     {"a1": {"question": "q", "answer": 1}, "a2": {"question": "p", "answer": 2}},
     {"question": {"0": "q", "1": "p"}, "answer": {"1": 2, "0": 1}}],
)  # fmt: skip
def test_a_json_object_that_is_no_table_of_columns(content):
    assert _rows_of(content) == [content]


def test_columns_of_a_csv_file_have_types(tmp_path):
    """Check the types of columns. The comparison int(m) == target in a reward must work."""
    path = tmp_path / "d.csv"
    path.write_text(
        "question,answer,id,long,float,bool,mixed,date\n"
        "q,7,007,12345678901234567890,1.5,True,1,2020-01-02\n"
        "r,-12,010,1,2,False,x,2020-01-03\ns,,011,2,1e-3,,,\n"
    )
    rows = read_examples(DataConfig(task="jsonl", path=str(path)))
    columns = {name: [e.fields[name] for e in rows] for name in rows[0].fields}
    assert columns == {
        "question": ["q", "r", "s"], "answer": [7, -12, None], "id": ["007", "010", "011"],
        "long": ["12345678901234567890", "1", "2"], "float": [1.5, 2.0, 0.001],
        "bool": [True, False, None], "mixed": ["1", "x", None],
        "date": ["2020-01-02", "2020-01-03", None],
    }  # fmt: skip
    assert [e.answer for e in rows] == ["7", "-12", None]


# ---------------------------------------------------------------------- Splits and skipped rows
def test_a_column_divides_the_rows_of_a_file(tmp_path):
    path = tmp_path / "d.jsonl"
    names = ["train"] * 5 + ["test"] * 2 + ["validation"]
    rows = [{"question": f"q{i}", "answer": i, "Split": name} for i, name in enumerate(names)]
    path.write_text("\n".join(map(json.dumps, rows)))
    train, test = read_questions(DataConfig(task="jsonl", path=str(path)), False)
    assert len(train) == 5 and [e.prompt for e in test] == ["q5", "q6"]
    path.write_text("\n".join(json.dumps({**row, "Split": "algebra"}) for row in rows))
    with pytest.raises(ValueError, match="column 'split': expected train or one of .*rename"):
        read_questions(DataConfig(task="jsonl", path=str(path)), False)


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
    code = [{"question": f"q{i}", "tests": "assert f() == 1"} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, code)))
    shown = invoke("data", str(path), "drop_unusable=true").stdout
    assert "3 judged by code_tests" in shown  # rows with tests need no answer
    path.write_text("\n".join(map(json.dumps, [rows[0], rows[2], rows[3]])))
    assert invoke("data", str(path)).exit_code == 0
    assert "1 rows have no answer; data.drop_unusable=true skips them" in caplog.text


def test_long_prompts_are_skipped_and_counted(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    rows = [{"question": "1" * n, "answer": n} for n in (3, 9, 4, 8, 7)]
    path.write_text("\n".join(map(json.dumps, rows)))
    words = {"task": "jsonl", "path": str(path), "n_test": 1, "max_prompt_tokens": 7}
    tokenizer = build_bpe_tokenizer([], 258)
    caplog.set_level(logging.WARNING)
    found = Splits(DataConfig(**words), 0).for_tokenizer(tokenizer, encode_prompts)
    kept = [len(e.prompt) for e in (*found.train, *found.test)]
    assert max(kept) <= 7 and "2 train prompts have more tokens" in caplog.text
    words["max_prompt_tokens"] = 2
    with pytest.raises(ValueError, match="max_prompt_tokens: expected a larger number, got 2, "):
        Splits(DataConfig(**words), 0).for_tokenizer(tokenizer, encode_prompts)


def test_rendered_prompts_get_no_second_template_and_no_second_bos(tmp_path):
    """Check prompts that were rendered by a chat template before.

    The tokenizer adds BOS to a text, but it must not do so if the text begins with BOS.
    """
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_bpe_tokenizer([], 258)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    parts = {"single": "<s> $A", "special_tokens": [("<s>", tokenizer.bos_token_id)]}
    tokenizer._tokenizer.post_processor = TemplateProcessing(**parts)
    tokenizer.chat_template = "{{ bos_token }}[u]{{ messages[0]['content'] }}"
    ids = encode_prompts(tokenizer, ["q", "<s>q", [user("q")]])
    assert [each.count(tokenizer.bos_token_id) for each in ids] == [1, 1, 1]
    assert ids[0] == ids[1]

    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": RENDERED + str(i)}) for i in range(3)))
    splits = Splits(DataConfig(task="jsonl", path=str(path)), 0)
    with pytest.raises(ValueError, match=r"the tokenizer to have the token <\|im_start\|>, got"):
        splits.for_tokenizer(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    found = splits.for_tokenizer(tokenizer)
    assert found.data.chat and all(e.prompt.startswith(RENDERED) for e in found.train)
