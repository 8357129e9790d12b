"""The steps of a run in their order: logged, evaluated and saved when they are made."""

from __future__ import annotations

import dataclasses
import functools
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_fast.errors import (
    SAVED,
    CheckpointError,
    EngineError,
    NonFiniteGradient,
    NonFiniteLogits,
    RankError,
    Stopped,
    require,
)
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.rewards import scorer_for
from grpo_fast.rollout import Engine, awake
from grpo_fast.rollout.saved import split_tensors
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics.losses import finite
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.lines import ONE_UPDATE, USUAL_CLIP
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.report.samples import rows_of
from grpo_fast.train.runs import checkpoint, storage
from grpo_fast.train.runs.state import RandomState, State, check_round_trip, read_state
from grpo_fast.train.update.step import Step, update_rows
from grpo_fast.train.update.trainer import Trainer


class Run:
    """Hands out steps; logs, evaluates and saves them when they are made."""

    def __init__(
        self,
        config: RunConfig,
        collector: Collector,
        trainer: Trainer,
        report: RunReport,
        evaluate: Callable[[Engine], dict[str, float]],
        fingerprints: dict[str, str],
    ) -> None:
        self.config, self.collector, self.trainer, self.report = config, collector, trainer, report
        self.engine, self._evaluate = collector.engine, evaluate
        self.id = uuid.uuid4().hex  # by which the run knows its own checkpoints
        self.state = State(
            step=0, before=None, after=None, metrics={}, lengths=report.lengths(),
            random=RandomState.now(), collector=collector.state_dict(),
            trainer=trainer.state_dict(), underway=None, ahead=None, fallback=self.engine.fallback,
            training_set=len(collector.queue.examples), fingerprints=fingerprints,
            config=config.model_dump(mode="json"),
        )  # fmt: skip

    def steps(self) -> Iterator[Step]:
        """All steps that are left, the one under way first; an evaluation before the first."""
        trainer, state = self.trainer, self.state
        if trainer.updates_per_step == 1:
            self.report.note(ONE_UPDATE)
        elif OBJECTIVES[trainer.loss_config.loss_type].clips == "ppo":
            self.report.note(USUAL_CLIP)
        if state.before is None:
            before = self.evaluate(0)
            self.report.log(0, before)
            state.before = state.after = before
            self.mark()
        for number in range(state.step + 1, self.config.steps + 1):
            yield state.underway or Step(number)

    def mark(self) -> None:
        """Remember what a rollout or an evaluation changes: one that is cut off starts again."""
        self.state.collector = self.collector.state_dict()
        self.state.lengths = self.report.lengths()
        self.state.random = RandomState.now()

    def rest(self, step: Step) -> None:
        """Mark a place where the run can be left: a checkpoint saved from now on begins here."""
        self.state.underway = step
        self.mark()

    def finish(self, step: Step) -> None:
        """Write a step down that is made; evaluate and save if that is due."""
        config, number, state = self.config, step.number, self.state
        metrics = dict(step.metrics)
        if number == config.steps or (config.eval.every and number % config.eval.every == 0):
            metrics |= (after := self.evaluate(number))
            state.after = after or state.after
        self.report.prompts([vars(row) for row in step.collected.prompts])
        if config.log.every_update:
            for row in update_rows(step.updates, (number - 1) * self.trainer.updates_per_step + 1):
                self.report.log(number, row)
        self.report.log(number, finite(metrics))
        every = config.log.completions_every
        if every and (number in (1, config.steps) or number % every == 0):
            self.report.completions(number, self._rows(step))
        state.step, state.metrics, state.underway = number, finite(metrics), None
        self.mark()
        if config.checkpoint.every and number % config.checkpoint.every == 0:
            self.save()

    def evaluate(self, steps: int) -> dict[str, float]:
        """Metrics on the held-out questions, by the weights after so many steps."""
        with awake(self.engine, self.trainer.policy, version=steps) as engine:
            return self._evaluate(engine)

    def _rows(self, step: Step) -> list[dict[str, Any]]:
        examples = self.collector.examples_of(step.collected)
        return rows_of(
            step.collected, step.batch.used_advantages(), examples, self.trainer.policy.tokenizer,
            functools.partial(scorer_for, self.config.data.task),
            count=self.config.log.completions, group_size=self.config.rollout.group_size,
        )  # fmt: skip

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save a checkpoint when a signal, the engine or the gradients end the run."""
        try:
            yield
        except NonFiniteLogits as error:
            has_begun = self.state.before is not None
            when = f"at step {self.state.step + 1}" if has_begun else "before the first step"
            advice = "a lower optim.lr or a wider model.dtype may help"
            raise NonFiniteLogits(f"{error} {when}; {advice}") from None
        except (NonFiniteGradient, EngineError) as error:
            raise type(error)(f"{error}; {self._saved()}") from error
        except Stopped as stopped:
            self.trainer.forget_gradients()
            path = self.save()
            stopped.code = SAVED
            self.report.note(f"{stopped.name}: saved in {path}; resume=auto goes on from there")
            raise

    def _saved(self) -> str:
        try:
            return f"saved in {self.save()}"
        except CheckpointError as error:
            return str(error)

    def save(self) -> Path:
        """Write a checkpoint of the latest mark, and prune the older ones. Collective."""
        trainer, config, underway = self.trainer, self.config, self.state.underway
        expected, states = "optim.states: full, whose moments a file can hold", config.optim.states
        require(states == "full", "checkpoint", expected, states, CheckpointError)
        name = checkpoint.name_of(self.state.step, 0 if underway is None else underway.place)
        best = config.checkpoint.best if underway is None else None
        value = None if best is None else self.state.metrics.get(best)
        self.report.sync()
        tensors: dict[str, torch.Tensor] = {}
        state = split_tensors(self._stored(), tensors)
        weights = trainer.weights()

        def fill(folder: Path) -> None:
            from safetensors.torch import save_file

            trainer.policy.tokenizer.save_pretrained(folder / checkpoint.TOKENIZER)
            save_file(tensors, folder / checkpoint.STATE_TENSORS)
            (folder / checkpoint.STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")

        path = checkpoint.write_checkpoint(
            self.report.folder, name, weights | trainer.moments(weights), fill,
            {"run": self.id, "step": self.state.step, "value": value},
        )  # fmt: skip
        distributed.from_main(lambda: checkpoint.prune(path, config.checkpoint.keep))
        return path

    def _stored(self) -> State:
        """The state for a checkpoint. Collective: a rank has its own part of a step."""
        underway = self.state.underway
        return dataclasses.replace(
            self.state, trainer=self.trainer.state_dict(), fallback=self.engine.fallback,
            underway=None if underway is None else underway.stored(),
            ahead=self.collector.ahead_state(),
        )  # fmt: skip

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Collective. Raises ValueError for one that does not fit."""
        from safetensors.torch import load_file

        with _refused(folder):
            with distributed.together():
                state = read_state(folder, load_file(folder / checkpoint.STATE_TENSORS))
                weights = self.trainer.weights()
                stored = storage.stored_names(folder / checkpoint.WEIGHTS)
                weights |= self.trainer.moments(weights, stored)
            storage.read_tensors(folder / checkpoint.WEIGHTS, weights)
            with distributed.together():
                self._load_state(folder, state)
            again = self._stored()  # collective, so not inside of `together`
            with distributed.together():
                if distributed.is_main():
                    check_round_trip(again, folder)
                # At the end: building and loading have drawn numbers.
                state.random.restore()
                self.state.random = RandomState.now()

    def _load_state(self, folder: Path, state: State) -> None:
        collector, trainer, step = self.collector, self.trainer, state.underway
        vocab_size = trainer.policy.head.weight.shape[0]
        collector.load_state_dict(state.collector)
        trainer.load_state_dict(state.trainer)
        if step is not None:
            _check_place(step, state.step + 1, trainer.updates_per_step)
            step.collected.rollout.check(vocab_size)
            collector.examples_of(step.collected)  # raises for prompts of other completions
            trainer.resume(step)
        if state.ahead is not None:
            state.ahead.rollout.check(vocab_size)
        collector.sampled = state.ahead
        # Sample as the run before did: by transformers' `generate` where its own loop was not.
        if state.fallback is not None:
            self.engine.fallback = state.fallback
        elif self.engine.fallback is not None:
            now = "which this one cannot take: its bits are others from here on"
            self.report.note(f"resume: the run before sampled by its own loop, {now}")
        if folder.parent.parent.resolve() == Path(self.report.folder).resolve():
            self.id = checkpoint.read_manifest(folder).run
        self.state = dataclasses.replace(
            state, config=self.state.config, fingerprints=self.state.fingerprints,
            training_set=self.state.training_set,
        )  # fmt: skip
        self.mark()


def _check_place(step: Step, number: int, most_updates: int) -> None:
    """Raise a ValueError for another step than this one, or for one without its completions."""
    made, has_all = len(step.updates), step.collected is not None and step.packing is not None
    fits = has_all and step.number == number and made <= most_updates
    came = f"step {step.number} with {made} updates"
    require(fits, f"{checkpoint.STATE}: underway", f"a place in step {number}", came)


@contextmanager
def _refused(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the readers of safetensors have classes of their own
        is_of_ranks = isinstance(error, (torch.distributed.DistError, RankError))
        if is_of_ranks or isinstance(error, MemoryError) or "gloo/" in str(error):
            raise
        text = f"{type(error).__name__} {error}" if isinstance(error, LookupError) else str(error)
        said = f"expected a checkpoint of this configuration in {folder}"
        raise ValueError(f"resume: {said}, got another: {text}") from error
