"""Tests of the GPU session and its report on a machine without a GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import kernel_times, report, session, smoke
from benchmarks.kernels.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
CALLER = ROOT / "benchmarks" / "gpu_session.sh"
SCRIPT = ROOT / "benchmarks" / "gpu" / "session.sh"
PY = sys.executable
WRITE = "import json, sys; json.dump({'cases': [1], 'name': sys.argv[1]}, open(sys.argv[-1], 'w'))"
SLOW = "; print('begun', flush=True); import time; time.sleep(60)"


def test_the_script_is_sound():
    for script in (CALLER, SCRIPT, SCRIPT.with_name("wheels.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK)


def test_the_script_joins_the_pieces_of_the_wheels(tmp_path):
    """Check that the script unpacks an archive of wheels that is split into two pieces."""
    script = tmp_path / "benchmarks" / "gpu" / "session.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    for folder in (script.parent, script.parent.parent):
        (folder / "__init__.py").touch()
    for name in ("first", "second"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    archive = tmp_path / "wheels.tar"
    with tarfile.open(archive, "w") as tar:
        for wheel in tmp_path.glob("*.whl"):
            tar.add(wheel, wheel.name)
    written, cut = archive.read_bytes(), 550  # the cut is in the first wheel
    for number, part in enumerate((written[:cut], written[cut:])):
        folder = tmp_path / "wheels" / f"0{number}"
        folder.mkdir(parents=True)
        (folder / f"wheels.tar.0{number}").write_bytes(part)
    module = tmp_path / "benchmarks" / "gpu" / "session.py"
    module.write_text("import first, second, sys; print('imported', *sys.argv[1:])")
    done = dry(script, PY)
    assert (done.stdout, done.stderr, done.returncode) == ("imported --dry\n", "", 0)
    (tmp_path / "wheels" / "01" / "wheels.tar.01").unlink()
    assert "a piece of wheels/ is missing" in dry(script, PY).stderr
    (tmp_path / "wheels" / "00" / "wheels.tar.00").unlink()
    assert "benchmarks/gpu/wheels.sh first" in dry(script, PY).stderr


def dry(script, python):
    environment = {**os.environ, "PYTHON": python}
    return subprocess.run([script, "--dry"], env=environment, capture_output=True, text=True)


def test_a_python_without_torch_is_refused():
    done = dry(CALLER, "false")
    assert done.returncode == 2 and "false has no torch with triton; set PYTHON" in done.stderr


def test_the_parts_fit_into_both_visits():
    every = session.parts()
    assert {part.visit for part in every.values()} == {*session.VISIT_SECONDS, session.BY_NAME}
    for visit, seconds in session.VISIT_SECONDS.items():
        chosen = session.of_visit(every, visit)
        assert next(iter(chosen.values())).stops, "a visit begins with the smoke test"
        assert sum(part.seconds for part in chosen.values()) <= seconds
    starts = len(session.VISIT_SECONDS) * session.START_SECONDS
    carried = sum(count - 1 for count in session.PIECES.values()) * session.CARRY_SECONDS
    most = session.SESSION_SECONDS - session.SLACK_SECONDS
    assert sum(session.VISIT_SECONDS.values()) + starts + carried <= most
    assert (
        session.VISIT_SECONDS[1] + session.START_SECONDS <= 540 and session.VISIT_SECONDS[2] <= 240
    )


def test_the_clock_adds_the_limits_of_a_session():
    every = session.parts()
    lines = list(session.clock(every))
    rows = [line.split() for line in lines if line.split()[0] in ("1", "2")]
    ends = {(visit, name): int(end) for visit, name, _, end in rows}
    before = session.START_SECONDS + every["smoke"].seconds
    assert ends["1", "bars"] == before + every["bars"].seconds
    assert [name for visit, name in ends if "wheels/" in name] == ["wheels/00", "wheels/01"]
    assert ends["2", "wheels/01"] == ends["2", "start"] + 2 * session.CARRY_SECONDS
    slack = session.SESSION_SECONDS - ends["2", "longest"]
    assert f"# slack: {slack} s" in lines[-3] and slack >= session.SLACK_SECONDS
    assert "in this order: longest, hybrid, heads, frozen, rows, tests" in lines[-2]
    assert "left out" in lines[-1] and "step, peers, memcheck" in lines[-1]


def test_parts_name_known_benchmarks():
    """Check that no part names a benchmark that was removed. Some parts run only by name."""
    commands = [x for part in session.parts().values() for x in part.commands]
    lines = [" ".join(x[3:]).split(" + ") for x in commands if x[1:3] == ["-m", "benchmarks"]]
    names = [line.split()[0] for each in lines for line in each]
    assert len(names) > 10 and {*names} <= {*OPERATIONS}
    for each in lines:
        reports = {line.partition(" --out ")[2] for line in each}
        assert len(reports) == len(each) and "" not in reports


def test_a_dry_run_has_only_the_packages_of_the_machine(small, tmp_path, monkeypatch, capsys):
    """Check that a dry run fails if a part needs a package that the GPU machine does not have.

    The GPU machine has pydantic only if it was copied there as a wheel.
    """
    code = "import importlib.util as u, pydantic; assert u.find_spec('trl') is None"
    part = session.Part(1, 30, [], [[PY, "-c", code]])
    monkeypatch.setattr(session, "parts", lambda: {"steps": part})
    assert session.main(["--dry"]) == 1
    shown = capsys.readouterr().out
    assert "No module named 'pydantic'" in shown and "does NOT start" in shown
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "pydantic.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "wheels"))
    assert session.main(["--dry"]) == 0 and "starts" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_only_a_dry_run_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    assert session.main(["--part", "smoke"]) == 2
    assert "no NVIDIA GPU; --dry needs none" in capsys.readouterr().err
    assert session.main(["--part", "smoke", "--dry"]) == 0
    shown = capsys.readouterr().out
    assert "would run" in shown and "starts" in shown
    assert "# plan: smoke 25 s; in all at most 25 s" in shown and not list(tmp_path.iterdir())


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Replace the parts of the session with three short ones, and return the output folder.

    One part writes a report, one fails, and one is killed after it has written a report.
    """

    def part(seconds, code, *words):
        return session.Part(1, seconds, [[PY, "-c", code, *words]], [])

    chosen = {
        "good": part(30, WRITE, "first", f"{session.REPORTS}/0.json"),
        "bad": part(30, "print('a reason'); raise SystemExit(3)"),
        "slow": part(2, WRITE + SLOW, "kept", f"{session.REPORTS}/0.json"),
    }
    monkeypatch.setattr(session, "parts", lambda: chosen)
    monkeypatch.setattr(session, "gpu_here", lambda: "a GPU")
    monkeypatch.setattr(session, "COMMITTED", tmp_path / "no_such.json")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def test_the_limit_also_ends_a_command_with_a_limit_inside():
    """Check that pytest ends at the limit of its part, even if it ignores the earlier SIGINT."""
    timed = session.parts()["tests"].commands[0]
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    command = [*timed[: timed.index(PY) - 1], "1", PY, "-c", code]
    assert command[:2] == ["timeout", "--foreground"]
    started = time.monotonic()
    assert session.run(command, 2.0, {}, print) == 124 and time.monotonic() - started < 30


def test_it_keeps_what_was_measured_and_goes_on_where_it_ended(small, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(session, "VISIT_SECONDS", {1: 5, 2: 5})
        assert session.main([]) == 1
    assert capsys.readouterr().out.count("no time left; call again") == 3
    assert not (small / "gpu_session.json").exists()
    started = time.monotonic()
    assert session.main([]) == 1 and time.monotonic() - started < 30
    found = json.loads((small / "gpu_session.json").read_text())["parts"]
    assert [part["status"] for part in found.values()] == ["done", "failed", "failed"]
    for name, word in (("good", "first"), ("slow", "kept")):
        (report,) = found[name]["reports"]
        assert report == {"cases": [1], "name": word, "where": found[name]["where"]}
        assert report["where"].endswith(" on a GPU")
    log = (small / "gpu_session.log").read_text()
    assert all(x in log for x in ("a reason", "begun", "ended after 2 s", "exit codes [3]"))
    capsys.readouterr()
    assert session.main(["--part", "good"]) == 0 and "good: done before" in capsys.readouterr().out
    assert session.main(["--part", "good", "--again"]) == 0
    assert "good: done in" in capsys.readouterr().out
    assert session.main(["--part", "bad"]) == 1 and "a reason" in capsys.readouterr().out
    (small / "gpu_session.json").rename(committed := small / "committed.json")
    monkeypatch.setattr(session, "COMMITTED", committed)
    assert session.main(["--part", "good"]) == 0 and "done before" in capsys.readouterr().out
    monkeypatch.setattr(session, "gpu_here", lambda: "another GPU")
    assert session.main(["--part", "good"]) == 0 and "good: done in" in capsys.readouterr().out
    found = json.loads((small / "gpu_session.json").read_text())["parts"]["good"]["reports"]
    assert [x["where"].partition(" on ")[2] for x in found] == ["a GPU", "another GPU"]


@pytest.fixture
def two_visits(small, monkeypatch):
    """Replace the parts of the session with a smoke test and one part for each of two visits.

    Return the path of a file. While the file exists, the smoke test fails.
    """
    broken = small.parent / "broken"

    def part(visit, code):
        return session.Part(visit, 30, [[PY, "-c", code]], [])

    code = f"import os; raise SystemExit(os.path.exists({str(broken)!r}))"
    chosen = {"smoke": part(1, code)._replace(stops=True)}
    chosen |= {f"part {visit}": part(visit, f"print('this is', {visit})") for visit in (1, 2)}
    monkeypatch.setattr(session, "parts", lambda: chosen)
    return broken


def test_visits_follow_each_other_and_each_begins_with_the_smoke_test(two_visits, capsys):
    for visit in (1, 2):
        assert session.main([]) == 0
        shown = capsys.readouterr().out
        assert f"visit {visit} of 2" in shown and f"this is {visit}" in shown
        assert "smoke: done in" in shown and shown.count("this is ") == 1
    assert session.main(["--visit", "2"]) == 0 and "part 2: done before" in capsys.readouterr().out
    assert session.main(["--visit", "2", "--again"]) == 0
    assert "this is 2" in capsys.readouterr().out


def test_a_failed_smoke_test_stops_the_session(two_visits, capsys):
    two_visits.touch()
    assert session.main([]) == 3
    shown = capsys.readouterr().out
    assert "stopped: smoke failed" in shown and "this is" not in shown


def test_a_tree_without_git_needs_its_commit(two_visits, small, monkeypatch, capsys):
    monkeypatch.setattr(session, "commit", lambda: os.environ.get("GRPO_FAST_COMMIT", "none"))
    monkeypatch.delenv("GRPO_FAST_COMMIT", raising=False)
    assert session.main([]) == 2 and "expected --commit HASH" in capsys.readouterr().err
    monkeypatch.setenv("GRPO_FAST_COMMIT", "set again by monkeypatch's undo")
    assert session.main(["--commit", "abc123"]) == 0


@pytest.mark.parametrize("module", [smoke, kernel_times])
def test_what_runs_on_the_gpu_runs_here_at_tiny_sizes(module, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert module.main(["--device", "cpu", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found.get("checks") or found.get("profiles")


def test_kernel_times_keeps_the_profiles_before_an_error(tmp_path, monkeypatch):
    """Check that the report contains the first profile if the command exits during the second."""
    monkeypatch.setattr(kernel_times.measure, "header", lambda *_: {})
    profiles = iter([{"shape": [1, 2, 3]}])
    monkeypatch.setattr(kernel_times, "profiled", lambda *_: next(profiles))
    file = tmp_path / "out.json"
    with pytest.raises(StopIteration):
        kernel_times.main(["--device", "cuda", "--out", str(file)])
    assert json.loads(file.read_text())["profiles"] == [{"shape": [1, 2, 3]}]


@pytest.mark.parametrize("error", [float("nan"), 1.5])
def test_the_smoke_test_fails_on_a_wrong_result(error, monkeypatch, capsys):
    monkeypatch.setitem(smoke.CHECKS, "head", lambda device: (error, "by hand"))
    assert smoke.main(["--device", "cpu"]) == 1 and "head: WRONG" in capsys.readouterr().out


# ---- the report ----


def test_the_committed_report_is_of_the_committed_results():
    expected = report.rendered(report.SESSION)
    assert report.REPORT.read_text() == expected, "python -m benchmarks.gpu.report"


def test_no_bar_is_measured_without_results(tmp_path):
    page = report.rendered(tmp_path / "none.json")
    for bar in report.bars("H100", report.Results([], [])):
        assert re.search(rf"^\| {re.escape(bar.title)} \|.*\| not measured \|$", page, re.M)


def measured_session(tmp_path, ours_ms):
    """Write a result file like that of a GPU session, and return its path.

    The file has the times of a training step, of single kernels, and of the loss at H = 4096.
    grpo_fast takes `ours_ms` for the loss.
    """
    case = {
        "operation": "linear_grpo_loss", "shape": [8192, 4096, 151936], "active": 1.0,
        "inactive": "masked", "allocator": "cuda",
        "rows": {
            "three GEMMs": {"role": "limit", "median_ms": 40.0},
            "TRL": {"role": "peer", "median_ms": 120.0},
            "Liger": {"role": "peer", "status": "failed"},
            "grpo_fast (auto)": {
                "role": "ours", "median_ms": ours_ms, "ratio_to_limit": ours_ms / 40,
                "workspace_mib": 2048.0,
            },
        },
    }  # fmt: skip
    hardware = {"gpu": "NVIDIA H200, 139 GiB, 132 SMs"}
    common = {"hardware": hardware, "commit": "abc", "versions": {"torch": "2.11.0"}}
    step = {
        **common, "cases": [], "settings": {"prompt": 150, "completion": 200, "group": 8},
        "providers": {"TRL": {"median_ms": 30.0}, "shared": {"median_ms": 20.0}},
    }  # fmt: skip
    kernels = {
        "shape": [8192, 4096, 151936], "us_in_kernels": 4e4, "us_without_profiler": 4.1e4,
        "launches": 70, "kernels": [{"kernel": "slice_kernel", "calls": 1, "us": 1.5e4}],
    }  # fmt: skip
    reports = [{**common, "cases": [case]}, step, {**common, "profiles": [kernels]}]
    done = {"status": "done", "seconds": 80.0, "finished": "2026-11-22", "reports": reports}
    file = tmp_path / "gpu_session.json"
    file.write_text(json.dumps({"parts": {"bars": done}}))
    return file


def test_the_report_sets_what_was_measured_beside_what_was_predicted(tmp_path):
    page = report.rendered(measured_session(tmp_path, 42.0))
    h100, _, page = page.partition("## Bars on an H200")
    assert "1.05×" not in h100 and "/ 42.0 |" not in h100, "results of one card stay with it"
    assert "NVIDIA H200" in h100
    predicted = next(iter(report.estimates("H200").values()))
    ratio = f"{predicted.ratio:.2f}×"
    assert f"| ≤ 1.12× | {ratio} | 1.05× |" in page
    assert page.count("| 2.86× |") == 2  # faster than TRL, and than the fastest peer
    assert "/ 2048.0 |" in page and "| 1.50× |" in page and "/ 42.0 |" in page
    assert "`slice_kernel`" in page and "dH and dW products" in page
    assert "| 1 | bars | 50 | done |" in page


def test_results_without_a_commit_are_not_rendered(tmp_path):
    file = measured_session(tmp_path, 42.0)
    file.write_text(file.read_text().replace('"commit": "abc"', '"commit": "none"'))
    with pytest.raises(SystemExit, match="expected the commit of every report"):
        report.rendered(file)


def test_the_report_says_where_a_bar_is_missed(tmp_path):
    page = report.rendered(measured_session(tmp_path, 60.0))
    assert "1.50× **missed**" in page and "2.00× **missed**" in page
