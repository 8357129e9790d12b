"""Fixtures that provide a tiny recipe, the folder of a finished run, and a server of ranks."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import invoke, write_recipe
from tests.rank_server import Ranks
from tests.train.runs import train_until, warm_up


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


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    with Ranks(tmp_path_factory.mktemp("ranks"), warm_up) as server:
        yield server


@pytest.fixture(scope="session")
def plain(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that trains a case of `CASES` in one process and returns its folder.

    Each case is trained only once. The attribute `passes` has the number of points at which a
    signal can end the run.
    """
    root = tmp_path_factory.mktemp("plain")

    def run(case: str) -> Path:
        if case not in run.passes:
            [[found]] = ranks(1, [train_until, case, None, str(root / case), 0, None])
            assert "error" not in found and "code" not in found, found
            run.passes[case] = found["seen"]
        return root / case

    run.passes = dict[str, int]()
    return run
