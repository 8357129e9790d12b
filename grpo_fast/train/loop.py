"""A run from top to bottom: load, then step by step sample, score, update, log, evaluate, save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from grpo_fast.data.splits import Splits
from grpo_fast.kernels import route
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.rewards import RewardSet, build_rewards, check_examples, scorer_for
from grpo_fast.rollout import Engine, awake, build_engine, check_prompts
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.collect.recorded import build_collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluation.evaluate import build_evaluation
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import finite
from grpo_fast.train.models.loading import build_tokenizer, load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference, load_another
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.lines import (
    ONE_UPDATE,
    USUAL_CLIP,
    closing_lines,
    memory_line,
    opening_lines,
)
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.report.samples import rows_of
from grpo_fast.train.report.trackers import check_trackers
from grpo_fast.train.runs.export import save_models
from grpo_fast.train.runs.fingerprints import FILES, check_ranks, check_same, fingerprints
from grpo_fast.train.runs.resume import Start, entered, resume
from grpo_fast.train.runs.saving import Saver
from grpo_fast.train.runs.state import Rows
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.budget import host_peak
from grpo_fast.train.update.critic import load_critic
from grpo_fast.train.update.step import Step, update_rows
from grpo_fast.train.update.trainer import Trainer
from grpo_fast.train.update.warm_start import warm_start

log = logging.getLogger(__name__)
Evaluation = Callable[[Engine], dict[str, float]]


def train(config: RunConfig) -> dict[str, Any]:
    """Run a recipe and return its summary, which is also in `output_dir/summary.json`.

    The same configuration on the same machine gives the same metrics bit for bit, timings apart.

    Raises:
        ValueError: a configuration, data or a model cannot be used.
        RunError: the run cannot go on, or the disk is full or read-only.
        Stopped: a signal ended the run (a SystemExit).
    """
    ranks = config.distributed, config.distributed_replicas, config.distributed_timeout
    with distributed.process_group(*ranks), entered(config) as start:
        return _train(start)


def _be_deterministic(seed: int) -> None:
    """Make torch deterministic, without its fill of empty memory, which costs another pass over
    each buffer of the loss.
    """
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _load_inputs(start: Start) -> tuple[RewardSet, Splits, dict[str, Any]]:
    """Return rewards, data, and all that the run depends on: settings and fingerprints."""
    config = start.config
    with distributed.together():
        rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
        splits = Splits(config.data, config.seed)
        check_examples(rewards, splits.listed, "training")
        prints = splits.fingerprints() | fingerprints(config)
    settings = {**config.model_dump(mode="json"), FILES: prints}
    check_ranks(settings)
    if start.state is not None:
        check_same(start.state.settings, settings, config.resume_allow)
    return rewards, splits, settings


def _load_models(config: RunConfig, questions: Splits) -> tuple[Policy, Policy | None]:
    """Return the policy, and the reference if it is a different model."""
    is_dealt = config.is_sharded and not distributed.is_main()  # rank 0 sends the weights
    with distributed.together():
        tokenizer = build_tokenizer(config.model, questions)
        policy = load_policy(config.model, tokenizer, empty=is_dealt)
        another = load_another(config.reference, config.model, policy)
    if not config.is_sharded:
        distributed.align([policy.model])
    return policy, another


def _train(start: Start) -> dict[str, Any]:
    started, memory_before, config = time.perf_counter(), host_peak(), start.config
    # 1 load
    _be_deterministic(config.seed)
    check_trackers(config.log.trackers)
    rewards, questions, settings = _load_inputs(start)
    policy, another = _load_models(config, questions)
    splits, longest = questions.with_shots(policy.tokenizer), config.rollout.max_new_tokens
    check_prompts(policy, [example.prompt for example in splits.listed], longest)
    evaluate = build_evaluation(config.eval, splits, policy, rewards, longest)
    report = RunReport(config.output_dir, config.log, config.steps, *start.logged)
    if start.checkpoint is None:
        start.enter_folder(report)
    stopping = Stopping()
    with (
        stopping.listening(policy.lm.base_model, policy.agreed),
        report,
        build_engine(policy, config.rollout) as engine,
        distributed.answered(),
    ):
        if config.warm_start is not None and start.checkpoint is None:
            warm_start(
                policy, questions.train, config.warm_start, seed=config.seed,
                is_sharded=config.is_sharded, log=report.log,
            )  # fmt: skip
        # After the warm start: a frozen reference is a copy of the policy that it led to.
        reference = Reference(policy, config.reference, another)
        critic = load_critic(config.critic, config.model, policy)
        trainer = Trainer(config, policy, reference, critic)
        collector = build_collector(config, policy, engine, rewards, PromptQueue(splits.train))
        saver = Saver(config, collector, trainer, report, settings, stopping)
        resume(start, saver)
        kernels = {
            "backend": route.head_route("auto", policy.head.weight).backend,
            "backend_fallback": route.fallback_reason(policy.device.type),
        }
        report.note(*opening_lines(config.rollout, kernels, engine.fallback))
        _note_updates(trainer, report)
        with saver.saved_when_it_ends(), distributed.answered():
            _make_steps(saver, evaluate, stopping)
            summary = {
                "before": saver.state.before, "after": saver.state.after, **kernels,
                **trainer.summary(memory_before), "seconds": time.perf_counter() - started,
            }  # fmt: skip
            report.finish(summary)
            if config.log.save_model:
                save_models(policy, critic, config.model, report.folder)
        report.note(memory_line(summary), *closing_lines(report.folder, config.has_code))
    return summary


def _make_steps(saver: Saver, evaluate: Evaluation, stopping: Stopping) -> None:
    """Make, log and save the steps that are left, after an evaluation of the untrained model."""
    if saver.state.before is None:
        before = _evaluated(0, saver, evaluate)
        saver.report.log(0, before)
        saver.mark(before=before, after=before)
    _log(saver, evaluate)  # a step that was saved before it was logged
    for number in range(saver.state.step + 1, saver.config.steps + 1):
        # 2 to 6
        step, metrics = make_step(number, saver.collector, saver.trainer)
        # 7 log and evaluate
        rows = _rows(step, metrics, saver.collector, saver.trainer)
        saver.mark(step=number, unlogged=rows)
        _log(saver, evaluate)
        # 8 save
        if saver.is_due():
            saver.save()
        with distributed.together():
            stopping.raise_if_asked()


def make_step(number: int, collector: Collector, trainer: Trainer) -> tuple[Step, dict[str, float]]:
    """Make one step of training and return it with its metrics."""
    clock = Clock()
    # 2 sample, 3 score, 4 advantages
    collected = collector.next(number, clock)
    # 5 pack and precompute
    step = trainer.pack(number, clock, collected)
    collector.begin_ahead(number, clock)
    # 6 update: hidden states → fused loss → backward → clip → optimizer
    for minibatch in trainer.minibatches(step):
        trainer.update(step, minibatch)
    clock.lap("train")
    collector.settle_ahead(clock)
    return step, trainer.finish(step)


def _rows(step: Step, metrics: dict[str, float], collector: Collector, trainer: Trainer) -> Rows:
    """Return what a finished step has to log. Collective: each rank has a part of its batch."""
    config, number = trainer.config, step.number
    rows = Rows(finite(metrics), [], [vars(record) for record in step.collected.prompts], [])
    if config.log.every_update:
        rows.updates = update_rows(step.updates, (number - 1) * trainer.updates_per_step + 1)
    every = config.log.completions_every
    if every and (number in (1, config.steps) or number % every == 0):
        examples = collector.examples_of(step.collected)
        answers = [example.answer for example in examples if example.answer]
        rows.completions = rows_of(
            step.collected, step.batch.used_advantages(), examples, trainer.policy.tokenizer,
            scorer_for(config.data.task, answers), count=config.log.completions,
            group_size=config.rollout.group_size,
        )  # fmt: skip
    return rows


def _log(saver: Saver, evaluate: Evaluation) -> None:
    """Log the latest finished step, unless it is logged, with an evaluation if one is due."""
    rows, number, config = saver.state.unlogged, saver.state.step, saver.config
    if rows is None:
        return
    report, metrics, after = saver.report, rows.metrics, saver.state.after
    report.prompts(rows.prompts)
    for row in rows.updates:
        report.log(number, row)
    if rows.completions:
        report.completions(number, rows.completions)
    every = config.eval.every
    if number == config.steps or (every and number % every == 0):
        found = _evaluated(number, saver, evaluate)
        metrics, after = finite(metrics | found), found or after
    report.log(number, metrics)
    saver.mark(metrics=metrics, after=after, unlogged=None)


def _evaluated(number: int, saver: Saver, evaluate: Evaluation) -> dict[str, float]:
    """Return metrics on the held-out questions, by the weights after `number` steps."""
    with awake(saver.collector.engine, saver.trainer.policy, version=number) as engine:
        return evaluate(engine)


def _note_updates(trainer: Trainer, report: RunReport) -> None:
    if trainer.updates_per_step == 1:
        report.note(ONE_UPDATE)
    elif OBJECTIVES[trainer.loss_config.loss_type].clips == "ppo":
        report.note(USUAL_CLIP)
