"""Tests of runs on several processes.

They cover equality with one process, resuming on another number of processes, and refusals.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from grpo_fast.errors import SAVED
from grpo_fast.train import loop
from grpo_fast.train import ranks as train_ranks
from grpo_fast.train.batch import balanced
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.folder import checkpoints_in
from grpo_fast.train.report import report as trackers
from tests.data.test_data import write_lines
from tests.train.rank_runs import CASES, SMALL, differences, train
from tests.train.resuming import Leave

UNSHARDED = ("alone", "exact", "apart", "local", "sampled", "warm", "per-token")
COMPARED = [
    *((case, "ddp", 2) for case in CASES),
    # The case "exact" logs the gradient variance, the engine of "apart" copies unsharded weights,
    # and "alone" computes every completion alone. None of them works with sharded weights. The
    # other excluded cases would test nothing new.
    *((case, "fsdp2", 2) for case in CASES if case not in UNSHARDED),
    *((case, "ddp", 4) for case in ("few", "ppo")),
    *((case, "hsdp", 4) for case in ("mu", "divergence")),
]


@pytest.mark.parametrize("case, kind, count", COMPARED)
def test_several_processes_do_what_one_does(ranks, plain, tmp_path, case, kind, count):
    """Check that several ranks produce the same metrics and weights as one process.

    In the case "few", one rank gets no group of samples.
    """
    expected = plain(case)
    found = ranks(count, [train, case, kind, str(tmp_path / "run")])
    assert all(x == found[0] and x[0]["skipped"] == 0 for x in found), found
    assert differences(tmp_path / "run", expected) == []


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
    """Check that sharding does not start. Only rank 0 knows the reason, because it has weights."""
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


def train_until(case: str, kind: str, folder: str, rank: int, passes: int, *words: str) -> Any:
    """Train a case, and send a signal to one rank just before its `passes`-th forward pass.

    Returns:
        The result of `train`. It also contains the number of forward passes, as `seen`.
    """
    with MonkeyPatch.context() as patched:
        leave = Leave(patched, passes if train_ranks.rank() == rank else None)
        return {**train(case, kind, folder, *words), "seen": leave.passes}


# Each entry has the case, the setting `distributed`, the number of the call (a forward pass of a
# rollout, or the end of a step) at which rank 1 gets a signal, the name of the expected checkpoint,
# and the numbers of ranks and settings with which the run resumes. It also resumes on the same
# ranks.
LEFT = [
    ("mu", "ddp", 29, "step_000002", [(4, "ddp"), (1, None)]),
    ("mu", "fsdp2", 29, "step_000002", [(2, "ddp"), (1, None)]),
    ("ppo", "fsdp2", 29, "step_000002", [(4, "fsdp2")]),
    ("ppo", "ddp", 29, "step_000002", [(2, "fsdp2"), (1, None)]),
    ("apart", "ddp", 1, "step_000001", [(4, "ddp")]),
]


def copied(run: Path, name: str) -> str:
    """Copy the folder of a run, so that a test can resume the run more than once."""
    return str(shutil.copytree(run, run.with_name(name)))


@pytest.mark.parametrize("case, kind, passes, place, others", LEFT)
def test_a_run_that_is_left_goes_on_on_any_number_of_processes(
    ranks, plain, tmp_path, case, kind, passes, place, others
):
    """Check that a signal to one rank ends all ranks at the same step with one checkpoint.

    The resumed run must have the results of an uninterrupted run.
    """
    left, whole = tmp_path / "left", tmp_path / "whole"
    found = ranks(2, [train_until, case, kind, str(left), 1, passes])
    assert [x[0]["code"] for x in found] == [SAVED] * 2 and found[1][0]["seen"] >= passes, found
    [saved] = checkpoints_in(left)
    assert saved.name == place
    folders = [copied(left, str(number)) for number in range(len(others) + 1)]
    again = [train, case, kind, folders[-1], "resume=auto"]
    ranks(2, again, [train, case, kind, str(whole)])
    assert differences(Path(folders[-1]), whole, 0.0) == []
    for folder, (count, other) in zip(folders, others, strict=False):
        ranks(count, [train, case, other, folder, "resume=auto"])
        assert differences(Path(folder), plain(case)) == [], (count, other)


def test_one_process_goes_on_on_several(ranks, plain, tmp_path):
    ranks(1, [train_until, "mu", None, str(tmp_path / "left"), 0, 70])
    assert len(checkpoints_in(tmp_path / "left")) == 1
    for kind in ("ddp", "fsdp2"):
        ranks(2, [train, "mu", kind, copied(tmp_path / "left", kind), "resume=auto"])
        assert differences(tmp_path / kind, plain("mu")) == []


def track() -> Any:
    """Start and finish a metrics tracker on rank 0, and return the rows that the tracker received.

    The ranks then gather the rows, which fails if finishing the tracker destroyed the process
    group.
    """
    from tests.train.test_trackers import Fake

    if train_ranks.is_main():
        mine = trackers.start_trackers([Fake("run")], ".", {})  # type: ignore[list-item]
        for tracker in mine:
            tracker.log({"reward": 0.5}, step=1)
            tracker.finish()
    return train_ranks.gather([[each.rows, each.finished] for each in Fake.made])[0]


def test_trackers_are_rank_0s(ranks):
    for [seen] in ranks(2, [track]):
        assert seen == [[[[1, {"reward": 0.5}]], 1]]


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
