"""Tests of user data sets: file formats, folders, columns, chat messages and notes in the log."""

import json
from types import SimpleNamespace

import datasets
import pytest

from grpo_fast.data.readers import FORMATS, is_local, read_file
from grpo_fast.rollout import encode_prompts, prompt_texts
from tests.command_line import invoke, refused
from tests.data import test_data
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder
from tests.train.test_evaluation import TEMPLATE

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


def write_as(path, rows):
    """Write rows to a file, in the format given by the suffix of the file name."""
    if path.suffix in (".jsonl", ".json"):
        lines = map(json.dumps, rows)
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else json.dumps(rows))
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        path.write_text("\n".join(mark.join(row) for row in (rows[0], *(r.values() for r in rows))))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        import pyarrow

        table = datasets.Dataset.from_list(rows).data.table
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)


# ------------------------------------------------------------------------------------- File formats
@pytest.mark.parametrize("ending", FORMATS)
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


TEXT = b"question,answer,note\n"
JSON = b'{"question": "2020-01-01", "answer": "007", "note": 12345678901234567890}'
ROW = {"question": "2020-01-01", "answer": "007", "note": 12345678901234567890}


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("d.csv", b'\xef\xbb\xbf' + TEXT + b'"a, ""b""\r\nc",007,\r\n',
         {"question": 'a, "b"\r\nc', "answer": "007", "note": None}),
        ("d.csv", TEXT + b"q,None,NA\n", {"question": "q", "answer": "None", "note": "NA"}),
        ("d.CSV", b"question;answer\r\nq;1,5\r\n", {"question": "q", "answer": "1,5"}),
        ("d.csv", b"question|answer\nq|1\n", {"question": "q", "answer": "1"}),
        ("d.tsv", b"question\tanswer\nq\t1\n", {"question": "q", "answer": "1"}),
        ("d.tsv", b"question\tanswer, as text, short\nq\t1\n",
         {"question": "q", "answer, as text, short": "1"}),
        ("d.jsonl", JSON, ROW),
        ("d.jsonl", b"[" + JSON + b"]", ROW),
        ("d.json", b"\n " + JSON + b"\r\n\n", ROW),
        ("d.json", b"[\n" + JSON + b"\n]", ROW),
    ],
)  # fmt: skip
def test_values_of_text_files_are_not_changed(tmp_path, name, content, row):
    (tmp_path / name).write_bytes(content)
    assert [fields for _, fields in read_file(tmp_path / name)] == [row]


LINE = b'{"prompt": "q", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.parquet", b"PAR1", "data.path: could not load .*d.parquet': "),
        ("d.csv", b"question,answer\n\xff,1\n", "expected .* UTF-8 text, got .*d.csv: .*0xff"),
        ("d.csv", "question,answer\nq,1\n".encode("utf-16"), "expected .* UTF-8 text, .*d.csv"),
        ("d.csv", b"question,answer\n", "d.csv: expected at least one row, got none"),
        ("d.csv", b"", "d.csv: expected at least one row, got none"),
        ("d.csv", TEXT + b"q,1,\na,b,c,d\n", "d.csv:3: expected 3 fields.*put a text with ','"),
        ("d.csv", TEXT + b"q,1\n", "d.csv:2: expected 3 fields, as in the first line"),
        ("d.csv", TEXT + b'q,1,\n"a,2\nb,3\n', "d.csv:3: not a row .unexpected end.*in quotes"),
        ("d.csv", b"a,a\nq,1\n", "d.csv:1: expected different names of columns"),
        ("d.tsv", b"a\tb\n1\t2\n", "d.tsv:2: expected a field 'prompt'"),
        ("d.xlsx", b"PK", "data.path: expected an unpacked file with one of the endings .jsonl, "),
        ("d.jsonl.gz", b"\x1f\x8b", "data.path: expected an unpacked file with one of the endings"),
        ("d.jsonl", LINE + b"\n{not json", "d.jsonl:3: not a JSON object"),
        ("d.jsonl", LINE + b"[1, 2]", "d.jsonl:2: expected a JSON object, got list"),
        ("d.jsonl", LINE + b"[" * 10_000, "d.jsonl:2: not a JSON object"),
        ("d.jsonl", LINE + b'{"answer": ' + b"1" * 5000 + b"}", "d.jsonl:2: .*4300 digits"),
        ("d.jsonl", b'{"prompt": "x \\ud800"}', r"d.jsonl:1: .*lone surrogate '\\ud800'"),
        ("d.jsonl", b'{"prompt": [{"role": "user", "content": "\\udc00"}]}', "lone surrogate"),
        ("d.json", b"[]", "d.json: expected at least one row, got none"),
        ("d.json", b'[{"question": "q"},', "d.json: not a JSON list .*or a list of objects"),
        ("d.json", b"[1]", r"d.json\[1\]: expected a JSON object, got int"),
        ("d.json", b'{\n "question": "q"\n}', "d.json:1: not a JSON object .*one object per line"),
        ("d.json", b'{"data": [{"question": "q"}]}', "expected a field 'prompt' .* got 'data'"),
        ("d.json", b'{"question": ["q", "p"]}', "'role' and 'content', got 'q'"),
    ],
)  # fmt: skip
def test_damaged_files_and_other_formats(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name)


def test_folders_without_data_and_hub_ids(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="data.path: could not load .*empty"):
        load(tmp_path / "empty")
    for source in ("owner/name", "owner/name:config", "openai/gsm8k", "a-b/c.d_e"):
        assert not is_local(source), source
    for source in ("name", "a/b/c", "a/b.jsonl", "a/b.parquet", "./a", "~/a", "/a"):
        assert is_local(source), source


# ---------------------------------------------------------------------------- Rows of chat messages
USER = {"role": "user", "content": "u"}


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
    prompt = [USER, {"role": "assistant", "content": "<think>\nLet"}]
    policy = SimpleNamespace(tokenizer=chat, template_kwargs={})
    sent = prompt_texts(policy, [prompt, [USER]])
    assert sent == ["[user] u\n[assistant] <think>\nLet", "[user] u\n[assistant]"]
    ids = encode_prompts(chat, [prompt, [USER]])
    assert [chat.decode(i) for i in ids] == sent


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
    assert "1 training rows are skipped, as their prompts are in the test split" in caplog.text
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
