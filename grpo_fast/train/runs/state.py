"""The state of a run at the end of a step, and its files in a checkpoint.

weights/           policy and moments; a critic; a reference that cannot be built again; with LoRA
                   the adapters alone
state.json         `State`
state.safetensors  random numbers, and the tensors of the rollout that is sampled ahead
tokenizer/         for `grpo-fast export`
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_fast.errors import RankError, require
from grpo_fast.rollout import Samples
from grpo_fast.train.collect.collector import Ahead, CollectorState
from grpo_fast.train.config.base import Count
from grpo_fast.train.files import read_regular
from grpo_fast.train.runs.checkpoint import step_of
from grpo_fast.train.update.trainer import TrainerState

STATE, TENSORS = "state.json", "state.safetensors"


def _null(value: Any) -> None:
    if value is not None:
        raise ValueError(f"expected null, got {str(value)[:100]!r}")


Null = PlainValidator(_null)


def random_now() -> dict[str, Tensor]:
    """Return the state of torch's random numbers, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@dataclass
class Rows:
    """What the latest step has to log."""

    metrics: dict[str, float]
    updates: list[dict[str, float]]
    prompts: list[dict[str, Any]]
    completions: list[dict[str, Any]]


@dataclass
class State:
    """A run at the end of a step, without its weights and moments."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    step: Count  # finished steps
    before: dict[str, float] | None  # metrics of the first evaluation
    after: dict[str, float] | None  # of the latest evaluation
    metrics: dict[str, float]  # of the latest step
    unlogged: Rows | None  # a step is finished before it is logged and evaluated
    lengths: tuple[Count, Count]  # bytes of metrics.jsonl and prompts.jsonl
    collector: CollectorState
    trainer: TrainerState
    fallback: str | None  # why the engine samples by transformers' `generate`
    settings: dict[str, Any]  # the configuration, and fingerprints of the files that it names
    # The fields in state.safetensors, null in state.json.
    random: Annotated[dict[str, Tensor], Null] = None  # type: ignore[assignment]
    ahead: Annotated[Ahead | None, Null] = None  # the samples of the next step


def write_state(state: State, folder: Path) -> None:
    tensors = {f"random.{name}": value for name, value in state.random.items()}
    if state.ahead is not None:
        columns = state.ahead.samples.tensors()
        columns["seconds"] = torch.tensor(state.ahead.seconds, dtype=torch.float64)
        tensors |= {f"ahead.{name}": value for name, value in columns.items()}
    plain = dataclasses.asdict(dataclasses.replace(state, random=None, ahead=None))
    (folder / STATE).write_text(json.dumps(plain) + "\n", encoding="utf-8")
    save_file(tensors, folder / TENSORS)


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint. Raises ValueError with the file and the field at fault."""
    try:
        state = TypeAdapter(State).validate_json(read_regular(checkpoint / STATE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ValueError(f"{STATE}: {where}: {first['msg']}") from error
    step = step_of(checkpoint)
    require(state.step == step, f"{STATE}: step", f"{step}, as its name says", state.step)
    parts: dict[str, dict[str, Tensor]] = {"random": {}, "ahead": {}}
    for name, tensor in load_file(checkpoint / TENSORS).items():
        part, _, rest = name.partition(".")
        require(part in parts, TENSORS, f"names that begin with {sorted(parts)}", name)
        parts[part][rest] = tensor
    state.random = parts["random"]
    require("cpu" in state.random, TENSORS, "random.cpu", "none")
    ahead = parts["ahead"]
    if ahead:
        require("seconds" in ahead, TENSORS, "ahead.seconds", "none")
        state.ahead = Ahead(seconds=float(ahead.pop("seconds")), samples=Samples.of_tensors(ahead))
    return state


@contextmanager
def refused(what: str, checkpoint: Path) -> Iterator[None]:
    """Raise a ValueError that names the checkpoint for any error of its readers."""
    try:
        yield
    except Exception as error:  # safetensors and torch have classes of their own
        is_of_ranks = isinstance(error, (torch.distributed.DistError, RankError))
        if is_of_ranks or isinstance(error, MemoryError) or "gloo/" in str(error):
            raise
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        said = f"expected a checkpoint of this configuration in {checkpoint}"
        raise ValueError(f"{what}: {said}, got another: {text}") from error
