"""Tests of the reward function `code_tests`, which runs a model's code against unit tests."""

import contextlib
import functools
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml

from grpo_fast.data import Example
from grpo_fast.data import answers as data_answers
from grpo_fast.data.splits import Splits
from grpo_fast.rewards import build_rewards, check_examples, columns, score
from grpo_fast.rewards.columns import usable
from grpo_fast.rewards.workers import code_tests as worker
from grpo_fast.rewards.workers import sandbox, unit_tests
from grpo_fast.train.config import DataConfig
from tests.reward_specs import spec

pytestmark = pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"), reason="no seccomp numbers of this machine"
)
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 4"]
GOOD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
CHEATS = yaml.safe_load(Path(__file__).with_name("cheats.yaml").read_text())
HOSTILE = CHEATS["hostile"] | {
    "deep source": "x = " + "(" * 50_000,
    "control characters": "\x00\x1b[2J\ud800",
}


def build(timeout=20.0, **options):
    return build_rewards([spec("code_tests", timeout=timeout, **options)])


@pytest.fixture(scope="module")
def rewards():
    return build(seconds=1.0, memory=256)


def ask(rewards, *completions, tests=TESTS, prompt_texts=None):
    examples = [Example("", None, None, {"tests": tests})] * len(completions)
    return score(rewards, examples, completions, prompt_texts=prompt_texts)


def test_the_reward_is_the_share_of_tests_that_hold(rewards):
    half = "def add(a, b):\n    return abs(a) + abs(b)"
    result = ask(rewards, GOOD, half, "def add(a, b): return 7", "def add(")
    torch.testing.assert_close(result.total, torch.tensor([1.0, 2 / 3, 0.0, 0.0]))
    assert result.reasons == {"code_tests": {}}
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(9, 9) == 18"]
    code = "def add(a, b):\n    while a == 9: pass\n    return a + b"
    torch.testing.assert_close(ask(rewards, code, tests=tests).total, torch.tensor([2 / 3]))
    code = "import sys\ndef add(a, b):\n    return sys.exit() if a < 0 else a + b"
    torch.testing.assert_close(ask(rewards, code).total, torch.tensor([2 / 3]))


def test_code_in_a_thought_is_not_the_answer(rewards):
    draft = "```python\ndef add(a, b):\n    return 7\n```"
    texts = [
        f"<think>{GOOD}",
        f"<think>{draft}</think>{GOOD}",
        f"<think>{GOOD}</think>{draft}",
        GOOD,
    ]
    assert ask(rewards, *texts).total.tolist() == [0.0, 1.0, 0.0, 1.0]
    found = ask(rewards, GOOD, f"hm</think>{GOOD}", prompt_texts=["<think>\n"] * 2)
    assert found.total.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_costs_its_own_reward_only(rewards, tmp_path, name):
    victim = tmp_path / "folder" / "victim"
    victim.parent.mkdir()
    victim.write_text("here")
    code = HOSTILE[name].replace("VICTIM", repr(str(victim))).replace("PORT", "9")
    result = ask(rewards, GOOD, f"```python\n{code}\n```", GOOD)
    assert result.total.tolist() == [1.0, 0.0, 1.0] and result.reasons == {"code_tests": {}}
    assert victim.read_text() == "here" and list(victim.parent.iterdir()) == [victim]
    worker_pid = rewards.rewards[0].function.child.pid
    assert _session(worker_pid) == {worker_pid}


def _session(leader: int) -> set[int]:
    """Return the ids of all processes in the session of the worker process `leader`.

    Processes that an answer starts cannot leave this session, so the result includes all of them.
    """
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = file.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[3]) == leader:
                found.add(int(pid))
    return found


def test_an_answer_cannot_connect_to_a_server(rewards):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        code = HOSTILE["socket"].replace("PORT", str(server.getsockname()[1]))
        assert ask(rewards, code).total.tolist() == [0.0]
        with pytest.raises(TimeoutError):
            server.accept()


def test_many_answers_that_hang_have_their_own_time():
    # Six answers hang for 1 s each, which together is longer than `timeout`. The call must not
    # fail, because its time limit is `timeout` times the number of completions.
    found = ask(build(seconds=1.0, timeout=2.0), GOOD, *["while True: pass"] * 6)
    assert found.total.tolist() == [1.0] + [0.0] * 6 and found.reasons == {"code_tests": {}}


@pytest.mark.parametrize(
    "unit", ["`", "```\n", "``` \n", "```a\n\n\n", "\t\n", "````\n```\n", "~~~\n \n"]
)
@pytest.mark.parametrize("start", ["", "```python\n"])
def test_a_hostile_text_costs_less_than_a_second(unit, start):
    began = time.thread_time()
    worker.code_of(start + unit * (200_000 // len(unit)), ["f"])
    assert time.thread_time() - began < 1


def test_faulty_data_is_named_and_costs_its_samples(rewards):
    rows = [{"tests": tests} for tests in ("x = 1", TESTS, "assert add(abs, 1) == 3")]
    result = score(rewards, [Example("", None, None, row) for row in rows], [GOOD] * 3)
    assert result.total.isnan().tolist() == [True, False, True]
    assert result.reasons == {"code_tests": {"error": 2}}
    assert "at least one assert" in rewards.last_error["code_tests"]
    with pytest.raises(ValueError, match="code_tests asks for tests: expected a field 'tests'"):
        check_examples(rewards, [Example("p", "a", None)], "train")


def test_a_sandbox_that_does_not_start_costs_its_sample(monkeypatch):
    def fails(text, *_):
        raise OSError("no process") if text == "first" else ValueError("tests")

    monkeypatch.setattr(worker, "share_of_tests", fails)
    found = worker.code_tests(completions=["first", "second"], tests=[TESTS] * 2)
    assert list(map(type, found)) == [OSError, ValueError]


def test_rows_with_tests_that_are_not_supported_can_be_dropped(rewards, tmp_path, caplog):
    listed = [{"tests": TESTS}, {"tests": "assert f(1).x == 2"}, {"input_output": {"fn_name": "f"}}]
    reasons = r"calls such as `f.1.`, .* \(\d\)"
    path = tmp_path / "d.jsonl"
    rows = [{"question": f"q{i}", **listed[i % 3]} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(task="jsonl", path=str(path), n_test=6)
    refused = (
        f"got . of 6 without, first .*: .*{reasons}.*; data.drop_unusable=true skips such rows"
    )
    with pytest.raises(ValueError, match=refused):
        Splits(config, 0, usable=functools.partial(usable, rewards, False))
    kept = Splits(config, 0, usable=functools.partial(usable, rewards, True))
    assert {e.prompt for e in [*kept.train, *kept.test]} == {"q0", "q3", "q6", "q9"}
    # The same rows are held out as without the rewards.
    assert all(example in Splits(config, 0).test for example in kept.test)
    assert caplog.text.count("rows with tests that code_tests refuses are skipped") == 2
    assert len(re.findall(rf"are skipped: .*{reasons}", caplog.text)) == 2
    check_examples(rewards, kept.listed, "training")
    assert usable(build_rewards([spec("gsm8k_format")]), False, kept.train) == kept.train
    with pytest.raises(ValueError, match="expected at least one test example in .*, got none"):
        Splits(config, 0, usable=lambda examples: [])


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("assert (", "tests: expected Python, got 'assert"),
        ([["assert 1", 3]], "tests: expected Python source, .* got .'assert 1', 3."),
        (["assert 1", 3], "tests: expected Python source, .* got 'assert 1'"),
        ([], "tests: expected Python source, .* got None"),
        ("assert 1 == 1", "which uses 0 names of the answer"),
        ("assert sqrt(4) == log(1)", "which uses 0 names of the answer"),
        ("f(1)", "tests: expected at least one assert, or call of a function that the tests"),
        (None, "tests: expected Python source, .* got None"),
        ([{"input": "1", "output": 2}], "tests: expected Python source, .* got {'input'"),
        ([{"input": "1", "output": "2"}, "assert 1"], "expected Python source, .* got 'assert 1'"),
        ({"inputs": "12", "outputs": "34"}, "tests: expected Python source, .* got {'inputs'"),
        ({"inputs": ["1"], "outputs": []}, "tests: expected Python source, .* got {'inputs'"),
        ("assert 1" + " + (" * 9999, "tests: expected Python"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, "expected Python source, .*fn_name"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "expected .*functional"),
    ],
)  # fmt: skip
def test_tests_of_another_form_get_a_sentence(tests, said):
    with pytest.raises(ValueError, match=said):
        unit_tests.check(tests)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("def check(g):\n    raise ValueError\ncheck(f)", unit_tests.ASSERTS),
        ("if f(1) != 2:\n    assert False", unit_tests.ASSERTS),
        ("class A: pass\nassert f(A()) == 2", unit_tests.CLASSES),
        ("async def test_a():\n    assert await f(1) == 2", unit_tests.FUNCTIONS),
        ("def test_a(capsys):\n    assert f(1) == 2", unit_tests.FUNCTIONS),
        ("@pytest.fixture\ndef x(): pass\nassert f(1) == 2", unit_tests.FUNCTIONS),
        ("import numpy as np\nassert f(1) == 2", unit_tests.IMPORTS),
        ("from unittest.mock import patch\nassert f(1) == 2", unit_tests.IMPORTS),
        ("from . import f\nassert f(1) == 2", unit_tests.IMPORTS),
        ("with raises(E):\n    f(1)", unit_tests.CALLS),
        ("assert f(1)(2) == 3", unit_tests.CALLS),
        ("assert f(len) == 3", unit_tests.CALLS),
    ],
)
def test_the_message_says_what_to_write(tests, said):
    with pytest.raises(ValueError, match=re.escape(f"tests: expected {said}, got ")):
        unit_tests.check(tests)


def test_tests_that_use_several_names_of_the_answer_are_logged(caplog):
    unit_tests.warn_once.cache_clear()
    unit_tests.check("assert f(1) == 2")
    assert not caplog.records
    unit_tests.check("assert same(f(1), 2)")
    assert "some tests use several names of the answer" in caplog.text


@pytest.mark.parametrize("options", [{"seconds": 0}, {"memory": 1}, {"seconds": float("nan")}])
def test_limits_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="code_tests: expected 0 < seconds"):
        worker.code_tests(completions=[GOOD], tests=[TESTS], **options)


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """Return a function that builds the reward `code_tests` from edited copies of its files.

    Each argument of the function is a pair of a text to replace and its replacement.
    """
    folder = tmp_path / "rewards" / "workers"
    folder.mkdir(parents=True)
    (tmp_path / "data").mkdir()
    shutil.copy(data_answers.__file__, tmp_path / "data")
    monkeypatch.setattr("grpo_fast.rewards.workers.__file__", str(folder / "__init__.py"))

    def make(*replacements):
        for file in Path(worker.__file__).parent.glob("*.py"):
            text = file.read_text()
            for before, after in replacements:
                text = text.replace(before, after)
            (folder / file.name).write_text(text)
        return build()

    return make


def test_a_machine_without_the_sandbox_is_refused_when_the_reward_is_built(changed):
    with pytest.raises(ValueError, match="code_tests cannot be used.*expected Linux on x86-64"):
        changed(('"x86_64": (', '"m68k": ('), ("aarch64", "vax"))


def test_a_kernel_without_landlock_is_announced(changed, capfd):
    rewards = changed(
        ("CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444", "CREATE_RULESET, *_ = 9444")
    )
    assert ask(rewards, GOOD, "def add(a, b): return 7").total.tolist() == [1.0, 0.0]
    said = "code_tests: this kernel has no Landlock: answers can read files"
    assert said in capfd.readouterr().err


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
