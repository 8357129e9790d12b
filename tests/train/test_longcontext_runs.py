"""Tests of long-context runs: out of memory, the recipe, and k-shot prompts with a token budget."""

import itertools

import pytest
import torch

from grpo_fast.data.prompts import question_key
from grpo_fast.train import loop, update
from grpo_fast.train.config.recipes import load_recipe
from tests.data import test_data
from tests.data.test_data import GSM8K, needs_gsm8k, write_lines
from tests.tiny import tiny_folder
from tests.train.tiny_runs import logged, questions, sort

pytestmark = pytest.mark.usefixtures("no_pictures")

CPU_ERROR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), CPU_ERROR])
def test_a_run_out_of_memory_is_saved_and_goes_on_with_fewer_tokens(tmp_path, monkeypatch, error):
    """Check the message, and that the run resumes from the last finished step."""
    loss, calls = update.packed_loss, itertools.count(1)

    def failing(*arguments):
        if next(calls) == 2:
            raise error
        return loss(*arguments)

    words = ["steps=2", "tokens_per_microbatch=400"]
    with monkeypatch.context() as patched:
        patched.setattr(update, "packed_loss", failing)
        with pytest.raises(ValueError, match="tokens_per_microbatch: memory ran out with") as found:
            sort(tmp_path / "run", *words)
    assert str(error).splitlines()[0] in str(found.value) and "resume=auto" in str(found.value)
    assert "saved in" in found.value.__notes__[0]
    words = [*words[:1], "tokens_per_microbatch=40", "resume=auto"]
    rows = sort(tmp_path / "run", *words)
    assert [row["step"] for row in rows] == [1, 2]


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


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """Write the first questions of GSM8K, and return their folder. Counting all tokens is slow."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for name, count in (("train", 400), ("test", 20)):
        lines = (GSM8K / f"{name}.jsonl").read_text().splitlines()
        write_lines(folder / f"{name}.jsonl", *lines[:count])
    return folder


@needs_gsm8k
@pytest.mark.parametrize("budget", [1500, 8192])
@pytest.mark.parametrize("split", ["train", "test"])
def test_real_shots(gsm8k, budget, split):
    """Check the worked examples that `shots_tokens` puts before each question of GSM8K.

    They must nearly fill the token budget. They must be different training questions, and must not
    contain the asked question.
    """
    pool = {question_key(e.prompt.removeprefix("Question: ").removesuffix("\nAnswer:"))
            for e in load(gsm8k)}  # fmt: skip
    examples = load(gsm8k, split, shots_tokens=budget)
    assert len(examples) == {"train": 400, "test": 20}[split]
    for i in (0, 7, len(examples) - 1):
        *shots, asked = questions_in(examples[i].prompt)
        shot_text = examples[i].prompt.rpartition("Question: ")[0]
        assert budget - 400 < words(shot_text) <= budget
        keys = [question_key(text) for text in shots]
        assert len(set(keys)) == len(keys) and question_key(asked) not in keys and set(keys) <= pool
        assert (question_key(asked) in pool) == (split == "train")
        assert shot_text.count("#### ") == len(shots) and "<<" not in shot_text


def test_draws_depend_on_seed_and_index_only(tmp_path):
    path = questions(tmp_path / "data")
    one, again, other = (load(path, seed=seed, shots_tokens=60) for seed in (0, 0, 1))
    assert one[5] == again[5] and one[5] == one[:6][5] == one[5 - len(one)]
    assert one.shots(5) != one.shots(6)
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
