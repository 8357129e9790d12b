"""A run on one screen: model and data, then a step after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from grpo_fast.data import load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rollout import Engine, build_engine, check_prompts
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.collect.prompts import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluation.evaluate import build_evaluation
from grpo_fast.train.files import written
from grpo_fast.train.models.loading import build_tokenizer, load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import check_reference
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import (
    RunReport,
    kernels_line,
    memory_line,
    sampler_line,
    support_line,
)
from grpo_fast.train.report.silent_report import SilentReport
from grpo_fast.train.report.trackers import check_trackers
from grpo_fast.train.runs.resume import Start, find_start
from grpo_fast.train.runs.run import Run
from grpo_fast.train.runs.run_state import RunState
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.step import Step
from grpo_fast.train.update.budget import host_peak
from grpo_fast.train.update.critic import load_critic
from grpo_fast.train.update.trainer import Trainer
from grpo_fast.train.update.warm_start import warm_start

log = logging.getLogger(__name__)


def train(config: RunConfig) -> dict[str, Any]:
    """Run a recipe; returns the summary that also lies in `output_dir/summary.json`.

    The same configuration on the same machine gives the same metrics bit for bit, timings apart.

    Raises:
        ValueError: a configuration, data or a model that cannot be used.
        NonFiniteLogits, NonFiniteGradient, RewardError, EngineError: the run cannot go on.
        CheckpointError, WriteError: the disk is full, or does not allow it.
        Stopped: (a SystemExit) a signal ended the run.
    """
    ranks = config.distributed, config.distributed_replicas, config.distributed_timeout
    with distributed.joined(*ranks):
        return _train(config)


def _train(config: RunConfig) -> dict[str, Any]:
    started, memory_before = time.perf_counter(), host_peak()
    torch.manual_seed(config.seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    start = agreed_start(config)
    check_trackers(config.log.trackers)
    rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
    plain = config.data.model_copy(update={"shots_tokens": None})
    questions = load_examples(plain, split="train", seed=config.seed)
    # Of examples that are made when asked for, all alike, the first is checked.
    known = questions if isinstance(questions, list) else questions[:1]
    check_examples(rewards, known, "training")
    policy = load_policy(config.model, build_tokenizer(config, questions))
    distributed.align([policy.model])
    check_reference(config.reference, config.model, policy.tokenizer)
    counted = token_counter(policy.tokenizer)
    examples = load_examples(config.data, split="train", seed=config.seed, count_tokens=counted)
    listed = examples if isinstance(examples, list) else examples[:1]
    check_prompts(policy, [example.prompt for example in listed], config.rollout.max_new_tokens)
    evaluate = build_evaluation(config, policy, rewards)
    kernels = {
        "backend": route.head_route("auto", policy.head.weight).backend,
        "backend_fallback": route.fallback_reason(policy.device.type),
    }
    with (
        open_report(config, start) as report,
        build_engine(policy, config.rollout) as engine,
        Stopping().listening(policy.lm.base_model, agreement(policy)),
    ):
        report.note(kernels_line(kernels))
        if config.rollout.wants_kept:
            report.note(support_line(config.rollout))
        if config.warm_start is not None and start.checkpoint is None:
            warm_start(policy, questions, config.warm_start, seed=config.seed, log=report.log)
        trainer = Trainer(config, policy, load_critic(config, policy))
        collector = build_collector(config, policy, engine, rewards, PromptQueue(examples))
        state = RunState(collector, trainer, report)
        if start.checkpoint is not None:
            state.load(start.checkpoint)
        report.note(sampler_line(config.rollout.engine, engine.fallback))
        run = Run(config, state, evaluate, engine)
        with run.saved_when_it_ends():
            run_steps(run, collector, trainer)
        summary = {
            "before": state.before, "after": state.after, **kernels,
            **trainer.summary(memory_before), "seconds": time.perf_counter() - started,
        }  # fmt: skip
        report.finish(summary)
        report.note(memory_line(summary))
        if config.log.save_model:
            save_models(trainer, report.folder)
    return summary


def build_collector(
    config: RunConfig, policy: Policy, engine: Engine, rewards: RewardSet, queue: PromptQueue
) -> Collector:
    """The collector of a run."""
    group_size = config.rollout.group_size
    advantages = Advantages(config.advantages, config.advantage_options, group_size)
    return Collector(
        config.rollout, policy, engine, rewards, queue, advantages,
        seed=config.seed, steps=config.steps,
    )  # fmt: skip


def agreement(policy: Policy) -> Callable[[], AbstractContextManager[None]]:
    """How the ranks agree on a signal in a forward pass, where they make that in step."""
    return lambda: distributed.together() if policy.in_step else nullcontext()


def agreed_start(config: RunConfig) -> Start:
    """Where the run begins, as rank 0 finds it."""

    def found() -> list[Any]:
        start = find_start(config, log.warning)
        return [None if start.checkpoint is None else str(start.checkpoint), *start[1:]]

    checkpoint, (metrics, prompts), again = distributed.from_main(found)
    return Start(None if checkpoint is None else Path(checkpoint), (metrics, prompts), again)


def open_report(config: RunConfig, start: Start) -> RunReport:
    """Rank 0's, or one that writes nothing."""
    with distributed.together():
        if not distributed.is_main():
            return SilentReport(config.output_dir)
        return RunReport(config.output_dir, config, start=start)


def save_models(trainer: Trainer, folder: Path) -> None:
    """What the run was for, behind its summary: a disk that is full costs no more than this."""
    critic = None if trainer.critic is None else trainer.critic.gathered()
    policy = trainer.policy.gathered()
    with distributed.together(), written(folder / "model"):
        if distributed.is_main():
            policy.save(folder / "model")
            if critic is not None:
                critic.save(folder / "critic")


def run_steps(run: Run, collector: Collector, trainer: Trainer) -> None:
    """All steps that are left."""
    for step in run.steps():
        make_step(step, collector, trainer, run.rest)
        run.finish(step)


def make_step(
    step: Step, collector: Collector, trainer: Trainer, rest: Callable[[Step], Any] = id
) -> None:
    """Completions, then μ passes of updates over them, from where the step stands.

    rest: called where the run can be left, and go on from there.
    """
    if step.collected is None:
        trainer.pack(step, collector.next(step.number, step.clock))
        rest(step)
    collector.sample_ahead(step.number, step.clock)
    if step.metrics is not None:
        return
    for minibatch in trainer.remaining(step):  # of all passes over the batch
        trainer.update(step, minibatch)  # hidden → fused loss → clip → optimizer
        rest(step)
    step.clock.lap("train")
    collector.settle(step.clock)
    trainer.finish(step)
    rest(step)
