"""Where a run begins: anew, or at a checkpoint of its own folder or of another run's.

The order is: lock the folder, look for a start, load, and only then change what lies in the folder.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_fast.train.config import RunConfig, require
from grpo_fast.train.config.recipes import load_recipe, save_config
from grpo_fast.train.files import check_regular, written
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs import checkpoint as checkpoints
from grpo_fast.train.runs.checkpoint import FOLDER, MANIFEST, newest, order_of, problem_of
from grpo_fast.train.runs.fingerprints import check_same
from grpo_fast.train.runs.folder import OutputFolderError, check_folder, is_occupied, locked
from grpo_fast.train.runs.state import read_state

log = logging.getLogger(__name__)

AUTO, CONFIG = "auto", "config.yaml"
LOGS, COMPLETIONS = ("metrics.jsonl", "prompts.jsonl"), "completions"
# What a run reads, appends to, replaces or removes in a folder that it goes on in.
TOUCHED = (CONFIG, f"{CONFIG}.tmp", *LOGS, COMPLETIONS, FOLDER, "completions.html", "curves.png",
           "summary.json", "summary.json.tmp", "model", "critic")  # fmt: skip


@dataclass
class Start:
    """Where a run begins: at the start, or at a checkpoint."""

    config: RunConfig
    checkpoint: Path | None = None  # where it goes on; None: from the beginning
    lengths: tuple[int, int] = (0, 0)  # bytes of metrics.jsonl and prompts.jsonl until then
    fingerprints: dict[str, str] = field(default_factory=dict)  # the checkpoint's

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else order_of(self.checkpoint.name)[0]

    def enter_folder(self, report: RunReport) -> None:
        """Let a run and its report write into its folder: rank 0 does, for all."""
        with distributed.together():
            if distributed.is_main():
                self._put_back()
                report.begin()

    def _put_back(self) -> None:
        """Set newer checkpoints aside, copy the logs of another run into an empty folder, and write
        the resolved config.yaml.
        """
        folder = Path(self.config.output_dir)
        if self.checkpoint is not None:
            place, source = order_of(self.checkpoint.name), self.checkpoint.parent.parent
            for path in checkpoints.checkpoints_in(folder):
                if order_of(path.name) > place:
                    checkpoints.set_aside(path)
            for name in (*LOGS, COMPLETIONS) if not is_occupied(folder) else ():
                if (source / name).is_dir():
                    shutil.copytree(source / name, folder / name)
                elif (source / name).exists():
                    shutil.copyfile(source / name, folder / name)
        with written(folder):
            save_config(self.config.model_copy(update={"resume": None}), folder / CONFIG)


@contextmanager
def entered(config: RunConfig) -> Iterator[Start]:
    """Lock the folder of a run, then look for its start: rank 0 does, for all."""
    with ExitStack() as until_the_end:
        with distributed.together():
            if distributed.is_main():
                until_the_end.enter_context(locked(config.output_dir))

        def look() -> list[Any]:
            start = find_start(config, log.warning)
            place = None if start.checkpoint is None else str(start.checkpoint)
            return [place, start.lengths, start.fingerprints]

        place, lengths, prints = distributed.from_main(look)
        yield Start(config, None if place is None else Path(place), tuple(lengths), prints)


def find_start(config: RunConfig, say: Callable[[str], None]) -> Start:
    """Where `config.resume` leads, for a folder that is locked. Changes nothing.

    Raises OutputFolderError for a folder that this run cannot go on from; ValueError for a
    checkpoint that is not there or damaged, or of another configuration or version, logs that are
    shorter than it says, a link or a device among its files.
    """
    folder = Path(config.output_dir)
    if config.resume is None:
        check_folder(folder)
        return Start(config)
    if config.resume == AUTO:
        _check_files(folder)
        checkpoint = newest(folder, say)
        if checkpoint is None:
            _check_begins(folder, config.model_dump(mode="json"))
            return Start(config)
    else:
        checkpoint = _named(Path(config.resume), say)
    source = checkpoint.parent.parent
    _check_files(source)
    if source.resolve() != folder.resolve():
        check_folder(folder)
    state = read_state(checkpoint)
    check_same(state.config, config.model_dump(mode="json"))
    expected = f"a checkpoint of at most the {config.steps} steps of the run"
    require(state.step <= config.steps, "resume", expected, checkpoint)
    for log_file, length in zip((source / name for name in LOGS), state.lengths, strict=True):
        size = log_file.stat().st_size if log_file.is_file() else -1
        came = f"{size} bytes" if size >= 0 else "no file"
        expected = f"at least {length} bytes in {log_file}, which its checkpoint has seen"
        require(size >= length, "resume", expected, came)
    return Start(config, checkpoint, state.lengths, state.fingerprints)


def _named(path: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint at `path`, or the newest whole one of the run there."""
    if (path / MANIFEST).is_file():
        problem = problem_of(path)
        require(problem is None, "resume", "a whole checkpoint", f"{path}: {problem}")
        return path.resolve()
    _check_files(path)
    checkpoint = newest(path, say)
    expected = "auto, or the folder of a run or a checkpoint that is whole"
    require(checkpoint, "resume", expected, repr(str(path)))
    return checkpoint


def _check_files(run: Path) -> None:
    """Raise a ValueError for a link, a pipe or a device where a run reads or writes."""
    for path in (run / name for name in TOUCHED):
        check_regular(path)
        for inside in path.glob("*"):
            check_regular(inside)


def _check_begins(folder: Path, settings: dict[str, Any]) -> None:
    """Raise unless the folder is empty, or holds a run of these settings that was ended before its
    first checkpoint.
    """
    if not is_occupied(folder):
        check_folder(folder)
        return
    damaged = checkpoints.checkpoints_in(folder)
    if damaged:
        came = f"{len(damaged)} damaged ones ({damaged[0].name}, …); move them away to begin again"
        raise ValueError(f"resume: expected a whole checkpoint in {folder}, got {came}")
    if os.listdir(folder) == [f"{CONFIG}.tmp"]:
        return
    if (folder / "summary.json").exists() or not (folder / CONFIG).is_file():
        said = "is occupied by something else than a run that was ended"
        raise OutputFolderError(f"output_dir: {folder} {said}; choose another with output_dir=…")
    check_same(load_recipe(str(folder / CONFIG)).model_dump(mode="json"), settings)
