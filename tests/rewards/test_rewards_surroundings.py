"""What a reward function does to its process (folder, gradient mode, terminal) is put back."""

import io
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from grpo_fast.rewards import build_rewards
from tests.reward_specs import own, spec

MODULE = r"""
import os
import torch


def wanders(*, prompts, completions, answers):
    here = os.getcwd()
    os.chdir(prompts[0])
    torch.set_grad_enabled(False)
    if "fail" in completions:
        raise ValueError("in between")
    return [float(os.getcwd() != here)] * len(completions)
"""


def test_folder_and_gradients_are_as_they_were(tmp_path, monkeypatch):
    (tmp_path / "wanderer.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    os.mkdir("away")
    here, isolated = (
        build_rewards([spec("wanderer:wanders", **options)])
        for options in ({"in_process": True}, {"timeout": 30})
    )
    # A relative path: the second call begins where the first did.
    for completions in (["a"] * 2, ["a", "fail"]):
        here(["away"] * 2, completions, ["x"] * 2)
        assert os.getcwd() == str(tmp_path) and torch.is_grad_enabled()
    with torch.no_grad():
        here(["away"], ["a"], ["x"])
        assert not torch.is_grad_enabled()
    try:
        for _ in range(2):
            assert isolated(["away"], ["a"], ["x"]).total.tolist() == [1.0]
    finally:
        isolated.rewards[0].function.close()


def test_folder_and_streams_after_calls_from_several_threads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sys.stdout, sys.stderr
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()

    def wander(*, prompts, completions, answers):
        os.chdir(prompts[0])
        time.sleep(0.001)
        return [1.0]

    rewards = own(wander)
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda i: rewards([str(folders[i % 4])], ["a"], ["x"]), range(200)):
            pass
    assert os.getcwd() == str(tmp_path) and (sys.stdout, sys.stderr) == before


def test_a_folder_that_is_gone_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    os.rmdir(tmp_path / "gone")
    rewards = own(lambda **_: [1.0])
    assert rewards(["p"], ["a"], ["x"]).total.tolist() == [1.0]


def test_control_characters_that_a_reward_prints_here_are_escaped(capsys):
    def prints(*, prompts, completions, answers):
        print(completions[0])
        print(completions[0], file=sys.stderr)
        return [1.0]

    before = sys.stdout, sys.stderr
    own(prints)(["p"], ["\x1b[31mred\tü \u202e\nnext"], ["x"])
    assert (sys.stdout, sys.stderr) == before
    said = capsys.readouterr()
    assert said.err == "\\x1b[31mred\tü \\u202e\nnext\n" * 2 and not said.out


def test_a_reward_that_closes_its_streams_leaves_them_to_the_others(monkeypatch):
    def closes(*, prompts, completions, answers):
        sys.stdout.close()
        sys.stderr.close()
        return [1.0]

    streams = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    own(closes)(["p"], ["a"], ["x"])
    assert not any(stream.closed for stream in streams)


def test_messages_are_a_copy_for_each_function():
    def rewrites(*, prompts, completions, answers):
        prompts[0][0]["content"] = "other"
        return [1.0]

    prompts = [[{"role": "user", "content": "question"}]]
    own(rewrites)(prompts, ["a"], ["x"])
    assert prompts == [[{"role": "user", "content": "question"}]]


def test_one_set_in_several_threads_counts_every_loss():
    rewards = own(lambda **_: [math.nan], max_failures=1.0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:  # the counting alone: whole calls meet in it too seldom
            for _ in pool.map(lambda _: [rewards._count("f", 1, 1) for _ in range(5000)], range(4)):
                pass
    finally:
        sys.setswitchinterval(before)
    assert rewards.state.failed_total == {"f": 20000}
