"""Tests of user data sets: file formats, folders, columns, chat messages and notes in the log."""

import gzip
import json
from types import SimpleNamespace

import datasets
import pytest

from grpo_fast.data.readers import FORMATS, is_local, read_file
from grpo_fast.data.records import parse_record
from grpo_fast.rollout import encode_prompts, prompt_texts
from tests.command_line import invoke, refused
from tests.data import test_data
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder
from tests.train.test_asking import TEMPLATE

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(20)]
QUESTIONS = sorted(row["question"] for row in ROWS)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Make the package `datasets` store its cache of converted tables in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def load(path, split="train", **fields):
    return test_data.load(split, path=str(path), **fields)


def parse(fields, gsm8k=False, **columns):
    return parse_record("f:1", fields, gsm8k, columns)


def write_as(path, rows):
    """Write rows to a file, in the format given by the suffix of the file name."""
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif name.endswith(".json"):
        text = json.dumps(rows)
    elif name.endswith((".csv", ".tsv")):
        mark = "," if name.endswith(".csv") else "\t"
        text = "\n".join(mark.join(map(str, row)) for row in (rows[0], *(r.values() for r in rows)))
    else:
        table = datasets.Dataset.from_list(rows)
        if name.endswith(".parquet"):
            table.to_parquet(str(path))
        else:
            import pyarrow

            with pyarrow.ipc.new_stream(str(path), table.data.table.schema) as stream:
                stream.write_table(table.data.table)
        return
    (gzip.open if path.suffix == ".gz" else open)(path, "wt").write(text)


# ------------------------------------------------------------------------------------- File formats
@pytest.mark.parametrize("ending", [*FORMATS, ".jsonl.gz", ".json.gz", ".csv.gz"])
def test_every_format_as_a_file_and_as_a_folder(tmp_path, ending):
    write_as(tmp_path / f"one{ending}", ROWS)
    train, test = (load(tmp_path / f"one{ending}", split) for split in ("train", "test"))
    assert len(train) == 18 and sorted(e.prompt for e in [*train, *test]) == QUESTIONS
    assert all(e.answer == e.prompt[1:] for e in train)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_as(folder / f"train{ending}", ROWS[:15])
    write_as(folder / f"test{ending}", ROWS[15:])
    assert len(load(folder)) == 15 and [e.prompt for e in load(folder, "test")][0] == "q15"
    assert len(load(folder / f"train{ending}", "test")) == 5


def test_folders_that_datasets_wrote(tmp_path):
    every = datasets.Dataset.from_list(ROWS)
    every.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict(
        {"train": every.select(range(12)), "validation": every.select([19])}
    )
    both.save_to_disk(tmp_path / "both")
    assert len(load(tmp_path / "one")) == 18
    assert len(load(tmp_path / "both")) == 12 and load(tmp_path / "both", "test")[0].prompt == "q19"
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    every.select(range(4)).to_parquet(str(hub / "train-00000-of-00001.parquet"))
    every.select([7]).to_parquet(str(hub / "test-00000-of-00001.parquet"))
    assert len(load(tmp_path / "hub")) == 4 and load(tmp_path / "hub", "test")[0].prompt == "q7"


def test_a_table_of_texts_keeps_them(tmp_path):
    (tmp_path / "t.csv").write_bytes(
        b'\xef\xbb\xbfquestion,answer,note\r\n"a, ""b""\r\nc",007,NA\r\nq2,None,\r\nq3,1e3,x\r\n'
    )
    rows = [fields for _, fields in read_file(tmp_path / "t.csv")]
    assert [r["answer"] for r in rows] == ["007", "None", "1e3"]
    assert [r["note"] for r in rows] == ["NA", None, "x"]
    assert rows[0] == {"question": 'a, "b"\r\nc', "answer": "007", "note": "NA"}
    (tmp_path / "t.csv").write_text("question,answer\nq,1,\n")  # a delimiter too many
    assert [fields for _, fields in read_file(tmp_path / "t.csv")] == [
        {"question": "q", "answer": 1}
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl.gz", b"no gzip", "data.path: expected a readable file, got .*Not a gzipped"),
        (
            "d.csv.gz",
            gzip.compress(b"question,answer\nq,1\n", mtime=0)[:-9],
            "readable file, got .*ended",
        ),
        ("d.parquet", b"PAR1", "data.path: could not load .*d.parquet': "),
        (
            "d.csv",
            b"question,answer\n\xff,1\n",
            "d.csv:2: not UTF-8 text .byte 0xff.; data.encoding=cp1252 reads",
        ),
        ("d.csv", b"question,answer\n", "the file is empty"),
        ("d.csv", b"", "the file is empty"),
        (
            "d.csv",
            b"question,answer\nq,1\na,b,c\n",
            "d.csv:3: expected 2 fields.* got 3; put a text with ','",
        ),
        ("d.csv", b'question,answer\nq,1\n"a,2\nb,3\n', "d.csv:3: not a row .*unexpected end"),
        ("d.csv", b'question,answer\n"a,2\nb,3\n', "d.csv:2: not a row .*unexpected end"),
        ("d.csv", b"question,answer\nq\n", "d.csv:2: expected 2 fields, .* got 1; put"),
        ("d.csv", b"a,a\nq,1\n", "d.csv:1: expected different names of columns"),
        ("d.xlsx", b"PK", "data.path: expected a file with one of the endings .jsonl, "),
        ("d.json", b"[]", "the file is empty"),
        ("d.json", b"[1]", r"d.json\[1\]: expected a JSON object, got int"),
        ("d.json", b'[{"prompt": "x", "prompt": "y"}]', "the key 'prompt' occurs twice"),
        ("d.tsv", b"a\tb\n1\t2\n", "d.tsv:2: expected a field 'prompt'"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name)


def test_folders_without_data_and_hub_ids(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="data.path: expected .* found nothing at .*empty"):
        load(tmp_path / "empty")
    for source in ("owner/name", "owner/name:config", "openai/gsm8k", "a-b/c.d_e"):
        assert not is_local(source), source
    for source in ("name", "a/b/c", "a/b.jsonl", "a/b.parquet", "./a", "~/a", "/a", "a/b.csv.gz"):
        assert is_local(source), source


# --------------------------------------------------------------------------------- Columns of a row
@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"problem": "q", "solution": "no mark in it"}, "q", None),
        ({"query": "q", "answer": 2.5}, "q", "2.5"),
        ({"prompt": None, "question": "q", "answer": None, "ground_truth": "1"}, "q", "1"),
        ({"prompt": "q", "messages": [{"role": "user", "content": "x"}]}, "q", None),
        ({"question": "q", "answer": r"\boxed{}"}, "q", r"\boxed{}"),
        ({"question": "q", "answer": " 5 "}, "q", " 5 "),
        ({"question": "q", "answer": "$1,080"}, "q", "$1,080"),
        ({"question": "q"}, "q", None),
        ({"question": "q", "answer": ["7"]}, "q", "7"),
        ({"question": "q", "answer": 10**400}, "q", "1" + "0" * 400),
        ({"prompt": '[{"role": "user", "content": "q"}]'},
         [{"role": "user", "content": "q"}], None),
        ({"prompt": '[{"no JSON'}, '[{"no JSON', None),
    ],
)  # fmt: skip
def test_usual_columns(row, prompt, answer):
    found = parse(row)
    assert (found.prompt, found.answer) == (prompt, answer)
    assert found.fields == {name: value for name, value in row.items() if name != "prompt"}


def test_columns_by_their_names():
    row = {"title": "q", "target": {"value": "9"}, "question": "other", "why": "w"}
    found = parse(row, prompt="title", answer="target.value", solution="why")
    assert found[:3] == ("q", "9", "w")
    with pytest.raises(ValueError, match="expected a field 'body' .found 'title', 'target'"):
        parse(row, prompt="body")
    with pytest.raises(ValueError, match="expected a field 'gold'"):
        parse(row, prompt="title", answer="gold")
    with pytest.raises(ValueError, match="found 'a', 'b', 'c'; say which column it is: "
                       "data.columns={prompt: COLUMN, answer: COLUMN}"):  # fmt: skip
        parse({"a": "1", "b": "2", "c": 3})


def test_the_key_in_the_message_works(tmp_path):
    file = write_lines(tmp_path / "d.jsonl", *({"a": f"q{i}", "b": i} for i in range(4)))
    message = invoke("data", str(file)).stderr
    words = message.partition("which column it is: data.")[2].partition("  (")[0]
    words = words.replace("COLUMN", "a", 1).replace("COLUMN", "b")
    assert invoke("data", str(file), words).exit_code == 0
    assert refused(invoke("data", str(file), "columns={promt: a}"), "columns")


# ---------------------------------------------------------------------------- Rows of chat messages
USER = {"role": "user", "content": "u"}
SYSTEM = {"role": "system", "content": "s"}


def reply(text):
    return {"role": "assistant", "content": text}


def test_a_supervised_row_ends_with_its_answer():
    found = parse({"messages": [SYSTEM, USER, reply("so\n#### 4")]})
    assert found[:3] == ([SYSTEM, USER], "4", "so\n#### 4")
    found = parse({"messages": [USER, reply("first"), USER, reply("Paris")]})
    assert found.answer == "Paris" and found.prompt == [USER, reply("first"), USER]
    found = parse({"messages": [USER, reply("long")], "answer": "5"})
    assert found[:3] == ([USER], "5", "long")
    found = parse({"chat": [USER, reply("x")]}, prompt="chat")
    assert found[:2] == ([USER], "x")
    with pytest.raises(ValueError, match="expected a message before the assistant's, got none"):
        parse({"messages": [reply("x")]})
    with pytest.raises(ValueError, match="a non-empty text in the answer, got ''"):
        parse({"messages": [USER, reply("")]})
    row = {"messages": [USER, reply("x")]}
    # Parsing must not remove the answer from the list of messages in the row.
    assert parse(row).prompt == [USER] and len(row["messages"]) == 2


def test_parts_of_text_are_joined_and_missing_keys_left_out():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"prompt": [{"role": "user", "content": parts, "tool_calls": None}]}
    assert parse(row).prompt == [{"role": "user", "content": "ab"}]
    image = [{"type": "image", "url": "x"}]
    with pytest.raises(ValueError, match="'role' and 'content'"):
        parse({"prompt": [{"role": "user", "content": image}]})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tiny_folder(tmp_path_factory.mktemp("chat"))
    found = AutoTokenizer.from_pretrained(folder)
    found.chat_template = TEMPLATE.replace("{{ m['role'] }}", "{{ m['role'] }}{{ mood }}")
    found.save_pretrained(folder)
    return folder, found


def test_a_beginning_of_the_assistant_is_continued(tokenizer):
    _, chat = tokenizer
    found = parse({"prompt": [USER, reply("<think>\nLet")], "answer": "4"})
    assert found.prompt[-1] == reply("<think>\nLet") and found.answer == "4"
    policy = SimpleNamespace(tokenizer=chat, template_kwargs={})
    sent = prompt_texts(policy, [found.prompt, [USER]])
    assert sent == ["[user] u\n[assistant] <think>\nLet", "[user] u\n[assistant]"]
    ids = encode_prompts(chat, [found.prompt, [USER]])
    assert [chat.decode(i) for i in ids] == sent
    assert parse({"prompt": [USER, reply("A")]}).prompt == [USER, reply("A")]


def test_arguments_of_the_template(tokenizer):
    _, chat = tokenizer
    policy = SimpleNamespace(tokenizer=chat, template_kwargs={"mood": "!"})
    sent = prompt_texts(policy, [[USER], "u"])
    assert sent == ["[user!] u\n[assistant]", "u"]
    ids = encode_prompts(chat, [[USER], "u"], {"mood": "!"})
    assert [chat.decode(i) for i in ids] == sent
    with pytest.raises(
        ValueError, match="prompts: expected a prompt that the tokenizer and its chat"
    ):
        encode_prompts(chat, [[USER]], {"tokenize": True})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [USER], "answer": "2"}, "expected none for rows of messages"),
        ({"prompt": "no gold"}, "expected answers to all shots, got none to 'no gold'"),
    ],
)
def test_rows_that_worked_examples_refuse(tmp_path, row, message):
    """Check the errors for a row of messages and for a row without an answer."""
    write_lines(tmp_path / "train.jsonl", {"prompt": "q", "answer": "1"}, row)
    write_lines(tmp_path / "test.jsonl", {"prompt": "t", "answer": "3"})
    with pytest.raises(ValueError, match=f"data.shots_tokens: {message}"):
        list(load(tmp_path, shots_tokens=100))


# ------------------------------------------------------------------------ The command and the log
def test_data_shows_prompts_answers_and_what_is_skipped(tmp_path, tokenizer, caplog):
    folder, _ = tokenizer
    rows = [{"question": f"q{i}", "answer": gold} for i, gold in enumerate(["1", "2 eggs", "x^2"])]
    write_lines(tmp_path / "train.jsonl", *rows, {"question": "t", "answer": "1"})
    write_lines(tmp_path / "test.jsonl", {"question": "t", "answer": "1"})
    words = (f"model={folder}", "system_prompt=S", "template_kwargs={mood: '!'}")
    lines = invoke("data", str(tmp_path), *words).stdout.splitlines()
    assert lines[0] == f"{tmp_path}: 3 training and 1 test examples"
    assert "gold answers: 2 judged as numbers, 1 judged as texts, 1 judged as expressions" in lines
    assert "1 training rows are skipped, because their prompts are test" in caplog.text
    i = lines.index("prompt 2:")
    assert lines[i + 1 : i + 4] == ["  | [system!] S", "  | [user!] q1", "  | [assistant]"]
    assert lines[i + 4] == "  gold answer: '2 eggs' (judged as texts)"
    assert refused(invoke("data", str(tmp_path), "task=sort"), "path: expected none for task sort")
    plain = invoke("data", str(tmp_path), "prompt_template=plain").stdout
    assert "prompt 1 (model=MODEL shows its tokens):\n  | Question: q0\n  | Answer:\n" in plain
    (tmp_path / "odd.jsonl").write_text('{"question": "\\u001b[31mred", "answer": "1"}\n')
    assert "\x1b" not in invoke("data", str(tmp_path / "odd.jsonl")).stdout


def test_dates_and_bytes_of_a_table_become_texts(tmp_path):
    import datetime

    row = {"question": "q", "answer": "1", "at": datetime.datetime(2026, 1, 2), "raw": b"x"}
    datasets.Dataset.from_list([row]).to_parquet(str(tmp_path / "d.parquet"))
    fields = load(tmp_path / "d.parquet", "test")[0].fields
    assert fields["at"].startswith("2026-01-02") and isinstance(fields["raw"], str)
