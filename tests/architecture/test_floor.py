"""Tests that our tests run with the oldest versions of packages that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = {"mypy", "ruff"}  # used only in their current versions, not in the oldest
REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)")
PIN = re.compile(r"^([\w-]+)==([\d.]+)$", re.MULTILINE)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros, so that 5.17 equals 5.17.0."""
    numbers = [int(part) for part in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


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


def test_what_ci_runs_on_older_versions_is_the_floor():
    makefile = (ROOT / "Makefile").read_text()
    pins = dict(PIN.findall((ROOT / "constraints-floor.txt").read_text()))
    for name in ("triton", "transformers"):
        assert f"$(VENV)/{name}-{pins[name].removesuffix('.0')}" in makefile


# Modules that import transformers but are not tested by `make test-transformers`, with the reason.
# `make test-floor` runs their tests.
LEFT_TO_TEST_FLOOR = {
    "grpo_fast.examples.hf_trainer": "two processes",
    "grpo_fast.examples.plain_loop": "a process of its own",
    "grpo_fast.integrations.trl.originals": "its tests need TRL",
    "grpo_fast.integrations.trl.packed": "its tests need TRL",
    "grpo_fast.integrations.trl.rollouts": "its tests need TRL",
    "grpo_fast.train.ranks.sharding": "two processes",
}


def test_what_calls_transformers_is_tested_on_the_oldest():
    """Check that `make test-transformers` runs a test of every module that imports transformers."""
    words = ["make", "--no-print-directory", "-s", "-n", "test-transformers"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    chosen = {ROOT / name for name in re.findall(r"\btests/\w+/test_\w+\.py", said)}
    assert len(chosen) > 10 and all(path.is_file() for path in chosen)
    texts = {path.name: path.read_text() for path in chosen}
    found = {}
    for path in sorted((ROOT / "grpo_fast").rglob("*.py")):
        # Ignore imports for type checking, because they never run.
        run = re.sub(
            r"^if TYPE_CHECKING:\n((    .*)?\n)*", "", path.read_text(), flags=re.MULTILINE
        )
        if re.search(r"^\s*(from|import) transformers", run, re.MULTILINE):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            parent, _, own = name.rpartition(".")
            used = re.compile(rf"{re.escape(name)}\b|from {re.escape(parent)} import .*\b{own}\b")
            is_used = any(used.search(text) for text in texts.values())
            found[name] = is_used or f"test_{own}.py" in texts
    missing = {name for name, is_tested in found.items() if not is_tested}
    assert missing == LEFT_TO_TEST_FLOOR.keys(), missing
