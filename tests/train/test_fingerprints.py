"""Tests that changes of data, rewards and models before a resume are detected and named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_fast.train.config import RewardConfig, load_recipe
from grpo_fast.train.folder import FILES, check_same, fingerprints
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder
from tests.train.resuming import run
from tests.train.tiny_runs import questions

REWARD = "def score(completions):\n    return [float(len(text)) for text in completions]\n"

pytestmark = pytest.mark.usefixtures("no_pictures")


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
