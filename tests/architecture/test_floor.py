"""The oldest versions that are declared are the oldest that are tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = {"mypy", "ruff"}  # which check the tree in the environment of today only
REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)")
PIN = re.compile(r"^([\w-]+)==([\d.]+)$", re.MULTILINE)


def release(version: str) -> tuple[int, ...]:
    """5.17 and 5.17.0 are one."""
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
        floors[found[1].lower()] = release(found[2])
    text = (ROOT / "constraints-floor.txt").read_text()
    pins = {name.lower(): release(version) for name, version in PIN.findall(text)}
    assert {name: pins.get(name) for name in floors if name not in TOOLS} == {
        name: floor for name, floor in floors.items() if name not in TOOLS
    }


def test_what_ci_runs_on_older_versions_is_the_floor():
    makefile = (ROOT / "Makefile").read_text()
    pins = dict(PIN.findall((ROOT / "constraints-floor.txt").read_text()))
    for name in ("triton", "transformers"):
        assert f"$(VENV)/{name}-{pins[name].removesuffix('.0')}" in makefile
