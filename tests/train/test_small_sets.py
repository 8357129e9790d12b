"""Few prompts, other prompts, used folders: runs that a beginner makes first."""

from __future__ import annotations

import json
import math
import os

import pytest

from grpo_fast.train import loop
from grpo_fast.train.config.recipes import load_recipe
from tests.command_line import invoke, refused
from tests.data.test_data import write_lines
from tests.train.tiny_runs import TINY_SORT

pytestmark = pytest.mark.usefixtures("no_pictures")


def train(folder, *words):
    config = load_recipe("sort", [*TINY_SORT, "steps=1", *words, f"output_dir={folder}/run"])
    return loop.train(config)


def test_words_of_a_file_are_symbols(tmp_path):
    """A symbol tokenizer takes any jsonl: its words, those of the test prompts too."""
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
    words = ["data.n_test=1", "eval={samples: 2, k: [1, 2], temperature: 1.0}"]
    summary = train(tmp_path, *words, "log.progress=true", "log.save_model=true")
    assert summary["after"]["eval_n"] == 1
    assert "(n=1, ± one standard error)" in capsys.readouterr().out
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["after"]["eval_reward_se"] is None
    result = invoke("eval", str(tmp_path / "run"))
    assert result.exit_code == 0 and "sampled (n=1 questions, 2 sample(s) each)" in result.output
    assert invoke("eval", *[str(tmp_path / "run")] * 2).exit_code == 0


def test_a_used_folder_of_a_recipe_counts_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("train", "sort", *TINY_SORT, "steps=0")
    first, second, third = (invoke(*words) for _ in range(3))
    assert "runs/sort holds" not in first.output
    said = "runs/sort holds another run; this one goes to runs/sort-2"
    assert second.output.splitlines()[0] == said
    assert third.output.splitlines()[0].endswith("goes to runs/sort-3")
    assert sorted(os.listdir("runs")) == ["sort", "sort-2", "sort-3"]
    assert invoke(*words, "resume=auto", "steps=1").exit_code == 2  # of the first, which has ended
    for name in os.listdir("runs"):
        assert load_recipe(f"runs/{name}/config.yaml").output_dir == f"runs/{name}"
    assert refused(invoke(*words, "output_dir=runs/sort"), "runs/sort is occupied", "--name")
    assert sorted(os.listdir("runs")) == ["sort", "sort-2", "sort-3"]
