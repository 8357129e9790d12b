"""Where a run begins: anew, or at a checkpoint of its own folder or of another run's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.runs.checkpoint import MANIFEST, newest, order_of, problem_of, read_state
from grpo_fast.train.runs.folder import (
    FolderLock,
    OutputFolderError,
    check_folder,
    claim_folder,
    is_occupied,
)

AUTO, CONFIG = "auto", "config.yaml"
LOGS, COMPLETIONS = ("metrics.jsonl", "prompts.jsonl"), "completions"
# sections and keys that may change
FREE = ("output_dir", "log", "checkpoint", "resume", "rollout.vllm", "distributed",
        "distributed_replicas", "distributed_timeout")  # fmt: skip


class Start(NamedTuple):
    """How the folder of a run is entered.

    Attributes:
        checkpoint: where it goes on; None: from the beginning.
        lengths: bytes of metrics.jsonl and prompts.jsonl that were written until then.
        again: files of this run lie in the folder already.
    """

    checkpoint: Path | None = None
    lengths: tuple[int, int] = (0, 0)
    again: bool = False

    @property
    def source(self) -> Path | None:
        """The folder of the run whose checkpoint it is."""
        return None if self.checkpoint is None else self.checkpoint.parent.parent

    @property
    def step(self) -> int:
        """The steps that are finished."""
        return 0 if self.checkpoint is None else order_of(self.checkpoint.name)[0]


ANEW = Start()


def find_start(config: RunConfig, say: Callable[[str], None]) -> Start:
    """Where `config.resume` leads. Creates nothing.

    Raises:
        OutputFolderError: the folder is occupied, by something that this run cannot go on from.
        ValueError: a checkpoint that is not there or damaged, or of another configuration.
    """
    folder = Path(config.output_dir)
    if config.resume is None:
        check_folder(folder)
        return ANEW
    if config.resume == AUTO:
        checkpoint = newest(folder, say)
        if checkpoint is None:
            return Start(again=_may_begin_again(folder, config))
    else:
        checkpoint = _named(Path(config.resume), say)
    is_own = checkpoint.parent.parent.resolve() == folder.resolve()
    if not is_own:
        check_folder(folder)
    state = read_state(checkpoint)
    check_same(state["config"], config)
    metrics, prompts = state["lengths"]
    return Start(checkpoint, (metrics, prompts), again=is_own)


def enter_folder(folder: str | Path, start: Start) -> tuple[Path, FolderLock]:
    """The folder of a run, locked; what another run has logged until `start` is copied into it."""
    if start.again:
        return Path(folder), FolderLock(folder)
    path = claim_folder(folder)
    lock = FolderLock(path)
    check_folder(path)  # two that came at the same time: the second finds it occupied
    if start.source is not None:
        for name in (*LOGS, COMPLETIONS):
            if (start.source / name).is_dir():
                shutil.copytree(start.source / name, path / name)
            elif (start.source / name).exists():
                shutil.copyfile(start.source / name, path / name)
    return path, lock


def check_same(was: dict[str, Any], config: RunConfig) -> None:
    """Raise a ValueError that lists what a configuration changes in a run that has begun.

    What may change is where things lie and servers are, what is logged and kept, and the number of
    steps: it may grow, where the learning rate does not depend on it.
    """
    now = config.model_dump(mode="json")
    changed = list(_differences(was, now, ""))
    if config.optim.schedule == "constant" and now["steps"] > was["steps"]:
        changed = [line for line in changed if not line.startswith("steps: ")]
    if changed:
        raise ValueError(
            "resume: expected the configuration that the run began with, came another\n  "
            + "\n  ".join(changed)
        )


def _differences(was: Any, now: Any, above: str) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            if f"{above}{key}" not in FREE:
                yield from _differences(was.get(key), now.get(key), f"{above}{key}.")
    elif was != now:
        yield f"{above[:-1]}: {was!r} → {now!r}"


def _named(path: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint at `path`, or the newest whole one of the run there."""
    if (path / MANIFEST).is_file():
        problem = problem_of(path)
        if problem is not None:
            raise ValueError(f"resume: expected a whole checkpoint, got {path}: {problem}")
        return path.resolve()
    found = newest(path, say)
    if found is None:
        expected = "expected auto, or the folder of a run or a checkpoint that is whole"
        raise ValueError(f"resume: {expected}, got {str(path)!r}")
    return found


def _may_begin_again(folder: Path, config: RunConfig) -> bool:
    """Whether a run that ended before its first checkpoint lies there; an empty folder: False."""
    if not is_occupied(folder):
        check_folder(folder)
        return False
    if os.listdir(folder) == [f"{CONFIG}.tmp"]:
        return True
    if (folder / "summary.json").exists() or not (folder / CONFIG).is_file():
        said = "is occupied by something else than a run that was ended"
        raise OutputFolderError(f"output_dir: {folder} {said}; choose another with output_dir=…")
    check_same(load_recipe(str(folder / CONFIG)).model_dump(mode="json"), config)
    return True
