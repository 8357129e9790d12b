"""k-shot prompts by a token budget: what fits, what is never among the shots, the same draws."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_fast.data import DatasetError, load_examples
from grpo_fast.data.prompts import question_key
from tests.data.test_data import GSM8K, needs_gsm8k, write_lines


def words(text):
    return len(text.split())


def load(path, split="train", seed=0, **fields):
    data = SimpleNamespace(task="gsm8k", path=str(path), prompt_template="plain", **fields)
    return load_examples(data, split=split, seed=seed, count_tokens=words)


def questions_in(prompt):
    return [part.split("\nAnswer:")[0].strip() for part in prompt.split("Question: ")[1:]]


@pytest.fixture
def twins(tmp_path):
    """Five questions: the third is the second in other blanks, the test asks the fourth."""
    texts = ["One and one?", "Two and  two?", "two and two?", "Three and three?", "Five and five?"]
    lines = [{"question": text, "answer": f"It is {i}\n#### {i}"} for i, text in enumerate(texts)]
    write_lines(tmp_path / "train.jsonl", *lines)
    write_lines(tmp_path / "test.jsonl", {"question": "Three and three?", "answer": "#### 6"})
    return tmp_path


@needs_gsm8k
@pytest.mark.parametrize("budget", [1500, 8192])
@pytest.mark.parametrize("split", ["train", "test"])
def test_real_shots(budget, split):
    """Budgets are nearly used up; shots are training questions, different, never the question."""
    pool = {question_key(e.prompt.removeprefix("Question: ").removesuffix("\nAnswer:"))
            for e in load(GSM8K)}  # fmt: skip
    examples = load(GSM8K, split, shots_tokens=budget)
    assert len(examples) == {"train": 7473, "test": 1319}[split]
    for i in (0, 7, len(examples) - 1):
        *shots, asked = questions_in(examples[i].prompt)
        shot_text = examples[i].prompt.rpartition("Question: ")[0]
        assert budget - 400 < words(shot_text) <= budget
        keys = [question_key(text) for text in shots]
        assert len(set(keys)) == len(keys) and question_key(asked) not in keys and set(keys) <= pool
        assert (question_key(asked) in pool) == (split == "train")
        assert shot_text.count("#### ") == len(shots) and "<<" not in shot_text


@needs_gsm8k
def test_draws_depend_on_seed_and_index_only():
    one, again, other = (load(GSM8K, seed=seed, shots_tokens=500) for seed in (0, 0, 1))
    assert one[5] == again[5] and one[5] == one[:6][5] == one[5 - len(one)]
    assert one.shots(5) != one.shots(6)
    same_question = next(i for i in range(len(other)) if other.examples[i] == one.examples[5])
    assert other[same_question].prompt != one[5].prompt
    first, second = (load(GSM8K, "test", seed=seed, shots_tokens=500)[3] for seed in (0, 1))
    assert first == second


def test_the_question_and_its_twins_never_leak(twins):
    for seed in range(20):
        examples = load(twins, seed=seed, shots_tokens=1000)
        for i in range(len(examples)):
            *shots, asked = (question_key(text) for text in questions_in(examples[i].prompt))
            assert asked not in shots and len(set(shots)) == len(shots) == 2
        asked = load(twins, "test", seed=seed, shots_tokens=1000)[0].prompt
        assert asked.count("Three and three?") == 1


def test_only_what_fits(twins):
    shot = words("Question: One and one?\nAnswer: It is 0\n#### 0")
    counts = [len(questions_in(e.prompt)) for e in load(twins, shots_tokens=2 * shot + 1)]
    assert counts == [3] * len(load(twins))
    with pytest.raises(DatasetError, match="not one of 4 training examples fits into 3 tokens"):
        load(twins, shots_tokens=3)
    data = SimpleNamespace(task="gsm8k", path=str(twins), shots_tokens=9)
    with pytest.raises(DatasetError, match="count_tokens"):
        load_examples(data, split="train", seed=0)


def test_chat_messages_hold_the_shots(twins):
    prompt = load(twins, shots_tokens=1000, chat=True, system_prompt="Be brief.")[0].prompt
    assert [m["role"] for m in prompt] == ["system", "user"]
    assert len(questions_in(prompt[1]["content"])) >= 3
