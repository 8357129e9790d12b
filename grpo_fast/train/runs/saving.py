"""Save a run after every step that is due, and when an error or a signal ends the run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from grpo_fast.errors import SAVED, NonFiniteLogits, Stopped, WriteError
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs import checkpoint
from grpo_fast.train.runs.state import State, draws_now, write_state
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.trainer import Trainer


class Saver:
    """Records the state at the end of each step, and writes checkpoints of the latest record.

    `mark` records references to the weights and does not copy them. A checkpoint can therefore be
    written only until the next step's first optimizer step. After that the checkpoint would mix two
    steps.

    Args:
        config: configuration of the run.
        collector: provides the place in the training set and samples that were drawn ahead.
        trainer: provides weights, moments and counters.
        report: provides the logs, whose lengths are stored in a checkpoint.
        settings: the configuration, and fingerprints of the files that it names.
        stopping: signal handler. The saver sets its `may_stop`, so that a signal ends the run only
            when the run can be saved.
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
        self.can_save = config.optim.states == "full"  # 8-bit or offloaded states cannot be saved
        self.saved_at = time.monotonic()
        self.state = State(
            step=0, before=None, after=None, metrics={}, unlogged=None, lengths=report.lengths(),
            collector=collector.state_dict(), trainer=trainer.state_dict(), settings=settings,
        )  # fmt: skip
        self.mark()
        stopping.may_stop = lambda: not self.has_moved()

    def mark(self, **changes: Any) -> None:
        """Record the current state of the run, with the fields in `changes` replaced."""
        trainer = self.trainer
        collector = self.collector
        tensors = trainer.weights()
        if self.can_save:
            tensors |= trainer.moments(tensors)
        state = dataclasses.replace(
            self.state, lengths=self.report.lengths(), collector=collector.state_dict(),
            trainer=trainer.state_dict(), **changes,
        )  # fmt: skip
        draws = draws_now(collector.sampled)
        # Assign the versions last. If an interrupt comes between these assignments, the versions do
        # not fit the tensors, and no inconsistent state is saved.
        self.state = state
        self.draws = draws
        self.tensors = tensors
        self.versions = {id(tensor): tensor._version for tensor in tensors.values()}

    def has_moved(self) -> bool:
        """Return True if a weight or a moment has changed since the last call of `mark`.

        torch's fused AdamW does not increment the versions of the weights that it changes. It
        increments its step counters before it changes any weight, and these are tensors among the
        moments.
        """
        tensors = list(self.tensors.values())
        for optimizer in self.trainer.optimizers.values() if self.can_save else ():
            for moments in optimizer.adam.state.values():
                tensors += moments.values()
        # Moments that were created after `mark`, but not yet used by an update, have version 0.
        return any(tensor._version != self.versions.get(id(tensor), 0) for tensor in tensors)

    def is_due(self) -> bool:
        """Return True if a checkpoint is due, by steps or by rank 0's clock. Collective call."""
        plan = self.config.checkpoint
        by_step = plan.every and self.state.step % plan.every == 0
        seconds = 60 * plan.every_minutes
        is_late = distributed.from_main(lambda: 0 < seconds <= time.monotonic() - self.saved_at)
        return self.can_save and bool(by_step or is_late)

    def save(self) -> Path:
        """Write a checkpoint of the latest recorded state, and remove old ones. Collective call."""
        state = self.state
        plan = self.config.checkpoint
        run = self.report.folder

        def fill(folder: Path) -> None:
            self.report.sync()  # a power cut must not lose lines that the checkpoint counts
            self.trainer.policy.tokenizer.save_pretrained(folder / checkpoint.TOKENIZER)
            write_state(state, folder)

        value = None if plan.best is None else state.metrics.get(plan.best)
        tensors = self.tensors | self.draws
        path = checkpoint.write_checkpoint(run, state.step, tensors, fill, value)
        distributed.from_main(lambda: checkpoint.prune(run, plan.keep))
        self.saved_at = time.monotonic()
        return path

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save the latest recorded state if an error or a signal ends the run inside the context.

        The error gets a note that names the checkpoint from which the run can be resumed.
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
            # Do not save: the current weights are broken and must not replace a good checkpoint.
            error.add_note(self._newest())
            raise
        except BaseException as error:
            error.add_note(self._save_at_the_end(error))
            raise

    def _save_at_the_end(self, error: BaseException) -> str:
        """Save the latest recorded state, if possible, and return a sentence about the result."""
        if not self.can_save:
            states = self.config.optim.states
            return f"not saved: a checkpoint needs optim.states=full, and this run has {states}"
        if self.has_moved():
            return f"the step was not finished; {self._newest()}"
        is_shared = distributed.is_on_all_ranks(error)
        if not is_shared and self.config.is_sharded:  # the other ranks would not join in
            return f"one rank alone cannot save sharded weights; {self._newest()}"
        if not is_shared and not distributed.is_main():
            return "only rank 0 can save the run"
        self.trainer.forget_gradients()  # frees memory for saving
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
