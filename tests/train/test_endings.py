"""Tests of how a run ends and which checkpoints it leaves.

Runs end by signals, by errors in every phase, and by a full disk.
"""

import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from grpo_fast.errors import SAVED, EngineError, NonFiniteLogits, WriteError
from grpo_fast.train.checkpoint import UNFINISHED, read_state
from grpo_fast.train.folder import checkpoints_in
from tests.command_line import ROOT, invoke, refused, write_recipe
from tests.rank_server import alive, wait_until
from tests.train.runs import Leave, config_of, opened, result, run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LONG = ["steps=100000", "eval.n=2", "log.completions_every=0"]


def answer_signals():
    """Restore the default signal handlers in a child process.

    Otherwise, some signals would be ignored if the tests run under nohup or as a background job.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start():
    """Return a function that starts `grpo-fast train` in a subprocess.

    Processes that are still running after the test are killed.
    """
    processes = []

    def started(*words, under=()):
        process = subprocess.Popen(
            [sys.executable, "-m", *under, "grpo_fast", "train", *words], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=ENVIRONMENT, text=True, preexec_fn=answer_signals,
        )  # fmt: skip
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.wait()


def wait_for(folder, process):
    """Wait until the file metrics.jsonl in the folder of a run has three lines."""
    file = folder / "metrics.jsonl"

    def has_lines():
        if file.is_file() and file.read_bytes().count(b"\n") >= 3:
            return True
        assert process.poll() is None, process.communicate()
        return False

    wait_until(has_lines, 120)


pytestmark = pytest.mark.usefixtures("no_pictures")


def test_a_signal_saves_the_run_and_has_a_status_of_its_own(start, tmp_path):
    """Check that SIGINT makes a run save a checkpoint and exit with status 75.

    The worker processes of a reward function must end, too.
    """
    rewards = tmp_path / "mine.py"
    rewards.write_text("def one(completions):\n    return [float(len(c)) for c in completions]\n")
    recipe = write_recipe(tmp_path)
    process = start(recipe, *LONG, f"rewards=[{{name: '{rewards}:one'}}]")
    wait_for(tmp_path / "run", process)
    workers = _children(process.pid)
    assert workers  # worker processes of the reward, in a different session
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == SAVED == 75, (out, err)
    assert "SIGINT: saved in" in out and "Traceback" not in err
    assert len(checkpoints_in(tmp_path / "run")) == 1
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(row) for row in rows)
    wait_until(lambda: not any(alive(pid) for pid in workers), 10)


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def test_a_signal_before_there_is_anything_to_save(tmp_path, monkeypatch):
    Leave(monkeypatch, 3, before=True)
    result = invoke("train", write_recipe(tmp_path), "warm_start={steps: 9, batch_size: 4}")
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    assert "SIGTERM: ended before there was anything to save\n" in result.stderr


def test_a_signal_to_torchrun_saves_the_run_of_all_its_processes(start, tmp_path):
    """Check that SIGTERM to torchrun makes the run save one checkpoint.

    torchrun forwards the signal to all of its processes.
    """
    torchrun, folder = ["torch.distributed.run", "--nproc-per-node", "2", "-m"], tmp_path / "run"
    process = start(write_recipe(tmp_path), "distributed=ddp", *LONG, under=torchrun)
    wait_for(folder, process)
    process.terminate()
    said = "".join(process.communicate(timeout=60))
    assert said.count("SIGTERM: saved in") == 1 and "Stopped" not in said, said
    [saved] = checkpoints_in(folder)
    assert read_state(saved).step > 0


def test_losing_stdout_ends_no_run(start, tmp_path):
    """Check that a run continues if it cannot write to stdout.

    The test uses a closed pipe, as after `| head -1`, and a full device.
    """
    process = start(write_recipe(tmp_path), "log.save_model=false")
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and not err, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    with open("/dev/full", "w", encoding="utf-8") as full:
        report = opened(tmp_path / "other", config_of(tmp_path), stream=full)
        report.note("nobody hears this")
        report.close()


def test_a_line_that_does_not_fit_is_cut_by_the_next_run(tmp_path):
    """Check that a resumed run removes the beginning of a line that a full disk accepted.

    A limit on the file size simulates the full disk.
    """
    config = config_of(tmp_path)
    file = tmp_path / "a" / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path / "a", config) as report:
        report.log(1, {"a": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (report.length + 5, before[1]))
        try:
            with pytest.raises(WriteError, match=r"metrics\.jsonl.*File too large"):
                report.log(2, {"b": 2222})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert file.stat().st_size == report.length + 5
    opened(tmp_path / "a", config, length=report.length).close()
    assert json.loads(file.read_text()) == {"step": 1, "a": 1.0}


def test_other_commands_on_a_full_disk_name_the_file(tmp_path, monkeypatch):
    run(tmp_path / "run", *TABLE)
    for name in ("x.json", "x.png"):
        (tmp_path / name).symlink_to("/dev/full")
    monkeypatch.setattr("grpo_fast.train.policy.Policy.save", Mock(side_effect=FULL))
    for command, *words, file in (
        ("eval", str(tmp_path / "run"), "n=2", f"out={tmp_path}/x.json"),
        ("plot", str(tmp_path / "run"), "-o", f"{tmp_path}/x.png"),
        ("export", str(tmp_path / "run"), f"{tmp_path}/out"),
    ):
        last = invoke(command, *words, file).stderr.splitlines()[-1]
        assert last.startswith(f"grpo-fast: {file.removeprefix('out=')}: expected a disk with"), (
            last
        )
        assert "No space left on device; free some space, or choose" in last


# ---------------------------------------------------------------------------- Errors that end a run
FULL, KEY = OSError(28, "No space left on device"), KeyboardInterrupt()
EVALUATE = "grpo_fast.train.evaluate.evaluate"
COLLECTOR, REPORT = "grpo_fast.train.collect", "grpo_fast.train.report.report"
LOSS, ADAM = "grpo_fast.train.update.packed_loss", "torch.optim.AdamW.step"
SAVE = "grpo_fast.train.checkpoint"
MU, EVERY = ["inner_iterations=2"], ["checkpoint.every=1"]
TABLE = ["steps=3", "eval.every=1", "log.completions_every=1", "log.progress=false", "eval.n=4",
         "tokens_per_microbatch=400"]  # fmt: skip
BEFORE, AFTER, NOTHING = "saved in RUN/step_000001", "saved in RUN/step_000002", "no checkpoint"
NEWEST = "the newest checkpoint is RUN/step_000001"
MEMORY = "tokens_per_microbatch: memory ran out with"
# Maps a description of an error to a tuple with these elements:
# - the function that raises the error
# - the number (from 1) of the call that raises the error, or an inclusive range of numbers
# - the error, or a function that is called before the patched function
# - the expected text, or texts, in the last line of the output; the last one names the checkpoint
# - the expected exit status
# - further settings of the run
ENDINGS: dict[str, tuple[Any, ...]] = {
    # The error occurs before the first update of step 2.
    "a reward's interrupt": (f"{COLLECTOR}.score", 2, KEY, BEFORE, 130),
    "an engine's error": (f"{COLLECTOR}.generate", 2, EngineError("gone"), BEFORE, 1),
    "no memory": (LOSS, 2, torch.OutOfMemoryError("no"), (MEMORY, BEFORE), 2),
    "no memory on a CPU": (LOSS, 2, RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
        (MEMORY, BEFORE), 2),
    "an interrupt of the first evaluation": (EVALUATE, 1, KEY, "saved in RUN/step_000000", 130),
    "no memory in AdamW": (ADAM, 2, torch.OutOfMemoryError("no"), NEWEST, 2, *EVERY),
    # The error occurs between two updates of step 2, where a checkpoint would mix two steps.
    "an interrupt between updates": (LOSS, 4, KEY, NOTHING, 130, *MU),
    "a signal between updates": (LOSS, 4, partial(signal.raise_signal, signal.SIGTERM),
                                 ("SIGTERM: ", AFTER), SAVED, *MU),
    "a bug between updates": (LOSS, 4, RuntimeError("shape"), NEWEST, 1, *MU, *EVERY),
    "an interrupt between critic and policy": (
        f"{ADAM}", 4, KEY, NEWEST, 130, "advantages=gae", "critic={kind: model}", *EVERY),
    # The error occurs after the updates of step 2. The checkpoint contains its unlogged metrics.
    "a full disk for metrics": (f"{REPORT}.RunReport.log", 3, WriteError("full"), AFTER, 1),
    "a bug in a tracker": (f"{REPORT}.RunReport._show", 3, TypeError("mine"), AFTER, 1),
    "no memory while evaluating": (EVALUATE, 3, MemoryError("no"), AFTER, 1),
    # The error occurs while a checkpoint is saved.
    "a full disk for a checkpoint": ("safetensors.torch.save", (2, 99), FULL, NEWEST, 1, *EVERY),
    "an interrupt while saving": (f"{SAVE}._finish", 2, KEY, AFTER, 130, *EVERY),
    # The error occurs after the last step.
    "a full disk for the model": ("grpo_fast.train.policy.Policy.save", 1, FULL,
                                  "saved in RUN/step_000003", 1),
}  # fmt: skip


def failing(monkeypatch, target, calls, error):
    """Patch a function so that some of its calls raise an error.

    Args:
        monkeypatch: The pytest fixture.
        target: Dotted name of the function.
        calls: Number (from 1) of the call that fails, or an inclusive range (first, last).
        error: The error to raise, or a function to call first.
    """
    first, last = calls if isinstance(calls, tuple) else (calls, calls)
    owner, name = resolve(target)
    own, count = getattr(owner, name), itertools.count(1)

    @functools.wraps(own)
    def call(*arguments, **options):
        if first <= next(count) <= last:
            if isinstance(error, BaseException):
                raise error
            error()
        return own(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def resolve(target):
    *above, name = target.split(".")
    for end in range(len(above), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            owner = importlib.import_module(".".join(above[:end]))
            return functools.reduce(getattr, above[end:], owner), name
    raise LookupError(target)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that trains an uninterrupted run and returns its results.

    The argument of the function is a tuple of settings. A run with equal settings runs only once.
    """
    known = {}

    def whole(words):
        if words not in known:
            folder = tmp_path_factory.mktemp("whole")
            assert invoke("train", write_recipe(folder), *TABLE, *words).exit_code == 0
            known[words] = result(folder / "run")
        return known[words]

    return whole


@pytest.mark.parametrize("name", ENDINGS)
def test_an_ending_leaves_a_checkpoint_and_names_it(tmp_path, monkeypatch, undisturbed, name):
    """Check the checkpoint and the message that a run leaves when it ends with an error.

    The checkpoint must not be damaged. The resumed run must have bitwise the same results as an
    uninterrupted run.
    """
    target, calls, error, parts, code, *words = ENDINGS[name]
    parts = parts if isinstance(parts, tuple) else (parts,)
    recipe, root = write_recipe(tmp_path), tmp_path / "run" / "checkpoints"
    with monkeypatch.context() as patched:
        failing(patched, target, calls, error)
        ended = invoke("train", recipe, *TABLE, *words)
    if isinstance(error, BaseException):
        error.__notes__ = []  # the next test raises the same object again
    assert ended.exit_code == code, ended.output
    assert "Traceback" not in ended.output
    last = (ended.stderr or ended.stdout).splitlines()[-1]
    assert all(part.replace("RUN", str(root)) in last for part in parts), last
    saved = checkpoints_in(tmp_path / "run")
    assert [path.name for path in saved[:1]] == re.findall(r"step_\d+", parts[-1])
    assert not list(root.glob(f"*{UNFINISHED}"))
    assert invoke("train", recipe, *TABLE, *words, "resume=auto").exit_code == 0
    assert result(tmp_path / "run") == undisturbed(tuple(words))


def test_broken_weights_replace_no_checkpoint(tmp_path, monkeypatch):
    """Check that a run that ends because its logits are NaN does not save the broken weights.

    The error message must name the newest checkpoint, which was saved before.
    """
    failing(monkeypatch, f"{COLLECTOR}.generate", 3, NonFiniteLogits("the logits are NaN"))
    ended = invoke("train", write_recipe(tmp_path), *TABLE, "checkpoint.every=2")
    [saved] = checkpoints_in(tmp_path / "run")
    cause = "the logits are NaN; this happened after 2 steps; a lower optim.lr"
    assert refused(ended, cause, str(saved), code=1)


def test_a_checkpoint_is_due_by_time(tmp_path):
    """Check that `checkpoint.every_minutes` writes checkpoints, of which the newest two remain.

    The default is a checkpoint every 15 minutes. The value 0 disables these checkpoints.
    """
    plan = config_of(tmp_path / "run").checkpoint
    assert (plan.every, plan.every_minutes, plan.keep) == (0, 15, 2)
    run(tmp_path / "run", "steps=4", "checkpoint.every_minutes=1e-9")
    names = [path.name for path in checkpoints_in(tmp_path / "run")]
    assert names == ["step_000004", "step_000003"]
    run(tmp_path / "none", "steps=2", "checkpoint.every_minutes=0")
    assert not (tmp_path / "none" / "checkpoints").exists()
