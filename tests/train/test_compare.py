"""`grpo-fast compare`: what is run, what is not run again, and the numbers that are shown."""

import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from grpo_fast.train import loop
from grpo_fast.train.config.recipes import load_recipe, save_config
from grpo_fast.train.experiments import compare as module
from grpo_fast.train.experiments.compare import compare, plan_arms, table
from grpo_fast.train.experiments.compare_plot import band, grouped, is_telling
from grpo_fast.train.runs.folder import locked
from tests.command_line import invoke
from tests.train.tiny_runs import TINY_SORT

MODES, STEPS = "advantages=centered,rloo", "steps=20"
GRID = [MODES, "loss.loss_type=grpo,reinforce", STEPS]


class FakeRun:
    """Leaves a run's files behind; the reward of a step is seed + step, plus one for rloo."""

    def __init__(self, fails: str = "") -> None:
        self.ran: list[str] = []
        self.fails = fails

    def __call__(self, config) -> None:
        self.ran.append(config.output_dir)
        folder = Path(config.output_dir)
        folder.mkdir(parents=True)
        save_config(config, folder / "config.yaml")
        if self.fails and self.fails in config.output_dir:
            raise RuntimeError("the loss is NaN\x1b[31m")
        first = config.seed + (config.advantages == "rloo")
        rows = [{"step": n, "reward": first + n} for n in range(1, config.steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text("{}")


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """`compared(words)`: the comparison and the folders of the runs that it made; no picture."""
    plot = "grpo_fast.train.experiments.compare_plot.plot"
    monkeypatch.setattr(plot, lambda *arguments: arguments[-1])

    def made(words=(MODES, STEPS), out=tmp_path / "out", fails="", **options):
        run = FakeRun(fails)
        found = compare("sort", [*words], out=out, run=run, **{"say": lambda _: None, **options})
        return found, run.ran

    return made


def test_every_setting_with_every_seed_and_nothing_twice(tmp_path, compared):
    found, ran = compared(GRID, seeds=2)
    assert len(ran) == len(set(ran)) == 8
    for arm in found.arms:
        assert [config.seed for config in arm.runs] == [0, 1]
        for config in arm.runs:
            assert config.advantages == arm.values["advantages"]
            assert config.loss.loss_type == arm.values["loss.loss_type"]
            assert config.steps == 20
    _, ran = compared(GRID, seeds=3)
    assert {*ran} == {str(tmp_path / "out" / arm.name / "seed-2") for arm in found.arms}


def test_a_run_that_was_cut_off_begins_anew(tmp_path, compared):
    compared()
    cut = tmp_path / "out" / "advantages=rloo" / "seed-0"
    (cut / "summary.json").unlink()
    (cut / "rest").write_text("of the first attempt")
    assert compared()[1] == [str(cut)] and not (cut / "rest").exists()


def test_a_run_that_another_process_is_making_stays(tmp_path, compared):
    compared()
    busy = tmp_path / "out" / "advantages=rloo" / "seed-0"
    (busy / "summary.json").unlink()
    with locked(busy):
        found, ran = compared()
    assert ran == [] and (busy / "metrics.jsonl").is_file()
    assert "another process is writing a run into it" in found.failed[str(busy)]


def test_other_runs_are_never_replaced(tmp_path, compared):
    compared()
    with pytest.raises(ValueError, match=r"others \(steps\); choose another folder"):
        compared([MODES, "steps=7"])
    stranger = tmp_path / "b" / "advantages=rloo" / "seed-0"
    stranger.mkdir(parents=True)
    (stranger / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="no config.yaml"):
        compared(out=tmp_path / "b")
    assert [path.name for path in stranger.parent.parent.rglob("*.*")] == ["letter.txt"]


def test_the_numbers_are_means_of_the_last_tenth_with_their_standard_error(tmp_path):
    words = [MODES, STEPS]
    found = compare("sort", words, seeds=3, out=tmp_path, run=FakeRun(), say=lambda _: None)
    centered, rloo = found.arms
    mean, error = found.cell(centered, "reward")
    # Steps 19 and 20 of seeds 0, 1, 2: 19.5, 20.5, 21.5.
    assert mean == pytest.approx(20.5) and error == pytest.approx(1 / math.sqrt(3))
    assert found.cell(rloo, "reward")[0] == pytest.approx(21.5)
    assert "| advantages=rloo | 21.5 ± 0.58 | 3 |" in table(found)
    assert (tmp_path / "table.md").read_text() == table(found)
    stored = json.loads((tmp_path / "compare.json").read_text())
    assert stored["arms"][0]["metrics"]["reward"] == [19.5, 20.5, 21.5]
    assert (tmp_path / "compare.png").stat().st_size > 10_000


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, compared):
    found, ran = compared(seeds=2, fails="rloo/seed-0")
    assert len(ran) == 4
    assert list(found.failed.values()) == ["RuntimeError: the loss is NaN\\x1b[31m"]
    assert "| advantages=rloo | 21.5 | 1 (1 failed) |" in table(found)
    arms = json.loads((tmp_path / "out" / "compare.json").read_text())["arms"]
    values = [(arm["setting"], arm["seeds"], arm["metrics"]["reward"]) for arm in arms]
    of_centered = ("advantages=centered", [0, 1], [19.5, 20.5])
    assert values == [of_centered, ("advantages=rloo", [1], [21.5])]
    assert compared(seeds=2)[1] == list(found.failed)


def test_a_line_per_setting_and_a_row_per_key(compared):
    found, _ = compared(GRID)
    groups = grouped(found.rows, {arm.name: arm.values for arm in found.arms})
    assert list(groups) == ["", "advantages", "loss.loss_type"]
    assert len(groups[""]) == 4 and all(len(runs) == 1 for runs in groups[""].values())
    counts = {label: len(runs) for label, runs in groups["advantages"].items()}
    assert counts == {"centered": 2, "rloo": 2}


def test_the_band_is_one_standard_error_around_the_mean():
    runs = [[(1.0, 1.0), (2.0, 4.0)], [(1.0, 3.0)]]
    middle, low, high = band(runs, "eval_reward")
    assert middle == [(1.0, 2.0), (2.0, 4.0)]
    assert low == [1.0, 4.0] and high == [3.0, 4.0]  # of one run: no error


@pytest.mark.parametrize(
    "words, seeds, message",
    [
        (["advantages=rloo,"], 1, "grid: expected a value between the commas"),
        (["advantages=rloo,nonsense"], 1, "nonsense"),
        (["stepz=1,2"], 1, "nearest: steps"),
        (["steps=1,2", "steps=3"], 1, "settings: expected each key once"),
        (["steps=1,1"], 1, "grid: expected settings that differ"),
        (["steps=1,2"], 0, "seeds: expected at least 1, got 0"),
        (["steps=1,2"], 501, "grid: expected at most 1000 runs, got 1002"),
    ],
)
def test_refusals_come_before_the_first_run(tmp_path, compared, words, seeds, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        compared(words, seeds=seeds)
    assert not (tmp_path / "out").exists()


def test_several_recipes_side_by_side(tmp_path):
    other = tmp_path / "other.yaml"
    save_config(load_recipe("sort", ["optim.lr=0.5"]), other)
    arms = plan_arms(f"sort,{other}", [MODES], 1, tmp_path)
    assert [arm.name for arm in arms] == [
        f"recipe={recipe},advantages={mode}"
        for recipe in ("sort", "other") for mode in ("centered", "rloo")
    ]  # fmt: skip
    assert [arm.runs[0].optim.lr for arm in arms] == [1e-3, 1e-3, 0.5, 0.5]
    grid = ["data={task: jsonl, path: ../../x},{task: jsonl, path: /etc/y}"]
    arms = plan_arms("sort", grid, 1, tmp_path)
    for arm in arms:
        assert Path(arm.runs[0].output_dir).resolve().is_relative_to(tmp_path.resolve())
        assert "/" not in arm.name


def test_the_command_trains_and_says_what_failed(tmp_path, monkeypatch):
    words = [word for word in TINY_SORT if word != "steps=3"]  # each key once
    words += ["steps=2", "log.completions_every=0", "eval.every=0"]
    command = ["compare", "sort", "advantages=centered,rloo", *words, "-o", str(tmp_path)]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert "| advantages=rloo |" in result.output
    assert json.loads((tmp_path / "advantages=rloo/seed-0/summary.json").read_text())["steps"] == 2
    (tmp_path / "advantages=rloo/seed-0/summary.json").unlink()
    monkeypatch.setattr(loop, "train", Mock(side_effect=RuntimeError("no memory")))
    result = invoke(*command)
    assert result.exit_code == 1
    assert "1 runs failed" in result.output and "no memory" in result.output
    assert module.MOST_RUNS == 1000


@pytest.mark.parametrize(("ratio", "shown"), [(1.0, False), (0.995, False), (0.9, True)])
def test_a_ratio_that_is_1_as_ever_gets_no_panel(ratio, shown):
    name = "sampling/importance_sampling_ratio/mean"
    runs = [[{"step": 1, name: 1.0, "kl": 0.0}], [{"step": 1, name: ratio}]]
    assert is_telling(runs, name) == shown
    assert is_telling(runs, "kl") and not is_telling(runs, "reward")
