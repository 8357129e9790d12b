"""Tests of long-context runs: out of memory, the recipe, and k-shot prompts with a token budget."""

import pytest

from grpo_fast.data.prompts import question_key
from grpo_fast.train import loop
from grpo_fast.train.config import load_recipe
from tests.data import test_data
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder
from tests.train.tiny_runs import logged, questions

pytestmark = pytest.mark.usefixtures("no_pictures")


# -------------------------------------------------------------------------- Settings and the recipe
def test_the_longcontext_recipe_trains_a_tiny_model(tmp_path):
    questions(tmp_path, test=0)
    model = tiny_folder(tmp_path / "tiny", "qwen2")
    config = load_recipe("gsm8k-longcontext", [
        f"model.path={model}", f"data.path={tmp_path}", "data.shots_tokens=220",
        "data.n_test=4", "rollout.max_new_tokens=4", "rollout.prompts_per_step=2", "steps=1",
        "log.progress=false", "model.autocast=null", "log.save_model=false", "model.tiled_mlp=64",
        "eval.n=2", f"output_dir={tmp_path / 'run'}",
    ])  # fmt: skip
    loop.train(config)
    row = logged(tmp_path / "run")[-1]
    # The batch has two groups of 16 samples. A group must contain its prompt of about 220 tokens
    # only once.
    assert 2 * 220 < row["num_tokens"] < 2 * 400
    # A longer question than that of the first prompt must not end a run in the middle.
    config.data.shots_tokens = 512 - 40
    config.output_dir = str(tmp_path / "again")
    with pytest.raises(ValueError, match="data.shots_tokens: expected at most .* a question of "):
        loop.train(config)


# --------------------------------------------------------------------- Prompts with worked examples
def words(text):
    return len(text.split())


def load(path, split="train", seed=0, **fields):
    return test_data.load(split, seed, "gsm8k", path=str(path), prompt_template="plain", **fields)


def questions_in(prompt):
    return [part.split("\nAnswer:")[0].strip() for part in prompt.split("Question: ")[1:]]


@pytest.fixture
def twins(tmp_path):
    """Write a data set with repeated questions, and return its folder.

    The third training question repeats the second one. The only test question repeats the fourth
    training question.
    """
    texts = ["One and one?", "Two and  two?", "two and two?", "Three and three?", "Five and five?"]
    lines = [{"question": text, "answer": f"It is {i}\n#### {i}"} for i, text in enumerate(texts)]
    write_lines(tmp_path / "train.jsonl", *lines)
    write_lines(tmp_path / "test.jsonl", {"question": "Three and three?", "answer": "#### 6"})
    return tmp_path


def test_draws_depend_on_seed_and_index_only(tmp_path):
    path = questions(tmp_path / "data")
    one, again, other = (load(path, seed=seed, shots_tokens=60) for seed in (0, 0, 1))
    assert one[5] == again[5] and one[5] == one[:6][5] == one[5 - len(one)]
    assert questions_in(one[5].prompt)[:-1] != questions_in(one[6].prompt)[:-1]
    same_question = next(i for i in range(len(other)) if other.examples[i] == one.examples[5])
    assert other[same_question].prompt != one[5].prompt
    first, second = (load(path, "test", seed=seed, shots_tokens=60)[3] for seed in (0, 1))
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
    with pytest.raises(ValueError, match="not one of 4 training examples fits into 3 tokens"):
        load(twins, shots_tokens=3)
    prompt = load(twins, shots_tokens=1000, chat=True, system_prompt="Be brief.")[0].prompt
    assert [m["role"] for m in prompt] == ["system", "user"]
    assert len(questions_in(prompt[1]["content"])) >= 3
