"""Saving of a run's checkpoints, on schedule and when an error or a signal ends the run.

A checkpoint contains the following files:

- weights/: safetensors files with the policy (with LoRA only the adapter), the optimizer's moments,
  the critic, the reference if no path can load it again, the random state, and the samples that
  were drawn ahead for the next step.
- state.json: the fields of `State`.
- tokenizer/: the tokenizer, which `grpo-fast export` needs.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from grpo_fast.errors import SAVED, NonFiniteLogits, Stopped, WriteError, require
from grpo_fast.rollout import Samples
from grpo_fast.train.collect.collector import Ahead, Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.base import Count, Positive
from grpo_fast.train.files import read_regular
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs import checkpoint
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.budget import is_out_of_memory
from grpo_fast.train.update.trainer import Trainer

STATE = "state.json"


@dataclass
class Rows:
    """The metrics and completions of a finished step that were not logged yet."""

    metrics: dict[str, float]
    completions: list[dict[str, Any]]


@dataclass
class State:
    """The state of a run at the end of a step, without tensors. It is stored as state.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    length: Count  # length of metrics.jsonl in bytes
    consumed: Count  # number of prompts that were taken from PromptQueue
    # For each reward function and each of its latest calls: the number of samples without a reward,
    # and the number of all samples.
    lost_rewards: dict[str, list[tuple[Count, Count]]]
    baseline: dict[str, float | None] | None  # running baseline of the advantages
    num_tokens: Count  # trunk tokens trained so far
    beta: Annotated[float, Field(allow_inf_nan=False)]  # weight of the KL divergence
    tokens_per_microbatch: Positive
    optimizers: dict[str, dict[str, Count]]  # counters of the optimizers of policy and critic
    settings: dict[str, Any]  # the configuration, and fingerprints of the files that it names
    step: Count = 0  # finished steps
    before: dict[str, float] | None = None  # metrics of the first evaluation
    after: dict[str, float] | None = None  # metrics of the latest evaluation
    unlogged: Rows | None = None  # rows of a step that was finished and not yet logged


def draws_now(ahead: Ahead | None) -> dict[str, Tensor]:
    """Return torch's random state, and samples drawn ahead for the next step, as named tensors."""
    draws = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        draws["random.cuda"] = torch.cuda.get_rng_state()
    if ahead is not None:
        draws["ahead.seconds"] = torch.tensor(ahead.seconds, dtype=torch.float64)
        draws |= {f"ahead.{name}": column for name, column in ahead.samples.tensors().items()}
    return draws


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Restore torch's random state from tensors, whose keys are "cpu" and "cuda"."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def ahead_of(columns: dict[str, Tensor]) -> Ahead | None:
    """Rebuild the samples drawn ahead from their stored tensors. Return None without tensors."""
    if not columns:
        return None
    return Ahead(seconds=float(columns.pop("seconds")), samples=Samples.of_tensors(columns))


def write_state(state: State, folder: Path) -> None:
    text = json.dumps(dataclasses.asdict(state))
    (folder / STATE).write_text(text + "\n", encoding="utf-8")


def read_state(folder: Path) -> State:
    """Read the state of a checkpoint.

    Raises:
        ValueError: a field of the file is invalid. The message names the field.
    """
    try:
        state = TypeAdapter(State).validate_json(read_regular(folder / STATE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ValueError(f"{STATE}: {where}: {first['msg']}") from error
    step = checkpoint.step_of(folder)
    require(state.step == step, f"{STATE}: step", f"{step}, as its name says", state.step)
    return state


@contextmanager
def refused(argument: str, folder: Path) -> Iterator[None]:
    """Convert an error inside this context to a ValueError about an unusable checkpoint.

    Out-of-memory errors and errors of collectives are not converted, because the checkpoint does
    not cause them.

    Args:
        argument: name of the argument that selected the checkpoint, for the message.
        folder: folder of the checkpoint, for the message.
    """
    try:
        yield
    except Exception as error:  # safetensors and torch raise many exception classes
        if distributed.is_of_collective(error) or is_out_of_memory(error):
            raise
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        said = f"expected a checkpoint of this configuration in {folder}"
        raise ValueError(f"{argument}: {said}, got another: {text}") from error


class Saver:
    """Records the state of a run after each step, and writes checkpoints of the recorded state.

    The method `mark` records references to the weights, and does not copy them. The recorded state
    is therefore only valid until the next optimizer step changes the weights. A checkpoint that is
    written later would mix two steps.

    Args:
        config: configuration of the run.
        collector: provides the position in the training set, and samples that were drawn ahead.
        trainer: provides weights, moments and counters.
        report: provides the length of metrics.jsonl.
        settings: the configuration, and fingerprints of the files that it names.
        stopping: signal handler. The saver sets its function `may_stop`, so that a signal ends the
            run only while the recorded state is valid.
    """

    def __init__(
        self,
        config: RunConfig,
        collector: Collector,
        trainer: Trainer,
        report: RunReport,
        settings: dict[str, Any],
        stopping: Stopping,
    ) -> None:
        self.config = config
        self.collector = collector
        self.trainer = trainer
        self.report = report
        self.saved_at = time.monotonic()
        now = {**collector.state_dict(), **trainer.state_dict()}
        self.state = State(length=report.length(), settings=settings, **now)
        self.mark()
        stopping.may_stop = lambda: not self.has_moved()

    def mark(self, **changes: Any) -> None:
        """Record the current state of the run.

        Args:
            **changes: new values of fields of `State`, for example the number of finished steps.
        """
        trainer = self.trainer
        collector = self.collector
        tensors = trainer.weights()
        tensors |= trainer.moments(tensors)
        state = dataclasses.replace(
            self.state, length=self.report.length(), **collector.state_dict(),
            **trainer.state_dict(), **changes,
        )  # fmt: skip
        draws = draws_now(collector.sampled)
        # Assign the versions last. If an interrupt comes between these assignments, the old
        # versions do not match the new tensors, and `has_moved` prevents saving a mixed state.
        self.state = state
        self.draws = draws
        self.tensors = tensors
        self.versions = {id(tensor): tensor._version for tensor in tensors.values()}

    def has_moved(self) -> bool:
        """Return True if a weight or a moment has changed since the last call of `mark`.

        The check compares the version counters of the tensors. The fused AdamW of torch does not
        increment the versions of weights. However, it increments its step counters before it
        changes a weight, and the step counters are tensors among the moments.
        """
        tensors = list(self.tensors.values())
        for optimizer in self.trainer.optimizers.values():
            for moments in optimizer.adam.state.values():
                tensors += moments.values()
        # A moment that was created after `mark` has version 0 until the first update changes it.
        return any(tensor._version != self.versions.get(id(tensor), 0) for tensor in tensors)

    def is_due(self) -> bool:
        """Return True if the schedule requires a checkpoint now. Collective call.

        All ranks use rank 0's clock, so that they agree.
        """
        plan = self.config.checkpoint
        by_step = plan.every and self.state.step % plan.every == 0
        seconds = 60 * plan.every_minutes
        is_late = distributed.from_main(lambda: 0 < seconds <= time.monotonic() - self.saved_at)
        return bool(by_step or is_late)

    def save(self) -> Path:
        """Write a checkpoint of the recorded state, and delete old checkpoints. Collective call."""
        state = self.state
        plan = self.config.checkpoint
        run = self.report.folder

        def fill(folder: Path) -> None:
            self.report.sync()  # flush the log lines that `length` counts, in case of a power cut
            self.trainer.policy.tokenizer.save_pretrained(folder / checkpoint.TOKENIZER)
            write_state(state, folder)

        tensors = self.tensors | self.draws
        path = checkpoint.write_checkpoint(run, state.step, tensors, fill)
        distributed.from_main(lambda: checkpoint.prune(run, plan.keep))
        self.saved_at = time.monotonic()
        return path

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save the recorded state if an error or a signal ends the run inside this context.

        The error gets a note with the checkpoint from which the run can be resumed.
        """
        try:
            yield
        except Stopped as stopped:
            said = self._save_at_the_end(stopped)
            self.report.note(f"{stopped.name}: {said}")
            raise
        except NonFiniteLogits as error:
            advice = "a lower optim.lr or a wider model.dtype may help"
            error.add_note(f"this is after {self.state.step} steps; {advice}")
            # Do not save the run. The weights are broken, and a checkpoint of them could replace a
            # good one.
            error.add_note(self._newest())
            raise
        except BaseException as error:
            error.add_note(self._save_at_the_end(error))
            raise

    def _save_at_the_end(self, error: BaseException) -> str:
        """Save the recorded state if possible. Return a sentence that says what was saved."""
        if self.has_moved():
            return f"the step was not finished; {self._newest()}"
        is_shared = distributed.is_on_all_ranks(error)
        if not is_shared and self.config.is_sharded:  # the other ranks do not take part in saving
            return f"one rank alone cannot save sharded weights; {self._newest()}"
        if not is_shared and not distributed.is_main():
            return "only rank 0 can save the run"
        self.trainer.forget_gradients()  # free memory for saving
        try:
            with nullcontext() if is_shared else distributed.alone():
                path = self.save()
        except WriteError as failed:
            return f"{failed}; {self._newest()}"
        if isinstance(error, Stopped):
            error.code = SAVED
        return f"saved in {path}; resume=auto goes on from there"

    def _newest(self) -> str:
        path = checkpoint.newest(self.report.folder)
        if path is None:
            return "there is no checkpoint: resume=auto begins again"
        return f"the newest checkpoint is {path}: resume=auto repeats the steps after it"
