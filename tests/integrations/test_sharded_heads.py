"""A head that FSDP2 shards over 2 and 4 processes has the gradients of one process on all rows."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", minversion="1.16")
ranks = importlib.import_module("tests.integrations.sharded_ranks")
CASES = [(n, case) for n in (2, 4) for case in [*ranks.names(n), *ranks.PUBLIC]]
RUNS = ["train-untied", "train-tied"]
# In bf16 it is the rounding of a tiny random model, not of its head alone.
TOLERANCE, IN_BF16 = 1e-5, 0.08
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[int, dict[str, Any]]:
    """All results of both worlds: the ranks are started once."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.integrations.sharded_ranks", str(folder), "2", "4"]
    root, log = Path(__file__).resolve().parents[2], folder / "log"
    with log.open("w") as output:
        subprocess.run(command, cwd=root, stdout=output, stderr=output, timeout=600, check=False)
    found: dict[int, dict[str, Any]] = {2: {}, 4: {}}
    for path in sorted(folder.glob("world*.json"), reverse=True):
        results = json.loads(path.read_text())
        world = int(path.name[len("world")])
        found[world] |= results  # rank 0 last; an error stays
    assert found[2] and found[4], log.read_text()[-3000:]
    return found


def check(results: dict[str, Any], case: str, tolerance: float) -> None:
    assert case in results, results.get("error", {}).get("error", results.keys())
    result = results[case]
    # A mean of terms around 1 that cancel: its fp32 rounding is that of the terms.
    assert result["loss"] == pytest.approx(result["expected"], rel=tolerance, abs=1e-6)
    assert not result["missing"] and result.get("placed", True)
    assert not {name: off for name, off in result["off"].items() if not off <= tolerance}


@pytest.mark.parametrize(("world", "case"), CASES)
def test_gradients_are_those_of_one_process(worlds, world, case):
    check(worlds[world], case, IN_BF16 if "bf16" in case else TOLERANCE)


@pytest.mark.skipif(not ranks.TRAINS_SHARDED, reason="needs the Trainer of transformers >= 5.23")
@pytest.mark.parametrize("case", RUNS)
def test_a_run_on_shards_ends_in_the_weights_of_one_under_ddp(worlds, case):
    check(worlds[2], case, TOLERANCE)
