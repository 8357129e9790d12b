"""Tests of runs with few prompts, prompts without answers, and folders of earlier runs."""

import json
import math
import os

import pytest

from grpo_fast.train import loop
from grpo_fast.train.config import load_recipe
from tests.command_line import invoke, refused
from tests.data.test_data import write_lines
from tests.train.test_run_refusals import texts_recipe
from tests.train.tiny_runs import TINY_SORT, logged

pytestmark = pytest.mark.usefixtures("no_pictures")


def train(folder, *words):
    config = load_recipe("sort", [*TINY_SORT, "steps=1", *words, f"output_dir={folder}/run"])
    return loop.train(config)


def test_words_of_a_file_are_symbols(tmp_path):
    """Check that the vocabulary of the tokenizer `symbols` has all words of both data splits."""
    lines = [{"prompt": f"say w{i}", "answer": f"w{i} w0"} for i in range(6)]
    write_lines(tmp_path / "train.jsonl", *lines[:5])
    write_lines(tmp_path / "test.jsonl", lines[5])
    rewards = "rewards=[{name: exact_match}]"
    data = f"data={{task: jsonl, path: {tmp_path}}}"
    words = ["rollout.max_new_tokens=4", "log.save_model=true"]
    summary = train(tmp_path, data, rewards, *words)
    assert summary["after"]["eval_n"] == 1 and not math.isnan(summary["after"]["eval_reward"])
    with open(tmp_path / "run" / "model" / "tokenizer.json") as file:
        vocabulary = json.load(file)["model"]["vocab"]
    assert set(vocabulary) == {"<|pad|>", "<|eos|>", "say", *(f"w{i}" for i in range(6))}


def test_one_test_prompt(tmp_path, capsys):
    words = ["data.n_test=1", "eval={samples: 2, temperature: 1.0}"]
    summary = train(tmp_path, *words, "log.progress=true", "log.save_model=true")
    assert summary["after"]["eval_n"] == 1
    assert "(n=1, ± one standard error)" in capsys.readouterr().out
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["after"]["eval_reward_se"] is None
    result = invoke("eval", str(tmp_path / "run"))
    assert result.exit_code == 0
    for said in ("sampled (n=1 questions, 2 sample(s) each)", "greedy (n=1", "pass@2"):
        assert said in result.output


def test_a_used_folder_of_a_recipe_counts_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("train", "sort", *TINY_SORT, "steps=0")
    first, second, third = (invoke(*words) for _ in range(3))
    assert "runs/sort holds" not in first.output
    said = "runs/sort holds another run; this run goes to runs/sort-2"
    assert second.output.splitlines()[0] == said
    assert third.output.splitlines()[0].endswith("goes to runs/sort-3")
    assert sorted(os.listdir("runs")) == ["sort", "sort-2", "sort-3"]
    assert invoke(*words, "resume=auto", "steps=1").exit_code == 2  # no step was saved
    for name in os.listdir("runs"):
        assert load_recipe(f"runs/{name}/config.yaml").output_dir == f"runs/{name}"
    said = "runs/sort is occupied", "output_dir=…"
    assert refused(invoke(*words, "output_dir=runs/sort"), *said)
    assert sorted(os.listdir("runs")) == ["sort", "sort-2", "sort-3"]


# ------------------------------------------------------------------------ Prompts without an answer
LEVELS = """
def level(completions, level):
    return [float(n) + len(c) / 1000 for c, n in zip(completions, level, strict=True)]
"""


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe with nine prompts, and return its path.

    Each prompt has a field `level`, and only one prompt has an answer.
    """
    lines = [{"prompt": f"say {i}", "level": i} for i in range(8)]
    return texts_recipe(tmp_path, [*lines, {"prompt": "what?", "level": 3, "answer": "18"}], 2)


@pytest.mark.parametrize("here", ["true", "false"])
def test_a_run_on_prompts_alone(recipe, tmp_path, here):
    (tmp_path / "own.py").write_text(LEVELS)
    result = invoke(
        "train", recipe, "steps=2", "log.progress=false", "log.completions_every=1",
        "rewards=[{name: length_penalty, options: {scale: 10}}, "
        f"{{name: '{tmp_path}/own.py:level', in_process: {here}}}]",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert -1 < summary["after"]["eval_rewards/length_penalty"] < 0
    assert summary["after"]["eval_rewards/level"] >= 0
    lines = logged(tmp_path / "run")
    assert lines[-1]["rewards/level/failed"] == 0
    assert not any("/failed/" in name for line in lines for name in line)


def test_an_evaluation_counts_the_answers_there_are(recipe, tmp_path):
    """Check that an evaluation computes the accuracy only over questions that have an answer."""
    length = "rewards=[{name: length_penalty, options: {scale: 10}}]"
    words = ["steps=1", "log.progress=false", length]
    assert invoke("train", recipe, *words).exit_code == 0
    after = json.loads((tmp_path / "run" / "summary.json").read_text())["after"]
    assert after["eval_n"] == 2 and not any("accuracy" in name for name in after)
    run, out = str(tmp_path / "run"), tmp_path / "out.json"
    assert invoke("eval", run, f"data={tmp_path}/d.jsonl", f"out={out}").exit_code == 0
    greedy = json.loads(out.read_text())["greedy"]
    assert greedy["eval_n"] == 9 and greedy["eval_accuracy_strict"] in (0, 1)
    assert greedy["eval_accuracy_strict_se"] is None  # a single question has no standard error
    assert refused(invoke("eval", run, f"data={tmp_path}/none.jsonl"), "got nothing")
