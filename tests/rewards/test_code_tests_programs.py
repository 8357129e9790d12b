"""Tests of `code_tests` with the programs of cheats.yaml and solutions.yaml."""

import time
from pathlib import Path

import pytest
import yaml

from grpo_fast.data import Example
from grpo_fast.rewards import columns
from grpo_fast.rewards.workers import code_tests as worker
from grpo_fast.rewards.workers import sandbox, unit_tests
from tests.rewards.test_code_tests import CHEATS, pytestmark  # noqa: F401

SOLUTIONS = yaml.safe_load(Path(__file__).with_name("solutions.yaml").read_text())
SHARED = CHEATS["shared"] | SOLUTIONS["shared"]
STYLES = SOLUTIONS["styles"] | {
    "a program of bytes": {
        "right": "import os\nwhile part := os.read(0, 9): os.write(1, part.upper())",
        "wrong": "import os\nos._exit(0)",
        "tests": [{"input": "ü a\n" * 30_000, "output": "ü A\n" * 30_000}],
    }
}


def code_of(answer):
    return CHEATS["fragments"].get(answer.get("uses"), "") + answer["code"]


def scores(table, **limits):
    """Return the reward of each answer in a table, by its name."""
    codes = list(map(code_of, table.values()))
    tests = [x.get("tests", "secret") for x in table.values()]
    tests = [SHARED.get(x, x) if isinstance(x, str) else x for x in tests]
    return dict(
        zip(table, worker.code_tests(completions=codes, tests=tests, **limits), strict=True)
    )


def test_cheats_score_nothing():
    found = scores(CHEATS["cheats"], seconds=2.0, memory=256)
    assert len(found) > 125
    assert {n: x for n, x in found.items() if x} == {}


@pytest.mark.parametrize("table", [CHEATS["right"], SOLUTIONS["unusual"]])
def test_correct_answers_score_one(table):
    assert {n: x for n, x in scores(table, seconds=20.0).items() if x != 1} == {}


def test_the_code_of_cheats_is_valid():
    """Check that no cheat scores 0 only because its code does not compile."""
    for code in map(code_of, CHEATS["cheats"].values()):
        if "```" not in code:
            compile(code, "<cheat>", "exec")


def test_two_threads_do_not_parse_tests_at_once(monkeypatch):
    inside, most = [], []

    def prepared(text):
        inside.append(text)
        most.append(len(inside))
        time.sleep(0.02)  # another thread would enter in the meantime
        inside.remove(text)
        raise ValueError("refused")

    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(worker.unit_tests, "prepared", prepared)
    worker.code_tests(completions=["x"] * 8, tests=[f"assert f() == {i}" for i in range(8)])
    assert most == [1] * 8


def judged(right, wrong, tests):
    return worker.code_tests(completions=[right, wrong], tests=[tests] * 2, seconds=20.0)


@pytest.mark.parametrize("style", STYLES)
def test_a_right_solution_scores_one_and_a_wrong_one_nothing(style):
    assert judged(**STYLES[style]) == [1.0, 0.0]


@pytest.mark.parametrize("name", SOLUTIONS["published"])
def test_rows_of_published_data_sets_are_read(name):
    row, right, wrong = SOLUTIONS["published"][name].values()
    others = {key: value for key, value in row.items() if key != "prompt"}
    tests = columns.tests_of(Example(row.get("prompt", "Write it."), None, None, others))
    unit_tests.check(tests)
    assert judged(right, wrong, tests) == [1.0, 0.0]


@pytest.mark.parametrize("tests", SOLUTIONS["refused"])
def test_tests_that_need_more_are_refused(tests):
    with pytest.raises(ValueError, match=r"tests: expected (?!at least one|Python)"):
        unit_tests.check(tests)


@pytest.mark.parametrize("fence", SOLUTIONS["fences"])
def test_the_code_is_found_in_the_fenced_blocks(fence):
    assert worker.code_of(fence["text"], ["f"]) == fence["blocks"]
    assert worker.code_of(fence["text"])[-1] == fence["program"]


@pytest.mark.skipif(not sandbox.has_landlock(), reason="a kernel without Landlock")
def test_landlock_leaves_the_libraries_only():
    code = """
import os
def opened(paths):
    found = []
    for path in paths:
        try:
            os.listdir(path) if os.path.isdir(path) else open(path).read(1)
            found.append(path)
        except OSError:
            pass
    return found
"""
    out_of_reach = ["/", "/proc", "/proc/self/environ", "/proc/1/cmdline", "/etc/passwd", "/home",
                    "/root", "/tmp", "/sys", "/var", "/usr/bin", __file__,
                    worker.__file__]  # fmt: skip
    tests = f"import os\nassert opened({out_of_reach} + [os.__file__]) == [os.__file__]"
    assert worker.code_tests(completions=[code], tests=[tests], seconds=20.0) == [1.0]


@pytest.mark.parametrize(
    ("fields", "tests"),
    [
        ({"test": ["assert f(1) == 2"]}, ["assert f(1) == 2"]),
        ({"test_list": "assert f(1) == 2", "test_imports": "import math"},
         ["", "import math", "assert f(1) == 2"]),
    ],
)  # fmt: skip
def test_columns_may_contain_a_text_or_a_list(fields, tests):
    assert columns.tests_of(Example("Write f.", None, None, fields)) == tests
