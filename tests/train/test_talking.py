"""Tests of the command line and of the messages of a run."""

import os
import shlex
import subprocess
import sys

import pytest

from grpo_fast.train.config import recipe_names, recipe_table
from grpo_fast.train.report.page import step_html
from grpo_fast.train.report.report import closing_lines, shown_number
from tests.command_line import ROOT, invoke, write_recipe
from tests.train.test_completions import row


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
