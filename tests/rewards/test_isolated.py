"""Tests of `IsolatedReward`, which runs a reward function in a worker process."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_fast import rewards as package
from grpo_fast.rewards import build_rewards
from grpo_fast.rewards.conventions import RewardFailure
from grpo_fast.rewards.isolated import IsolatedReward, path_of
from grpo_fast.rewards.scoring import EXPRESSIONS
from tests.rank_server import alive, wait_until
from tests.reward_specs import ask as rewarded
from tests.reward_specs import own, spec

ROOT = Path(__file__).resolve().parents[2]
MODULE = r"""
import os, re, subprocess, sys, threading, time


def value(*, prompts, completions, answers):
    time.sleep(0.3 if "slow" in prompts else 0)
    return [float(c) for c in completions]


def moody(completions):
    if "hang" in completions: time.sleep(60)
    if "die" in completions: os._exit(3)
    if "raise" in completions: raise ValueError("boom")
    return [{"nan": float("nan")}.get(c, 1.0) for c in completions]


def hang(*, prompts, completions, answers):
    with open(prompts[0], "a") as file:
        print(os.getpid(), file=file, flush=True)
        if completions == ["idle"]:
            return [1.0]
        if completions == ["child"]:
            print((child := subprocess.Popen(["sleep", "30"])).pid, file=file, flush=True)
            child.wait()
    if completions == ["regex"]:  # does not let go of the interpreter lock
        re.match(r"(a+)+$", "a" * 60 + "b")
    time.sleep(30)  # the test ends even if no deadline ends this call


def stuck_afterwards(*, prompts, completions, answers):
    threading.Timer(0.2, re.match, [r"(a+)+$", "a" * 60 + "b"]).start()
    return [1.0] * len(completions)


def prints(*, prompts, completions, answers):
    print("printed")
    os.system("echo by a child")
    try:
        return [float(input())]
    except EOFError:
        return [7.0]


def leaves_a_program(completions):
    os.system("setsid sleep 6 > /dev/null 2>&1 &")
    os._exit(3)


def half_a_reply(*, prompts, completions, answers):
    os.write(int(sys.argv[1]), b"\0\0\1\0half")  # of a message of 256 bytes
    time.sleep(15)
    os._exit(1)
"""


@pytest.fixture
def isolated(tmp_path, monkeypatch):
    """Return a function that builds an `IsolatedReward` for a reward function of `MODULE`."""
    (tmp_path / "tried_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, timeout=30.0: IsolatedReward(f"tried_rewards:{name}", timeout)


def ask(reward, *completions, prompt="p"):
    n = len(completions)
    given = dict(prompts=[prompt] * n, completions=list(completions), answers=["x"] * n)
    reward.load()
    return reward(**reward.signature.select(given))


# --------------------------------------------------------------------- Each call gets its own reply
def test_no_reply_is_left_by_an_interrupted_call(isolated):
    reward = isolated("value")
    assert ask(reward, "1") == [1.0]

    def interrupt(*_):
        raise KeyboardInterrupt("now")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt, match="now"):
            ask(reward, "2", prompt="slow")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.4)  # by now the worker would have written the reply 2.0 to the pipe
    assert [ask(reward, str(i)) for i in (3, 4)] == [[3.0], [4.0]]


def test_four_threads_on_one_set(isolated):
    rewards = build_rewards([spec("tried_rewards:value", timeout=30)])

    def calls(thread):
        asked = [[1000.0 * thread + i, -i] for i in range(100)]
        texts = [[str(value) for value in pair] for pair in asked]
        return [
            rewarded(rewards, ["p"] * 2, pair, ["x"] * 2).total.tolist() for pair in texts
        ] == asked

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))


def test_an_error_of_the_function_keeps_the_worker(isolated):
    reward = isolated("value")
    assert ask(reward, "1") == [1.0]
    worker = reward.child.pid
    with pytest.raises(RuntimeError, match="ValueError: could not convert"):
        ask(reward, "no number")
    assert ask(reward, "5") == [5.0] and reward.child.pid == worker


@pytest.mark.parametrize(
    ("completion", "why", "lost"),
    [("hang", "timeout", 3), ("die", "died", 3), ("raise", "error", 3), ("nan", "not_a_number", 1)],
)
def test_a_call_that_fails_costs_its_samples_and_has_its_reason(isolated, completion, why, lost):
    function = isolated("moody", 1.0)
    function.load()
    rewards = own(function)
    result = rewarded(rewards, ["p"] * 3, ["good", completion, "good"], ["x"] * 3)
    assert result.total.isnan().sum() == lost and result.reasons == {"f": {why: lost}}
    assert rewarded(rewards, ["p"], ["good"], ["x"]).total.tolist() == [1.0]


# ------------------------------------------------------------ No worker process outlives its caller
def test_workers_end_with_a_caller_that_was_killed(isolated, tmp_path):
    """Check that all worker processes and their child processes end if their caller is killed.

    One worker is idle, one sleeps, one holds the interpreter lock, one waits for a child process,
    and one imports a module.
    """
    (tmp_path / "import_hangs.py").write_text(
        "import os, time\nopen('import', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    kinds = ("idle", "sleep", "regex", "child", "import")
    script = (
        "import sys, threading, time\n"
        "from grpo_fast.rewards.isolated import IsolatedReward\n"
        "calls = []\n"
        "for kind in sys.argv[1:]:\n"
        "    path = 'import_hangs:f' if kind == 'import' else 'tried_rewards:hang'\n"
        "    calls.append(IsolatedReward(path, 600))\n"
        "    asked = dict(prompts=[kind], completions=[kind], answers=['x'])\n"
        "    threading.Thread(target=calls[-1], kwargs=asked, daemon=True).start()\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    caller = subprocess.Popen([sys.executable, "-c", script, *kinds], cwd=tmp_path, env=environment)

    def started():
        files = [tmp_path / kind for kind in kinds]
        return [int(p) for file in files if file.exists() for p in file.read_text().split()]

    try:
        wait_until(lambda: len(started()) == 6, 60)
        assert all(alive(pid) for pid in started())
        time.sleep(0.2)  # wait until the regular expression is running
        caller.kill()
        caller.wait()
        wait_until(lambda: not any(alive(pid) for pid in started()), 10)
    finally:
        caller.kill()
        for pid in filter(alive, started()):
            os.kill(pid, signal.SIGKILL)


def test_a_call_that_takes_too_long_ends_what_the_function_started(isolated, tmp_path):
    with pytest.raises(RewardFailure, match="took longer than 2 s"):
        ask(isolated("hang", timeout=2), "child", prompt=str(tmp_path / "pids"))
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids), 5)
    with pytest.raises(RewardFailure, match="took longer than 1 s"):
        ask(isolated("half_a_reply", timeout=1), "a")


def test_a_program_that_outlives_its_worker_does_not_delay_the_call(isolated):
    with pytest.raises(RuntimeError, match="ended in the middle of a call"):
        ask(isolated("leaves_a_program", timeout=4), "a")


def test_a_worker_that_does_not_read_takes_too_long(isolated):
    reward = isolated("stuck_afterwards", timeout=2.0)
    assert ask(reward, "a") == [1.0]
    time.sleep(1.5)
    with pytest.raises(RewardFailure, match="took longer than 2 s"):
        ask(reward, "a" * 10**6)  # sending blocks, because the pipe is full
    assert ask(reward, "a") == [1.0]


def test_a_forgotten_reward_ends_its_worker(isolated):
    reward = isolated("value")
    ask(reward, "1")
    pid = reward.child.pid
    assert alive(pid)
    del reward
    wait_until(lambda: not alive(pid), 5)


def test_a_worker_prints_to_stderr_and_has_no_input(isolated, capfd):
    assert [ask(isolated("prints"), "1") for _ in range(2)] == [[7.0], [7.0]]
    shown = capfd.readouterr()
    assert not shown.out and "printed\nby a child\n" in shown.err


# ---------------------------------------------------- Built-in reward functions in a worker process
def test_without_math_verify_the_reward_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'math_verify'\")"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = IsolatedReward(path_of(EXPRESSIONS), 20.0)
    monkeypatch.setattr(package, "built_in", lambda _: worker)
    with pytest.raises(ValueError, match=r"cannot be used: .*pip install 'grpo_fast\[math\]"):
        build_rewards([spec("math_equal")])
    worker.close()
