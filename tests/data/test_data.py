"""Tests of data sources and tokenizers, including GSM8K if its files are available."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_fast.data.prompts import PROMPT_TEMPLATES
from grpo_fast.data.records import column_of, parse_record
from grpo_fast.data.splits import SortTask, Splits
from grpo_fast.data.tokenizer import build_bpe_tokenizer, build_symbol_tokenizer
from grpo_fast.train.config import DataConfig

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(
    not (GSM8K / "train.jsonl").is_file(), reason="GSM8K is not in ../shared/data/gsm8k"
)


def load(split: str = "train", seed: int = 0, task: str = "jsonl", **fields: Any) -> Any:
    """Return one split of a data set. Each word counts as one token."""
    data = DataConfig(task=task, **fields)
    splits = Splits(data, seed).for_tokenizer(lambda text, **_: {"input_ids": text.split()})
    return getattr(splits, split)


def read(path: Path, task: str = "jsonl", **fields: Any) -> Any:
    return Splits(DataConfig(task=task, path=str(path), **fields), 0, whole=True).test


def write_lines(path: Path, *lines) -> Path:
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
    path.write_bytes(b"".join(text + b"\n" for text in raw))
    return path


# -------------------------------------------------------------------------------------------- GSM8K
@needs_gsm8k
def test_gsm8k_counts_of_the_real_files():
    """Check that all questions of the GSM8K files are loaded with the correct gold answer.

    Some answers are negative or contain commas.
    """
    for split, count, commas, negative in (("train", 7473, 79, 3), ("test", 1319, 14, 2)):
        answers = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").open()]
        raw = [answer.rpartition("####")[2].strip() for answer in answers]
        assert sum("," in g for g in raw) == commas
        assert sum(g.startswith("-") for g in raw) == negative
        examples = load(split, task="gsm8k", path=str(GSM8K))
        assert len(examples) == count
        assert sorted(e.answer for e in examples) == sorted(g.replace(",", "") for g in raw)
        assert not any("." in e.answer or "," in e.answer for e in examples)
        assert all(e.solution.rpartition("#### ")[2].replace(",", "") == e.answer for e in examples)
        assert not any("<<" in e.solution for e in examples)


def test_gold_answers_of_gsm8k():
    def gold(answer):
        data = DataConfig(task="gsm8k", path=".")
        return parse_record("f:1", {"question": "q", "answer": answer}, data)

    texts = ("1,080", "1\n#### -7 ", "$12", "12%", ".5", "+7", "\u22127", "12.", "**12**",
             "\\boxed{12}", "15/2", "1e3")  # fmt: skip
    plain = ["1080", "-7", "12", "12", "0.5", "7", "-7", "12", "12", "12", "15/2", "1000"]
    assert [gold(f"so\n#### {text}").answer for text in texts] == plain
    assert gold("48/2 = <<48/2=24>>24\n#### 24").solution == "48/2 = 24\n#### 24"
    for answer in ("no marker", "#### ", "#### about 3", "#### ١٨", "#### " + "9" * 33, 7):
        message = "f:1: answer: expected '#### <number>' at its end.*got .*data.task=jsonl reads"
        with pytest.raises(ValueError, match=message):
            gold(answer)


def test_columns_without_a_value_are_skipped():
    row = {"answer": math.nan, "Final Answer": None, "truth": {"a": [1, {"b": 2}]}}
    names = ["answer", "final_answer", "truth.c", "truth.a.5", "truth.a.1.b"]
    assert column_of(row, names) == 2 and column_of(row, names[:4]) is None
    assert column_of({"answer": None, "Answer": "5"}, ["answer"]) == "5"
    assert column_of({"Gold Answer": "5"}, ["gold answer"]) == "5"


# -------------------------------------------------------------------------------------------- Files
@pytest.mark.parametrize("lines", [10, 2, 1])
def test_a_training_set_that_is_the_test_set(tmp_path, lines, caplog):
    """Check that a warning is logged if every training prompt is also a test prompt.

    The data set is a single file that repeats one line, or two files with the same prompt.
    """
    path = write_lines(tmp_path / "train.jsonl", *[{"prompt": "p", "answer": "1"}] * lines)
    assert {e.prompt for e in load(path=str(path))} == {"p"}
    assert "every training prompt is also a test prompt" in caplog.text
    write_lines(tmp_path / "test.jsonl", {"prompt": "p", "answer": "1"})
    assert len(load(path=str(tmp_path))) == lines
    assert len(load("test", path=str(tmp_path))) == 1


def test_fields_and_templates(tmp_path):
    path = write_lines(
        tmp_path / "d.jsonl",
        {"prompt": "p {x}", "answer": 5, "solution": "s"},
        {"question": "q", "answer": "thus\n#### 7"},
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "a"},
        {"prompt": [{"role": "system", "content": "own"}], "answer": "a"},
    )
    system = {"role": "system", "content": "S"}
    assert read(path)[2].prompt == [{"role": "user", "content": "hi"}]
    chat = read(path, system_prompt="S", chat=True)
    assert chat[1].prompt == [system, {"role": "user", "content": "q"}]
    assert chat[2].prompt == [system, {"role": "user", "content": "hi"}]
    assert chat[3].prompt == [{"role": "system", "content": "own"}]
    with pytest.raises(ValueError, match="data.prompt_template: expected none for messages"):
        read(path, prompt_template="plain")
    write_lines(path, *path.read_text().splitlines()[:2])
    first, second = read(path, prompt_template=r"[{question}] {{y}} \boxed{x}")
    assert first == (r"[p {x}] {y} \boxed{x}", "5", "s", {"answer": 5, "solution": "s"}, 5, None)
    assert second[:3] == (r"[q] {y} \boxed{x}", "7", "thus\n#### 7")
    assert second.fields == {"question": "q", "answer": "thus\n#### 7"}  # the unchanged row
    plain = PROMPT_TEMPLATES["plain"].replace("{question}", "q")
    assert read(path, prompt_template="plain")[1].prompt == plain
    with pytest.raises(ValueError, match="prompt_template: expected {question}"):
        read(path, prompt_template="no place")
    line = '{"prompt": "\\ud83d\\ude42", "answer": "1", "unused": "\\ud83d"}'
    assert read(write_lines(tmp_path / "d.jsonl", line))[0].prompt == "🙂"


def test_one_file_is_split_the_same_for_every_seed(tmp_path):
    lines = [{"prompt": f"p{i % 40}", "answer": str(i)} for i in range(50)]
    path = write_lines(tmp_path / "d.jsonl", *lines)
    data = dict(path=str(path), n_test=12)
    test = load("test", seed=1, **data)
    train = {seed: load(seed=seed, **data) for seed in (1, 2)}
    assert test == load("test", seed=2, **data) and len(test) == 12
    # A prompt that occurs twice in the file must not be in both splits.
    assert not {e.prompt for e in test} & {e.prompt for e in train[1]}
    assert train[1] == load(seed=1, **data)
    assert train[1] != train[2] and sorted(train[1]) == sorted(train[2])
    lines = [{"prompt": f"p{i}", "answer": "1"} for i in range(3)]
    path = str(write_lines(tmp_path / "d.jsonl", *lines))
    train, test = (load(split, path=path, n_test=3) for split in ("train", "test"))
    assert sorted(e.prompt for e in train) == [e.prompt for e in test] == ["p0", "p1", "p2"]
    assert len(load(path=path, n_test=2)) == 1
    with pytest.raises(ValueError, match="data.n_test: expected at most the 3 lines of .* got 4"):
        load("test", path=path, n_test=4)


def test_missing_and_unreadable_sources(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="expected at least one row"):
        load(path=str(write_lines(tmp_path / "e.jsonl")))

    def decode(*_):
        raise ImportError("no decoder of audio")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=decode))
    with pytest.raises(ValueError, match="could not load 'a/b' from the hub.*no decoder of audio"):
        load(path="a/b")
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"})
    for missing in (f"{path}/x.jsonl", "x" * 5000):
        with pytest.raises(ValueError, match=f"got nothing at {missing}"):
            load(path=missing)
    memory = tmp_path / "memory.jsonl"  # root may read every file, but not this place
    memory.symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match="expected a readable file of UTF-8 text, .*Errno"):
        read(memory)


def test_hub_rows(monkeypatch):
    rows = {x: [{"question": f"{x} q", "answer": "#### 1"}] for x in ("train", "test")}
    calls = []

    def load_dataset(*arguments):
        calls.append(arguments)
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load(task="gsm8k", path="openai/gsm8k")[0].prompt == "train q"
    assert load("test", path="a/b:c")[0].prompt == "test q"
    assert calls == [("openai/gsm8k", "main"), ("a/b", "c")]
    for name, kind in (("train", "training"), ("test", "test")):
        full = rows[name]
        rows[name] = []
        with pytest.raises(ValueError, match=f"at least one {kind} example in a/b, got none"):
            load(path="a/b")
        rows[name] = full
    rows = {"only": [{"question": f"q{i}", "answer": "1"} for i in range(20)]}
    assert len(load(path="a/b")) == 18  # two rows are held out for the test split


def test_the_message_of_the_hub_is_kept(monkeypatch):
    def load_dataset(*_):
        raise OSError("visit its page to ask for access") from OSError("403 Client Error")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="could not load 'a/b'.*: visit its page"):
        load(path="a/b")


# ---------------------------------------------------------------------------------- Generated tasks
def test_sort_answers_and_held_out_prompts():
    """Check the examples of a task with 1000 prompts, of which 100 are test prompts.

    Random training prompts would often equal test prompts if the task did not exclude them.
    """
    test, train = (load(x, 3, "sort", n_test=100, digits=3) for x in ("test", "train"))
    assert len(test) == 100 and len(train) == 1 << 16
    prompts = {e.prompt for e in test}
    assert len(prompts) == 100 and not prompts & {e.prompt for e in train[:3000]}
    for prompt, answer, solution, *_ in [*test, *train[:200]]:
        numbers = prompt.removesuffix(" =").split()
        assert len(numbers) == 3 and {*numbers, "="} <= {*test.vocabulary}
        assert answer == solution == " ".join(sorted(numbers, key=int))


def test_generated_examples_depend_on_seed_and_index_alone():
    one, again, other = (SortTask(5, split="train", seed=s) for s in (1, 1, 2))
    assert one[500] == again[500] and one[-1] == one[len(one) - 1]
    assert one[:50] != other[:50]
    assert SortTask(5, split="test", seed=1)[:] == SortTask(5, split="test", seed=2)[:]
    with pytest.raises(IndexError):
        one[len(one)]


def test_the_default_size_of_the_test_split():
    assert len(SortTask(5, split="test", seed=0)) == 256
    assert len(SortTask(1, split="test", seed=0)) == 5  # half of the ten prompts

    def prompts(split, n_test):
        return {example.prompt for example in SortTask(1, split=split, seed=0, n_test=n_test)[:200]}

    test, train = prompts("test", 9), prompts("train", 9)
    assert len(test) == 9 and len(train) == 1 and not test & train
    assert prompts("test", 10) == prompts("train", 10) and len(prompts("test", 10)) == 10
    with pytest.raises(ValueError, match="at most the 10 different prompts .* got 11"):
        SortTask(1, split="test", seed=0, n_test=11)


# --------------------------------------------------------------------------------------- Tokenizers
def test_bpe_round_trip_and_reload(tmp_path):
    texts = ["Janet has 16 eggs and sells 9 of them.\n#### 18", "A robe takes 2 bolts."] * 5
    tokenizer = build_bpe_tokenizer(texts, 300)
    assert len(tokenizer) <= 300 and tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    odd = "a\tb  é 漢 🙂 1080\n####"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd
    assert len(tokenizer("1080")["input_ids"]) == 4  # one token per digit
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(odd)["input_ids"] == tokenizer(odd)["input_ids"] and loaded.padding_side == "left"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert loaded.apply_chat_template(messages, **options) == "S\nQ\n"
    assert build_bpe_tokenizer(texts, 300).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError, match="vocab_size: expected at least 258"):
        build_bpe_tokenizer(texts, 200)


def test_symbol_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = build_symbol_tokenizer([*map(str, range(30)), "="])
    assert len(tokenizer) == 33
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded("0 29 =")["input_ids"] == [2, 31, 32]
        assert loaded.decode([2, 31, 1, 0], skip_special_tokens=True) == "0 29"
        batch = loaded(["1 2 =", "1 ="], padding=True)
        assert batch["input_ids"][1][0] == loaded.pad_token_id
        with pytest.raises(Exception, match="UNK"):
            loaded("77")
    for wrong in ([], ["a", "a"], ["a", "<|pad|>"]):
        with pytest.raises(ValueError, match="symbols: expected different"):
            build_symbol_tokenizer(wrong)
