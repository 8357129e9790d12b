"""The order of the tests (`--random-order SEED`), that none feels which ones came before it, and
what `tests.pairs` leaves of a grid.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pairs import covering

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import random, pathlib, torch, pytest

@pytest.mark.parametrize("i", range(6))
def test_one(i):
    with open({log!r}, "a") as log:
        print(pathlib.Path(__file__).stem, i, torch.rand(1).item(), random.random(), file=log)
"""


def run(folder: Path, *options: str) -> tuple[list[str], list[str], str]:
    """(the tests in the order in which they ran, what each drew, what pytest said)"""
    log = folder / "log"
    for name in ("a", "b", "c", "triton_compile"):
        (folder / f"test_{name}.py").write_text(FILE.format(log=str(log)))
    line = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*line, "--rootdir", str(folder), *options, str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    words = [text.split() for text in log.read_text().splitlines()]
    log.unlink()
    return [f"{w[0]} {w[1]}" for w in words], [f"{w[2]} {w[3]}" for w in words], done.stdout


def test_a_seed_shuffles_files_and_their_tests_and_repeats_itself(tmp_path: Path) -> None:
    plain, draws, _ = run(tmp_path)
    names = ("triton_compile", "a", "b", "c")  # the slow one first
    assert plain == [f"test_{name} {i}" for name in names for i in range(6)]
    assert len(set(draws)) == 1  # the same for all: no test's draws depend on its neighbours
    order, shuffled_draws, said = run(tmp_path, "--random-order=1")
    assert order == run(tmp_path, "--random-order=1")[0]
    assert sorted(order) == sorted(plain) and shuffled_draws == draws
    assert "--random-order=1 repeats it" in said
    files = list(dict.fromkeys(line.split()[0] for line in order))
    places = [order.index(f"{file} {i}") for file in files for i in range(6)]
    assert all(max(places[k : k + 6]) < k + 6 for k in range(0, 24, 6))  # files stay whole
    assert files[0] == "test_triton_compile" and files != [f"test_{name}" for name in names]
    assert all(places[k : k + 6] != list(range(k, k + 6)) for k in range(0, 24, 6))


def test_draws_are_those_of_a_fresh_generator() -> None:
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(1), expected) and random.random() == random.Random(0).random()


@pytest.mark.parametrize("sizes", [(3, 2, 2, 6), (5, 4, 3), (2,) * 6, (4, 1, 3), (3, 3), (4,)])
def test_pairs_has_every_pair_and_is_short(sizes):
    rows = covering(sizes)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == {
            *itertools.product(*map(range, (sizes[a], sizes[b])))
        }
    assert len({*rows}) == len(rows) <= 2 * math.prod(sorted(sizes)[-2:])
