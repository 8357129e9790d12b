"""A run's folder that somebody changed between an end and a resume; checkpoints signed anew."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_fast.train.files import sha256_of
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.runs import build, resume
from grpo_fast.train.runs.checkpoint import checkpoints_in, problem_of, write_checkpoint
from grpo_fast.train.runs.folder import locked
from tests.command_line import invoke, refused
from tests.train.resuming import Leave, run

SHARD = "weights/shard-00001-model-00001-of-00001.safetensors"
WORDS = ["steps=2", "checkpoint.every=1", "checkpoint.keep=9", "log.save_model=false",
         "eval.every=0", "log.completions_every=0", "optim.schedule=constant"]  # fmt: skip

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
    """Set `a.b.0` of state.json to a value; DELETE removes it."""
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
    sign(checkpoint)


DELETE = object()
FIELDS = [
    ("step", 10**9, "state.json: step: expected 2, as its name says"),
    ("step", "2", "state.json: step: Input should be a valid integer"),
    ("collector.consumed", -1, "state.json: collector.consumed: Input should be greater"),
    ("collector.consumed", 1 << 70, "state.json: collector.consumed"),
    ("lengths", DELETE, "state.json: lengths: Field required"),
    ("lengths.0", -5, "state.json: lengths.0: Input should be greater"),
    ("lengths.1", 10**9, "at least 1000000000 bytes in .*prompts.jsonl"),
    ("trainer.optimizers.policy.skipped", -1, "state.json: trainer.optimizers.policy.skipped"),
    ("trainer.optimizers", {}, "got another: .*policy"),
    ("trainer.beta", None, "state.json: trainer.beta"),
    ("trainer.budget.tokens", 0, "state.json: trainer.budget.tokens"),
    ("trainer.more", 1, "state.json: trainer.more: Unexpected keyword"),
    ("collector.rewards.failed_total", {}, "got another: .*sort"),
    ("settings", [], "state.json: settings"),
    ("settings.seed", 5, "seed: 5 → 0"),
    ("settings.optim", None, "optim: None → "),
    ("settings.model", None, "model: None → "),
    ("settings.files", {}, "got others .resume_allow=.data."),
    ("settings.files", 7, "got others"),
    ("run", "x", "state.json: run: Unexpected keyword"),
]


@pytest.mark.parametrize("path, value, said", FIELDS)
def test_what_a_state_cannot_hold(folder, newest, path, value, said):
    """33, 48: refused with the name of the field, and nothing in the folder changes."""
    before = checkpoints_in(folder)
    change(newest, path, value)
    logs = [(folder / name).read_bytes() for name in resume.LOGS]
    is_refused(folder, said)
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
    "missing": (lambda t: t.pop(WEIGHT), f"the tensor {WEIGHT}: expected .* got none"),
    "extra": (lambda t: t.update(more=torch.ones(1)), "the tensor more: expected no such tensor"),
    "shape": (lambda t: t.update({WEIGHT: t[WEIGHT][:, 1:].clone()}), f"{WEIGHT}: expected .*32"),
    "rows": (lambda t: t.update({WEIGHT: t[WEIGHT][1:].clone()}), f"{WEIGHT}: expected"),
    "dtype": (lambda t: t.update({WEIGHT: t[WEIGHT].double()}), f"{WEIGHT}: expected"),
    "half of the moments": (
        lambda t: t.pop(f"optimizer.{WEIGHT}.exp_avg"), "exp_avg: expected .* got none"),
    "one moment more": (
        lambda t: t.update({f"optimizer.{WEIGHT}.third": torch.ones(3)}), "third: expected no su"),
    "moments of nobody": (
        lambda t: t.update({"optimizer.critic.y.step": torch.zeros(())}), "critic.y.step: expec"),
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


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint holds the samples of the next step."""
    folder = tmp_path_factory.mktemp("ahead") / "run"
    run(folder, *WORDS, *AHEAD, "steps=3", "checkpoint.keep=2")
    shutil.rmtree(checkpoints_in(folder)[0])
    return folder


AHEAD = ["rollout.ahead=1", "rollout.correct_sampling=true", "rollout.top_p=0.9"]
COLUMNS = {
    "a token of no vocabulary": (lambda t: t["ahead.ids"].fill_(10**6), "samples: ids"),
    "a negative token": (lambda t: t["ahead.ids"].fill_(-1), "samples: ids"),
    "logps of another length": (
        lambda t: t.update({"ahead.logps": torch.zeros(1)}), "samples: logps"),
    "one sample less": (
        lambda t: t.update({"ahead.truncated": t["ahead.truncated"][1:].clone()}),
        "samples: truncated"),
    "samples of other prompts": (lambda t: t["ahead.group"].add_(1), "ahead.group: expected"),
    "a column more": (lambda t: t.update({"ahead.more": torch.ones(1)}), "the columns"),
    "a column less": (lambda t: t.pop("ahead.segment"), "the columns"),
    "no offsets": (lambda t: t.pop("ahead.support.offsets"), "the columns"),
    "offsets that fall": (lambda t: t["ahead.support.offsets"].neg_(), "samples: support"),
    "no seconds": (lambda t: t.pop("ahead.seconds"), "ahead.seconds"),
    "two seconds": (lambda t: t.update({"ahead.seconds": torch.ones(2)}), "got another"),
    "another part": (lambda t: t.update(other=torch.ones(1)), "names that begin with"),
    "no random numbers": (lambda t: t.pop("random.cpu"), "random.cpu"),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLUMNS)
def test_samples_of_the_next_step_that_do_not_fit(sampled, tmp_path, kind):
    folder = Path(shutil.copytree(sampled, tmp_path / "run"))
    [checkpoint] = checkpoints_in(folder)
    edit, said = COLUMNS[kind]
    tensors = load_file(checkpoint / "state.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "state.safetensors")
    sign(checkpoint)
    with pytest.raises(ValueError, match=f"{CHECKPOINT}.*{said}"):
        run(folder, *WORDS, *AHEAD, "steps=3", "resume=auto")


GARBAGE = [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 7 + b"\x00" + b"{" * 99]


@pytest.mark.parametrize("name", [SHARD, "state.safetensors"])
def test_bytes_that_are_no_tensors(folder, newest, name):
    for content in GARBAGE:
        (newest / name).write_bytes(content)
        sign(newest)
        is_refused(folder, CHECKPOINT)


# ----------------------------------------------------------------------- files that are none
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


@pytest.mark.parametrize("is_signed", [True, False])
def test_no_file_is_unpickled_or_executed(folder, newest, tmp_path, monkeypatch, is_signed):
    """33, 46, 47: whether the manifest names it or not."""
    monkeypatch.chdir(tmp_path)
    for name, content in EVIL.items():
        (newest / name).write_bytes(content)
    if is_signed:
        sign(newest)
    invoke("export", str(newest), str(tmp_path / "out"))
    if is_signed:
        run(folder, *WORDS, f"resume={newest}", "steps=3")
    else:
        is_refused(folder, "is not in the manifest", f"resume={newest}")
    assert not (tmp_path / "exploded").exists()


ENDLESS = {"zero": lambda path: path.symlink_to("/dev/zero"), "pipe": os.mkfifo}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_file_without_an_end(folder, tmp_path, kind):
    """47: nothing hangs: a checkpoint is passed over as damaged, a log is refused."""
    newest, before = checkpoints_in(folder)
    for name in ("manifest.json", "state.json", SHARD):
        copy = Path(shutil.copytree(folder, tmp_path / name.replace("/", "-")))
        place = checkpoints_in(copy)[0] / name
        place.unlink()
        ENDLESS[kind](place)
        assert "expected a regular file" in str(
            problem_of(place.parents[len(Path(name).parts) - 1])
        )
    run(copy, *WORDS, "resume=auto", "steps=3")
    (folder / "metrics.jsonl").unlink()
    ENDLESS[kind](folder / "metrics.jsonl")
    is_refused(folder, "metrics.jsonl")


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_json_without_an_end(folder, newest, tmp_path, name):
    """48: nested a million times, a bomb of digits, no JSON at all."""
    deep = "[" * 10**6, '{"a":' * 10**6, "1" * 10**6
    for text in (*deep, "", "\x00", '{"format": 1e999}', "null"):
        (newest / name).write_text(text)
        if name == "manifest.json":
            assert "cannot be read" in str(problem_of(newest)), text[:20]
            continue
        sign(newest)
        is_refused(folder, r"state\.json", f"resume={newest}")
        assert refused(invoke("export", str(newest), str(tmp_path / "out")), "export: expected a")


def test_an_export_of_a_checkpoint_that_was_edited(newest, tmp_path):
    """91: each was a KeyError, a SafetensorError, or a model with NaN weights without a word."""
    words = "export", str(newest), str(tmp_path / "out")
    tensors = load_file(newest / SHARD)
    for weight, said in ((torch.nan, "finite weights"), (torch.inf, "finite weights"), (0.5, "")):
        changed = tensors[WEIGHT].clone()
        changed[0, 0] = weight
        write_shard(newest, tensors | {WEIGHT: changed})
        assert refused(invoke(*words), said, "policy.lm_head") if said else True
    for content in GARBAGE:
        (newest / SHARD).write_bytes(content)
        sign(newest)
        assert refused(invoke(*words), "export: expected a checkpoint")
    write_shard(newest, {name: x for name, x in tensors.items() if name != WEIGHT})
    assert refused(invoke(*words), WEIGHT)
    for path in ("model", "files", "loss", "model.config", "data"):
        state = (newest / "state.json").read_text()
        change(newest, f"settings.{path}", DELETE)
        assert refused(invoke(*words), "export: expected a checkpoint"), path
        (newest / "state.json").write_text(state)
    assert not (tmp_path / "out").exists()


def test_an_export_never_writes_into_a_checkpoint(folder, newest, tmp_path):
    """83: it damaged the checkpoint that it read."""
    (tmp_path / "link").symlink_to(newest)
    places = newest / "hf", newest / "a/b", newest, tmp_path / "link" / "hf"
    later = newest.with_name("step_000009")
    for place in (*places, later, later / "hf", newest / "weights"):
        assert refused(invoke("export", str(newest), str(place)), "it is in a checkpoint"), place
    assert problem_of(newest) is None and not later.exists()
    with pytest.raises(ValueError, match="it is in a checkpoint"):
        run(newest / "run", *WORDS)


def test_a_run_is_exported_from_its_newest_checkpoint(folder, newest, tmp_path):
    """83."""
    words = [str(tmp_path / name) for name in "abc"]
    assert invoke("export", str(folder), words[0]).exit_code == 0
    assert invoke("export", str(newest), words[1]).exit_code == 0
    a, b = (load_file(f"{word}/model.safetensors") for word in words[:2])
    assert all(a[name].equal(b[name]) for name in a)
    (newest / "state.json").unlink()
    assert invoke("export", str(folder), words[2]).exit_code == 0
    c = load_file(f"{words[2]}/model.safetensors")
    assert any(not a[name].equal(c[name]) for name in a)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for place in (tmp_path / "empty", tmp_path / "nothing", folder / "config.yaml"):
        assert refused(invoke("export", str(place), str(tmp_path / "d")), "there is none")


def test_an_exported_config_is_data(newest, tmp_path, monkeypatch):
    """46, 47: no layers without end, and no kernel of the hub."""
    asked: list[str] = []
    words = "export", str(newest), str(tmp_path / "out")
    change(newest, "settings.model.config.num_hidden_layers", 10**7)
    assert refused(invoke(*words), "num_hidden_layers: expected 0 to")
    change(newest, "settings.model.config.num_hidden_layers", 1)
    change(newest, "settings.model.config.attn_implementation", "some/kernel")
    assert refused(invoke(*words), "expected one of transformers' implementations")
    change(newest, "settings.model.config.attn_implementation", DELETE)
    change(newest, "settings.model.attn", "some/kernel")
    monkeypatch.setattr(Policy, "save", lambda self, _: asked.append(self.generation_attn))
    assert invoke(*words).exit_code == 0 and asked == ["sdpa"]
    assert not (tmp_path / "out").exists()


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


# ------------------------------------------------------------------ another version, another run
def test_another_format_is_not_damage(folder, tmp_path):
    """40: the run is refused, and nothing that it did not write is removed."""
    newest, before = checkpoints_in(folder)
    manifest = json.loads((newest / "manifest.json").read_text())
    for was in (4, 6):
        text = json.dumps({"format": was, "step": 2, "anything": {}})
        (newest / "manifest.json").write_text(text)
        for word in ("resume=auto", f"resume={newest}", f"resume={folder}"):
            is_refused(folder, f"format 5, which .* got format {was} in", word)
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


def test_what_is_in_the_way_of_a_save_is_set_aside(folder, newest):
    """40: as a checkpoint that was damaged while its run went on."""
    (newest / "state.json").write_text("dear")
    fill = lambda part: (part / "state.json").write_text("{}")  # noqa: E731
    assert write_checkpoint(folder, 2, {"x": torch.ones(2)}, fill) == newest
    aside = newest.with_name(f"{newest.name}.aside-1")
    assert problem_of(newest) is None and (aside / "state.json").read_text() == "dear"


def test_going_back_in_ones_own_folder(folder, monkeypatch):
    """41: newer checkpoints are set aside by name, so that `auto` follows the new way."""
    newest, before = checkpoints_in(folder)
    whole = run(folder.parent / "whole", *WORDS, "steps=3")
    Leave(monkeypatch, 8)
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
        patched.setattr(
            resume, "_find_checkpoint", lambda *_: pytest.fail("looked without the lock")
        )
        is_refused(folder, "another process is writing", "resume=auto")
    monkeypatch.setattr(build, "load_policy", lambda *_, **__: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run(folder, *WORDS, "resume=auto", "steps=3")


@pytest.mark.parametrize("name", ["_find_checkpoint", "load_policy", "build_rewards"])
def test_the_second_of_two_runs_that_start_at_once_is_refused(tmp_path, monkeypatch, name):
    """In a folder that did not exist: before anything is looked for or loaded."""
    folder, owner = tmp_path / "run", resume if name == "_find_checkpoint" else build
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


@pytest.mark.parametrize(
    "place, owner, name",
    [("model", build, "load_policy"), ("state", resume, "read_tensors"),
     ("pruned", build, "check_prompts")],
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
