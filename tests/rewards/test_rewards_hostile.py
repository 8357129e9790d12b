"""Tests of reward functions that return unusual results or raise unusual errors."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from grpo_fast.rewards import RewardError, build_rewards, import_function
from tests.reward_specs import own, spec

# The function `odd` behaves as the prompt says, so that one worker process can serve all tests.
MODULE = r"""
import asyncio, collections, decimal, itertools, sys
import numpy as np
import torch


class Mute:
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class MuteError(Exception):
    __str__ = __repr__ = Mute.__str__


class Interrupts(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class Fails:
    def __float__(self):
        raise OSError


class Exits:
    def __float__(self):
        sys.exit(0)

    __str__ = __float__


def throw(error):
    raise error


async def exits():
    await asyncio.sleep(0)
    sys.exit(0)


def each(value):
    return lambda n: [value] * n


class Late:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return self.value


GOOD = {
    "decimal": each(decimal.Decimal("0.5")),
    "0-d bf16 tensor": each(torch.tensor(0.5, dtype=torch.bfloat16)),
    "array": lambda n: np.full(n, 0.5, dtype=np.float32),
    "tensor": lambda n: torch.full((n,), 0.5),
    "object array": lambda n: np.array([decimal.Decimal("0.5")] * n, dtype=object),
    "generator": lambda n: (0.5 for _ in range(n)),
    "deque": lambda n: collections.deque([0.5] * n),
    "values of a dict": lambda n: dict.fromkeys(range(n), 0.5).values(),
    "awaitable": lambda n: Late([0.5] * n),
    "awaitable generator": lambda n: Late(0.5 for _ in range(n)),
}
INTEGERS = {"bool": each(True), "bool_": each(np.True_), "uint8": each(torch.tensor(1).byte())}
BAD = {
    "dict": lambda n: {i: 1.0 for i in range(n)},
    "user dict": lambda n: collections.UserDict({i: 1.0 for i in range(n)}),
    "set": lambda n: {float(i) for i in range(n)},
    "keys": lambda n: dict.fromkeys(range(n)).keys(),
    "string": lambda n: "1" * n,
    "bytes": lambda n: b"1" * n,
    "none": lambda n: None,
    "nested list": each([1.0]),
    "matrix": lambda n: torch.ones(n, 2),
    "strings": each("1"),
    "number in bytes": each(b"1"),
    "complex": each(1 + 1j),
    "long integer": each(10**5000),
    "mute": each(Mute()),
    "exits as a number": each(Exits()),
    "nan": each(float("nan")),
    "infinity": each(np.float32("inf")),
    "beyond fp32": each(1e39),
    "exit": lambda n: sys.exit(0),
    "coroutine that exits": lambda n: exits(),
    "exit with a message": lambda n: sys.exit(Mute()),
    "cancelled": lambda n: throw(asyncio.CancelledError()),
    "mute error": lambda n: throw(MuteError()),
    "generator that fails": lambda n: (1.0 if i else throw(ValueError("late")) for i in range(n)),
    "generator that exits": lambda n: (sys.exit(0) for i in range(n)),
}
WRONG_LENGTH = {
    "number": lambda n: 1.0,
    "tensor without axis": lambda n: torch.tensor(1.0),
    "endless": lambda n: itertools.repeat(1.0),
    "one more": lambda n: [1.0] * (n + 1),
    "one less": lambda n: [1.0] * (n - 1),
}
INTERRUPTING = {"error": lambda n: throw(Interrupts()), "value": each(Interrupts())}


def odd(*, prompts, completions, answers):
    return {**GOOD, **INTEGERS, **BAD, **WRONG_LENGTH, **INTERRUPTING}[prompts[0]](len(completions))
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """Write the module `odd_rewards` to a folder, and return the imported module.

    The folder is on `sys.path`, so that worker processes can import the module, too.
    """
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "odd_rewards.py").write_text(MODULE)
    (folder / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    mute = "class Mute(Exception):\n    def __str__(self): raise OSError\nraise Mute\n"
    (folder / "mute.py").write_text(mute)
    sys.path.insert(0, str(folder))
    yield __import__("odd_rewards")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module", params=["here", "isolated"])
def odd(request, module):
    """Return the reward function `odd`, which runs in this process or in a worker."""
    options = {"timeout": 30, "in_process": request.param == "here"}
    return build_rewards([spec("odd_rewards:odd", **options)]).rewards[0].function


def ask(function, what, n):
    return own(function, max_failures=1.0)([what] * n, ["a"] * n, ["x"] * n)


# ------------------------------------------------------------- Unusual results of a reward function
def test_everything_that_is_a_number_counts(odd, module):
    good = {what: ask(odd, what, 3).total.tolist() for what in module.GOOD}
    assert good == dict.fromkeys(module.GOOD, [0.5] * 3)
    whole = {what: ask(odd, what, 2).total.tolist() for what in module.INTEGERS}
    assert whole == dict.fromkeys(module.INTEGERS, [1.0] * 2)


def test_everything_else_costs_its_samples(odd, module):
    lost = {what: ask(odd, what, 3) for what in module.BAD}
    failures = {what: result.reasons["f"].total() for what, result in lost.items()}
    assert failures == dict.fromkeys(module.BAD, 3)
    assert all(result.total.isnan().all() for result in lost.values())


@pytest.mark.parametrize(
    ("what", "came"),
    [("number", "one number"), ("tensor without axis", "one number"), ("endless", "more"),
     ("one more", "more"), ("one less", "1")],
)  # fmt: skip
def test_a_reward_of_the_wrong_length_is_refused(odd, what, came):
    said = (
        f"f: a reward function must return one value per completion: expected 2 values, got {came}"
    )
    with pytest.raises(RewardError, match=said):
        ask(odd, what, 2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dict", "must return one value per completion: expected 2 values in a list, got dict"),
        ("none", "must return one value per completion: expected 2 values in a list, got None"),
        ("exit", "SystemExit: 0"),
        ("strings", "not a finite number: '1'"),
        ("mute", "not a finite number: '<Mute without a text>'"),
        ("mute error", "MuteError: <MuteError without a text>"),
    ],
)
def test_the_message_says_what_came(odd, caplog, what, said):
    ask(odd, what, 2)
    assert len(caplog.records) == 1 and said in caplog.text  # only the first failure is logged


def test_the_error_that_ends_the_run_shows_no_control_characters():
    def shouts(*, prompts, completions, answers):
        raise ValueError("\x1b[31mred \u202e")

    rewards = own(shouts)
    with pytest.raises(RewardError, match=r"ValueError: \\x1b\[31mred \\u202e") as caught:
        for _ in range(5):
            rewards(["p"], ["a"], ["x"])
    assert "\x1b" not in str(caught.value)


def test_a_value_that_is_no_number_costs_its_own_sample_without_a_second_call(module):
    calls = []

    def mixed(*, prompts, completions, answers):
        calls.append(len(completions))
        return [1.0, module.torch.ones(2), module.Fails(), 0.5]

    result = own(mixed)(["p"] * 4, ["a"] * 4, ["x"] * 4)
    assert result.total.isnan().tolist() == [False, True, True, False] and calls == [4]


# ---------------------------------------------------------------------------- Errors and interrupts
@pytest.mark.parametrize("what", ["error", "value"])
def test_a_text_that_interrupts_costs_its_samples(odd, what):
    result = None
    with contextlib.suppress(KeyboardInterrupt):
        result = ask(odd, what, 2)
    assert result is not None and result.reasons["f"].total() == 2


def test_a_module_that_exits_or_cannot_say_why_it_fails_is_refused(module):
    with pytest.raises(ValueError, match="could not import 'leaving'.*SystemExit: 0"):
        import_function("leaving:f")
    with pytest.raises(ValueError, match="could not import 'mute'.*<Mute without a text>"):
        import_function("mute:f")


def test_the_users_interrupt_gets_through():
    # Install Python's handler of SIGINT, because a background process of a shell ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*, prompts, completions, answers):
        raise KeyboardInterrupt

    async def waits(*, prompts, completions, answers):
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        await asyncio.sleep(60)

    start = time.monotonic()
    try:
        for function in (interrupted, waits):
            with pytest.raises(KeyboardInterrupt):
                own(function)(["p"], ["a"], ["x"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 20
