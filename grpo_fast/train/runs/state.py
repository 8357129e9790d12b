"""The state of a run at the end of a step, and its files in a checkpoint.

weights/     safetensors: the policy, with LoRA the adapter alone; moments; a critic; a reference
             that cannot be built again; random numbers; with `rollout.ahead` the next samples
state.json   `State`
tokenizer/   for `grpo-fast export`
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
    """The rows that the latest step has to log."""

    metrics: dict[str, float]
    updates: list[dict[str, float]]
    prompts: list[dict[str, Any]]
    completions: list[dict[str, Any]]


@dataclass
class State:
    """A run at the end of a step, without its tensors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    step: Count  # finished steps
    before: dict[str, float] | None  # metrics of the first evaluation
    after: dict[str, float] | None  # metrics of the latest evaluation
    metrics: dict[str, float]  # of the latest step
    unlogged: Rows | None  # rows of a step that was finished and not yet logged
    lengths: tuple[Count, Count]  # bytes of metrics.jsonl and prompts.jsonl
    collector: CollectorState
    trainer: TrainerState
    settings: dict[str, Any]  # the configuration, and fingerprints of the files that it names


def draws_now(ahead: Ahead | None) -> dict[str, Tensor]:
    """Return the state of torch's random numbers and the samples drawn ahead, as named tensors."""
    draws = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        draws["random.cuda"] = torch.cuda.get_rng_state()
    if ahead is not None:
        draws["ahead.seconds"] = torch.tensor(ahead.seconds, dtype=torch.float64)
        draws |= {f"ahead.{name}": column for name, column in ahead.samples.tensors().items()}
    return draws


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Set torch's random numbers, from states by device."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def ahead_of(columns: dict[str, Tensor]) -> Ahead | None:
    """Return the samples drawn ahead from their stored columns, or None without columns."""
    if not columns:
        return None
    return Ahead(seconds=float(columns.pop("seconds")), samples=Samples.of_tensors(columns))


def write_state(state: State, folder: Path) -> None:
    text = json.dumps(dataclasses.asdict(state))
    (folder / STATE).write_text(text + "\n", encoding="utf-8")


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint. Raises ValueError with the field at fault."""
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
    """Raise a ValueError that names the argument and the checkpoint for any error inside."""
    try:
        yield
    except Exception as error:  # safetensors and torch raise many classes
        is_of_ranks = isinstance(error, (torch.distributed.DistError, RankError))
        if is_of_ranks or isinstance(error, MemoryError) or "gloo/" in str(error):
            raise
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        said = f"expected a checkpoint of this configuration in {checkpoint}"
        raise ValueError(f"{argument}: {said}, got another: {text}") from error
