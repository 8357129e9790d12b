"""Tests of errors on one of several ranks, which must end or change the run on all ranks."""

import itertools
import os
import signal
import time
from typing import Any
from unittest.mock import Mock, patch

import pytest
import safetensors.torch
import torch

from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train import ranks as train_ranks
from grpo_fast.train import update as gradients
from grpo_fast.train.folder import checkpoints_in
from grpo_fast.train.report import report
from tests.train.rank_runs import train


def train_with(fault: str, case: str, kind: str | None, folder: str, *words: str) -> Any:
    """Train a case with a simulated fault, and return the result of `train`.

    Args:
        fault: "disk" makes every write of a checkpoint fail. "memory" and "nan" make the fourth
            call of the loss on the last rank raise a MemoryError or return NaN. "nans" does this
            with all calls on the last rank. "log" makes rank 0 fail to log step 2,
            and "finish" makes it fail to finish the logs. "stale" makes the engines ignore new
            weights.
        case: Key of `CASES`.
        kind: The setting `distributed`.
        folder: The output folder.
        *words: Further settings.
    """
    calls, own = itertools.count(1), gradients.packed_loss
    is_last = train_ranks.rank() == train_ranks.size() - 1
    write = getattr(report.RunReport, fault, None)

    def failing_loss(*given: Any) -> Any:
        is_here = (next(calls) == 4 or fault == "nans") and is_last
        if is_here and fault == "memory":
            raise MemoryError("no room")
        loss, *others = own(*given)
        return loss * (float("nan") if is_here else 1), *others

    def failing_log(self: Any, *given: Any) -> None:
        if train_ranks.is_main() and (fault == "finish" or given[0] == 2):
            raise TypeError("a bug")
        write(self, *given)

    full_disk = safetensors.torch, "save", Mock(side_effect=OSError(28, "No space left on device"))
    in_logs = report.RunReport, fault, failing_log
    old_weights = TransformersEngine, "update", lambda *_, **__: None
    patches = {"disk": full_disk, "log": in_logs, "finish": in_logs, "stale": old_weights}
    with patch.object(*patches.get(fault, (gradients, "packed_loss", failing_loss))):
        return train(case, kind, folder, *words)


def test_out_of_memory_on_one_rank_ends_all(ranks, tmp_path):
    [[first], [second]] = ranks(2, [train_with, "memory", "mu", "ddp", str(tmp_path / "run")])
    assert second["error"] == "ValueError" and "resume=auto and fewer tokens" in second["text"]
    assert first["error"] == "RankError", first


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks, tmp_path, kind):
    """Check also that three such steps in a row end the run, and that the run is saved."""
    jobs = ("nan", "mu", kind, str(tmp_path / "run")), ("nans", "few", kind, str(tmp_path / "end"))
    found = ranks(2, *([train_with, *job] for job in jobs))
    assert [x[0]["skipped"] for x in found] == [1, 1], found
    assert [x[1].get("error") for x in found] == ["NonFiniteGradient"] * 2, found
    assert [path.name for path in checkpoints_in(tmp_path / "end")] == ["step_000002"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_full_disk_of_rank_0_ends_all_ranks(ranks, tmp_path, kind):
    folder = str(tmp_path / "run")
    # DCP raises an error of rank 0 on all ranks. With ddp, rank 0 alone calls DCP.
    error_of_rank_1 = "RankError" if kind == "ddp" else "WriteError"
    found = ranks(2, [train_with, "disk", "mu", kind, folder, "checkpoint.every=1"])
    assert [x[0].get("error") for x in found] == ["WriteError", error_of_rank_1], found
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


LOGGING, STALE = ["TypeError", "RankError"], ["EngineError", "EngineError"]


@pytest.mark.parametrize(
    "fault, errors, place",
    [("log", LOGGING, "step_000002"), ("finish", LOGGING, "step_000003"),
     ("stale", STALE, "step_000001")],
)  # fmt: skip
def test_an_error_of_logs_or_old_samples_ends_all_ranks_and_saves_the_run(
    ranks, tmp_path, fault, errors, place
):
    found = ranks(2, [train_with, fault, "few", "ddp", str(tmp_path / "run")])
    assert [x[0].get("error") for x in found] == errors, found
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == [place]


def raise_on_main() -> Any:
    """Call a function on rank 0 that fails, and return the error of this rank."""
    try:
        train_ranks.from_main(lambda: {}["key"])
    except Exception as error:
        return [type(error).__name__, str(error), train_ranks.is_common(error)]
    return None


def test_an_error_of_rank_0_is_raised_by_all(ranks):
    first, second = ranks(2, [raise_on_main])
    assert first == [["KeyError", "'key'", True]]
    assert second == [["RankError", "rank 0: KeyError: 'key'", True]]


def ended(folder: str, rank: int) -> Any:
    """Train on all ranks, but kill the process of `rank` in its first loss computation.

    Returns:
        On the other ranks, the result of `train` and the `seconds` until the training ended.
    """
    os.environ["MASTER_PORT"] = os.environ["ANOTHER_PORT"]
    torch.distributed.destroy_process_group()
    if int(os.environ["RANK"]) == rank:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        gradients.packed_loss = die
    began = time.monotonic()
    return {**train("mu", "ddp", folder), "seconds": time.monotonic() - began}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(ranks, tmp_path, dead):
    """Check that a rank ends with an error if the other rank is killed, even without torchrun."""
    found = ranks(2, [ended, str(tmp_path / "run"), dead])
    survivor, gone = found[1 - dead], found[dead]
    assert gone == [] and survivor[0]["error"] == "RankError", survivor
    assert "a rank, which torchrun names, has ended" in survivor[0]["text"]
    assert survivor[0]["seconds"] < 60
    saved = [path.name for path in checkpoints_in(tmp_path / "run")]
    assert saved == ([] if dead == 0 else ["step_000000"])  # rank 0 has all weights
