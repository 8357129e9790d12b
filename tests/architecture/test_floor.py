"""Tests that our tests run with the oldest versions of packages that pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

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
