"""The state of a run at the end of a step, and its files in a checkpoint.

weights/ contains safetensors files with the policy (only the adapter for LoRA), the moments, a
critic, a reference that cannot be built again, the random state, and the samples drawn ahead.
state.json contains `State`. tokenizer/ is needed by `grpo-fast export`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from grpo_fast.errors import RankError, require
from grpo_fast.rollout import Samples
from grpo_fast.train.collect.collector import Ahead, CollectorState
from grpo_fast.train.config.base import Count
from grpo_fast.train.files import read_regular
from grpo_fast.train.runs.checkpoint import step_of
from grpo_fast.train.update.trainer import TrainerState

STATE = "state.json"


@dataclass
class Rows:
    """The log rows of a finished step that were not yet written."""

    metrics: dict[str, float]
    updates: list[dict[str, float]]
    prompts: list[dict[str, Any]]
    completions: list[dict[str, Any]]


@dataclass
class State:
    """The state of a run at the end of a step, except its tensors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    step: Count  # finished steps
    before: dict[str, float] | None  # metrics of the first evaluation
    after: dict[str, float] | None  # metrics of the latest evaluation
    metrics: dict[str, float]  # metrics of the latest step
    unlogged: Rows | None  # rows of a step that was finished and not yet logged
    lengths: tuple[Count, Count]  # bytes of metrics.jsonl and prompts.jsonl
    collector: CollectorState
    trainer: TrainerState
    settings: dict[str, Any]  # the configuration, and fingerprints of the files that it names


def draws_now(ahead: Ahead | None) -> dict[str, Tensor]:
    """Return torch's random state and the samples drawn ahead, as named tensors."""
    draws = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        draws["random.cuda"] = torch.cuda.get_rng_state()
    if ahead is not None:
        draws["ahead.seconds"] = torch.tensor(ahead.seconds, dtype=torch.float64)
        draws |= {f"ahead.{name}": column for name, column in ahead.samples.tensors().items()}
    return draws


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Restore torch's random state from tensors with the names of the devices."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def ahead_of(columns: dict[str, Tensor]) -> Ahead | None:
    """Rebuild the samples drawn ahead from their stored columns. Return None if there are none."""
    if not columns:
        return None
    return Ahead(seconds=float(columns.pop("seconds")), samples=Samples.of_tensors(columns))


def write_state(state: State, folder: Path) -> None:
    text = json.dumps(dataclasses.asdict(state))
    (folder / STATE).write_text(text + "\n", encoding="utf-8")


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint.

    Raises:
        ValueError: a field is invalid. The message names the field.
    """
    try:
        state = TypeAdapter(State).validate_json(read_regular(checkpoint / STATE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ValueError(f"{STATE}: {where}: {first['msg']}") from error
    step = step_of(checkpoint)
    require(state.step == step, f"{STATE}: step", f"{step}, as its name says", state.step)
    return state


@contextmanager
def refused(argument: str, checkpoint: Path) -> Iterator[None]:
    """Convert any error inside to a ValueError that names the argument and the checkpoint.

    Errors of collectives and lack of memory are not converted.
    """
    try:
        yield
    except Exception as error:  # safetensors and torch raise many classes
        is_of_ranks = isinstance(error, (torch.distributed.DistError, RankError))
        if is_of_ranks or isinstance(error, MemoryError) or "gloo/" in str(error):
            raise
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        said = f"expected a checkpoint of this configuration in {checkpoint}"
        raise ValueError(f"{argument}: {said}, got another: {text}") from error
