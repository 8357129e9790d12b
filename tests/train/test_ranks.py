"""Tests of runs on several processes.

They cover equality with one process, shared errors, and resuming on another number of processes.
"""

import shutil
from pathlib import Path

import pytest

from grpo_fast.errors import SAVED
from grpo_fast.train import loop
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.runs.checkpoint import checkpoints_in
from grpo_fast.train.update.batch import balanced
from tests.data.test_data import write_lines
from tests.tiny import FAMILIES, tiny_folder
from tests.train.ranks import CASES, SMALL, Ranks, differences

UNSHARDED = ("exact", "apart", "local", "sampled", "warm")
COMPARED = [
    *((case, "ddp", 2) for case in CASES),
    # The case "exact" logs the gradient variance, and the engine of "apart" copies unsharded
    # weights. Neither works with sharded weights. The other excluded cases would test nothing
    # new.
    *((case, "fsdp2", 2) for case in CASES if case not in UNSHARDED),
    *((case, "ddp", 4) for case in ("few", "ppo")),
    *((case, "hsdp", 4) for case in ("mu", "distill")),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.kill()


@pytest.fixture(scope="module")
def plain(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that trains a case of `CASES` in one process and returns its folder.

    Each case is trained only once.
    """
    root, known = tmp_path_factory.mktemp("plain"), dict[str, Path]()

    def run(case: str) -> Path:
        if case not in known:
            [[found]] = ranks(1, ["train", case, None, str(root / case)])
            assert "error" not in found and "code" not in found, found
            known[case] = root / case
        return known[case]

    return run


@pytest.mark.parametrize("case, kind, count", COMPARED)
def test_several_processes_do_what_one_does(ranks, plain, tmp_path, case, kind, count):
    """Check that several ranks produce the same metrics and weights as one process.

    In the case "few", one rank gets no group of samples.
    """
    expected = plain(case)
    found = ranks(count, ["train", case, kind, str(tmp_path / "run")])
    assert all(x == found[0] and x[0]["skipped"] == 0 for x in found), found
    assert differences(tmp_path / "run", expected) == []


def test_a_rank_holds_its_shard_of_weights_gradients_and_moments(ranks, tmp_path):
    for kind, count in (("fsdp2", 2), ("ddp", 2), ("hsdp", 4)):
        for [found] in ranks(count, ["shards", "mu", kind, str(tmp_path / kind)]):
            share = 1.0 if kind == "ddp" else 0.5
            assert all(abs(found[x] - share) < 0.05 for x in ("weights", "grads", "moments")), found


def test_a_model_that_differs_between_ranks_is_refused(ranks):
    for [found] in ranks(2, ["load_other", 16]):
        assert "model: expected the parameters of rank 0's model" in found


def test_what_rank_0_reads_is_what_all_have(ranks, tmp_path):
    """Check that a sharded model has the same weights, buffers and adapters as an unsharded model.

    Only rank 0 reads the files of the sharded model. Tied weights must stay tied.
    """
    folders = [str(tiny_folder(tmp_path / family, family)) for family in FAMILIES]
    for [apart] in ranks(2, ["load_shards", *folders]):
        assert apart == []


def test_only_rank_0_has_room_for_the_whole_model(ranks):
    found = [x[0] for x in ranks(4, ["load_large", 200])]
    assert all(180 < x["size"] < 240 for x in found)
    assert found[0]["grown"] > 180, found
    assert all(x["grown"] < 0.45 * found[0]["grown"] for x in found[1:]), found


def test_a_rollout_leaves_no_order_behind(ranks):
    """Check that a sharded model can train after ranks made different forward passes in a rollout.

    Otherwise FSDP2 would prefetch parameters in a different order on each rank, and deadlock.
    """
    assert ranks(2, ["pass_unevenly"], timeout=60) == [[[True, True]]] * 2


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
        for [one] in ranks(2, ["train_apart", "ddp", str(tmp_path / name), [], words]):
            expected = f"rank 1: expected the settings and files of rank 0, got others\n  {said}"
            assert one.get("error") == "ValueError" and expected in one["text"], (name, one)
        assert not (tmp_path / name).exists()


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
    for [one] in ranks(2, ["train_apart", "ddp", str(tmp_path / "run"), *words]):
        assert one.get("error") == "ValueError", one
        assert "rank 1: expected " in one["text"] and "files.data.t" in one["text"], one
    assert not (tmp_path / "run").exists()


# Each entry has the case, the setting `distributed`, the number of the forward pass at which rank 1
# gets a signal, and the name of the expected checkpoint.
LEFT = [
    ("mu", "ddp", 45, "step_000002"),
    ("mu", "fsdp2", 45, "step_000002"),
    ("ppo", "fsdp2", 45, "step_000002"),
    ("ppo", "ddp", 60, "step_000002"),
    ("apart", "ddp", 11, "step_000001"),
]


def copied(run: Path, name: str) -> str:
    """Copy the folder of a run, so that a test can resume the run more than once."""
    return str(shutil.copytree(run, run.with_name(name)))


@pytest.mark.parametrize("case, kind, passes, place", LEFT)
def test_a_run_that_is_left_goes_on_on_any_number_of_processes(
    ranks, plain, tmp_path, case, kind, passes, place
):
    """Check that a signal to one rank ends all ranks at the same step with one checkpoint.

    The run must then resume on 1, 2 and 4 ranks, with the results of an uninterrupted run.
    """
    left, whole = tmp_path / "left", tmp_path / "whole"
    other = "ddp" if kind == "fsdp2" else "fsdp2"
    found = ranks(2, ["train_until", case, kind, str(left), 1, passes])
    assert all(x[0]["code"] == SAVED and x[0]["seen"] >= passes for x in found), found
    [saved] = checkpoints_in(left)
    assert saved.name == place
    two, others, four, one = (copied(left, name) for name in ("two", "other", "four", "one"))
    ranks(
        2,
        ["train", case, kind, two, "resume=auto"],
        ["train", case, other, others, "resume=auto"],
        ["train", case, kind, str(whole)],
    )
    assert differences(Path(two), whole, 0.0) == []
    ranks(4, ["train", case, kind, four, "resume=auto"])
    ranks(1, ["train", case, None, one, "resume=auto"])
    for name in (others, four, one):
        assert differences(Path(name), plain(case)) == [], name


def test_one_process_goes_on_on_several(ranks, plain, tmp_path):
    ranks(1, ["train_until", "mu", None, str(tmp_path / "left"), 0, 70])
    assert len(checkpoints_in(tmp_path / "left")) == 1
    for kind in ("ddp", "fsdp2"):
        ranks(2, ["train", "mu", kind, copied(tmp_path / "left", kind), "resume=auto"])
        assert differences(tmp_path / kind, plain("mu")) == []


def test_out_of_memory_on_one_rank_halves_the_micro_batches_of_all(ranks, plain, tmp_path):
    """Check also that the run is saved if one completion does not fit into memory."""
    found = ranks(2, ["train_with", "memory", "mu", "ddp", str(tmp_path / "run")])
    assert [x[0]["tokens"] for x in found] == [11, 11], found
    apart = differences(tmp_path / "run", plain("mu"))
    # Only the metric num_tokens may differ. With smaller micro-batches, a prompt whose completions
    # are in two micro-batches counts twice.
    assert len(apart) == 3 and all("num_tokens" in x for x in apart)
    found = ranks(2, ["train_with", "memory", "mu", "fsdp2", str(tmp_path / "shards")])
    assert found[1][0]["error"] == "ValueError" and "fewer tokens" in found[1][0]["text"]
    assert found[0][0]["error"] == "RankError", found
    found = ranks(2, ["train_with", "memories", "mu", "ddp", str(tmp_path / "end")])
    assert all(x[0]["error"] == "ValueError" for x in found), found
    assert [path.name for path in checkpoints_in(tmp_path / "end")] == ["step_000000"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks, tmp_path, kind):
    """Check also that three such steps in a row end the run, and that the run is saved."""
    jobs = ("nan", "mu", kind, str(tmp_path / "run")), ("nans", "few", kind, str(tmp_path / "end"))
    found = ranks(2, *(["train_with", *job] for job in jobs))
    assert [x[0]["skipped"] for x in found] == [1, 1], found
    assert [x[1].get("error") for x in found] == ["NonFiniteGradient"] * 2, found
    assert [path.name for path in checkpoints_in(tmp_path / "end")] == ["step_000002"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_full_disk_of_rank_0_ends_all_ranks(ranks, tmp_path, kind):
    folder = str(tmp_path / "run")
    found = ranks(2, ["train_with", "disk", "mu", kind, folder, "checkpoint.every=1"])
    assert [x[0].get("error") for x in found] == ["WriteError"] * 2, found
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


LOGGING, STALE = ["TypeError", "RankError"], ["EngineError", "EngineError"]


@pytest.mark.parametrize(
    "fault, errors, place",
    [("log", LOGGING, "step_000002"), ("finish", LOGGING, "step_000003"),
     ("stale", STALE, "step_000001")],
)  # fmt: skip
def test_an_error_of_logs_or_old_samples_ends_all_ranks_and_saves_the_run(
    ranks, tmp_path, fault, errors, place
):
    found = ranks(2, ["train_with", fault, "few", "ddp", str(tmp_path / "run")])
    assert [x[0].get("error") for x in found] == errors, found
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == [place]


def test_an_error_of_one_rank_is_raised_by_all(ranks):
    cases = {
        (None, None): ["NoneType", "None"],
        (None, "ValueError"): ["ValueError", "rank 1: of 1"],
        ("RewardError", "ValueError"): ["RewardError", "rank 0: of 0"],
        ("ValueError", "Stopped"): ["Stopped", "2"],
        (None, "unknown"): ["RankError", "rank 1: KeyError: 'of 1'"],
        ("NonFiniteLogits", None): ["NonFiniteLogits", "rank 0: of 0"],
    }
    first, second = ranks(2, *(["raise_together", *kinds] for kinds in cases))
    for own, other, ((a, b), (kind, text)) in zip(first, second, cases.items(), strict=True):
        for number, found in enumerate((own, other)):
            raises_its_own = (a, b)[number] is not None and f"rank {number}" in text
            assert found == [kind, text] or raises_its_own, (found, kind, text)


def test_trackers_are_rank_0s(ranks):
    for [seen] in ranks(2, ["track"]):
        assert seen == [[[[1, {"reward": 0.5}]], 1]]


def test_a_warm_start_of_shards_is_refused(ranks, tmp_path):
    """Check that a warm start with sharded weights is refused before any training."""
    for [found] in ranks(2, ["train", "warm", "fsdp2", str(tmp_path / "run")]):
        assert "warm_start: expected one process or distributed=ddp, got fsdp2" in found["text"]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(ranks, tmp_path, dead):
    """Check that a rank ends with an error if the other rank is killed, even without torchrun."""
    found = ranks(2, ["ended", str(tmp_path / "run"), dead])
    survivor, gone = found[1 - dead], found[dead]
    assert gone == [] and survivor[0]["error"] == "RankError", survivor
    assert "a rank, which torchrun names, has ended" in survivor[0]["text"]
    assert survivor[0]["seconds"] < 60
    assert checkpoints_in(tmp_path / "run") == []  # a run is saved by all ranks together


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
