"""Start of a run, either from the beginning or from the newest complete checkpoint.

The run locks its folder, finds a checkpoint and loads it. Only then does it change any file in the
folder, so a failed start has no effect on an existing run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_fast.rollout import Samples
from grpo_fast.train.config import RunConfig, WarmStartConfig, require
from grpo_fast.train.config.recipes import load_recipe, save_config
from grpo_fast.train.files import check_regular, write_on_main
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs.checkpoint import (
    WEIGHTS,
    checkpoints_in,
    newest,
    read_part,
    read_tensors,
    set_aside,
    step_of,
    stored_in,
)
from grpo_fast.train.runs.fingerprints import check_same
from grpo_fast.train.runs.folder import check_folder, is_occupied, locked
from grpo_fast.train.runs.saving import STATE, Saver, State, read_state, refused, restore_random

CONFIG = "config.yaml"
DRAWN = ("random.", "ahead.")  # prefixes of stored tensors that are neither weights nor moments


@dataclass
class Start:
    """Starting point of a run: a checkpoint, or step 0 if `checkpoint` is None."""

    config: RunConfig
    checkpoint: Path | None = None
    state: State | None = None  # the state that the checkpoint contains

    @property
    def warm_start(self) -> WarmStartConfig | None:
        """The warm start that must still run, or None. A checkpoint is saved after the warm start.

        A run that resumes from a checkpoint therefore needs no warm start.
        """
        return self.config.warm_start if self.checkpoint is None else None

    @property
    def logged(self) -> tuple[int, int]:
        """Number of bytes of metrics.jsonl to keep, and number of steps in these bytes."""
        if self.state is None:
            return 0, 0
        return self.state.length, self.state.step - (self.state.unlogged is not None)

    def enter_folder(self, report: RunReport) -> None:
        """Save the configuration in the run's folder, and begin the report.

        All ranks must call this. If the run resumes, checkpoints that are newer than the loaded one
        are renamed.
        """
        folder = Path(self.config.output_dir)

        def enter() -> None:
            for path in checkpoints_in(folder):
                if self.checkpoint and step_of(path) > step_of(self.checkpoint):
                    # The loaded checkpoint is the newest complete one, so this one is damaged.
                    set_aside(path)
            save_config(self.config.model_copy(update={"resume": None}), folder / CONFIG)

        write_on_main(folder, enter)
        settings = self.config.model_dump(mode="json")
        distributed.from_main(lambda: report.begin(settings))


@contextmanager
def run_start(config: RunConfig) -> Iterator[Start]:
    """Lock the folder of a run, and decide where the run starts. All ranks must enter this.

    Raises:
        ValueError: the folder is in use, it contains a different run, or all its checkpoints are
            damaged. Also raised if another version of the package wrote the checkpoint.
    """
    with ExitStack() as until_the_end:
        with distributed.together():
            if distributed.is_main():
                until_the_end.enter_context(locked(config.output_dir))
        found = distributed.from_main(lambda: _find_checkpoint(config))
        state = None
        if found is not None:
            with distributed.together():
                with refused("resume", found):
                    state = read_state(found)
                    step = step_of(found)
                    require(state.step == step, f"{STATE}: step", f"{step}, as its name says",
                            state.step)  # fmt: skip
                metrics = Path(config.output_dir, "metrics.jsonl")
                check_regular(metrics)
                size = metrics.stat().st_size if metrics.exists() else 0
                expected = f"at least {state.length} bytes"
                require(size >= state.length, str(metrics), expected, f"{size} bytes")
        yield Start(config, found, state)


def _find_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint from which the run resumes, or None if it starts at step 0.

    Raises:
        ValueError: the run must start at step 0, but its folder contains damaged checkpoints, a
            finished run, a run with other settings, or other files.
    """
    folder = Path(config.output_dir)
    if config.resume is None or not is_occupied(folder):
        check_folder(folder)
        return None
    checkpoint = newest(folder)
    if checkpoint is not None:
        return checkpoint
    damaged = checkpoints_in(folder)
    if damaged:
        came = f"{len(damaged)} damaged ones ({damaged[0].name}, …); move them away to start over"
        raise ValueError(f"resume: expected a complete checkpoint in {folder}, got {came}")
    if (folder / "summary.json").exists() or not (folder / CONFIG).is_file():
        check_folder(folder)
    # The folder has an unfinished run without checkpoints, which starts over.
    was = load_recipe(str(folder / CONFIG))
    check_same(was.model_dump(mode="json"), config.model_dump(mode="json"))
    return None


def resume(start: Start, saver: Saver) -> None:
    """Load the checkpoint of `start`, if there is one, into the run.

    All ranks must call this. Afterwards, remove the log rows of steps after the checkpoint.

    Raises:
        ValueError: the checkpoint does not fit the configuration.
    """
    if start.checkpoint is None or start.state is None:
        return
    trainer = saver.trainer
    collector = saver.collector
    # 1. Load everything before changing a file, so that an error leaves the folder unchanged.
    with distributed.together(), refused("resume", start.checkpoint):
        stored = stored_in(start.checkpoint / WEIGHTS)
        random = read_part(stored, "random.")
        require("cpu" in random, "the tensor random.cpu", "the state of torch's generator", "none")
        columns = read_part(stored, "ahead.")
        weights = {name: x for name, x in stored.items() if not name.startswith(DRAWN)}
        tensors = trainer.weights()
        tensors |= trainer.moments(tensors, weights)
        read_tensors(weights, tensors)
        trainer.load_state_dict(vars(start.state))
        collector.load_state_dict(vars(start.state))
        collector.take_ahead(Samples.of_tensors(columns) if columns else None)
    # 2. Remove the log rows of steps after the checkpoint.
    start.enter_folder(saver.report)
    # 3. Restore the random state last, because building and loading draw random numbers.
    saver.state = dataclasses.replace(start.state, settings=saver.state.settings)
    restore_random(random)
    saver.mark()
    saver.report.note(f"resumed from {start.checkpoint}")
