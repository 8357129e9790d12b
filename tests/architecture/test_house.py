"""Tests of rules for all code: the oldest packages it runs with, order of functions, security."""

from __future__ import annotations

import ast
import importlib
import itertools
import math
import random
import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_fast.data import answers
from tests.pairs import covering

ROOT = Path(__file__).parents[2]
TOOLS = {"mypy", "ruff"}  # used only in their current versions, not in the oldest
REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)")
PIN = re.compile(r"^([\w-]+)==([\d.]+)$", re.MULTILINE)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros, so that 5.17 equals 5.17.0."""
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_floor_that_is_tested_is_the_one_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(x for e in ("train", "trl", "dev") for x in extras[e])]
    floors = {}
    for line in declared:
        found = REQUIREMENT.match(line)
        assert found, f"{line}: expected a lower bound"
        if found[1] not in TOOLS:
            floors[found[1].lower()] = release(found[2])
    text = (ROOT / "constraints-floor.txt").read_text()
    pins = {name.lower(): release(version) for name, version in PIN.findall(text)}
    assert {name: pins.get(name) for name in floors} == floors
    makefile = (ROOT / "Makefile").read_text()
    for name in ("triton", "transformers"):  # what CI runs on older versions
        assert f"$(VENV)/{name}-{'.'.join(map(str, pins[name]))}" in makefile


# ---- Tests that the result of a test does not depend on earlier tests, and tests of `tests.pairs`
def test_draws_are_those_of_a_fresh_generator() -> None:
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(1), expected) and random.random() == random.Random(0).random()


@pytest.mark.parametrize("sizes", [(3, 2, 2, 6), (5, 4, 3), (2,) * 6, (4, 1, 3), (3, 3), (4,)])
def test_pairs_has_every_pair_and_is_short(sizes):
    rows = covering(sizes)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == {
            *itertools.product(*map(range, (sizes[a], sizes[b])))
        }
    assert len({*rows}) == len(rows) <= 2 * math.prod(sorted(sizes)[-2:])


# ---------------- Tests that untrusted data is not executed, and cannot stall a regular expression
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
LENGTH, SECONDS = 1 << 16, 0.1
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
            elif node.func.attr != "escape":
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
