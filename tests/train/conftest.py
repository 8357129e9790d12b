"""A finished run's folder, for tests that tamper with it."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import invoke, write_recipe


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. All tests read it: whoever changes one takes `run`."""
    folder = tmp_path_factory.mktemp("trained")
    assert invoke("train", write_recipe(folder), "steps=0", "log.progress=false").exit_code == 0
    return folder / "run"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A tiny recipe whose run goes to `tmp_path`/run."""
    return write_recipe(tmp_path)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))
