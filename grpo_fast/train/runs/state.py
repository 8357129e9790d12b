"""The state of a run between two updates, and its files in a checkpoint.

weights/          policy and moments; a critic; a reference that cannot be built again; with LoRA
                  the adapters alone
state.json        `State`
state.safetensors random numbers; of a step under way, or sampled ahead, its completions' numbers
tokenizer/        for `grpo-fast export`
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from grpo_fast.errors import require
from grpo_fast.rollout.saved import Saved, split_tensors
from grpo_fast.train.collect.collector import CollectorState, Sampled
from grpo_fast.train.config.base import Count, Positive
from grpo_fast.train.files import read_regular
from grpo_fast.train.runs.checkpoint import STATE, STRICT, order_of, read_checked
from grpo_fast.train.update.step import Step
from grpo_fast.train.update.trainer import TrainerState

MOST_BYTES = 1 << 30  # of state.json, which holds the completions of a step
# Another machine may have no GPU, or more of them; `resume` compares the others.
MAY_CHANGE = {"config", "fingerprints", "training_set", "fallback", "random"}


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
class State:
    """All of a run but its weights and moments."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: Count  # finished steps
    before: dict[str, float] | None  # metrics of the first evaluation
    after: dict[str, float] | None  # of the latest one
    metrics: dict[str, float]  # of the latest finished step
    lengths: tuple[Count, Count]  # bytes of metrics.jsonl and prompts.jsonl
    random: RandomState
    collector: CollectorState
    trainer: TrainerState
    underway: Step | None  # the step that has its completions
    ahead: Sampled | None
    fallback: str | None  # why the engine samples by transformers' `generate`
    training_set: Positive  # its size
    fingerprints: dict[str, str]
    config: dict[str, Any]


def read_state(checkpoint: Path, tensors: dict[str, Tensor] | None = None) -> State:
    """A checkpoint's state.json, with the `tensors` of the file beside it in their places."""
    state = read_checked(State, checkpoint / STATE, MOST_BYTES, tensors)
    if tensors:
        raise ValueError(f"{STATE}: the tensor {min(tensors)} has no place here")
    step = order_of(checkpoint.name)[0]
    require(state.step == step, f"{STATE}: step", f"{step}, as its name says", state.step)
    return state


def check_round_trip(state: State, checkpoint: Path) -> None:
    """Raise a ValueError where a loaded state is, stored again, not what the file holds."""
    texts = json.dumps(split_tensors(state, {})), read_regular(checkpoint / STATE, MOST_BYTES)
    ours, theirs = (json.loads(text, parse_int=float) for text in texts)  # 1 is 1.0
    for key in sorted({field.name for field in dataclasses.fields(State)} - MAY_CHANGE):
        if json.dumps(ours[key], sort_keys=True) != json.dumps(theirs[key], sort_keys=True):
            raise ValueError(f"{STATE}: {key} holds what this configuration has no place for")
