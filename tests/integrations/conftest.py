"""Fixture that saves a tiny model for TRL."""

import pytest


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.integrations import trl_cases  # needs TRL

    return trl_cases.folder(tmp_path_factory.mktemp("trl") / "llama")
