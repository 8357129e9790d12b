"""Where a run starts: at the beginning, or at a checkpoint of its own folder or of another run.

The order matters: lock the folder, look for the start, load, and only then change the folder.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_fast.train.config import RunConfig, require
from grpo_fast.train.config.recipes import load_recipe, save_config
from grpo_fast.train.files import written
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs.checkpoint import (
    MANIFEST,
    WEIGHTS,
    checkpoints_in,
    newest,
    problem_of,
    read_tensors,
    set_aside,
    step_of,
    stored_tensors,
)
from grpo_fast.train.runs.fingerprints import FILES, check_same
from grpo_fast.train.runs.folder import OutputFolderError, check_folder, is_occupied, locked
from grpo_fast.train.runs.saving import Saver
from grpo_fast.train.runs.state import State, read_state, refused, restore_random

log = logging.getLogger(__name__)

AUTO, CONFIG = "auto", "config.yaml"
LOGS, COMPLETIONS = ("metrics.jsonl", "prompts.jsonl"), "completions"


@dataclass
class Start:
    """Where a run starts. Without a checkpoint it starts at the beginning."""

    config: RunConfig
    checkpoint: Path | None = None
    state: State | None = None  # of the checkpoint

    @property
    def logged(self) -> tuple[tuple[int, int], int]:
        """Return the bytes of the logs, and the number of steps in them."""
        if self.state is None:
            return (0, 0), 0
        return self.state.lengths, self.state.step - (self.state.unlogged is not None)

    def enter_folder(self, report: RunReport) -> None:
        """Let the run and its report write into the folder: rank 0 does, for all ranks."""
        with distributed.together():
            if distributed.is_main():
                self._put_back()
                report.begin()

    def _put_back(self) -> None:
        """Set newer checkpoints aside, copy the logs of another run, write config.yaml."""
        folder = Path(self.config.output_dir)
        if self.checkpoint is not None:
            for path in checkpoints_in(folder):
                if step_of(path) > step_of(self.checkpoint):
                    set_aside(path)
            if not is_occupied(folder):
                source = self.checkpoint.parent.parent
                for name in LOGS:
                    shutil.copyfile(source / name, folder / name)
                if (source / COMPLETIONS).is_dir():
                    shutil.copytree(source / COMPLETIONS, folder / COMPLETIONS)
        with written(folder):
            save_config(self.config.model_copy(update={"resume": None}), folder / CONFIG)


@contextmanager
def entered(config: RunConfig) -> Iterator[Start]:
    """Lock the folder of a run and find its start: rank 0 does, for all ranks.

    Raises OutputFolderError for a folder that this run cannot use, ValueError for a checkpoint that
    is missing, damaged, or of another configuration or version.
    """
    with ExitStack() as until_the_end:
        with distributed.together():
            if distributed.is_main():
                until_the_end.enter_context(locked(config.output_dir))
        found = distributed.from_main(lambda: str(_find_checkpoint(config) or ""))
        if not found:
            yield Start(config)
            return
        with distributed.together(), refused("resume", Path(found)):
            state = read_state(Path(found))
        with distributed.together():
            _check_fits(state, config, Path(found))
        yield Start(config, Path(found), state)


def _find_checkpoint(config: RunConfig) -> Path | None:
    folder = Path(config.output_dir)
    if config.resume is None:
        check_folder(folder)
        return None
    source = folder if config.resume == AUTO else Path(config.resume)
    if (source / MANIFEST).is_file():
        problem = problem_of(source)
        require(problem is None, "resume", "a complete checkpoint", f"{source}: {problem}")
        checkpoint: Path | None = source.resolve()
    else:
        checkpoint = newest(source, log.warning)
    if checkpoint is None:
        expected = "auto, or the folder of a run or of a checkpoint that is complete"
        require(config.resume == AUTO, "resume", expected, repr(config.resume))
        _check_begins(folder, config.model_dump(mode="json"))
    elif checkpoint.parent.parent.resolve() != folder.resolve():
        check_folder(folder)
    return checkpoint


def _check_begins(folder: Path, settings: dict[str, Any]) -> None:
    """Raise unless the folder is empty, or holds a run of these settings without a checkpoint."""
    if not is_occupied(folder):
        check_folder(folder)
        return
    damaged = checkpoints_in(folder)
    if damaged:
        came = f"{len(damaged)} damaged ones ({damaged[0].name}, …); move them away to begin again"
        raise ValueError(f"resume: expected a complete checkpoint in {folder}, got {came}")
    if (folder / "summary.json").exists() or not (folder / CONFIG).is_file():
        said = "is occupied by something else than a run that was ended"
        raise OutputFolderError(f"output_dir: {folder} {said}; choose another with output_dir=…")
    check_same(load_recipe(str(folder / CONFIG)).model_dump(mode="json"), settings)


def _check_fits(state: State, config: RunConfig, checkpoint: Path) -> None:
    was = {key: value for key, value in state.settings.items() if key != FILES}
    check_same(was, config.model_dump(mode="json"))  # the files follow when the data is loaded
    expected = f"a checkpoint of at most the {config.steps} steps of the run"
    require(state.step <= config.steps, "resume", expected, checkpoint)
    for name, length in zip(LOGS, state.lengths, strict=True):
        file = checkpoint.parent.parent / name
        size = file.stat().st_size if file.is_file() else 0
        expected = f"at least {length} bytes in {file}, as when the checkpoint was written"
        require(size >= length, "resume", expected, f"{size} bytes")


def resume(start: Start, saver: Saver) -> None:
    """Load the checkpoint of `start`, if it has one, then cut the logs back to it. Collective.

    Raises ValueError for a checkpoint that does not fit the configuration.
    """
    if start.checkpoint is None or start.state is None:
        return
    trainer, state = saver.trainer, start.state
    with refused("resume", start.checkpoint):
        with distributed.together():
            tensors = trainer.weights()
            stored = stored_tensors(start.checkpoint / WEIGHTS)
            tensors |= trainer.moments(tensors, stored)
        read_tensors(start.checkpoint / WEIGHTS, tensors)
        with distributed.together():
            trainer.load_state_dict(state.trainer)
            saver.collector.load_state_dict(state.collector)
            saver.collector.take_ahead(state.ahead)
    _sample_as_before(state.fallback, saver)
    start.enter_folder(saver.report)
    saver.state = dataclasses.replace(state, settings=saver.state.settings)
    restore_random(state.random)  # at the end: building and loading have drawn random numbers
    saver.mark()
    saver.report.note(f"goes on from {start.checkpoint}")


def _sample_as_before(fallback: str | None, saver: Saver) -> None:
    """Sample by transformers' `generate` if the run before did: another path has other bits."""
    engine = saver.collector.engine
    if fallback is not None:
        engine.fallback = fallback
    elif engine.fallback is not None:
        now = "which this one cannot take: its bits are others from here on"
        saver.report.note(f"resume: the run before sampled by its own loop, {now}")
