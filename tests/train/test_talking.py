"""Tests of the messages of a run: closing lines, labels of curves, and displayed numbers."""

import io
import shlex

import pytest

from grpo_fast.train.config.recipes import recipe_names, recipe_table
from grpo_fast.train.plan import plan, render
from grpo_fast.train.report.page import step_html
from grpo_fast.train.report.report import closing_lines, shown_number
from tests.command_line import invoke, write_recipe
from tests.tiny import tiny_folder
from tests.train.test_completions import row


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train for three steps from the command line. Return the output and the run's folder."""
    folder = tmp_path_factory.mktemp("a run")
    result = invoke("train", write_recipe(folder), "steps=3")
    assert result.exit_code == 0, result.output
    return result.stdout, folder / "run"


def test_the_last_lines_say_where_things_lie_and_what_to_type(finished, tmp_path):
    said, folder = finished
    lines = said.splitlines()[-3:]
    assert lines == closing_lines(folder)
    assert closing_lines(folder, has_code=True)[1] == f"{lines[1]} --allow-code"
    assert lines[0].endswith(": completions.html, curves.png, model") and "'" in lines[0]
    assert lines[1].startswith("grpo-fast eval ") and lines[2].startswith("grpo-fast plot ")
    _, *commands = closing_lines(folder)
    (folder / "curves.png").unlink()
    for command in commands:
        result = invoke(*shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
    assert (folder / "curves.png").is_file()  # `plot` writes into the run's folder
    assert result.output.strip() == str(folder / "curves.png")
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


def test_a_plan_assumes_the_dtypes_with_which_recipes_train():
    found = plan("qwen2.5-0.5b", ["gpu=80"])
    fixed = found.memory["as configured"].fixed
    assert fixed == 18 * found.shape.parameters  # fp32 weights, gradients and moments, bf16 weights


@pytest.mark.parametrize("model", ["qwen2.5-7b", "sort"])
def test_no_cell_of_a_plan_is_cut_in_80_columns(model):
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*render(plan(model, ["gpu=80", "group=16"])), sep="")
    said = console.export_text()
    assert "checkpointing" in said and "groups" in said and "…" not in said
    assert all(line.endswith("┃") for line in said.splitlines() if line.startswith("┃"))
    assert " 0M parameters" not in said


@pytest.mark.parametrize("key", ["model.path", "reference.path"])
def test_a_folder_that_is_not_there_is_named_by_its_setting(tmp_path, key):
    own = tiny_folder(tmp_path / "policy", "gpt2")
    words = [f"model.path={own}", f"reference.path={own}", f"{key}={tmp_path / 'none'}"]
    found = invoke("train", "notebook", f"output_dir={tmp_path / 'run'}", *words)
    assert found.exit_code == 2 and found.stderr.count(f"{key}: expected a model") == 1
    assert f"got '{tmp_path / 'none'}': no such folder" in found.stderr
