"""When a run is saved: at the end of a step that is due, and when an error or a signal ends it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_fast.errors import SAVED, CheckpointError, NonFiniteLogits, Stopped
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs import checkpoint
from grpo_fast.train.runs.state import State, random_now, write_state
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.trainer import Trainer


class Saver:
    """Marks the ends of steps, and writes checkpoints of the latest mark.

    A mark refers to the weights and does not copy them. Its checkpoint can be written until the
    first optimizer step of the following step; after that a checkpoint would mix two steps.
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
        self.config, self.collector, self.trainer, self.report = config, collector, trainer, report
        self.can_save = config.optim.states == "full"  # no file holds the moments of the others
        self.saved_at = time.monotonic()
        self.state = State(
            step=0, before=None, after=None, metrics={}, unlogged=None, lengths=report.lengths(),
            random=random_now(), collector=collector.state_dict(),
            trainer=trainer.state_dict(), ahead=None, fallback=collector.engine.fallback,
            settings=settings,
        )  # fmt: skip
        self.mark()
        stopping.may_stop = lambda: not self.has_moved()

    def mark(self, **changes: Any) -> None:
        """Remember the run as it is now, with these changes of its state."""
        trainer, collector = self.trainer, self.collector
        tensors = trainer.weights()
        if self.can_save:
            tensors |= trainer.moments(tensors)
        # The state comes first: after an interrupt between the two assignments the versions do not
        # fit, and nothing is saved.
        self.state = dataclasses.replace(
            self.state, lengths=self.report.lengths(), random=random_now(),
            collector=collector.state_dict(), trainer=trainer.state_dict(),
            ahead=collector.sampled, fallback=collector.engine.fallback, **changes,
        )  # fmt: skip
        self.tensors = tensors
        self.versions = {id(tensor): tensor._version for tensor in tensors.values()}

    def has_moved(self) -> bool:
        """Return whether a weight or a moment has changed since the latest mark.

        torch's fused AdamW does not count versions of the weights that it changes. Before it
        changes any, it adds 1 to its step counters, which are tensors among the moments.
        """
        tensors = list(self.tensors.values())
        for optimizer in self.trainer.optimizers.values() if self.can_save else ():
            for moments in optimizer.adam.state.values():
                tensors += moments.values()
        # Moments that exist since the mark, and that no update has used, have version 0.
        return any(tensor._version != self.versions.get(id(tensor), 0) for tensor in tensors)

    def is_due(self) -> bool:
        """Return whether a checkpoint is due, by steps or by rank 0's clock. Collective."""
        plan, step = self.config.checkpoint, self.state.step
        by_step = plan.every and step % plan.every == 0
        seconds = 60 * plan.every_minutes
        is_late = distributed.from_main(lambda: 0 < seconds <= time.monotonic() - self.saved_at)
        return self.can_save and bool(by_step or is_late)

    def save(self) -> Path:
        """Write a checkpoint of the latest mark and prune the older ones. Collective."""
        if self.config.is_sharded:
            path = self._write()
        else:
            path = Path(distributed.from_main(lambda: str(self._write_alone())))
        self.saved_at = time.monotonic()
        return path

    def _write_alone(self) -> Path:
        """Write a checkpoint of weights that this rank has in full."""
        with distributed.alone():
            return self._write()

    def _write(self) -> Path:
        state, plan, run = self.state, self.config.checkpoint, self.report.folder

        def fill(folder: Path) -> None:
            self.report.sync()  # the logs are never behind a checkpoint
            self.trainer.policy.tokenizer.save_pretrained(folder / checkpoint.TOKENIZER)
            write_state(state, folder)

        value = None if plan.best is None else state.metrics.get(plan.best)
        path = checkpoint.write_checkpoint(run, state.step, self.tensors, fill, value)
        distributed.from_main(lambda: checkpoint.prune(run, plan.keep))
        return path

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save the latest mark if an error or a signal ends the run.

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
            # The weights of the latest mark are the broken ones: they must not replace good ones.
            error.add_note(self._newest())
            raise
        except BaseException as error:
            error.add_note(self._save_at_the_end(error))
            raise

    def _save_at_the_end(self, error: BaseException) -> str:
        """Save the latest mark if it can be saved; return a sentence with the checkpoint."""
        if not self.can_save:
            states = self.config.optim.states
            return f"not saved: a checkpoint needs optim.states=full, and this run has {states}"
        if self.has_moved():
            return f"the step was not finished; {self._newest()}"
        is_shared = distributed.is_of_all(error)
        if self.config.is_sharded and not is_shared:
            # The ranks without this error wait elsewhere.
            return f"one rank alone cannot save sharded weights; {self._newest()}"
        if not is_shared and not distributed.is_main():
            return "only rank 0 can save the run"
        self.trainer.forget_gradients()
        try:
            path = self.save() if is_shared else self._write_alone()
        except CheckpointError as failed:
            return f"{failed}; {self._newest()}"
        if isinstance(error, Stopped):
            error.code = SAVED
        return f"saved in {path}; resume=auto goes on from there"

    def _newest(self) -> str:
        path = checkpoint.newest(self.report.folder)
        if path is None:
            return "there is no checkpoint: resume=auto begins again"
        return f"the newest checkpoint is {path}: resume=auto repeats the steps after it"
