"""Top level of a training run. It loads the models, runs the steps and saves the result."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import Any

from grpo_fast.kernels import route
from grpo_fast.rewards import scorer_for
from grpo_fast.rollout import awake, build_engine, prompt_texts
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import finite
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.page import rows_of
from grpo_fast.train.report.report import RunReport, closing_lines, opening_lines
from grpo_fast.train.runs.build import Evaluation, build, load
from grpo_fast.train.runs.export import save_models
from grpo_fast.train.runs.resume import run_start
from grpo_fast.train.runs.saving import Rows, Saver
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.trainer import Step, Trainer

log = logging.getLogger(__name__)

SHOWN = 8  # number of completions in a saved table, which is rounded up to complete groups


def train(config: RunConfig) -> dict[str, Any]:
    """Train a model with a configuration.

    The numbered comments in this file name the parts of a run. On the same machine, the same
    configuration gives bitwise identical metrics, except for timings.

    Args:
        config: the configuration, for example from `load_recipe`.

    Returns:
        The summary of the run, which is also written to `output_dir/summary.json`.

    Raises:
        ValueError: the configuration, the data or a model is invalid.
        RunError: the run cannot continue, or the disk is full or read-only.
        Stopped: a signal ended the run. This exception is a SystemExit.
    """
    started = time.perf_counter()
    ranks = config.distributed, config.distributed_replicas, config.distributed_timeout
    with distributed.process_group(*ranks), run_start(config) as start:
        # 1. Load rewards, data and models. Invalid input raises an error here, before any step.
        loaded = load(start)
        policy = loaded.policy
        stopping = Stopping()
        report = RunReport(config.output_dir, config.log, config.steps, *start.logged)
        if start.checkpoint is None:
            start.enter_folder(report)
        with (
            stopping.listening(policy.lm.base_model, policy.agreed),
            report,
            build_engine(policy, config.rollout) as engine,
        ):
            saver = build(start, loaded, engine, report, stopping)
            kernels = {
                "backend": route.head_route("auto", policy.head.weight).backend,
                "backend_fallback": route.fallback_reason(policy.device.type),
            }
            report.note(*opening_lines(config.rollout, kernels, engine.fallback))
            report.note(*loaded.asking)
            with saver.saved_when_it_ends(), distributed.as_rank_error():
                _make_steps(saver, loaded.evaluate, stopping)
                summary = {
                    "before": saver.state.before, "after": saver.state.after, **kernels,
                    **saver.trainer.summary(),
                    "seconds": time.perf_counter() - started,
                }  # fmt: skip
                with distributed.together():
                    report.finish(summary)
                if config.log.save_model:
                    save_models(policy, saver.trainer.critic, config.model, report.folder)
            report.note(*closing_lines(report.folder, config.has_code))
        return summary


def _make_steps(saver: Saver, evaluate: Evaluation, stopping: Stopping) -> None:
    """Evaluate the model before training, and then run, log and save all remaining steps."""
    trainer = saver.trainer
    collector = saver.collector
    if saver.state.before is None:
        before = _evaluated(0, saver, evaluate)
        saver.report.log(0, before)
        saver.mark(before=before, after=before)
    _log(saver, evaluate)  # in a resumed run, the last finished step may not be logged yet
    for number in range(saver.state.step + 1, saver.config.steps + 1):
        step, metrics = make_step(number, collector, trainer)  # parts 2 to 6
        # 7. Record the step and its log rows first, so that an error in logging or evaluation does
        # not lose the step. Then evaluate the model if an evaluation is due, and log the step.
        saver.mark(step=number, unlogged=_rows(step, metrics, collector, trainer))
        _log(saver, evaluate)
        # 8. Save a checkpoint if one is due.
        if saver.is_due():
            saver.save()
        with distributed.together():
            stopping.raise_if_asked()


def make_step(number: int, collector: Collector, trainer: Trainer) -> tuple[Step, dict[str, float]]:
    """Run one training step, and return the step and its metrics. All ranks must call this.

    Args:
        number: number of the step, counted from 1.
        collector: the object that samples and scores completions.
        trainer: the object that updates the weights.
    """
    clock = Clock()
    # 2. Sample G completions of each prompt. 3. Score the completions. 4. Compute advantages.
    collected = collector.next(number, clock)
    # 5. Pack the samples into micro-batches. With rollout.ahead, start sampling for the next step.
    step = trainer.pack(number, clock, collected)
    collector.begin_ahead(number, clock)
    # 6. Update the weights: hidden states → fused loss → backward → gradient clipping → optimizer.
    for minibatch in trainer.minibatches(step):
        trainer.update(step, minibatch)
    clock.lap("train")
    collector.settle_ahead(clock)
    return step, trainer.finish(step)


def _rows(step: Step, metrics: dict[str, float], collector: Collector, trainer: Trainer) -> Rows:
    """Return the log rows of a step: its metrics and, if due, its table of completions.

    All ranks must call this function.
    """
    config = trainer.config
    number = step.number
    rows = Rows(finite(metrics), [])
    every = config.log.completions_every
    if every and (number in (1, config.steps) or number % every == 0):
        size = config.rollout.group_size
        groups = math.ceil(SHOWN / size)
        samples = step.batch.samples
        shown = samples[list(range(min(len(samples), groups * size)))]
        examples = collector.examples_of(shown)
        sent = prompt_texts(trainer.policy, [example.prompt for example in examples])
        rows.completions = rows_of(
            shown, step.batch.used_advantages(), examples, sent, trainer.policy.tokenizer,
            partial(scorer_for, config.data.task), group_size=size,
        )  # fmt: skip
    return rows


def _log(saver: Saver, evaluate: Evaluation) -> None:
    """Evaluate the model if due, and log the last finished step, unless it is already logged."""
    rows = saver.state.unlogged
    if rows is None:
        return
    number = saver.state.step
    report = saver.report
    found = _evaluated(number, saver, evaluate)
    with distributed.together():  # only rank 0 writes, and its error ends all ranks
        if rows.completions:
            report.completions(number, rows.completions)
        report.log(number, finite(rows.metrics | found))
    saver.mark(after=found or saver.state.after, unlogged=None)


def _evaluated(number: int, saver: Saver, evaluate: Evaluation) -> dict[str, float]:
    """Evaluate the model after a step and return the metrics, or {} if no evaluation is due."""
    every = saver.config.eval.every
    is_due = number in (0, saver.config.steps) or (every and number % every == 0)
    if not is_due:
        return {}
    with awake(saver.collector.engine, saver.trainer.policy, version=number) as engine:
        return evaluate(engine)
