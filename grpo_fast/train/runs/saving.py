"""Saving of a run's checkpoints, on schedule and when an error or a signal ends the run.

A checkpoint contains the following files:

- weights/: safetensors files with the policy (with LoRA only the adapter), the optimizer's moments,
  the critic, the reference if it cannot be loaded from a path, the random state, and the samples
  that were drawn ahead for the next step.
- state.json: the fields of `State`.
- tokenizer/: the tokenizer, which `grpo-fast export` needs.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from grpo_fast.errors import SAVED, NonFiniteLogits, Stopped, WriteError
from grpo_fast.rollout import Samples
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.sections import Count, Positive
from grpo_fast.train.files import read_regular, sync
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs import checkpoint
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.budget import is_out_of_memory
from grpo_fast.train.update.trainer import Trainer

STATE = "state.json"


@dataclass
class Rows:
    """The metrics and completions of a finished step that have not been logged yet."""

    metrics: dict[str, float]
    completions: list[dict[str, Any]]


@dataclass
class State:
    """The state of a run at the end of a step, without tensors. It is stored as state.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    length: Count  # length of metrics.jsonl in bytes
    consumed: Count  # number of prompts that were taken from PromptQueue
    # Maps the name of a reward function to one tuple for each of its latest calls: the number of
    # samples without a reward, and the number of all samples.
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


def draws_now(ahead: Samples | None) -> dict[str, Tensor]:
    """Return torch's random state and the samples of the next step as a dict of tensors.

    `ahead` is None if no samples were drawn ahead for the next step.
    """
    draws = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        draws["random.cuda"] = torch.cuda.get_rng_state()
    if ahead is not None:
        draws |= {f"ahead.{name}": column for name, column in ahead.tensors().items()}
    return draws


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Restore torch's random state. The keys are "cpu" and, if the run used a GPU, "cuda"."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def read_state(folder: Path) -> State:
    """Read the state of a checkpoint.

    Raises:
        ValueError: a field of the file is invalid. The message names the field.
    """
    try:
        return TypeAdapter(State).validate_json(read_regular(folder / STATE))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ValueError(f"{STATE}: {where}: {first['msg']}") from error


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
    """Recorder of a run's state after each step, which also writes checkpoints of this state.

    The method `mark` does not copy the weights. The recorded state is therefore only valid until
    the next optimizer step changes the weights. A checkpoint that is written later would mix two
    steps.

    Args:
        config: configuration of the run.
        collector: the collector. It holds the position in the training set, and the samples that
            were drawn ahead.
        trainer: the trainer. It holds the weights, moments and counters.
        report: the writer of the logs. It knows the length of metrics.jsonl.
        settings: the configuration, and fingerprints of the files that it names.
        stopping: the signal handler. The saver sets its function `may_stop`, so that a signal ends
            the run only while the recorded state is valid.
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
        self.state = dataclasses.replace(
            self.state, length=self.report.length(), **collector.state_dict(),
            **trainer.state_dict(), **changes,
        )  # fmt: skip
        self.draws = draws_now(collector.sampled)
        for optimizer in trainer.optimizers.values():
            optimizer.has_moved = False

    def has_moved(self) -> bool:
        """Return True if an optimizer has begun to change weights since the last call of `mark`."""
        return any(optimizer.has_moved for optimizer in self.trainer.optimizers.values())

    def is_due(self) -> bool:
        """Return True if `checkpoint.every` or `checkpoint.every_minutes` requires a checkpoint.

        All ranks must call this. They use rank 0's clock, so that they get the same result.
        """
        plan = self.config.checkpoint
        by_step = plan.every and self.state.step % plan.every == 0
        seconds = 60 * plan.every_minutes
        is_late = distributed.from_main(lambda: 0 < seconds <= time.monotonic() - self.saved_at)
        return bool(by_step or is_late)

    def save(self) -> Path:
        """Write a checkpoint of the recorded state, and delete old checkpoints.

        All ranks must call this.
        """
        run = self.report.folder
        trainer = self.trainer

        def fill(folder: Path) -> None:
            metrics = run / "metrics.jsonl"
            if metrics.exists():  # a run goes on if somebody moves its log away
                sync(metrics)  # the state counts its bytes, which a power cut could lose
            trainer.policy.tokenizer.save_pretrained(folder / checkpoint.TOKENIZER)
            text = json.dumps(dataclasses.asdict(self.state))
            (folder / STATE).write_text(text + "\n", encoding="utf-8")

        tensors = trainer.weights()
        tensors |= trainer.moments(tensors) | self.draws
        path = checkpoint.write_checkpoint(run, self.state.step, tensors, fill)
        distributed.from_main(lambda: checkpoint.prune(run, self.config.checkpoint.keep))
        self.saved_at = time.monotonic()
        return path

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save the recorded state if an error or a signal ends the run inside this context.

        A note on the error names the checkpoint from which the run can resume.
        """
        try:
            yield
        except BaseException as error:
            said = self._save_at_the_end(error)
            if isinstance(error, Stopped):
                self.report.note(f"{error.name}: {said}")
            else:
                error.add_note(said)
            raise

    def _save_at_the_end(self, error: BaseException) -> str:
        """Save the recorded state if possible. Return a sentence that says what was saved."""
        if isinstance(error, NonFiniteLogits):
            # Do not save a checkpoint, because the weights are broken. Old checkpoints, which are
            # deleted after each save, may be the only ones with finite weights.
            advice = "a lower optim.lr or a wider model.dtype may help"
            return f"this is after {self.state.step} steps; {advice}; {self._newest()}"
        if self.has_moved():
            return f"the step was not finished; {self._newest()}"
        if not distributed.is_on_all_ranks(error):
            return f"one rank alone cannot save the run; {self._newest()}"
        self.trainer.forget_gradients()  # free memory for saving
        try:
            path = self.save()
        except WriteError as failed:
            return f"{failed}; {self._newest()}"
        if isinstance(error, Stopped):
            error.code = SAVED
        return f"saved in {path}; resume=auto continues from there"

    def _newest(self) -> str:
        path = checkpoint.newest(self.report.folder)
        if path is None:
            return "there is no checkpoint: resume=auto starts over"
        return f"the newest checkpoint is {path}: resume=auto repeats the steps after it"
