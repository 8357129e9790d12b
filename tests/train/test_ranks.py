"""Tests of runs on several processes: refusals, and the division of the groups."""

import os
from typing import Any

import pytest

from grpo_fast.train import loop
from grpo_fast.train import ranks as train_ranks
from grpo_fast.train.batch import balanced
from grpo_fast.train.config.recipes import load_recipe
from tests.data.test_data import write_lines
from tests.train.rank_runs import SMALL, train


def train_apart(kind: str, folder: str, *words_of_ranks: list[str]) -> Any:
    """Train with different settings on every rank, and return the result of `train`.

    The word `cd=FOLDER` changes the working folder of a rank.
    """
    words = list(words_of_ranks[train_ranks.rank()])
    for word in [word for word in words if word.startswith("cd=")]:
        words.remove(word)
        os.chdir(word.removeprefix("cd="))
    return train("mu", kind, folder, "steps=1", *words)


APART = {
    "seed": (["seed=1"], "seed: 0 → 1"),
    "kind": (["distributed=fsdp2"], "distributed: 'ddp' → 'fsdp2'"),
    "reward": (["rewards=[{name: 'REWARD:score'}]"], "rewards"),
}


def test_ranks_that_were_started_differently_do_not_train(ranks, tmp_path):
    """Check that training does not start if the ranks have different settings.

    The error on every rank must name the rank and the setting that differ. No folder is created.
    """
    reward = "def score(completions):\n    return [1.0] * len(completions)\n"
    (tmp_path / "mine.py").write_text(reward)
    for name, (words, said) in APART.items():
        words = [word.replace("REWARD", str(tmp_path / "mine.py")) for word in words]
        for [one] in ranks(2, [train_apart, "ddp", str(tmp_path / name), [], words]):
            expected = f"rank 1: expected the settings and files of rank 0, got others\n  {said}"
            assert one.get("error") == "ValueError" and expected in one["text"], (name, one)
        assert not (tmp_path / name).exists()


def test_a_model_whose_prompts_are_not_shared_is_refused_by_all_ranks(ranks, tmp_path):
    """Check that sharding does not start, and that the message says why."""
    for [found] in ranks(2, [train, "alone", "fsdp2", str(tmp_path / "run")], timeout=120):
        assert found["error"] == "ValueError", found
        assert "distributed: expected ddp, because this model computes every" in found["text"]
        assert "nats" in found["text"]  # the reason


def test_ranks_with_other_data_or_rewards_do_not_train(ranks, tmp_path):
    """Check that training does not start if ranks have equal settings but different data files."""
    words = []
    for rank in range(2):
        here = tmp_path / str(rank)
        here.mkdir()
        rows = [{"prompt": f"{i} {i}", "answer": str(i + rank * (i == 5))} for i in range(8)]
        write_lines(here / "d.jsonl", *rows)
        words.append(["data.task=jsonl", "data.path=d.jsonl", "data.n_test=2", "cd=" + str(here),
                      "model.tokenizer=symbols", "rewards=[{name: exact_match}]"])  # fmt: skip
    for [one] in ranks(2, [train_apart, "ddp", str(tmp_path / "run"), *words]):
        assert one.get("error") == "ValueError", one
        assert "rank 1: expected " in one["text"] and "files.data.t" in one["text"], one
    assert not (tmp_path / "run").exists()


def test_a_warm_start_of_shards_is_refused(ranks, tmp_path):
    """Check that a warm start with sharded weights is refused before any training."""
    for [found] in ranks(2, [train, "warm", "fsdp2", str(tmp_path / "run")]):
        assert "warm_start: expected one process or distributed=ddp, got fsdp2" in found["text"]


def test_groups_are_dealt_by_their_tokens():
    assert balanced([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]
    assert balanced([3], 3) == [[0], [], []]
    assert balanced([2, 2, 2], 1) == [[0, 1, 2]]


@pytest.mark.parametrize(
    "ranks, words, said",
    [(None, ["distributed=ddp"], "distributed: expected processes .torchrun"),
     ("2", [], "distributed: expected ddp, fsdp2 or hsdp for 2"),
     ("3", ["distributed=hsdp", "distributed_replicas=2"], "divides the 3 processes, got 2")],
)  # fmt: skip
def test_processes_that_do_not_fit_are_refused(tmp_path, monkeypatch, ranks, words, said):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", ranks)):
        monkeypatch.delenv(name, raising=False)
        if ranks is not None:
            monkeypatch.setenv(name, value)
    config = load_recipe("sort", [*SMALL, *words, f"output_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match=said):
        loop.train(config)
    assert not (tmp_path / "run").exists()
