"""Tests of checkpoints: saved in a run, damaged, exported, and loaded to continue the run.

Changes of data, rewards and models before a resume are detected and named.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_fast.errors import SAVED, Stopped
from grpo_fast.train import checkpoint, loop
from grpo_fast.train.checkpoint import Checkpoints
from grpo_fast.train.config import RewardConfig, load_recipe
from grpo_fast.train.folder import FILES, NAME, check_same, checkpoints_in, fingerprints
from grpo_fast.train.ranks import Stopping
from grpo_fast.train.report.report import RunReport
from tests.command_line import ROOT, invoke, refused
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder
from tests.train.runs import Leave, config_of, questions, run

EVERY = ["checkpoint.every=1", "checkpoint.keep=3"]

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Train for three steps, each with a checkpoint. Return the run's folder and results."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    return folder, run(folder, *EVERY)


def left_at(folder, monkeypatch, at, *overrides):
    """Start a run, end it with a signal, and check its exit code.

    The signal arrives at the `at`-th call that `Leave` counts.
    """
    with monkeypatch.context() as patched, pytest.raises(Stopped) as stopped:
        Leave(patched, at)
        run(folder, *overrides)
    assert stopped.value.code == SAVED


def same(found, expected):
    assert [key for key in expected if found.get(key) != expected[key]] == []
    assert found == expected


def test_an_old_checkpoint_loses_its_name_before_its_files(tmp_path, monkeypatch):
    """Check that an old checkpoint that cannot be deleted is no checkpoint, and ends no run."""
    deleted = []

    def rmtree(path, ignore_errors=False):
        """Delete nothing, as if another process had opened a file on a network drive."""
        deleted.append(path.name)
        if not ignore_errors:
            raise PermissionError(path)

    monkeypatch.setattr(checkpoint, "shutil", Mock(rmtree=rmtree))
    run(tmp_path / "run", "checkpoint.every=1", "checkpoint.keep=1")
    left = checkpoints_in(tmp_path / "run")
    assert len(left) == 1 and checkpoint.read_state(left[0])
    assert deleted and not any(NAME.fullmatch(name) for name in deleted)


def test_a_run_goes_on_without_its_log(tmp_path, monkeypatch):
    """Check that a run saves and ends as usual if somebody moves metrics.jsonl away."""
    log = RunReport.log

    def moving(report: RunReport, *row: Any) -> None:
        log(report, *row)
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)

    monkeypatch.setattr(RunReport, "log", moving)
    loop.train(config_of(tmp_path, *EVERY))
    assert len(checkpoints_in(tmp_path)) == 3
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_model_of_a_checkpoint_is_exported_for_transformers(tmp_path, kept):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = checkpoints_in(kept[0])
    assert [path.name for path in saved] == ["step_000003", "step_000002", "step_000001"]
    final = AutoModelForCausalLM.from_pretrained(kept[0] / "model").state_dict()
    out = tmp_path / "out"
    for source, is_last in ((saved[1], False), (saved[0], True), (kept[0], True)):
        shutil.rmtree(out, ignore_errors=True)
        assert str(out) in invoke("export", str(source), str(out)).output
        found = AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert all(found[name].equal(final[name]) for name in final) == is_last
    assert AutoTokenizer.from_pretrained(out).eos_token_id is not None
    assert refused(invoke("export", str(saved[0]), str(out)), "OUT: expected a new or empty folder")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for place in (tmp_path / "empty", tmp_path / "nothing", kept[0] / "config.yaml"):
        assert refused(invoke("export", str(place), str(tmp_path / "b")), "has no state.json")
    (tmp_path / "model").mkdir()
    empty = invoke("export", str(tmp_path), str(tmp_path / "b"))
    assert refused(empty, "has no state.json; its trained model is ", str(tmp_path))
    assert not (tmp_path / "b").exists()
    suffixes = {path.suffix for path in saved[0].rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja"}


STEP = "step_000002"
# Points at which the process is killed while it saves a checkpoint. Each entry has the owner and
# the name of a function, and a condition on the number of the call (from 1) and its arguments. The
# call for which the condition is true is interrupted.
PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "weights": (checkpoint, "write_tensors", lambda n, *_: n == 2),
    "folder": (checkpoint, "sync", lambda n, p: Path(p).name == STEP + checkpoint.UNFINISHED),
    "rename": (os, "replace", lambda n, a, b: str(b).endswith(STEP)),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_end_in_the_middle_of_a_save_leaves_the_one_before(tmp_path, kept, monkeypatch, place):
    """Check that a run killed while saving a checkpoint resumes from the previous one.

    The killed process leaves an unfinished checkpoint, and the resumed run deletes it.
    """

    class Killed(BaseException):
        pass

    def dying(*arguments, **more):
        calls.append(arguments)
        if is_here(len(calls), *arguments):
            raise Killed
        return real(*arguments, **more)

    owner, name, is_here = PLACES[place]
    real, calls = getattr(owner, name), []
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dying)
        patched.setattr(Checkpoints, "_save_at_the_end", lambda *_: "")
        with pytest.raises(Killed):
            run(tmp_path / "run", *EVERY)
    [left] = checkpoints_in(tmp_path / "run")
    assert left.name == "step_000001"
    assert (left.parent / f"{STEP}{checkpoint.UNFINISHED}").is_dir()
    same(run(tmp_path / "run", *EVERY, "resume=auto"), kept[1])
    assert not list(left.parent.glob(f"*{checkpoint.UNFINISHED}"))


def test_more_steps_of_a_linear_schedule_change_its_rates(tmp_path, monkeypatch, caplog):
    left_at(tmp_path / "run", monkeypatch, 8, "optim.schedule=linear")
    rows = run(tmp_path / "run", "resume=auto", "optim.schedule=linear", "steps=4")["metrics"]
    assert rows[-1]["step"] == 4
    assert "steps: 3 → 4 changes the learning rates of the remaining steps" in caplog.text


def test_auto_begins_where_there_is_nothing(tmp_path, monkeypatch):
    never = ["checkpoint.every_minutes=0", "resume=auto"]
    whole = run(tmp_path / "run", *never)
    with pytest.raises(ValueError, match="occupied"):  # the run is finished and has no checkpoint
        run(tmp_path / "run", *never)
    early = tmp_path / "early"
    with monkeypatch.context() as patched:
        patched.setattr("grpo_fast.train.loop.make_step", Mock(side_effect=KeyboardInterrupt))
        patched.setattr(Checkpoints, "_save_at_the_end", lambda *_: "")  # as after kill -9
        with pytest.raises(KeyboardInterrupt):
            run(early)
    (early / "metrics.jsonl").write_text('{"half": ')
    same(run(early, "resume=auto"), whole)
    alien = tmp_path / "alien"
    alien.mkdir()
    (alien / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="occupied"):
        run(alien, "resume=auto")


def test_a_finished_run_is_extended(tmp_path):
    """Check that a longer run has the same bits if it was first finished with fewer steps."""
    words = ["optim.schedule=constant", "eval.every=1", "log.completions_every=1"]
    whole = run(tmp_path / "whole", *words, "steps=4")
    run(tmp_path / "run", *words, "steps=2")
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step_000002"]
    same(run(tmp_path / "run", *words, "steps=4", "resume=auto"), whole)
    with pytest.raises(ValueError, match="steps: expected at least 4 steps, which the run has"):
        run(tmp_path / "run", *words, "steps=3", "resume=auto")


@pytest.mark.parametrize("may_stop", [True, False])
def test_a_signal_ends_a_run_at_once_or_is_remembered(request, may_stop):
    # A process that a shell started in the background ignores SIGINT.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    stopping = Stopping()
    stopping.may_stop = lambda: may_stop
    before = signal.getsignal(signal.SIGTERM)
    reached = []
    with pytest.raises(Stopped) as stopped, stopping.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append(1)
        # A second signal must end the process at once.
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        stopping.raise_together()
    assert bool(reached) is not may_stop
    assert (stopped.value.code, stopped.value.name) == (143, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@pytest.mark.parametrize("ranks, steps, kills", [(1, 60, (2, 1, 1)), (2, 16, (1, 1, 0))])
def test_a_run_that_is_killed_goes_on_bit_for_bit(ranks, steps, kills):
    """Check that a run that is killed and resumed several times has bitwise the same results.

    SIGKILL arrives while a checkpoint is saved, in a rollout, or at a random time.
    """
    words = ["--ranks", str(ranks), "--steps", str(steps)]
    for name, count in zip(("saves", "rollouts", "moments"), kills, strict=True):
        words += [f"--{name}", str(count)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *words], capture_output=True, cwd=ROOT, text=True,
        timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{steps} steps, {sum(kills)} kills" in done.stdout and "identical" in done.stdout


REWARD = "def score(completions):\n    return [float(len(text)) for text in completions]\n"


@pytest.fixture
def words(tmp_path):
    """Write data, reward and model files. Return the command-line arguments of a run with them."""
    data = questions(tmp_path / "data", 8, 8)
    (tmp_path / "mine.py").write_text(REWARD)
    model = tiny_folder(tmp_path / "tiny", "llama")
    return [
        f"model.path={model}", "model.dtype=float32", f"data.path={data}",
        "rollout.max_new_tokens=6", "rollout.prompts_per_step=2", "steps=2", "eval.n=2",
        "eval.samples=1", "eval.every=0", "log.progress=false", "loss.beta=0.1",
        "rollout.group_size=2", "checkpoint.every=1", "log.save_model=false",
        "optim.schedule=constant",
        "reference.kind=frozen", f"rewards=[{{name: '{tmp_path / 'mine.py'}:score'}}]",
    ]  # fmt: skip


def lines(name: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[Path], Any]:
    """Return a function that applies `change` to the lines of a data file.

    `name` is the split, "train" or "test".
    """

    def rewrite(folder: Path) -> None:
        file = folder / "data" / f"{name}.jsonl"
        write_lines(file, *change([json.loads(x) for x in file.read_text().splitlines()]))

    return rewrite


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


CHANGES = {
    "cut": ("data.train: '8 examples, .* → '7 examples", lines("train", lambda rows: rows[1:])),
    "test set": ("data.test", lines("test", lambda rows: rows[::-1])),
    "reward": ("rewards.score", lambda p: (p / "mine.py").write_text(REWARD + "# more\n")),
    "weights": ("model", lambda p: flip(p / "tiny/model.safetensors")),
    "tokenizer": ("model", lambda p: (p / "tiny/tokenizer_config.json").open("a").write(" ")),
}  # fmt: skip


def test_what_changed_between_an_end_and_a_resume(words, tmp_path):
    """Check that a run is not resumed if a data, reward or model file has changed.

    The message must name the changed file.
    """
    folder = tmp_path / "run"
    run(folder, *words, recipe="gsm8k-smollm2-1.7b")
    logs = (folder / "metrics.jsonl").read_bytes()
    again = [*words, "resume=auto", "steps=3"]
    for name, (said, change) in CHANGES.items():
        files = {p: p.read_bytes() for p in tmp_path.rglob("*")
                 if p.is_file() and folder not in p.parents}  # fmt: skip
        change(tmp_path)
        expected = rf"got others\n  files.{said}(.*\n)*.*grpo-fast export"
        with pytest.raises(ValueError, match=expected):
            run(folder, *again, recipe="gsm8k-smollm2-1.7b")
        assert (folder / "metrics.jsonl").read_bytes() == logs, name
        for path, content in files.items():
            path.write_bytes(content)
    rows = run(folder, *again, "log.progress=true", recipe="gsm8k-smollm2-1.7b")["metrics"]
    assert rows[-1]["step"] == 3


def test_the_folder_of_a_reward_has_a_fingerprint_and_its_log_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "log.txt").write_text("written by the reward")

    def prints(path):
        reward = RewardConfig(name=f"{__file__}:f", options={"path": path})
        config = load_recipe("sort", []).model_copy(update={"rewards": [reward]})
        return fingerprints(config)

    assert "rewards.f.path" in prints("~/model")
    assert all("rewards.f.path" not in prints(path) for path in ("~/log.txt", "~/none", "org/name"))


def test_what_is_compared():
    settings = {"optim": {"schedule": "linear"}}
    was = settings | {FILES: {"data.train": "a", "rewards.x": "b"}}
    check_same(was, was)
    now = settings | {FILES: {"data.train": "a", "model": "d"}}
    said = r"\n  files.rewards.x: 'b' → None\n  files.model"
    with pytest.raises(ValueError, match=said) as refused:
        check_same(was, now)
    assert "data.train" not in str(refused.value)
    check_same(was | {"loss": {"delta": 5}}, was | {"loss": {"delta": 5.0}})
    with pytest.raises(ValueError, match="critic: 1 → True\n  only these keys may .*timeout$"):
        check_same(was | {"critic": 1}, was | {"critic": True})
