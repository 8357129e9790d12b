"""Tests of run folders that were manipulated before a resume or an export."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_fast.train import checkpoint as module
from grpo_fast.train import loop
from grpo_fast.train.folder import checkpoints_in, locked
from tests.command_line import invoke, refused
from tests.train.runs import run

FILE = "weights/model-00001-of-00001.safetensors"
WORDS = ["steps=2", "checkpoint.every=1", "checkpoint.keep=9", "log.save_model=false",
         "eval.every=0", "log.completions_every=0", "optim.schedule=constant"]  # fmt: skip
WEIGHT = "policy.lm_head.weight"
CHECKPOINT = "resume: expected a checkpoint of this configuration"
DELETE = object()

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, *WORDS)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, which has a checkpoint for each of its two steps."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def newest(folder: Path) -> Path:
    return checkpoints_in(folder)[0]


def is_refused(folder: Path, said: str, *words: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(folder, *WORDS, *words, "resume=auto", "steps=3")


def change(checkpoint: Path, path: str, value: Any) -> None:
    """Set the value at a dotted path of state.json.

    The value DELETE removes the key at the path.
    """
    state = json.loads((checkpoint / "state.json").read_text())
    *above, last = (int(x) if x.isdigit() else x for x in path.split("."))
    place = state
    for key in above:
        place = place[key]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    (checkpoint / "state.json").write_text(json.dumps(state))


def write(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, checkpoint / FILE)


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def edit_tensors(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(checkpoint / FILE)
    edit(tensors)
    write(checkpoint, tensors)


FIELDS = [
    ("step", 10**9, "state.json: step: expected 2, as its name says"),
    ("consumed", -1, "state.json: consumed: Input should be greater"),
    ("length", 10**9, "metrics.jsonl: expected at least 1000000000 bytes"),
    ("optimizers", {}, "got another: .*policy"),
    ("optimizers.policy.steps", DELETE, "got another: .*steps"),
    ("settings.seed", 5, "seed: 5 → 0"),
    ("settings.optim", None, "optim: None → "),
    ("settings.files", {}, "files.data.train: None → "),
    ("run", "x", "state.json: run: Unexpected keyword"),
    *(("format", number, "format: Input should be 14; use the version of grpo_fast that wrote it")
      for number in (13, 15)),
]  # fmt: skip
TENSORS = {  # for each case a function that edits the tensors, and a part of the message
    "missing": (lambda t: t.pop(WEIGHT), f"the tensor {WEIGHT}: expected .* got none"),
    "extra": (lambda t: t.update(more=torch.ones(1)), "the tensor more: expected no such tensor"),
    "shape": (lambda t: t.update({WEIGHT: t[WEIGHT][:, 1:].clone()}), f"{WEIGHT}: expected .*15"),
    "dtype": (lambda t: t.update({WEIGHT: t[WEIGHT].double()}), f"{WEIGHT}: expected"),
    "half of the moments": (
        lambda t: t.pop(f"optimizer.{WEIGHT}.exp_avg"), "exp_avg: expected .* got none"),
}  # fmt: skip
EDITS = {
    f"{n} {path}": (partial(change, path=path, value=x), said)
    for n, (path, x, said) in enumerate(FIELDS)
} | {name: (partial(edit_tensors, edit=edit), said) for name, (edit, said) in TENSORS.items()}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_checkpoint_is_refused_and_no_file_changes(folder, newest, edit):
    spoil, said = EDITS[edit]
    spoil(newest)
    files = contents(folder)
    is_refused(folder, said)
    assert contents(folder) == files


# The texts include a million nested lists, and a number of a million digits.
TEXTS = ("[" * 10**6, '{"a":' * 10**6, "1" * 10**6, "", '{"format": 1e999}', '{"format": 14}',
         "null")  # fmt: skip
GARBAGE = [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 7 + b"\x00" + b"{" * 99]


def test_what_cannot_be_read_is_refused_by_resume_and_export(folder, newest, tmp_path):
    unreadable = [("state.json", text.encode(), r"state\.json") for text in TEXTS]
    damaged = f"{CHECKPOINT} in {newest}, got another"
    cut = (newest / FILE).read_bytes()[:-100]
    for name, content, said in [*unreadable, *((FILE, x, damaged) for x in [*GARBAGE, cut])]:
        before = (newest / name).read_bytes()
        (newest / name).write_bytes(content)
        is_refused(folder, said)
        assert refused(invoke("export", str(newest), str(tmp_path / "out")), "export: expected a")
        (newest / name).write_bytes(before)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


EVIL = {
    "weights/.metadata": pickle.dumps(Bomb()),
    "weights/pytorch_model.bin": pickle.dumps(Bomb()),
    "tokenizer/tokenizer.py": b"import os; os.mkdir('exploded')",
    "tokenizer/tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["tokenizer.Own", null]}, '
                                       b'"tokenizer_class": "Own"}',
}  # fmt: skip


def test_no_file_is_unpickled_or_executed(folder, newest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in EVIL.items():
        (newest / name).write_bytes(content)
    invoke("export", str(newest), str(tmp_path / "out"))
    run(folder, *WORDS, "resume=auto", "steps=3")
    assert not (tmp_path / "exploded").exists()


def test_a_pipe_in_place_of_a_file_does_not_block(folder, newest, tmp_path):
    """Check that reading a named pipe in a run's folder gives an error and does not block.

    With a pipe in place of a table of completions or of metrics.jsonl, the run cannot resume. A run
    without a checkpoint cannot start over either.
    """
    more = FILE.replace("00001-of", "00002-of")
    for name in ("state.json", FILE, more):
        if (newest / name).exists():
            (newest / name).rename(newest.parent / "aside")
        os.mkfifo(newest / name)
        is_refused(folder, f"{name}: expected a regular file")
        export = invoke("export", str(newest), str(tmp_path / "out"))
        assert refused(export, f"{name}: expected a regular file")
        (newest / name).unlink()
        if name != more:
            (newest.parent / "aside").replace(newest / name)
    (folder / "completions").mkdir(exist_ok=True)
    os.mkfifo(folder / "completions" / "step_000001.parquet")
    is_refused(folder, "parquet: expected a regular file")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    is_refused(folder, "metrics.jsonl: expected a regular file")
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink()
    is_refused(folder, "metrics.jsonl: expected a regular file")


def test_an_export_of_a_checkpoint_that_was_edited_is_refused(newest, tmp_path):
    words = "export", str(newest), str(tmp_path / "out")
    tensors = load_file(newest / FILE)
    for value in (torch.nan, torch.inf):
        changed = tensors[WEIGHT].clone()
        changed[0, 0] = value
        write(newest, tensors | {WEIGHT: changed})
        assert refused(invoke(*words), "finite weights", "lm_head.weight")
    write(newest, {name: x for name, x in tensors.items() if name != WEIGHT})
    assert refused(invoke(*words), WEIGHT)
    write(newest, tensors)
    for path in ("model", "files", "model.config"):
        state = (newest / "state.json").read_text()
        change(newest, f"settings.{path}", DELETE)
        assert refused(invoke(*words), "export: expected a checkpoint"), path
        (newest / "state.json").write_text(state)
    assert not (tmp_path / "out").exists()


def test_an_exported_config_is_data(newest, tmp_path):
    """Check that an export refuses too many layers, an attention kernel, and an unknown setting."""
    words = "export", str(newest), str(tmp_path / "out")
    change(newest, "settings.model.config.num_hidden_layers", 10**7)
    assert refused(invoke(*words), "num_hidden_layers: expected 0 to")
    change(newest, "settings.model.config.num_hidden_layers", 1)
    change(newest, "settings.model.config.attn_implementation", "some/kernel")
    assert refused(invoke(*words), "expected one of transformers' implementations")
    change(newest, "settings.model.attn", "some/kernel")
    assert refused(invoke(*words), "got another: model.attn: unknown key")
    assert not (tmp_path / "out").exists()


def test_the_folder_is_locked_before_anyone_looks_and_free_at_the_end(folder, monkeypatch):
    with locked(folder), monkeypatch.context() as patched:
        patched.setattr(module, "_find", lambda *_: pytest.fail("the lock is held"))
        is_refused(folder, f"cannot use {folder}: another process is writing")
    monkeypatch.setattr(loop, "load_policy", lambda *_, **__: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run(folder, *WORDS, "resume=auto", "steps=3")


@pytest.mark.parametrize("owner, name", [(loop, "load_policy"), (module, "read_tensors")])
def test_a_start_that_fails_changes_nothing(folder, monkeypatch, owner, name):
    """Check that a resume that fails while loading changes no file of the run.

    The run can then be resumed again.
    """
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "half')
    files = contents(folder)

    def failing(*_: Any, **__: Any) -> None:
        raise ValueError("the model is gone")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        is_refused(folder, "the model is gone")
    assert contents(folder) == files
    assert run(folder, *WORDS, "resume=auto", "steps=3")["metrics"][-1]["step"] == 3


@pytest.mark.parametrize(
    "error",
    [MemoryError("no"), torch.OutOfMemoryError("no"), RuntimeError("can't allocate memory")],
)
def test_too_little_memory_is_not_the_checkpoints_fault(tmp_path, error):
    """Check that an out-of-memory error while a checkpoint is loaded is raised unchanged."""
    with pytest.raises(type(error)) as raised, module.refused("resume", tmp_path):
        raise error
    assert raised.value is error
