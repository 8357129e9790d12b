"""Tests of data sources and tokenizers, including GSM8K if its files are available."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_fast.data import DatasetError, load_examples, task_symbols
from grpo_fast.data.files import read_examples
from grpo_fast.data.generated import ArithmeticTask, SortTask
from grpo_fast.data.prompts import PROMPT_TEMPLATES
from grpo_fast.data.records import gold_answer, strip_calculator
from grpo_fast.data.tokenizer import build_bpe_tokenizer, build_symbol_tokenizer

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(
    not (GSM8K / "train.jsonl").is_file(), reason="GSM8K is not in ../shared/data/gsm8k"
)


SPLITS = ("train", "test")


def load(split="train", seed=0, **fields):
    return load_examples(SimpleNamespace(**fields), split=split, seed=seed)


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


@needs_gsm8k
def test_gsm8k_train_file_uses_its_sibling_as_test():
    by_folder = load("test", task="gsm8k", path=str(GSM8K))
    assert load("test", task="gsm8k", path=str(GSM8K / "train.jsonl"), seed=9) == by_folder


def test_gold_answer(tmp_path):
    assert gold_answer("a\n#### 1,080") == "1080"
    assert gold_answer("#### 1\n#### -7 ") == "-7"
    texts = ("$12", "12%", ".5", "+7", "\u22127", "12.", "**12**", "\\boxed{12}", "15/2", "1e3")
    plain = ["12", "12", "0.5", "7", "-7", "12", "12", "12", "15/2", "1000"]
    assert [gold_answer(f"so\n#### {text}") for text in texts] == plain
    assert strip_calculator("48/2 = <<48/2=24>>24") == "48/2 = 24"
    for bad in ("no marker", "#### ", "#### about 3", "#### ١٨"):
        with pytest.raises(ValueError, match="####"):
            gold_answer(bad)
    path = write_lines(tmp_path / "d.jsonl", {"question": "q", "answer": "18"})
    assert read_examples(path)[0].answer == "18"
    with pytest.raises(DatasetError, match=r"d\.jsonl:1: answer: expected '#### <number>'"):
        read_examples(path, data=SimpleNamespace(task="gsm8k"))


# -------------------------------------------------------------------------------------------- Files
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not a JSON object"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({"text": "x"}, "expected a field 'prompt' or 'question', found 'text'"),
        ({"prompt": "x", "answer": " "}, "field 'answer', got ' '"),
        ({"prompt": "", "answer": "1"}, "expected a non-empty text"),
        ({"prompt": 3, "answer": "1"}, "text or a list of chat messages, got 3"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "'role' and 'content'"),
        ({"prompt": "x", "answer": "1", "solution": 5}, "field 'solution', got int"),
        ('{"prompt": "x", "answer": "1", "answer": "2"}', "the key 'answer' occurs twice"),
        (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8"),
        ("[" * 100_000, "not a JSON object"),
        ('{"prompt": "x", "answer": ' + "1" * 5000 + "}", "4300 digits"),
        ('{"prompt": "x \\ud800", "answer": "1"}', "got the lone surrogate '\\ud800'"),
        ('{"prompt": [{"role": "user", "content": "\\udc00"}], "answer": "1"}', "lone surrogate"),
    ],
)
def test_bad_line_is_refused_with_file_and_line(tmp_path, line, reason):
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1"}, "", line)
    with pytest.raises(DatasetError) as error:
        read_examples(path)
    assert f"{path}:3: " in str(error.value) and reason in str(error.value)


@pytest.mark.parametrize("lines", [10, 2, 1])
def test_a_training_set_that_is_the_test_set(tmp_path, lines, caplog):
    """Check that a warning is logged if every training prompt is also a test prompt.

    The data set is a single file that repeats one line, or two files with the same prompt.
    """
    path = write_lines(tmp_path / "train.jsonl", *[{"prompt": "p", "answer": "1"}] * lines)
    one_file = dict(task="jsonl", path=str(path))
    found = load(**one_file)
    assert {e.prompt for e in found} == {"p"}
    assert "every training prompt is a test prompt" in caplog.text
    write_lines(tmp_path / "test.jsonl", {"prompt": "p", "answer": "1"})
    both = dict(task="jsonl", path=str(tmp_path))
    assert len(load(**both)) == lines
    assert len(load("test", **both)) == 1


def test_the_symbols_of_a_file_are_its_words(tmp_path):
    lines = [
        {"prompt": "b a\n?", "answer": "a b", "solution": "so a b"},
        {"messages": [{"role": "user", "content": "c\td"}], "answer": 7},
    ]
    write_lines(tmp_path / "train.jsonl", *lines)
    write_lines(tmp_path / "test.jsonl", {"prompt": "only here", "answer": "x"})
    found = task_symbols(SimpleNamespace(task="jsonl", path=str(tmp_path)))
    assert found == sorted(["b", "a", "?", "so", "c", "d", "7", "only", "here", "x"])
    tokenizer = build_symbol_tokenizer(found)
    assert tokenizer.decode(tokenizer("a b here")["input_ids"]) == "a b here"


def test_fields_and_templates(tmp_path):
    path = write_lines(
        tmp_path / "d.jsonl",
        {"prompt": "p {x}", "answer": 5, "solution": "s"},
        {"question": "q", "answer": "thus\n#### 7"},
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "a"},
    )

    def read(**fields):
        return read_examples(path, data=SimpleNamespace(**fields))

    assert read()[2].prompt == [{"role": "user", "content": "hi"}]
    chat = read(system_prompt="S", chat=True)
    assert chat[1].prompt == [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    assert chat[2].prompt == [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    with pytest.raises(DatasetError, match="data.prompt_template: expected none for messages"):
        read(prompt_template="plain")
    write_lines(path, *path.read_text().splitlines()[:2])
    first, second = read(prompt_template="[{question}] {y}")
    assert first == ("[p {x}] {y}", "5", "s", {"answer": 5, "solution": "s"}, 5)
    assert second[:3] == ("[q] {y}", "7", "thus\n#### 7")
    assert second.fields == {"question": "q", "answer": "thus\n#### 7"}  # the unchanged row
    plain = PROMPT_TEMPLATES["plain"].replace("{question}", "q")
    assert read(prompt_template="plain")[1].prompt == plain
    with pytest.raises(DatasetError, match="prompt_template: expected {question}"):
        read(prompt_template="no place")
    line = '{"prompt": "\\ud83d\\ude42", "answer": "1", "unused": "\\ud83d"}'
    assert read_examples(write_lines(tmp_path / "d.jsonl", line))[0].prompt == "🙂"


def test_one_file_is_split_the_same_for_every_seed(tmp_path):
    lines = [{"prompt": f"p{i % 40}", "answer": str(i)} for i in range(50)]
    path = write_lines(tmp_path / "d.jsonl", *lines)
    data = dict(task="jsonl", path=str(path), n_test=12)
    test = load("test", seed=1, **data)
    train = {seed: load(seed=seed, **data) for seed in (1, 2)}
    assert test == load("test", seed=2, **data) and len(test) == 12
    # A prompt that occurs twice in the file must be either in the training split or in the test
    # split.
    assert not {e.prompt for e in test} & {e.prompt for e in train[1]}
    assert train[1] == load(seed=1, **data)
    assert train[1] != train[2] and sorted(train[1]) == sorted(train[2])
    with pytest.raises(DatasetError, match="data.n_test: expected at most the 50 lines"):
        load("test", task="jsonl", path=str(path), n_test=51)
    lines = [{"prompt": f"p{i}", "answer": "1"} for i in range(3)]
    path = str(write_lines(tmp_path / "d.jsonl", *lines))
    train, test = (load(split, task="jsonl", path=path, n_test=3) for split in ("train", "test"))
    assert sorted(e.prompt for e in train) == [e.prompt for e in test] == ["p0", "p1", "p2"]
    partly = dict(task="jsonl", path=path, n_test=2)
    assert len(load(**partly)) == 1
    with pytest.raises(DatasetError, match="n_test: expected at most the 3 lines of .* got 4"):
        load("test", task="jsonl", path=path, n_test=4)


def test_missing_and_unreadable_sources(tmp_path, monkeypatch):
    with pytest.raises(DatasetError, match="found nothing at"):
        load(task="jsonl", path=str(tmp_path / "no.jsonl"))
    with pytest.raises(DatasetError, match="the file is empty"):
        load(task="jsonl", path=str(write_lines(tmp_path / "e.jsonl")))
    with pytest.raises(DatasetError, match="data.path: expected a file, a folder or a hub id"):
        load(task="gsm8k")
    known = "sort, arithmetic, open, gsm8k, jsonl, traces"
    with pytest.raises(DatasetError, match=f"data.task: expected one of {known}, got 'chess'"):
        load(task="chess")
    with pytest.raises(DatasetError, match="split: expected 'train' or 'test', got 'dev'"):
        load("dev", task="sort")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match="needs the package `datasets`"):
        load(task="gsm8k", path="openai/gsm8k")
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"})
    path.chmod(0)
    with pytest.raises(DatasetError, match="found nothing at .*d.jsonl/x.jsonl"):
        load(task="jsonl", path=f"{path}/x.jsonl")
    with pytest.raises(DatasetError, match="found nothing at"):
        load(task="jsonl", path="x" * 5000)
    unreadable = str(path) if not os.access(path, os.R_OK) else "/proc/self/mem"
    with pytest.raises(DatasetError, match="data.path: expected a readable file, got .*Errno"):
        read_examples(unreadable)


def test_hub_rows(monkeypatch):
    calls = []

    def load_dataset(repository, config):
        calls.append((repository, config))
        return {split: [{"question": f"{split} q", "answer": "#### 1"}] for split in SPLITS}

    def without_a_test(*arguments):
        return {**load_dataset(*arguments), "test": []}

    def installed(patch, load_dataset):
        patch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))

    installed(monkeypatch, load_dataset)
    with monkeypatch.context() as patch:
        installed(patch, without_a_test)
        for split in ("train", "test"):
            with pytest.raises(DatasetError, match="at least one test example in a/b, got none"):
                load(split, task="gsm8k", path="a/b")
        installed(patch, lambda *arguments: {**load_dataset(*arguments), "train": []})
        with pytest.raises(DatasetError, match="a training example .* in a/b, got none"):
            load(task="gsm8k", path="a/b")
    calls.clear()
    train = load(task="gsm8k", path="openai/gsm8k")
    assert train[0].prompt == "train q" and load("test", task="jsonl", path="a/b:c")[0].prompt[:4]
    assert calls == [("openai/gsm8k", "main"), ("a/b", "c")]
    one = {"only": [{"question": f"q{i}", "answer": "1"} for i in range(20)]}
    with monkeypatch.context() as patch:
        installed(patch, lambda *_: one)
        assert len(load(task="jsonl", path="a/b")) == 18  # two rows are held out for the test split


# ---------------------------------------------------------------------------------- Generated tasks
# These tasks have few different prompts, so random training prompts would often equal test prompts
# if the task did not exclude them.
@pytest.mark.parametrize(("digits", "symbols"), [(3, 10), (4, 30), (8, 2)])
def test_sort_answers_and_held_out_prompts(digits, symbols):
    data = dict(task="sort", n_test=100, n_train=3000, digits=digits, symbols=symbols)
    test, train = (load(s, seed=3, **data) for s in ("test", "train"))
    assert len(test) == 100 and len(train) == 3000
    prompts = [e.prompt for e in test]
    assert len(set(prompts)) == 100
    assert not set(prompts) & {e.prompt for e in train}
    known = set(task_symbols(SimpleNamespace(**data)))
    for prompt, answer, solution, *_ in [*test, *train[:200]]:
        numbers = prompt.removesuffix(" =").split()
        assert len(numbers) == digits and set(numbers) <= known
        assert answer == solution == " ".join(sorted(numbers, key=int))


def test_generated_examples_depend_on_seed_and_index_alone():
    one, again, other = (SortTask(split="train", seed=s) for s in (1, 1, 2))
    assert one[500] == again[500] and one[-1] == one[len(one) - 1]
    assert one[:50] != other[:50]
    assert SortTask(split="test", seed=1)[:] == SortTask(split="test", seed=2)[:]
    with pytest.raises(IndexError):
        one[len(one)]
    for prompt, answer, *_ in ArithmeticTask(split="train", seed=0, digits=3)[:300]:
        left, right = prompt.replace(" ", "").removesuffix("=").split("+")
        assert int(left) + int(right) == int(answer.replace(" ", ""))
    assert set(task_symbols(SimpleNamespace(task="arithmetic"))) == {*"0123456789+="}


def test_the_default_size_of_the_test_split():
    assert len(SortTask(split="test", seed=0)) == 256
    assert len(SortTask(split="test", seed=0, digits=1)) == 5  # half of the ten prompts

    def prompts(split, n_test):
        task = SortTask(split=split, seed=0, digits=3, symbols=2, n_test=n_test)
        return {example.prompt for example in task[:200]}

    test, train = prompts("test", 7), prompts("train", 7)
    assert len(test) == 7 and len(train) == 1 and not test & train
    assert prompts("test", 8) == prompts("train", 8) and len(prompts("test", 8)) == 8
    with pytest.raises(DatasetError, match="at most the 8 different prompts .* got 9"):
        SortTask(split="test", seed=0, digits=3, symbols=2, n_test=9)


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

    data = dict(task="sort", symbols=30)
    tokenizer = build_symbol_tokenizer(task_symbols(SimpleNamespace(**data)))
    assert len(tokenizer) == 33
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded("0 29 =")["input_ids"] == [2, 31, 32]
        assert loaded.decode([2, 31, 1, 0], skip_special_tokens=True) == "0 29"
        batch = loaded(["1 2 =", "1 ="], padding=True)
        assert batch["input_ids"][1][0] == loaded.pad_token_id
        with pytest.raises(Exception, match="UNK"):
            loaded("77")
    for wrong in ([], ["a", "a"], ["a b"], [""]):
        with pytest.raises(ValueError, match="symbols: expected different"):
            build_symbol_tokenizer(wrong)
    with pytest.raises(DatasetError, match="data.path: expected a file, a folder or a hub id"):
        task_symbols(SimpleNamespace(task="gsm8k"))
