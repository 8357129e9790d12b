"""A run's folder that somebody changed between an end and a resume; checkpoints signed anew."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_fast.train import loop
from grpo_fast.train.files import sha256_of
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.runs import resume
from grpo_fast.train.runs.checkpoint import checkpoints_in, problem_of, write_checkpoint
from grpo_fast.train.runs.folder import OutputFolderError, locked
from grpo_fast.train.runs.run import Run
from tests.command_line import invoke, refused
from tests.pairs import pairs
from tests.train.resuming import Leave, run

SHARD = "weights/shard-00001-model-00001-of-00001.safetensors"
WORDS = ["steps=2", "checkpoint.every=1", "checkpoint.keep=9", "log.save_model=false",
         "eval.every=0", "log.completions_every=0", "optim.schedule=constant"]  # fmt: skip
UNDERWAY = [*WORDS, "minibatches=2", "checkpoint.every=0", "inner_iterations=2", "eval.n=2"]

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, *WORDS)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run that has checkpoints of its two steps."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def newest(folder: Path) -> Path:
    """Its newest checkpoint."""
    return checkpoints_in(folder)[0]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left in the middle of its second step."""
    folder = tmp_path_factory.mktemp("left") / "run"
    with pytest.MonkeyPatch.context() as patch:
        counted = Leave(patch, None)
        run(folder.parent / "whole", *UNDERWAY)
        Leave(patch, counted.passes - 7)
        with pytest.raises(SystemExit):
            run(folder, *UNDERWAY)
    assert "+" in checkpoints_in(folder)[0].name
    return folder


def is_refused(folder: Path, said: str, word: str = "resume=auto") -> None:
    with pytest.raises(ValueError, match=said):
        run(folder, *WORDS, word, "steps=3")


def sign(checkpoint: Path) -> None:
    """Write the manifest anew, for the files as they are."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    manifest["files"] = {
        path.relative_to(checkpoint).as_posix(): sha256_of(path)
        for path in files
        if path.name != "manifest.json"
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def change(checkpoint: Path, path: str, value: Any) -> None:
    """Set `a.b.0` of state.json to a value; DELETE removes it, `a.b.+` adds it nine times."""
    state = json.loads((checkpoint / "state.json").read_text())
    *above, last = (int(x) if x.isdigit() else x for x in path.split("."))
    place = state
    for key in above:
        place = place[key]
    if last == "+":
        place.extend([value] * 9)
    elif value is DELETE:
        del place[last]
    else:
        place[last] = value
    (checkpoint / "state.json").write_text(json.dumps(state))
    sign(checkpoint)


DELETE = object()
EMPTY = {"losses": {"parts": [], "logps": [], "optimizer_steps": 1}, "norm": 1.0, "rate": 1.0}
FIELDS = [
    ("step", 10**9, "state.json: step: expected 2, as its name says"),
    ("step", "2", "state.json: step: Input should be a valid integer"),
    ("collector.consumed", -1, "state.json: collector.consumed: Input should be greater"),
    ("collector.consumed", 1 << 70, "state.json: collector.consumed"),
    ("lengths", DELETE, "state.json: lengths: Field required"),
    ("lengths.0", -5, "state.json: lengths.0: Input should be greater"),
    ("lengths.1", 10**9, "at least 1000000000 bytes in .*prompts.jsonl"),
    ("training_set", 0, "state.json: training_set"),
    ("trainer.optimizers.policy.skipped", -1, "state.json: trainer.optimizers.policy.skipped"),
    ("trainer.optimizers.critic", {"steps": 1, "skipped": 0, "skipped_in_a_row": 0}, "trainer hol"),
    ("trainer.optimizers", {}, "got another: .*policy"),
    ("trainer.beta", None, "state.json: trainer.beta"),
    ("trainer.budget.tokens", 0, "state.json: trainer.budget.tokens"),
    ("trainer.more", 1, "state.json: trainer.more: Unexpected keyword"),
    ("collector.rewards.recent", [], "state.json: collector.rewards.recent"),
    ("collector.rewards.failed_total", {}, "got another: .*sort"),
    ("config", [], "state.json: config"),
    ("config.seed", 5, "seed: 5 → 0"),
    ("config.steps", "2", "steps: '2' → 3"),
    ("config.model", None, "model: None → "),
    ("fingerprints", {}, "got others .resume_allow=.data."),
    ("run", "x", "state.json: run: Unexpected keyword"),
]


OF_A_STEP = [
    ("underway.number", 7, "a place in step 2, got step 7"),
    ("underway.updates.+", EMPTY, "a place in step 2, got step 2 with 1[0-3] updates"),
    ("underway.packing.parts.0.0", 5, "every completion once"),
    ("underway.packing.parts", [], "every completion once"),
    ("underway.packing.budget", 0, "underway.packing.budget"),
    ("underway.packing.fixed", ["no_such"], "underway.packing.fixed"),
    ("underway.collected.prompts.0.prompt", 10**9, "got another"),
    ("underway.collected.prompts.0.use", "eaten", "underway.collected.prompts.0.use"),
    ("underway.collected.prompts", [], "got another"),
    ("underway.collected.rollout.completion_ids", [], "lists of 8, as its texts"),
    ("underway.collected.rollout.completion_ids.0.0", -1, "got -1 to"),
    ("underway.collected.rollout.completion_ids.0.0", 10**6, "got another"),
    ("underway.collected.rollout.completion_ids.0", [1] * 50, "got another"),
    ("underway.collected.scores.1", {"other": "underway/collected/advantages"}, "got another"),
    ("underway.collected.advantages", "underway/collected/scores/0", "a tensor that is there once"),
    ("underway.collected.advantages", [1.0], "expected the name of a tensor that is there once"),
    ("underway.updates", [], "underway/updates.* has no place here"),
    ("underway.updates.0.norm", DELETE, "underway.updates.0.norm: Field required"),
    ("underway", None, "has no place here"),
    ("underway.collected", None, "has no place here"),
    ("underway.noise", DELETE, "underway holds"),  # the default is not filled in
]


@pytest.mark.parametrize(
    "is_underway, path, value, said",
    [*((False, *field) for field in FIELDS), *((True, *field) for field in OF_A_STEP)],
)
def test_what_a_state_cannot_hold(finished, left, tmp_path, is_underway, path, value, said):
    """33, 48: refused with the field's name, and nothing in the folder changes."""
    source, words = (left, UNDERWAY) if is_underway else (finished, [*WORDS, "steps=3"])
    folder = Path(shutil.copytree(source, tmp_path / "run"))
    before = checkpoints_in(folder)
    change(before[0], path, value)
    logs = [(folder / name).read_bytes() for name in resume.LOGS]
    with pytest.raises(ValueError, match=said):
        run(folder, *words, "resume=auto")
    assert [(folder / name).read_bytes() for name in resume.LOGS] == logs
    assert checkpoints_in(folder) == before


def write_shard(
    checkpoint: Path, tensors: Any, offsets: Any = (0, 0), number: int = 1, info: str = ""
) -> None:
    """A file of the weights, WEIGHT at these offsets by what DCP says of its shards; signed."""
    places = {x: {"saved_offsets": [0] * t.dim()} for x, t in tensors.items()}
    places[WEIGHT] = {"saved_offsets": offsets}
    file = checkpoint / SHARD.replace("shard-00001", f"shard-{number:05d}")
    save_file(tensors, file, metadata={"DCP_SHARDING_INFO": info or json.dumps(places)})
    sign(checkpoint)


WEIGHT, CHECKPOINT = "policy.lm_head.weight", "resume: expected a checkpoint of this configuration"
ELSEWHERE = f"resume: expected a checkpoint.*{WEIGHT}|expected a ch"  # rows stay unfilled
TENSORS = {  # an edit, what is said, the offsets
    "missing": (lambda t: t.pop(WEIGHT), f"the tensor {WEIGHT} is missing"),
    "extra": (lambda t: t.update(more=torch.ones(1)), "the tensor more has no place here"),
    "shape": (lambda t: t.update({WEIGHT: t[WEIGHT][:, 1:].clone()}), f"{WEIGHT}: expected .*32"),
    "rows": (lambda t: t.update({WEIGHT: t[WEIGHT][1:].clone()}), f"{WEIGHT}: expected"),
    "dtype": (lambda t: t.update({WEIGHT: t[WEIGHT].double()}), f"{WEIGHT}: expected"),
    "half of the moments": (
        lambda t: t.pop(f"optimizer.{WEIGHT}.exp_avg"), "exp_avg is missing"),
    "one moment more": (
        lambda t: t.update({f"optimizer.{WEIGHT}.third": torch.ones(3)}), "third has no pl"),
    "moments of nobody": (
        lambda t: t.update({"optimizer.critic.y.step": torch.zeros(())}), "critic.y.step has no"),
    **{f"at {offsets}": (len, ELSEWHERE, offsets) for offsets in ([1, 0], [0, 1], [10**6, 0], [0])},
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit(folder, newest, kind):
    """33, 48: nothing is filled in, and nothing is passed over."""
    edit, said, *offsets = TENSORS[kind]
    tensors = load_file(newest / SHARD)
    edit(tensors)
    write_shard(newest, tensors, *offsets)
    is_refused(folder, said)


@pytest.mark.parametrize("end, start", [(3, 5), (5, 3)])
def test_shards_with_a_gap_or_twice_the_same_rows(folder, newest, end, start):
    """The last row is there, so that the tensor has its shape; rows 3 and 4 are not, or twice."""
    tensors = load_file(newest / SHARD)
    rows = tensors[WEIGHT]
    write_shard(newest, tensors | {WEIGHT: rows[:end].clone()})
    write_shard(newest, {WEIGHT: rows[start:].clone()}, [start, 0], 2)
    is_refused(folder, f"{WEIGHT}: expected all of its rows once")


GARBAGE = [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 7 + b"\x00" + b"{" * 99]


@pytest.mark.parametrize("name", [SHARD, "state.safetensors"])
def test_bytes_that_are_no_tensors(folder, newest, name):
    for content in GARBAGE:
        (newest / name).write_bytes(content)
        sign(newest)
        is_refused(folder, CHECKPOINT)


def test_places_that_are_none(folder, newest):
    """What DCP says of its shards is JSON in the header of a file."""
    tensors = load_file(newest / SHARD)
    for info in ("[]", "{}", "[" * 10**5, '{"' + WEIGHT + '": 5}', "1"):
        write_shard(newest, tensors, info=info)
        is_refused(folder, CHECKPOINT)
    write_shard(newest, tensors, info="null")  # as a file without shards, which is whole
    assert run(folder, *WORDS, "resume=auto", "steps=3")["metrics"]


def test_state_tensors_that_are_too_many_or_too_few(left, tmp_path):
    folder = Path(shutil.copytree(left, tmp_path / "run"))
    checkpoint = checkpoints_in(folder)[0]
    whole = load_file(checkpoint / "state.safetensors")
    for name in ("random/cpu", "underway/more", "underway/collected/advantages"):
        others = {x: t for x, t in whole.items() if x != name}
        added = {} if name in whole else {name: torch.ones(1)}
        save_file(others | added, checkpoint / "state.safetensors")
        sign(checkpoint)
        with pytest.raises(ValueError, match=name.rpartition("/")[2]):
            run(folder, *UNDERWAY, "resume=auto")


# ----------------------------------------------------------------------- files that are none
FILES = {
    "weights/pytorch_model.bin": b"\x80\x02.",
    "tokenizer/modeling.py": b"1",
    "config.json": b'{"attn_implementation": "some/kernel"}',
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_signed", [True, False])
def test_files_that_no_checkpoint_has(folder, newest, name, is_signed):
    """33, 46, 47: no pickle, no code, and no config that a reader of models would obey."""
    (newest / name).write_bytes(FILES[name])
    if is_signed:
        sign(newest)
    expected = "String should match pattern" if is_signed else "is not in the manifest"
    assert expected in str(problem_of(newest))
    is_refused(folder, expected, f"resume={newest}")


ENDLESS = {"zero": lambda path: path.symlink_to("/dev/zero"), "pipe": os.mkfifo}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", SHARD])
def test_a_checkpoints_file_without_an_end(folder, kind, name):
    """47: it neither hangs nor reads; the checkpoint is passed over as damaged."""
    newest, before = checkpoints_in(folder)
    (newest / name).unlink()
    ENDLESS[kind](newest / name)
    assert "expected a regular file" in str(problem_of(newest))
    run(folder, *WORDS, "resume=auto", "steps=3")
    assert problem_of(before) is None


@pairs(
    kind=ENDLESS,
    name=[*resume.LOGS, "config.yaml", "config.yaml.tmp", "completions"],
    is_own=[True, False],
)
def test_a_runs_file_that_leads_elsewhere(folder, tmp_path, kind, name, is_own):
    """45, 47: in a folder that a run goes on in, or that it copies from."""
    (folder / name).unlink(missing_ok=True)
    ENDLESS[kind](folder / name)
    words = ["resume=auto"] if is_own else [f"resume={folder}"]
    with pytest.raises(ValueError, match=f"{name}: expected a regular file or a folder, got"):
        run(folder if is_own else tmp_path / "new", *WORDS, *words, "steps=3")


def contents(place: Path) -> dict[Path, bytes]:
    files = [path for path in (place, *place.rglob("*")) if path.is_file()]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "place", ["metrics.jsonl", "completions", "checkpoints", "model", "model/model.safetensors"]
)
def test_what_a_link_points_at_stays(folder, tmp_path, place):
    """45: nothing outside of the run's folder is cut, overwritten or removed."""
    target = tmp_path / "precious"
    was = folder / place
    was.parent.mkdir(exist_ok=True)
    if was.is_dir() or place in ("completions", "model"):
        shutil.rmtree(was, ignore_errors=True)
        target.mkdir()
        (target / "step_000009.parquet").write_text("dear")
    else:
        was.unlink(missing_ok=True)
        target.write_text("dear\n" * 999)
    before = contents(target)
    was.symlink_to(target)
    is_refused(folder, "got a link")
    assert contents(target) == before


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_json_without_an_end(folder, newest, name):
    """48: nested a million times, a bomb of digits, no JSON at all."""
    deep = "[" * 10**6, '{"a":' * 10**6, "1" * 10**6
    for text in (*deep, "", "\x00", '{"format": 1e999}', "null"):
        (newest / name).write_text(text)
        if name == "manifest.json":
            assert "cannot be read" in str(problem_of(newest)), text[:20]
            continue
        sign(newest)
        is_refused(folder, r"state\.json", f"resume={newest}")


def test_a_manifest_that_leads_out_of_its_folder(newest):
    manifest = json.loads((newest / "manifest.json").read_text())
    others = "../../config.yaml", "/etc/passwd", "weights/../state.json", "tokenizer/x.py"
    sums = [-1, "0" * 64], [1, "0" * 63], "0" * 64, [True, "0" * 64]
    wrong = [({name: [1, "0" * 64]}, "String should match pattern") for name in others]
    wrong += [({"state.json": value}, "cannot be read") for value in sums]
    for files, said in wrong:
        text = json.dumps({**manifest, "files": manifest["files"] | files})
        (newest / "manifest.json").write_text(text)
        assert said in str(problem_of(newest))


def test_an_exported_config_is_data(newest, tmp_path, monkeypatch):
    """46, 47: no layers without end, and no kernel of the hub."""
    asked: list[str] = []
    words = "export", str(newest), str(tmp_path / "out")
    change(newest, "config.model.config.num_hidden_layers", 10**7)
    assert refused(invoke(*words), "num_hidden_layers: expected 0 to")
    change(newest, "config.model.config.num_hidden_layers", 1)
    change(newest, "config.model.config.attn_implementation", "some/kernel")
    assert refused(invoke(*words), "expected one of transformers' own")
    change(newest, "config.model.config.attn_implementation", DELETE)
    change(newest, "config.model.attn", "some/kernel")
    monkeypatch.setattr(Policy, "save", lambda self, _: asked.append(self.generation_attn))
    assert invoke(*words).exit_code == 0 and asked == ["sdpa"]
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ another version, another run
def test_another_format_is_not_damage(folder, tmp_path):
    """40: the run is refused, and nothing that it did not write is removed."""
    newest, before = checkpoints_in(folder)
    manifest = json.loads((newest / "manifest.json").read_text())
    for was in (3, 5):
        text = json.dumps({"format": was, "step": 2, "anything": {}})
        (newest / "manifest.json").write_text(text)
        for word in ("resume=auto", f"resume={newest}", f"resume={folder}"):
            is_refused(folder, f"format 4, which .* got format {was} in", word)
        assert checkpoints_in(folder) == [newest, before]
        assert (newest / "manifest.json").read_text() == text
        assert refused(invoke("export", str(newest), str(tmp_path / "out")), f"format {was}")
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert problem_of(newest) is None


def test_checkpoints_that_are_all_damaged_do_not_begin_again(folder):
    """40: work that could be saved by hand is not trained over."""
    (folder / "summary.json").unlink()
    for checkpoint in checkpoints_in(folder):
        (checkpoint / "state.json").unlink()
    with pytest.raises(ValueError, match="got 2 damaged ones .*move them away to begin again"):
        run(folder, *WORDS, "resume=auto")
    assert len(checkpoints_in(folder)) == 2


def test_checkpoints_of_another_run_are_neither_pruned_nor_overwritten(folder):
    """40: they do not count as the newest ones to keep, either."""
    newest, before = checkpoints_in(folder)
    for path, run_id in ((newest, "b" * 32), (before, "a" * 32)):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | {"run": run_id, "value": 9.0}))
    later = before.with_name("step_000003")
    shutil.copytree(before, later)
    (later / "state.json").unlink()  # damaged: passed over, and in the way of the third step
    run(folder, *WORDS, "resume=auto", "steps=4", "checkpoint.keep=1", "checkpoint.best=reward")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert {"step_000001", "step_000003.aside-1", "step_000004"} <= set(names)


def test_what_is_in_the_way_of_a_save_is_set_aside(folder, newest):
    """40: as a checkpoint that was damaged while its run went on."""
    (newest / "state.json").write_text("dear")
    about = {"run": "a" * 32, "step": 2, "value": None}
    fill = lambda part: (part / "state.json").write_text("{}")  # noqa: E731
    assert write_checkpoint(folder, newest.name, {"x": torch.ones(2)}, fill, about) == newest
    aside = newest.with_name(f"{newest.name}.aside-1")
    assert problem_of(newest) is None and (aside / "state.json").read_text() == "dear"


def test_going_back_in_ones_own_folder(folder, monkeypatch):
    """41: what is newer is set aside by name, so that `auto` goes on from the new way."""
    newest, before = checkpoints_in(folder)
    whole = run(folder.parent / "whole", *WORDS, "steps=3")
    Leave(monkeypatch, 3)
    with pytest.raises(SystemExit):
        run(folder, *WORDS, f"resume={before}", "steps=3")
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert f"{newest.name}.aside-1" in names and newest.name not in names
    Leave(monkeypatch, None)
    found = run(folder, *WORDS, "resume=auto", "steps=3")
    assert found["metrics"] == whole["metrics"] and found["prompts"] == whole["prompts"]


# -------------------------------------------------------------------------- the order at the start
def test_the_folder_is_locked_before_anyone_looks_and_free_at_the_end(folder, monkeypatch):
    """39: a run that is still being written is no start, whatever lies there now."""
    with locked(folder), monkeypatch.context() as patched:
        patched.setattr(resume, "find_start", lambda *_: pytest.fail("looked without the lock"))
        is_refused(folder, "another process is writing", "resume=auto")
    monkeypatch.setattr(loop, "load_policy", lambda *_, **__: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run(folder, *WORDS, "resume=auto", "steps=3")


@pytest.mark.parametrize("name", ["find_start", "load_policy", "build_rewards"])
def test_the_second_of_two_runs_that_start_at_once_is_refused(tmp_path, monkeypatch, name):
    """In a folder that did not exist: before anything is looked for or loaded."""
    folder, owner = tmp_path / "run", resume if name == "find_start" else loop
    own, tried = getattr(owner, name), list[int]()

    def second(*arguments: Any, **options: Any) -> Any:
        tried.append(1)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_, **__: pytest.fail("the second run went on"))
            is_refused(folder, f"cannot use {folder}: another process is writing a run into it")
        return own(*arguments, **options)

    monkeypatch.setattr(owner, name, second)
    run(folder, *WORDS)
    assert len(tried) == 1


def test_a_folder_that_its_last_process_removed_is_not_taken(tmp_path, monkeypatch):
    """Another process has the lock when this one has opened the folder, and fails."""
    opened = os.open

    def other(path: Any, flags: int, *mode: int) -> int:
        handle = opened(path, flags, *mode)
        (tmp_path / "run").rmdir()
        return handle

    monkeypatch.setattr(os, "open", other)
    with pytest.raises(OutputFolderError, match="another process"), locked(tmp_path / "run"):
        pytest.fail("it is in no folder")


@pytest.mark.parametrize(
    "place, owner, name",
    [("model", loop, "load_policy"), ("state", Run, "_load_state"),
     ("pruned", loop, "check_prompts")],
)  # fmt: skip
def test_a_start_that_fails_changes_nothing(folder, tmp_path, monkeypatch, place, owner, name):
    """39: logs are cut only when the state is loaded; then the run goes on as if nothing was."""
    newest, before = checkpoints_in(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "half')
    files = contents(folder)

    def failing(*_: Any, **__: Any) -> None:
        if place == "pruned":
            shutil.move(newest, tmp_path / "moved")
        else:
            raise ValueError("the model is gone")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        for target in (folder, tmp_path / "new"):
            said = "the model is gone|resume: expected a checkpoint"
            is_refused(target, said, f"resume={newest}")
            if place == "pruned":
                shutil.move(tmp_path / "moved", newest)
    assert contents(folder) == files
    assert not (tmp_path / "new").exists()
    assert run(folder, *WORDS, "resume=auto", "steps=3")["metrics"][-1]["step"] == 3
