"""Tests of benchmarks/experiments/compare.py: which runs it starts, and its table and picture."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.experiments import compare as module
from benchmarks.experiments.compare import band, cell, compare, grid_values, grouped, is_telling
from grpo_fast.train.config.recipes import save_config

MODES, STEPS = "advantages=centered,rloo", "steps=20"
GRID = [MODES, "loss.loss_type=grpo,reinforce", STEPS]


@pytest.fixture
def ran(monkeypatch):
    """Replace training with a function that only writes metrics. Return the list of run folders.

    The reward is the seed plus the step. With the setting "rloo" it is 1 higher.
    """
    folders = []

    def train(config):
        folder = Path(config.output_dir)
        folder.mkdir(parents=True)
        save_config(config, folder / "config.yaml")
        first = config.seed + (config.advantages == "rloo")
        rows = [{"step": n, "reward": first + n} for n in range(1, config.steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text("{}")
        folders.append(config.output_dir)

    monkeypatch.setattr(module.loop, "train", train)
    return folders


def test_every_setting_with_every_seed_and_nothing_twice(tmp_path, ran):
    arms = compare("sort", GRID, 2, tmp_path)
    assert len(ran) == len(set(ran)) == 8
    for arm in arms:
        assert [config.seed for config in arm.runs] == [0, 1]
        for config in arm.runs:
            assert config.advantages == arm.values["advantages"]
            assert config.loss.loss_type == arm.values["loss.loss_type"]
    cut = Path(ran[0])
    (cut / "summary.json").unlink()
    (cut / "rest").write_text("of the first attempt")
    ran.clear()
    compare("sort", GRID, 2, tmp_path)
    assert ran == [str(cut)] and not (cut / "rest").exists()
    with pytest.raises(ValueError, match="out: expected an empty folder or a run of these setti"):
        compare("sort", [*GRID[:2], "steps=7"], 2, tmp_path)
    assert (cut / "summary.json").exists()


def test_the_numbers_are_means_of_the_last_tenth_with_their_standard_error(tmp_path, ran):
    compare("sort", [MODES, STEPS], 3, tmp_path)
    # The last tenth of the 20 steps are steps 19 and 20. The mean rewards of seeds 0, 1 and 2 are
    # 19.5, 20.5 and 21.5 for "centered", and 1 more for "rloo".
    assert "| advantages=centered | 20.5 ± 0.58 | 3 |" in (tmp_path / "table.md").read_text()
    assert "| advantages=rloo | 21.5 ± 0.58 | 3 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert cell([[{"step": 1, "reward": 2.0}]], "reward") == "2" and cell([[]], "reward") == "–"
    judged = [[{"step": 0, "eval_reward": 1 + seed}, {"step": 9, "eval_reward": 4.0}]
              for seed in (0.0, 1.0)]  # fmt: skip
    assert cell(judged, "eval_reward") == "1.5 ± 0.5 → 4 ± 0"


def test_a_line_per_setting_and_a_row_per_key(tmp_path, ran):
    arms = module.plan_arms("sort", GRID, 1, tmp_path)
    groups = grouped({arm.name: [[]] for arm in arms}, {arm.name: arm.values for arm in arms})
    assert list(groups) == ["", "advantages", "loss.loss_type"]
    assert len(groups[""]) == 4 and all(len(runs) == 1 for runs in groups[""].values())
    counts = {label: len(runs) for label, runs in groups["advantages"].items()}
    assert counts == {"centered": 2, "rloo": 2}
    arms = module.plan_arms("sort,ppo-sort", [STEPS], 1, tmp_path)
    assert [arm.name for arm in arms] == ["recipe=sort", "recipe=ppo-sort"]


def test_the_band_is_one_standard_error_around_the_mean():
    runs = [[(1.0, 1.0), (2.0, 4.0)], [(1.0, 3.0)]]
    middle, low, high = band(runs, "eval_reward")
    assert middle == [(1.0, 2.0), (2.0, 4.0)]
    assert low == [1.0, 4.0] and high == [3.0, 4.0]  # a single run has a band of width 0
    assert all(math.isfinite(x) for x in low + high)


@pytest.mark.parametrize(("ratio", "shown"), [(1.0, False), (0.995, False), (0.9, True)])
def test_a_ratio_that_stays_at_1_gets_no_panel(ratio, shown):
    name = "sampling/importance_sampling_ratio/mean"
    runs = {"a setting": [[{"step": 1, name: 1.0, "kl": 0.0}], [{"step": 1, name: ratio}]]}
    assert is_telling(runs, name) == shown
    assert is_telling(runs, "kl") and not is_telling(runs, "reward")


@pytest.mark.parametrize(
    ("word", "values"),
    [("a=1,2", ["1", "2"]), ("a=[1,2],[3]", ["[1,2]", "[3]"]), ("a='x,y',z", ["'x,y'", "z"]),
     ("a={x: 1, y: 2}", ["{x: 1, y: 2}"]), ("a=", [""]), ("a=b=c,d", ["b=c", "d"])],
)  # fmt: skip
def test_a_comma_separates_values_outside_of_brackets_and_quotes(word, values):
    assert grid_values(word) == ("a", values)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["advantages=rloo,"], "grid: expected a value between the commas"),
     (["advantages=rloo,nonsense"], "nonsense"), (["stepz=1,2"], "nearest: steps"),
     (["steps=1,1"], "grid: expected settings that differ"),
     (["steps=1,2", "steps=3"], "settings: expected each key once"),
     (["steps=3"], "settings: expected KEY=A,B, two recipes, or --seeds 2"),
     (["steps=1,2"], "seeds: expected at least 1, got 0")],
)  # fmt: skip
def test_a_refusal_comes_before_the_first_run(tmp_path, ran, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        compare("sort", words, int("seeds:" not in message), tmp_path)
    assert not ran
