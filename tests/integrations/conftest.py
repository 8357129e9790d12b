"""Fixtures that start a process group of one process, and save a tiny model for TRL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.integrations import trl_cases  # needs TRL

    return trl_cases.folder(tmp_path_factory.mktemp("trl") / "llama")
