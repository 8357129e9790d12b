"""Tests of long-context runs: out of memory, the recipe, and k-shot prompts with a token budget."""

import json
import logging
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from grpo_fast.data.prompts import question_key
from grpo_fast.data.splits import Splits
from grpo_fast.train import loop
from grpo_fast.train.config import DataConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models import loading
from grpo_fast.train.models.policy import Policy
from tests.data import test_data
from tests.data.test_data import GSM8K, needs_gsm8k, write_lines
from tests.tiny import tiny_folder
from tests.train.tiny_runs import logged, questions, sort


def sort_run(folder, *overrides):
    kl = ["loss.beta=0.05", "reference.kind=frozen"]
    return sort(folder, "steps=2", *kl, "optim.lr=0.01", *overrides)


GPU_ERROR = torch.OutOfMemoryError("CUDA out of memory.")
CPU_ERROR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
)

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def no_room(monkeypatch):
    """Return a function that makes some forward passes of the policy run out of memory.

    Its argument `fails(k, tokens)` returns True if the k-th forward pass, with the given number of
    tokens, must fail. The self-check before the run never fails.
    """
    original, calls = Policy.hidden, []
    check = loading.self_check

    def with_room(policy):
        with monkeypatch.context() as patched:
            patched.setattr(Policy, "hidden", original)
            return check(policy)

    def install(fails, error=GPU_ERROR):
        def hidden(self, packed):
            calls.append(packed.layout.total)
            states = original(self, packed)
            if fails(len(calls), packed.layout.total):
                raise error
            return states

        monkeypatch.setattr(Policy, "hidden", hidden)
        monkeypatch.setattr(loading, "self_check", with_room)
        return calls

    return install


def lowered_budget(folder):
    return json.loads((folder / "summary.json").read_text())["tokens_per_microbatch"]


REUSED = ["inner_iterations=2", "minibatches=2"]


@pytest.mark.parametrize(
    ("error", "room", "overrides", "where"),
    [
        (GPU_ERROR, 40, [], "anywhere"),
        (CPU_ERROR, 24, REUSED, "anywhere"),
        (GPU_ERROR, 24, REUSED, "with gradients"),
    ],
    ids=["gpu-once", "cpu-reused", "gpu-reused-in-the-update"],
)
def test_out_of_memory_halves_the_budget_and_starts_the_step_again(
    tmp_path, no_room, caplog, error, room, overrides, where
):
    """Check that a run that runs out of memory lowers `tokens_per_microbatch` and continues.

    The results must equal the results of a run that has the lower budget from the start.
    """
    # Memory runs out in every large forward pass, or only in forward passes with gradients. In the
    # second case, the old log-probs must be computed again with the lower budget.
    every = where == "anywhere"
    no_room(lambda call, tokens: tokens > room and (every or torch.is_grad_enabled()), error)
    with caplog.at_level(logging.WARNING, "grpo_fast"):
        lowered = sort_run(tmp_path / "lowered", *overrides, "tokens_per_microbatch=80")
    budget = lowered_budget(tmp_path / "lowered")
    lines = [record.message for record in caplog.records if "lowered" in record.message]
    assert 10 < budget <= room
    assert lines == [f"out of memory: tokens_per_microbatch lowered to {budget} ({error})"]
    assert sort_run(tmp_path / "lower", *overrides, f"tokens_per_microbatch={budget}") == lowered


def test_out_of_memory_between_micro_batches_forgets_the_gradients_so_far(tmp_path, no_room):
    """Check that the gradients are cleared if memory runs out in the second micro-batch.

    The step starts again with a lower budget, so gradients of the first micro-batch must not count
    twice.
    """
    options = ["reference.kind=none", "loss.beta=0"]
    calls = no_room(lambda call, tokens: call == 2)
    lowered = sort_run(tmp_path / "lowered", *options, "tokens_per_microbatch=50")
    budget = lowered_budget(tmp_path / "lowered")
    assert budget < calls[0] and max(calls[:2]) // 2 == budget and max(calls[2:]) <= budget
    assert sort_run(tmp_path / "lower", *options, f"tokens_per_microbatch={budget}") == lowered


def test_one_completion_that_does_not_fit_ends_the_run(tmp_path, no_room):
    no_room(lambda call, tokens: True)
    with pytest.raises(ValueError, match="tokens_per_microbatch: one completion with its prompt"):
        sort_run(tmp_path / "run")


def test_other_errors_are_not_taken_for_out_of_memory(tmp_path, no_room):
    no_room(lambda call, tokens: call == 1, RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        sort_run(tmp_path / "run")


# -------------------------------------------------------------------------- Settings and the recipe
def test_the_longcontext_recipe_trains_a_tiny_model(tmp_path, monkeypatch):
    # The default of `tokens_per_microbatch` depends on the memory of the machine. With 8 GiB the
    # whole batch fits into one micro-batch, which the assertions below expect.
    monkeypatch.setattr("grpo_fast.train.batch.host_memory", lambda: 8 << 30)
    questions(tmp_path, test=0)
    model = tiny_folder(tmp_path / "tiny", "qwen2")
    config = load_recipe("gsm8k-longcontext", [
        f"model.path={model}", f"data.path={tmp_path}", "data.shots_tokens=220",
        "data.n_test=4", "rollout.max_new_tokens=4", "rollout.prompts_per_step=2", "steps=1",
        "log.progress=false", "model.autocast=null", "log.save_model=false", "model.tiled_mlp=64",
        "eval.n=2", f"output_dir={tmp_path / 'run'}",
    ])  # fmt: skip
    summary = loop.train(config)
    row = logged(tmp_path / "run")[-1]
    # The batch has two groups of 16 samples. A group must contain its prompt of about 220 tokens
    # only once.
    assert 2 * 220 < row["num_tokens"] < 2 * 400
    assert summary["largest_microbatch"] == row["num_tokens"] and summary["predicted_memory"] > 0
    # A longer question than that of the first prompt must not end a run in the middle.
    config.data.shots_tokens = 512 - 40
    config.output_dir = str(tmp_path / "again")
    with pytest.raises(ValueError, match="data.shots_tokens: expected at most .* a question of "):
        loop.train(config)


def test_a_budget_for_all_worked_examples_is_accepted(tmp_path):
    questions(tmp_path, test=1, train=3)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder(tmp_path / "tiny", "qwen2"))
    data = DataConfig(task="gsm8k", path=str(tmp_path), shots_tokens=10**6, n_test=1)
    plain = Splits(data, 0)
    asked = Splits(data, 0, tokenizer).train
    refused = pytest.raises(ValueError, match="at most .* got 1000000")
    for positions, error in ((5000, nullcontext()), (math.inf, nullcontext()), (90, refused)):
        policy = SimpleNamespace(tokenizer=tokenizer, positions=positions, template_kwargs={})
        with error:
            loop._check_shots(policy, plain, asked, 4)


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
