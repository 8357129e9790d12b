"""The state of a run at the end of a step, and its files in a checkpoint.

weights/           policy and moments; a critic; a reference that cannot be built again; with LoRA
                   the adapters alone
state.json         `State`
state.safetensors  random numbers, and the tensors of the rollout that is sampled ahead
tokenizer/         for `grpo-fast export`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file

from grpo_fast.errors import RankError, require
from grpo_fast.rollout.saved import Saved, split_tensors
from grpo_fast.train.collect.collector import CollectorState, Sampled
from grpo_fast.train.config.base import Count
from grpo_fast.train.files import read_regular
from grpo_fast.train.runs.checkpoint import step_of
from grpo_fast.train.update.trainer import TrainerState

STATE, TENSORS = "state.json", "state.safetensors"


@dataclass
class RandomState:
    cpu: Saved
    cuda: Saved | None

    @classmethod
    def now(cls) -> RandomState:
        has_gpu = torch.cuda.is_available()
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if has_gpu else None)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)


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
    random: RandomState
    collector: CollectorState
    trainer: TrainerState
    ahead: Sampled | None  # the rollout of the next step
    fallback: str | None  # why the engine samples by transformers' `generate`
    settings: dict[str, Any]  # the configuration, and fingerprints of the files that it names


def write_state(state: State, folder: Path) -> None:
    tensors = dict[str, torch.Tensor]()
    plain = split_tensors(state, tensors)
    (folder / STATE).write_text(json.dumps(plain) + "\n", encoding="utf-8")
    save_file(tensors, folder / TENSORS)


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint. Raises ValueError with the file and the field at fault."""
    tensors, text = load_file(checkpoint / TENSORS), read_regular(checkpoint / STATE)
    try:
        state = TypeAdapter(State).validate_json(text, context=tensors)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ValueError(f"{STATE}: {where}: {first['msg']}") from error
    step = step_of(checkpoint)
    require(state.step == step, f"{STATE}: step", f"{step}, as its name says", state.step)
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
