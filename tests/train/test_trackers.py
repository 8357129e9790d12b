"""Tests that send the metrics of a run to TensorBoard and other trackers of accelerate."""

import math

import pytest
from accelerate import tracking

from grpo_fast.train import loop
from grpo_fast.train.config.recipes import load_recipe
from tests.train.tiny_runs import TINY_SORT

WORDS = [*TINY_SORT, "log.completions_every=0"]

pytestmark = pytest.mark.usefixtures("no_pictures")


class Fake(tracking.GeneralTracker):
    """Replacement for accelerate's tracker "trackio", which sends nothing to a server.

    It only stores the configuration and the metrics that it receives.
    """

    name, requires_logging_directory, main_process_only = "trackio", False, False
    made: list = []

    def __init__(self, run_name, **options):
        super().__init__()
        self.run_name, self.options = run_name, options
        self.config, self.rows, self.finished = None, [], 0
        Fake.made.append(self)

    def start(self):
        pass

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step, **options):
        self.rows.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", Fake)
    kinds = [kind for kind in tracking.LoggerType if kind.value == "trackio"]
    monkeypatch.setattr(tracking, "_available_trackers", kinds)
    Fake.made.clear()
    return Fake.made


def test_a_run_goes_to_its_tracker(tmp_path, fake):
    words = ["log.trackers=[trackio]", f"output_dir={tmp_path}/first run"]
    loop.train(load_recipe("sort", [*WORDS, *words]))
    (made,) = fake
    assert (made.run_name, made.options) == ("grpo_fast", {"name": "first run"})
    assert made.config["optim.lr"] == 1e-3 and made.config["model.config.hidden_size"] == 32
    assert made.config["model.path"] == "None"
    assert [step for step, _ in made.rows] == [0, 1, 2, 3] and made.finished == 1
    values = [value for _, row in made.rows for value in row.values()]
    assert all(isinstance(value, float) and math.isfinite(value) for value in values)
    assert "eval_reward" in made.rows[0][1] and "rewards/sort_positions/mean" in made.rows[1][1]


def test_what_has_no_number_is_not_logged(tmp_path, fake):
    from tests.train.resuming import opened

    config = load_recipe("sort", [*WORDS, "log.trackers=[trackio]"])
    with opened(tmp_path / "a", config) as report:
        report.log(1, {"loss": math.nan, "reward": 1.0, "kl": math.inf})
    assert fake[0].rows == [(1, {"reward": 1.0})] and fake[0].finished == 1


def test_a_missing_package_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    words = ["log.trackers=[tensorboard, tensor]", f"output_dir={tmp_path}/run"]
    expected = r"log.trackers: expected trackers .* installed, here \[\], got tensorboard, tensor$"
    with pytest.raises(ValueError, match=expected):
        loop.train(load_recipe("sort", [*WORDS, *words]))
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_what_a_run_wrote(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["log.trackers=[tensorboard]", f"output_dir={tmp_path}/run"]
    loop.train(load_recipe("sort", [*WORDS, *words]))
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "grpo_fast"))
    events.Reload()
    assert [e.step for e in events.Scalars("reward")] == [1, 2, 3]
    assert [e.step for e in events.Scalars("eval_reward")] == [0, 3]


def test_a_tracker_without_its_server_is_no_full_disk(tmp_path, fake, monkeypatch):
    def unreachable(*_):
        raise ConnectionError("no server")

    monkeypatch.setattr(Fake, "store_init_configuration", unreachable)
    words = ["log.trackers=[trackio]", f"output_dir={tmp_path}/run"]
    with pytest.raises(ConnectionError, match="^no server$"):
        loop.train(load_recipe("sort", [*WORDS, *words]))
