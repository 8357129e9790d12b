"""The state of a run at the end of a step, and its files in a checkpoint.

weights/           policy and moments; a critic; a reference that cannot be built again; with LoRA
                   the adapters alone
state.json         `State`
state.safetensors  random numbers, and the tensors of the rollout that is sampled ahead
tokenizer/         for `grpo-fast export`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_fast.errors import require
from grpo_fast.rollout import Samples
from grpo_fast.train.collect.collector import Ahead, CollectorState
from grpo_fast.train.config.base import Count
from grpo_fast.train.files import read_regular
from grpo_fast.train.runs.checkpoint import step_of
from grpo_fast.train.update.trainer import TrainerState

STATE, TENSORS = "state.json", "state.safetensors"


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
    fingerprints: dict[str, str]
    config: dict[str, Any]
    # Two fields of state.safetensors: random numbers, and the samples of the next step.
    random: Any = None  # dict[str, Tensor]
    ahead: Any = None  # Ahead | None


def write_state(state: State, folder: Path) -> None:
    plain = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    tensors = {f"random.{name}": value for name, value in plain.pop("random").items()}
    ahead = plain.pop("ahead")
    if ahead is not None:
        tensors |= {f"ahead.{name}": value for name, value in ahead.samples.tensors().items()}
        tensors["seconds.ahead"] = torch.tensor(ahead.seconds, dtype=torch.float64)
    text = TypeAdapter(dict[str, Any]).dump_json(plain).decode()
    (folder / STATE).write_text(text + "\n", encoding="utf-8")
    save_file(tensors, folder / TENSORS)


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint. Raises ValueError with the file and the field at fault."""
    tensors = load_file(checkpoint / TENSORS)
    try:
        state = TypeAdapter(State).validate_json(read_regular(checkpoint / STATE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ValueError(f"{STATE}: {where}: {first['msg']}") from error
    parts: dict[str, dict[str, Tensor]] = {"random": {}, "ahead": {}, "seconds": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        require(part in parts, f"{TENSORS}: {name}", f"names of {sorted(parts)}", "another")
        parts[part][rest] = tensor
    state.random = parts["random"]
    require("cpu" in state.random, TENSORS, "random.cpu", "none")
    state.ahead = None
    if parts["seconds"]:
        seconds = float(parts["seconds"]["ahead"])
        state.ahead = Ahead(Samples.of_tensors(parts["ahead"]), seconds)
    step = step_of(checkpoint)
    require(state.step == step, f"{STATE}: step", f"{step}, as its name says", state.step)
    return state
