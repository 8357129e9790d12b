"""Fixtures that provide a tiny recipe and the folder of a finished run."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import invoke, write_recipe


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny run, and return its folder. All tests share the folder and must not change it.

    The fixture `run` returns a copy of the folder that a test may change.
    """
    folder = tmp_path_factory.mktemp("trained")
    assert invoke("train", write_recipe(folder), "steps=0", "log.progress=false").exit_code == 0
    return folder / "run"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """Write a tiny recipe, and return its path. A run of the recipe writes to `tmp_path`/run."""
    return write_recipe(tmp_path)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return the folder of a finished tiny run. The folder is a copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))
