"""How a run ends that is not let alone: signals, a lost stdout, a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from grpo_fast.errors import SAVED, Stopped, WriteError
from grpo_fast.train import files
from grpo_fast.train.files import JsonLines
from grpo_fast.train.runs.audit import WAITING, audit
from grpo_fast.train.runs.checkpoint import checkpoints_in, problem_of
from tests.command_line import ROOT, invoke, refused, write_recipe
from tests.train.resuming import Leave, config_of, opened, result, run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LONG = ["steps=100000", "eval.n=2", "log.completions_every=0"]


def answer_signals():
    """In a child: as from a terminal. Under nohup, or behind a shell's &, some are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start():
    """Starts `grpo-fast train`; no process outlives its test."""
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


def wait_for(folder, count, process, limit=120):
    """Until the run has logged so many lines."""
    file, until = folder / "metrics.jsonl", time.monotonic() + limit
    while not file.is_file() or file.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


pytestmark = pytest.mark.usefixtures("no_pictures")


def test_a_signal_saves_the_run_and_has_a_status_of_its_own(start, tmp_path):
    """SIGINT: torchrun below sends SIGTERM."""
    rewards = tmp_path / "mine.py"
    rewards.write_text("def one(completions):\n    return [float(len(c)) for c in completions]\n")
    recipe = write_recipe(tmp_path)
    process = start(recipe, *LONG, f"rewards=[{{name: '{rewards}:one'}}]")
    wait_for(tmp_path / "run", 3, process)
    workers = _children(process.pid)
    assert workers  # of the reward, in a session of its own
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == SAVED == 75, (out, err)
    assert "SIGINT: saved in" in out and "Traceback" not in err
    assert len(checkpoints_in(tmp_path / "run")) == 1
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(row) for row in rows)
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.05)


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def test_a_signal_before_there_is_anything_to_save(tmp_path, monkeypatch):
    Leave(monkeypatch, 3)
    words = ["warm_start={steps: 9, batch_size: 4}", "data.task=arithmetic", "data.digits=1"]
    result = invoke("train", write_recipe(tmp_path), *words, "rewards=[{name: exact_match}]")
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    assert "SIGTERM: ended before there was anything to save\n" in result.stderr


def test_a_signal_to_torchrun_saves_the_run_of_all_its_processes(start, tmp_path):
    """torchrun sends each of them the signal."""
    torchrun, folder = ["torch.distributed.run", "--nproc-per-node", "2", "-m"], tmp_path / "run"
    process = start(write_recipe(tmp_path), "distributed=ddp", *LONG, under=torchrun)
    wait_for(folder, 3, process)
    process.terminate()
    said = "".join(process.communicate(timeout=60))
    assert said.count("SIGTERM: saved in") == 1 and "Stopped" not in said, said
    [saved] = checkpoints_in(folder)
    assert problem_of(saved) is None and not audit(folder).problems


def test_losing_stdout_ends_no_run(start, tmp_path):
    """`| head -1`, and `> /dev/full`."""
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


def test_a_line_is_whole_or_absent(tmp_path, monkeypatch):
    file = JsonLines(tmp_path / "lines.jsonl")
    file.append([{"a": 1}])
    write = os.write
    with monkeypatch.context() as patched:

        def full(handle, text):
            if len(text) > 4:
                return write(handle, text[:4])  # the disk takes the beginning
            raise OSError(28, "No space left on device")

        patched.setattr(files.os, "write", full)
        with pytest.raises(WriteError, match=r"lines\.jsonl.*No space left on device"):
            file.append([{"b": 2222}])
    assert (tmp_path / "lines.jsonl").read_text() == '{"a": 1}\n'
    file.append([{"c": 3}, {"d": 4}])
    assert file.length == (tmp_path / "lines.jsonl").stat().st_size
    file.close()
    JsonLines(tmp_path / "lines.jsonl", 9).close()
    assert (tmp_path / "lines.jsonl").read_text() == '{"a": 1}\n'


def test_a_full_disk_at_the_end_costs_the_model_and_no_summary(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("grpo_fast.train.models.policy.Policy.save", full)
    result = invoke("train", write_recipe(tmp_path), "log.progress=false")
    assert refused(result, "run/model", "No space left on device", code=1)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_the_audit_follows_every_prompt(tmp_path, monkeypatch):
    options = ["rollout.dynamic={rounds: 1}", "rollout.group_size=2", "minibatches=2"]
    counted = Leave(monkeypatch, None)
    run(tmp_path / "whole", *options)
    whole = audit(tmp_path / "whole")
    assert whole.problems == [] and {"trained", "dropped"} & {one.fate for one in whole.fates}
    Leave(monkeypatch, counted.passes - 3)
    with pytest.raises(Stopped):
        run(tmp_path / "left", *options)
    left = audit(tmp_path / "left")
    assert left.problems == []
    for one, other in zip(left.fates, whole.fates, strict=False):
        assert (one.place, one.prompt) == (other.place, other.prompt)
    shown = invoke("audit", str(tmp_path / "left"))
    assert shown.exit_code == 0 and "no prompt was skipped" in shown.output
    state = json.loads((checkpoints_in(tmp_path / "left")[0] / "state.json").read_text())
    waiting = [f.prompt for f in left.fates if f.fate == WAITING]
    asked = state["underway"]["collected"]["prompts"]
    assert waiting == [row["prompt"] for row in asked if row["use"] != "dropped"] != []
    Leave(monkeypatch, None)
    file = tmp_path / "whole" / "prompts.jsonl"
    rows = file.read_text().splitlines()
    file.write_text("".join(row + "\n" for row in rows[:2] + rows[3:]))
    broken = invoke("audit", str(tmp_path / "whole"))
    assert broken.exit_code == 1 and "place 2: expected prompt 2, found 3" in broken.output
    assert result(tmp_path / "whole")["metrics"]
    assert refused(invoke("audit", str(tmp_path)), "audit: expected a run's folder")
