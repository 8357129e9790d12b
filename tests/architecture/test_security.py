"""Tests that untrusted data is not executed, and cannot stall a regular expression.

The linter rejects calls that execute or unpickle data (ruff's rules S and TID251 in
pyproject.toml). Run names and control characters are tested in tests/train/test_report.py and
test_hostile_input.py.
"""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_fast.data import answers

ROOT = Path(__file__).resolve().parents[2]
# Arguments that make a library execute or unpickle data. The linter does not know them.
UNSAFE = re.compile(
    r"trust_remote_code=True|allow_pickle=True|weights_only=False"
    r"|safe_serialization=False|use_safetensors=False"
)


def test_no_call_lets_a_library_execute_or_unpickle_data():
    for path in (*(ROOT / "grpo_fast").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        found = UNSAFE.search(path.read_text())
        assert not found, f"{path}: {found}"


# ---------------------------------------------------------- regular expressions
LENGTH, SECONDS = 1 << 16, 0.05
# Modules that compile regular expressions from a configuration, each with the reason why it is
# safe.
GIVEN = {"grpo_fast.rewards.workers.slow": "a recipe's, in a process that a timeout ends"}
UNITS = (
    "1", "1,", "1.", ",", ".", "-", "-$", "$", "-1", "a", "a1", " ", "\t", "\n", " \n", "<<", "<<a",
    ">>", "<<1>>", "<", "####", "#### ", "<answer>", "</answer>", "`", "```", "vendor_id",
    "vendor_id ", "vendor_id\n", "vendor_id :", "\u2212", "\u0661", "\x00", "\ud800",
)  # fmt: skip


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the location and the pattern of every regular expression in the package.

    The patterns are module globals, and constants that are passed to functions of `re`.
    """
    for path in sorted((ROOT / "grpo_fast").rglob("*.py")):
        tree = ast.parse(path.read_text())
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        top = {id(x.value): x.targets[0].id for x in tree.body if isinstance(x, ast.Assign)
               and isinstance(x.targets[0], ast.Name)}  # fmt: skip
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("re."):
                continue
            where = f"{module}:{node.lineno}"
            if id(node) in top:
                yield where, getattr(importlib.import_module(module), top[id(node)])
            elif node.func.attr != "escape" and module not in GIVEN:
                text = ast.literal_eval(node.args[0])  # fails if the pattern is not a constant
                flags = re.MULTILINE if "MULTILINE" in ast.unparse(node) else 0
                yield where, re.compile(text, flags)


PATTERNS = list(patterns())


def seconds(pattern: re.Pattern[str], text: str) -> float:
    """Return the CPU time of this thread for matching `text` in three ways.

    Unlike the elapsed time, the CPU time does not depend on the load of the machine.
    """
    start = time.thread_time()
    pattern.match(text), pattern.fullmatch(text), pattern.findall(text)
    return time.thread_time() - start


@pytest.mark.parametrize(("where", "pattern"), PATTERNS, ids=[where for where, _ in PATTERNS])
def test_a_pattern_is_linear_in_hostile_text(where, pattern):
    for unit in UNITS:
        for text in (unit * (LENGTH // len(unit)), "1" + unit * (LENGTH // len(unit)) + "!"):
            is_quick = any(seconds(pattern, text) <= SECONDS for _ in range(3))
            assert is_quick, f"{where}: {unit!r}"


def test_the_patterns_are_found_and_one_that_backtracks_would_be_seen():
    assert answers._NUMBER_IN_TEXT in [pattern for _, pattern in PATTERNS] and len(PATTERNS) >= 7
    assert seconds(re.compile(r"(?:a+b?)+c"), "a" * 24) > SECONDS
