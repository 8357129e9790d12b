"""Functions that import other trainers for tests.

If a trainer is not installed, the test module that requests it is skipped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integrations import packages


@contextmanager
def skipping() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if "make trainers" not in str(error):
            raise
        pytest.skip(str(error), allow_module_level=True)


def load_verl(name: str) -> Any:
    with skipping():
        return packages.load_verl(name)


def load_openrlhf_loss() -> Any:
    with skipping():
        return packages.load_openrlhf_loss()
