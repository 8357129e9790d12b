"""Test that `group=`, a vocabulary split over 2 or 4 ranks, gives the results of one process.

The process groups run the cases of vocabulary_ranks.py once for all tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.kernels.head.shards import ShardedHead, VocabularyShard
from grpo_fast.kernels.route import head_route
from grpo_fast.kernels.types import ActiveRows, HeadTensors, LogitTransform
from tests import rank_server
from tests.loss import vocabulary_ranks

SIZES = (2, 4)
# Tolerances of the numerical contract. BARS are relative L2 errors of values and gradients, and
# LOGPS is the absolute error of a logp.
BARS = {"fp64": 1e-12, "fp32": 2e-6, "bf16": 3e-3, "fp16": 1e-3}
BARS["confident"], LOGPS = 1e-5, 1e-5
# The error of one process with the full head may exceed a tolerance in BARS. The allowed error on
# the ranks is then the error of that process, multiplied by this factor.
TIMES = {"fp32": 3.0, "bf16": 1.5, "fp16": 1.5}
CASES = [(size, name) for size in SIZES for name in vocabulary_ranks.cases_for(size)]
Ranks = list[dict[str, dict[str, Any]]]


def run_world(folder: Path, size: int, **environment: str) -> Ranks:
    with rank_server.Ranks(folder, **environment) as server:
        return [found for (found,) in server(size, [vocabulary_ranks.results], timeout=600)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Callable[[int], Ranks]:
    """Return a function that takes a number of ranks and returns the results of these ranks.

    The function runs the ranks when it is first called with this number.
    """
    return functools.cache(lambda size: run_world(tmp_path_factory.mktemp("ranks"), size))


def check(ranks: Ranks, name: str) -> None:
    kind = name.partition("-")[0]
    for results in ranks:
        assert name in results, list(results.values())[-1].get("error")
        found = results[name]
        assert "error" not in found, found["error"]
        # `own` holds the errors of one process with the full head, multiplied by TIMES. They may
        # exceed the tolerances in BARS.
        own = {what: TIMES.get(kind, 1) * x for what, x in found.get("own", {}).items()}
        off = found.get("off", {})
        wrong = {n: x for n, x in off.items() if not x <= max(BARS[kind], own.get(n, 0.0))}
        assert not wrong, wrong
        assert found.get("logps", 0.0) <= LOGPS
        assert found.get("same") is not False
        assert found.get("same") == ranks[0][name].get("same")
        for begin, message in found.get("told", {}).items():
            assert message.startswith(begin), (begin, message)


@pytest.mark.parametrize(("size", "name"), CASES, ids=lambda x: str(x))
def test_a_shared_head_is_the_whole_head(worlds, size, name):
    check(worlds(size), name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_what_one_rank_refuses_all_refuse_in_the_same_words(worlds, size, who):
    told = [ranks[f"refusals-{who}"]["told"] for ranks in worlds(size)]
    assert len(told[0]) > 10 and all(x == told[0] for x in told)
    odd = {"first": 0, "last": size - 1}.get(who)
    if odd is not None:
        assert f"(on rank {odd} of group)" in told[0]["target_ids: expected ids"]
    else:
        assert "of group)" not in told[0]["target_ids: expected ids"]


@pytest.mark.parametrize("size", SIZES)
def test_one_collective_for_each_chunk_and_one_for_the_gradient_of_hidden(worlds, size):
    """Check that a call has one collective per chunk, and one for the gradient of `hidden`.

    The 90 rows form three chunks. Before the first chunk, two all-gathers exchange the shard sizes
    and a description of the call.
    """
    forward = ["all_gather"] * (2 + 3)
    assert worlds(size)[0]["collectives"]["same"] == {
        "token": [*forward, "all_reduce"],
        "sequence": [*forward, "all_reduce"],
        "logps": [*forward, "all_reduce"],
        "frozen hidden": forward,
        "forward": forward,
    }


def test_all_ranks_cut_the_same_chunks(monkeypatch):
    """Check that all ranks use the same chunks, although their shards have different sizes.

    Each chunk needs a collective, so ranks with different chunks would deadlock.
    """
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", "1")
    hidden, ids, sizes = torch.zeros(500, 4), torch.zeros(500, dtype=torch.int64), (4000, 10, 0)
    rows = ActiveRows(500, None, ids, LogitTransform(), None)
    cut = []
    for rank, size in enumerate(sizes):
        shard, weight = VocabularyShard(None, sizes, rank), torch.zeros(size, 4)
        route = head_route("torch", weight, is_shard=True)
        cut.append(
            ShardedHead(HeadTensors(hidden, weight, None), rows, route, shard).chunks(stores=True)
        )
    assert len(cut[0]) > 5 and cut[0] == cut[1] == cut[2]


def test_the_triton_row_kernels_know_shards(tmp_path):
    pytest.importorskip("triton")
    ranks = run_world(tmp_path, 2, TRITON_INTERPRET="1")
    assert len(ranks[0]) > 6
    for name in ranks[0]:
        check(ranks, name)
