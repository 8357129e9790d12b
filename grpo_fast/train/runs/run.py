"""The steps of a run in their order, and all that is written about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_fast.errors import (
    SAVED,
    CheckpointError,
    EngineError,
    NonFiniteGradient,
    NonFiniteLogits,
    Stopped,
)
from grpo_fast.objective.advantages import CENTERED
from grpo_fast.rewards import scorer_for
from grpo_fast.rollout import Engine, awake
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluation.evaluate import EvalResult
from grpo_fast.train.metrics.losses import finite, is_zero_on_policy
from grpo_fast.train.report.report import zero_line
from grpo_fast.train.report.samples import rows_of
from grpo_fast.train.runs.run_state import RunState
from grpo_fast.train.update.step import Step


class Run:
    """Hands out steps; logs, evaluates and saves them when they are made.

    Args:
        state: what a checkpoint holds, loaded from one or new.
        evaluate: asks the held-out questions.
        engine: samples the answers to them.
    """

    def __init__(
        self,
        config: RunConfig,
        state: RunState,
        evaluate: Callable[[Engine], EvalResult],
        engine: Engine,
    ) -> None:
        self.config, self.state, self.engine, self._evaluate = config, state, engine, evaluate
        self.report, self.trainer = state.report, state.trainer
        self.number = 0  # of the step that is being made

    def steps(self) -> Iterator[Step]:
        """All steps that are left, the one under way first; an evaluation before the first."""
        trainer, state = self.trainer, self.state
        is_first = trainer.updates_per_step == 1 and self.config.advantages in CENTERED
        if is_first and is_zero_on_policy(trainer.loss_config):
            self.report.note(zero_line(trainer.loss_config, self.config.advantages))
        if state.before is None:
            before = self.evaluate(0)
            self.report.log(0, before)
            state.before = state.after = before
            state.mark()
        for number in range(state.step + 1, self.config.steps + 1):
            self.number = number
            yield state.underway or trainer.begin(number)

    def rest(self, step: Step) -> None:
        """A place where the run can be left: what a checkpoint saved from here on goes on from."""
        self.state.underway = step
        self.state.mark()

    def finish(self, step: Step) -> None:
        """A step is made: evaluate and save if that is due, and write it down."""
        config, number = self.config, step.number
        metrics, after = dict(step.metrics), None
        if number == config.steps or (config.eval.every and number % config.eval.every == 0):
            metrics |= (after := self.evaluate(number))
        self.report.prompts(step.collected.prompts)
        for row in step.update_rows:
            self.report.log(number, row)
        self.report.log(number, finite(metrics))
        every = config.log.completions_every
        if every and (number in (1, config.steps) or number % every == 0):
            self.report.completions(number, self._rows(step))
        self.state.finish_step(number, finite(metrics), after)
        if config.checkpoint.every and number % config.checkpoint.every == 0:
            self.state.save()

    def evaluate(self, steps: int) -> dict[str, float]:
        """Metrics on the held-out questions, by the weights after so many steps."""
        with awake(self.engine, self.trainer.policy, version=steps) as engine:
            return self._evaluate(engine).metrics

    def _rows(self, step: Step) -> list[dict[str, Any]]:
        """The completions of a step for its table and for the page."""
        collected = step.collected._replace(advantages=step.batch.used_advantages())
        answers = [example.answer for example in collected.examples if example.answer]
        return rows_of(
            collected, self.trainer.policy.tokenizer, scorer_for(self.config.data.task, answers),
            count=self.config.log.completions, group_size=self.config.rollout.group_size,
        )  # fmt: skip

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save a checkpoint when a signal, the engine or the gradients end the run.

        Other errors leave the checkpoints that are there.
        """
        try:
            yield
        except NonFiniteLogits as error:
            when = f"at step {self.number}" if self.number else "before the first step"
            advice = "a lower optim.lr or a wider model.dtype may help"
            raise NonFiniteLogits(f"{error} {when}; {advice}") from None
        except NonFiniteGradient as error:
            raise NonFiniteGradient(f"{error}; {self._saved()}") from None
        except EngineError as error:
            raise EngineError(f"{error}; {self._saved()}") from error
        except Stopped as stopped:
            self.trainer.forget_gradients()
            path = self.state.save()
            stopped.code = SAVED
            self.report.note(f"{stopped.name}: saved in {path}; resume=auto goes on from there")
            raise

    def _saved(self) -> str:
        try:
            return f"saved in {self.state.save()}"
        except CheckpointError as error:
            return str(error)
