"""Tests that LM heads sharded over 2 and 4 processes get the same gradients as in one process."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.rank_server import Ranks

pytest.importorskip("trl", minversion="1.16")
ranks = importlib.import_module("tests.integrations.sharded_ranks")
CASES = [(n, case) for n in (2, 4) for case in ranks.names(n)]
RUNS = ["train-untied", "train-tied"]
# Relative tolerances of losses and gradients. The tolerance in bf16 is large, because all layers of
# the tiny model round to bf16, not only the head.
TOLERANCE, IN_BF16 = 1e-5, 0.08
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[int, dict[str, Any]]:
    """Run all cases with 2 and with 4 processes, and return the results of rank 0."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    with Ranks(Path(folder)) as server:
        server(1, [ranks.references, [2, 4], folder], timeout=600)
        job = [ranks.results_of, folder]
        return {n: server(n, job, timeout=600)[0][0] for n in (2, 4)}


def check(results: dict[str, Any], case: str, tolerance: float) -> None:
    result = results[case]
    # Allow a small absolute error. The loss is a mean of terms near 1 that cancel, so its relative
    # error may be large.
    assert result["loss"] == pytest.approx(result["expected"], rel=tolerance, abs=1e-6)
    assert not result["missing"]
    assert not {name: off for name, off in result["off"].items() if not off <= tolerance}


@pytest.mark.parametrize(("world", "case"), CASES)
def test_gradients_are_those_of_one_process(worlds, world, case):
    check(worlds[world], case, IN_BF16 if "bf16" in case else TOLERANCE)


@pytest.mark.skipif(not ranks.TRAINS_SHARDED, reason="needs the Trainer of transformers >= 5.23")
@pytest.mark.parametrize("case", RUNS)
def test_a_run_on_shards_ends_in_the_weights_of_one_under_ddp(worlds, case):
    check(worlds[2], case, TOLERANCE)
