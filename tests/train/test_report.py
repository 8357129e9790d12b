"""Tests of a run's folder, logs, progress display, curves and messages."""

import io
import json
import math
import os
import shlex
import subprocess
import sys

import pytest
import torch

from grpo_fast.errors import escape_control
from grpo_fast.train.config import RunConfig, load_recipe, recipe_names, recipe_table
from grpo_fast.train.config.words import validated
from grpo_fast.train.folder import check_folder, locked
from grpo_fast.train.report.curves import plot_runs, read_metrics, series, smooth
from grpo_fast.train.report.page import step_html
from grpo_fast.train.report.report import closing_lines, final_line, shown_number
from tests.command_line import ROOT, invoke, write_recipe
from tests.train.runs import opened
from tests.train.test_completions import row
from tests.train.test_words import MINIMAL


def config(**changes):
    return validated(RunConfig, {**MINIMAL, "steps": 40, **changes})


def logged_run(folder, steps=40):
    report = opened(folder, config(), stream=io.StringIO())
    constant = {"completions/mean_length": 5.0, "clip_ratio/region_mean": 0.1, "grad_norm": 1.0}
    evaluation = {"eval_reward": 0.5, "eval_accuracy_strict": 0.2, "eval_accuracy_lenient": 0.4}
    evaluation |= {f"{name}_se": 0.05 for name in evaluation}
    for step in range(1, steps + 1):
        moving = {"reward": step / steps, "kl": 0.01 * step, "entropy": 1 / step}
        moving |= {"perf/rollout_tok_s": 100.0 + step, "perf/train_tok_s": 300.0}
        report.log(step, moving | constant | (evaluation if step % 10 == 0 else {}))
    return report


def test_folder_of_a_run(tmp_path):
    out = tmp_path / "runs" / "a"
    report = logged_run(out)
    report.completions(10, [row()])
    names = [f"eval_{name}{se}" for name in ("reward", "accuracy_strict") for se in ("", "_se")]
    before = dict(zip(names, (0.25, 0.01, 0.0, 0.0), strict=True))
    after = dict(zip(names, (0.95, 0.011, 0.941, 0.015), strict=True)) | {"eval_n": 256.0}
    odd = {"nan": math.nan, "t": torch.tensor(2.0), "folder": out}
    report.finish({"before": before, "after": after, "steps": 40, **odd})
    assert report._stream.getvalue().endswith(
        "reward 0.250 ± 0.010 → 0.950 ± 0.011 · strict 0.0% ± 0.0 → 94.1% ± 1.5 "
        "(n=256, ± one standard error)\n"
    )
    names = {path.name for path in out.iterdir()}
    pages = {"completions", "completions.html"}
    assert names == pages | {"config.yaml", "metrics.jsonl", "summary.json", "curves.png"}
    picture = (out / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 20_000
    summary = json.loads((out / "summary.json").read_text())
    wanted = {"after": after, "nan": None, "t": 2.0, "folder": str(out)}
    assert summary.items() >= wanted.items()
    assert load_recipe(str(out / "config.yaml"), []) == config(output_dir=str(out))
    shown = report._stream.getvalue()
    report.finish({})  # without an evaluation, no line is printed
    assert report._stream.getvalue() == shown


def test_a_resumed_run_deletes_the_tables_of_later_steps(tmp_path):
    with opened(tmp_path / "a", config(), stream=io.StringIO()) as report:
        for step in range(1, 4):
            report.completions(step, [row(tokens=["x", f"step {step}"])])
    opened(tmp_path / "a", config(), step=2, stream=io.StringIO()).close()
    names = sorted(path.name for path in (tmp_path / "a" / "completions").iterdir())
    assert names == ["step_000001.parquet", "step_000002.parquet"]
    page = (tmp_path / "a" / "completions.html").read_text()
    assert "step 2" in page and "step 3" not in page


def test_metrics_lines_are_json_and_flushed_at_once(tmp_path):
    report = opened(tmp_path / "a", config(), stream=io.StringIO())
    report.log(1, {"loss": torch.tensor(0.5), "kl": math.nan, "reward": math.inf, "num_tokens": 7})
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()  # the report is still open
    expected = {"step": 1, "loss": 0.5, "kl": None, "reward": None, "num_tokens": 7.0}
    assert [json.loads(line) for line in lines] == [expected]
    assert read_metrics(tmp_path / "a")[0]["kl"] is None
    report.close()
    report.close()


def test_progress_is_a_line_per_logged_step(tmp_path, monkeypatch):
    """Check which steps print a progress line.

    These are the first and the last step, each evaluation, and steps at least `SECONDS` seconds
    after the last line.
    """
    with logged_run(tmp_path / "a") as report:
        lines = report._stream.getvalue().splitlines()
    shown = "reward 0.025 · kl 0.0100 · clipped 0.10 · length 5 · tok/s 300"
    assert lines[0] == f"step 1/40 · {shown}"
    assert lines[-1].startswith("step 40/40 · 0:00:00 left · reward 1.000")
    held_out = [line for line in lines if "held out" in line]
    said = "held out: reward 0.500 ± 0.050 · strict 20.0% ± 5.0 · lenient 40.0% ± 5.0"
    assert held_out[0] == f"step 10/40 · {said}"
    assert (len(lines), len(held_out)) == (6, 4)
    monkeypatch.setattr("grpo_fast.train.report.report.SECONDS", 0)
    with logged_run(tmp_path / "b") as report:
        report.note("[red]note\x1b[31m")
        assert report._stream.getvalue().count("\n") == 45
        assert report._stream.getvalue().endswith("[red]note\\x1b[31m\n")
    quiet = opened(tmp_path / "c", config(log={"progress": False}), stream=io.StringIO())
    quiet.log(1, {"reward": 1.0})
    assert quiet._stream.getvalue() == ""


def test_occupied_folder_is_refused(tmp_path):
    folder, old, link = tmp_path / "a", tmp_path / "a" / "old.txt", tmp_path / "link"
    folder.mkdir()
    old.write_text("x")
    with locked(folder), pytest.raises(ValueError, match=r"output_dir: .*a is occupied \(it"):
        check_folder(folder)
    assert [p.name for p in folder.iterdir()] == ["old.txt"]
    link.symlink_to("nowhere")
    for wrong in (old, old / "b", "x" * 5000, "a\0b", link):
        with pytest.raises(ValueError, match="output_dir: cannot use "), locked(wrong):
            pytest.fail("it was made")
    assert link.is_symlink()


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    with locked(tmp_path / "deep" / "new") as folder:
        check_folder(folder)
    assert not list((tmp_path / "deep").iterdir())
    with locked(tmp_path / "deep" / "new") as folder:
        (folder / "file").touch()
    assert (tmp_path / "deep" / "new" / "file").exists()


def test_control_characters_are_escaped():
    assert escape_control("a\n\tb") == "a\n\tb"
    shown = r"\x1b[2J\r\x00\x9b\u202e\u200b\u2028\ud800"
    assert escape_control("\x1b[2J\r\x00\x9b\u202e\u200b\u2028\ud800") == shown
    assert escape_control("é漢🙂") == "é漢🙂"


def test_read_metrics_forgives_a_cut_last_line_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a\u2028b\x85c": null}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1, "a\u2028b\x85c": None}]
    path.write_text('{"step": 1}\n{"step": 2}')  # an editor may remove the last newline
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    with pytest.raises(ValueError, match="which does not exist"):
        read_metrics(tmp_path / "no")
    damaged = (b'{"step": 1, "rew', b"[" * 100_000, b'{"step": "1"}', b'{"\xff": 1}', b"[1]")
    for line in damaged:
        path.write_bytes(line + b"\n{}\n")
        expected = r"metrics.jsonl:1: expected a JSON object, whose values are numbers"
        with pytest.raises(ValueError, match=expected):
            read_metrics(tmp_path)


def test_a_picture_needs_a_files_name(tmp_path):
    """Check that the output path of a plot must be a file name with an image suffix.

    For other names, matplotlib would append a suffix and write to a different path.
    """
    logged_run(tmp_path / "run", 3).close()
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name in ("", "folder", "curves", ".png", "x.pgf"):
        with pytest.raises(ValueError, match="out: expected a file such as curves.png, got "):
            plot_runs([tmp_path / "run"], tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_plot_several_runs(tmp_path):
    names = b"x/run", b"y/run", b"a$\\frac{$", b"bad\xff\xfe", b"e\x1b[31mred"
    folders = [tmp_path / os.fsdecode(name) for name in names]
    for folder in folders:
        logged_run(folder, 30).close()
    for suffix in ("png", "svg"):
        picture = plot_runs(folders, tmp_path / "deep" / f"both.{suffix}")
        assert picture.stat().st_size > 10_000
    svg = picture.read_text()
    assert all(t in svg for t in ("Reward", "Entropy (nats)", "Throughput (tokens/s)"))
    assert "Clip fraction" not in svg  # a constant metric is not drawn
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "other": 1}\n')
    with pytest.raises(ValueError, match="expected metrics to draw"):
        plot_runs([tmp_path], tmp_path / "z.png")


def test_smoothing_has_neither_bias_nor_lag():
    rows = [{"step": i, "v": 3.0 if i % 2 else None} for i in range(100)]
    points = series(rows, "v")
    assert len(points) == 50 and points[0] == (1.0, 3.0)
    assert [value for _, value in smooth(points)] == pytest.approx([3.0] * 50)
    line = [(float(i), 2.0 * i) for i in range(200)]
    assert [value for _, value in smooth(line)] == pytest.approx([value for _, value in line])
    # A constant series must stay constant, because its axis would show any rounding error.
    assert {value for _, value in smooth([(float(i), 0.1) for i in range(2000)])} == {0.1}


def test_final_line():
    assert final_line({}, {"eval_reward": 1.0}) == ""
    same = {"eval_accuracy_strict": 0.5, "eval_accuracy_lenient": 0.5}
    assert final_line(same, same) == "strict 50.0% → 50.0% · lenient 50.0% → 50.0%"


def test_the_last_lines_say_how_it_ended_and_where_things_lie(tmp_path):
    done = invoke("train", write_recipe(tmp_path), "steps=3")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run"
    *_, change, files, to_evaluate, to_plot = done.stdout.splitlines()
    assert " → " in change and files.endswith(": completions.html, curves.png, model")
    assert [files, to_evaluate, to_plot] == closing_lines(folder)
    assert closing_lines(folder, has_code=True)[1] == f"{to_evaluate} --allow-code"
    (folder / "curves.png").unlink()
    for command in (to_evaluate, to_plot):
        done = invoke(*shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
    # `plot` writes into the run's folder.
    assert done.output.strip() == str(folder / "curves.png") and (folder / "curves.png").is_file()
    both = invoke("plot", str(folder), str(folder / "metrics.jsonl"), "-o", str(tmp_path / "b.png"))
    assert both.exit_code == 0 and (tmp_path / "b.png").is_file()


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-0.0, "{:.4f}", "0.0000"), (-1e-8, "{:+.3g}", "0"), (0.5, "{:+.3g}", "+0.5"),
        (2e-6, "{:.4g}", "2e-06"), (float("nan"), "{:.3f}", "nan"), (-100.0, "{:.0f}", "-100"),
    ],
)  # fmt: skip
def test_what_rounding_leaves_of_0_is_shown_as_0(value, form, text):
    assert shown_number(value, form) == text


def test_rounding_errors_of_a_completion_are_shown_as_0():
    html = step_html(1, [row(reward=-1e-9, advantage=-1e-8, logps=[-0.0] * 2, advantages=[0, 0])])
    assert "reward 0<" in html and "advantage 0 " in html
    assert 'title="logp 0.000 advantage 0"' in html and "cut off" not in html
    assert "cut off" in step_html(1, [row(truncated=True)])


def test_recipes_are_listed_with_what_they_are_and_need():
    table = recipe_table()
    names = [row[0].split()[1] for row in table if row[0].startswith("train ")]
    assert sorted(names) == recipe_names()
    assert all(len(row) == 5 and all(row) for row in table), table
    said = invoke("recipes").output
    assert "grpo-fast train sort\n" in said
    assert said.count("needs no download") == 3 and "needs needs" not in said


# ----------------------------------------------------------- Imports, terminals and the exit status
def test_help_and_version_load_nothing_heavy():
    """Check that `--help` and `--version` do not import torch or other slow packages."""
    code = (
        "import sys, types\n"
        "package = sys.modules['grpo_fast'] = types.ModuleType('grpo_fast')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "from grpo_fast.cli import app\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'datasets', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), sys.modules\n"
    )
    words = [sys.executable, "-c", code, str(ROOT / "grpo_fast")]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    shown = invoke("--help").output
    assert all(word in shown for word in ("train", "eval", "plot", "--version"))
    version = invoke("--version")
    assert version.exit_code == 0 and version.output.startswith("grpo-fast ")


def test_an_ascii_terminal_shows_question_marks():
    code = (
        "import grpo_fast.cli\n"
        "from grpo_fast.__main__ import main\n"
        "grpo_fast.cli.app = lambda: print('0.1 \\u2192 0.9')\n"
        "main()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, env=env, timeout=120, check=True)
    assert done.stdout == b"0.1 ? 0.9\n"
