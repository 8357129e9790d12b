"""Tests that a module which moved fails a test, and that only an absent package skips one."""

import re
from pathlib import Path

import pytest

from tests.integrations.trainer_packages import load

TESTS = Path(__file__).parents[1]


def test_a_module_that_moved_is_a_failure(tmp_path, monkeypatch):
    (tmp_path / "planted_package").mkdir()
    (tmp_path / "planted_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert load("planted_package").__name__ == "planted_package"
    with pytest.raises(ModuleNotFoundError, match="planted_package.moved"):
        load("planted_package.moved")
    with pytest.raises(pytest.skip.Exception, match="absent_package is not installed"):
        load("absent_package.moved")


def test_no_test_is_skipped_for_a_missing_module_of_a_package():
    for path in TESTS.rglob("*.py"):
        names = re.findall(r"importorskip\(\s*\"([^\"]+)", path.read_text())
        assert not [name for name in names if "." in name], path
