"""How a run enters its folder, and what it leaves there at its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_fast.train.config import RunConfig
from grpo_fast.train.files import written
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.report.silent_report import SilentReport
from grpo_fast.train.runs.export import unsharded_models
from grpo_fast.train.runs.folder import FolderLock
from grpo_fast.train.runs.resume import Start, find_start, lock_existing
from grpo_fast.train.update.trainer import Trainer

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: str) -> Iterator[FolderLock | None]:
    """Rank 0's lock of a run's folder, before anyone looks what lies there; None where none is."""
    with distributed.together():
        lock = lock_existing(folder) if distributed.is_main() else None
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()


def agreed_start(config: RunConfig) -> Start:
    """Where the run begins, as rank 0 finds it."""

    def start_of_main() -> list[Any]:
        start = find_start(config, log.warning)
        return [None if start.checkpoint is None else str(start.checkpoint), *start[1:]]

    checkpoint, (metrics, prompts), *rest = distributed.from_main(start_of_main)
    return Start(None if checkpoint is None else Path(checkpoint), (metrics, prompts), *rest)


def open_report(config: RunConfig, start: Start, lock: FolderLock | None) -> RunReport:
    """Rank 0's, or one that writes nothing."""
    with distributed.together():
        if not distributed.is_main():
            return SilentReport(config.output_dir)
        return RunReport(config.output_dir, config, start=start, lock=lock)


def begin_again(report: RunReport) -> None:
    """Cut the logs back to what the checkpoint has seen, which is loaded on all ranks."""
    with distributed.together():
        report.begin()


def save_models(trainer: Trainer, folder: Path) -> None:
    """What the run was for, behind its summary: a disk that is full costs no more than this."""
    policy, critic = unsharded_models(trainer.config, trainer.policy, trainer.critic)
    with distributed.together(), written(folder / "model"):
        if distributed.is_main():
            policy.save(folder / "model")
            if critic is not None:
                critic.save(folder / "critic")
