"""The GPU session without a GPU: it fits the time, resumes, keeps results, ends what is late."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import session

ROOT = Path(__file__).resolve().parents[2]
CALLER = ROOT / "benchmarks" / "gpu_session.sh"
SCRIPT = ROOT / "benchmarks" / "gpu" / "session.sh"
PY = sys.executable
WRITE = "import json, sys; json.dump({'cases': [1], 'name': sys.argv[1]}, open(sys.argv[-1], 'w'))"


def test_the_script_is_sound():
    for script in (CALLER, SCRIPT):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK)


def test_all_parts_fit_into_one_call():
    parts = session.parts()
    wanted = {
        "tests",
        "sanitize",
        "bench-loss",
        "bench-logits",
        "bench-logps",
        "bench-step",
        "attention",
        "trl",
        "tune",
    }
    assert set(parts) == wanted
    assert sum(part.seconds for part in parts.values()) < 600


def test_wheels_are_unpacked_onto_the_path(tmp_path):
    folder = tmp_path / "benchmarks" / "gpu"
    folder.mkdir(parents=True)
    shutil.copy(CALLER, folder.parent)
    shutil.copy(SCRIPT, folder)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "session.py").write_text("import peer, sys; print(peer.NAME, sys.argv[1:])")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer.py", "NAME = 'from the wheel'")
    environment = {**os.environ, "PYTHON": PY, "TMPDIR": str(tmp_path)}
    command = ["bash", str(tmp_path / "benchmarks" / "gpu_session.sh"), "--part", "tests"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "from the wheel ['--part', 'tests']\n"
    assert not list(tmp_path.glob("tmp.*")), "the unpacked wheels are cleared away"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_it_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    assert session.main(["--part", "bench-logits"]) == 2
    shown = capsys.readouterr().out
    assert "would run" in shown and "starts" in shown and "no NVIDIA GPU" in shown
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A session of three small parts: one measures, one fails, one takes too long."""

    def part(seconds, code, *words, measures=False):
        return session.Part(seconds, [[PY, "-c", code, *words]], [], measures=measures)

    parts = {
        "good": part(30, WRITE, "first", measures=True),
        "bad": part(30, "print('a reason'); raise SystemExit(3)"),
        "slow": part(2, "import time; print('begun', flush=True); time.sleep(60)"),
    }
    monkeypatch.setattr(session, "parts", lambda: parts)
    monkeypatch.setattr(session, "gpu_or_reason", lambda: (None, "a GPU"))
    monkeypatch.setattr(session, "COMMITTED", tmp_path / "no_such.json")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def test_it_keeps_what_was_measured_and_goes_on_where_it_ended(small, capsys):
    started = time.monotonic()
    assert session.main([]) == 1 and time.monotonic() - started < 30
    parts = json.loads((small / "gpu_session.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "good": "done",
        "bad": "failed",
        "slow": "failed",
    }
    assert parts["good"]["reports"] == [{"cases": [1], "name": "first"}]
    log = (small / "gpu_session.log").read_text()
    assert (
        "a reason" in log
        and "begun" in log
        and "ended after 2 s" in log
        and "exit codes [3]" in log
    )
    capsys.readouterr()
    assert session.main(["--part", "good"]) == 0 and "good: done before" in capsys.readouterr().out
    assert (
        session.main(["--part", "good", "--again"]) == 0
        and "good: done in" in capsys.readouterr().out
    )
    assert session.main(["--part", "bad"]) == 1 and "a reason" in capsys.readouterr().out, (
        "a failed part is run again"
    )


def test_no_part_is_started_after_the_deadline(small, capsys):
    assert session.main(["--deadline", "5"]) == 1
    assert capsys.readouterr().out.count("no time left; call again") == 3
    assert not (small / "gpu_session.json").exists()


def test_results_in_the_checkout_count_too(small, monkeypatch, tmp_path, capsys):
    committed = tmp_path / "committed.json"
    committed.write_text(json.dumps({"parts": {"good": {"status": "done", "reports": []}}}))
    monkeypatch.setattr(session, "COMMITTED", committed)
    assert session.main(["--part", "good"]) == 0 and "done before" in capsys.readouterr().out


def test_a_command_that_is_not_there_fails_its_part(small, capsys):
    assert session.run(["no-such-sanitizer"], 5, {}, print) == 127
    assert "no-such-sanitizer is not on the PATH" in capsys.readouterr().out
