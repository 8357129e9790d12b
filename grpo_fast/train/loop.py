"""A run on one screen: model and data, then a step after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from grpo_fast.data.splits import Splits
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rollout import build_engine, check_prompts
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.collect.recorded import build_collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluation.asking import asking_lines
from grpo_fast.train.evaluation.evaluate import build_evaluation
from grpo_fast.train.models.loading import build_tokenizer, load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference, load_another
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.lines import closing_lines, memory_line, opening_lines
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.report.trackers import check_trackers
from grpo_fast.train.runs.export import save_models
from grpo_fast.train.runs.fingerprints import check_ranks, check_resumed, fingerprints
from grpo_fast.train.runs.resume import Start, entered
from grpo_fast.train.runs.run import Run
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.budget import host_peak
from grpo_fast.train.update.critic import load_critic
from grpo_fast.train.update.step import Step
from grpo_fast.train.update.trainer import Trainer
from grpo_fast.train.update.warm_start import warm_start

log = logging.getLogger(__name__)


def train(config: RunConfig) -> dict[str, Any]:
    """Run a recipe; returns the summary that also lies in `output_dir/summary.json`.

    The same configuration on the same machine gives the same metrics bit for bit, timings apart.

    Raises:
        ValueError: a configuration, data or a model that cannot be used.
        RunError: the run cannot go on, or the disk does not allow it.
        Stopped: (a SystemExit) a signal ended the run.
    """
    ranks = config.distributed, config.distributed_replicas, config.distributed_timeout
    with distributed.process_group(*ranks), entered(config) as start:
        return _train(start)


def _be_deterministic(seed: int) -> None:
    """The same bits in every run, without torch's fill of empty memory: it would be one more sweep
    over each buffer of the loss.
    """
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _load_inputs(start: Start) -> tuple[RewardSet, Splits, dict[str, str]]:
    """Rewards, data, and the fingerprints of all that a run depends on, which are checked."""
    config = start.config
    with distributed.together():
        rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
        splits = Splits(config.data, config.seed)
        check_examples(rewards, splits.listed, "training")
        prints = splits.fingerprints() | fingerprints(config)
    check_ranks(config.model_dump(mode="json"), prints)
    if start.checkpoint is not None:
        for name in check_resumed(start.fingerprints, prints, config.resume_allow):
            log.warning("the run goes on with another %s than it began with", name)
    return rewards, splits, prints


def _load_models(config: RunConfig, questions: Splits) -> tuple[Policy, Policy | None, Splits]:
    """Return the policy, a reference model of its own or None, and the questions as it is asked."""
    is_dealt = config.is_sharded and not distributed.is_main()  # rank 0 sends the weights
    with distributed.together():
        tokenizer = build_tokenizer(config.model, questions)
        policy = load_policy(config.model, tokenizer, empty=is_dealt)
        policy.template_kwargs = config.data.template_kwargs
        another = load_another(config.reference, config.model, policy)
    if not config.is_sharded:
        distributed.align([policy.model])
    return policy, another, questions.asked_of(policy.tokenizer)


def _kernels(policy: Policy) -> dict[str, Any]:
    return {
        "backend": route.head_route("auto", policy.head.weight).backend,
        "backend_fallback": route.fallback_reason(policy.device.type),
    }


def _train(start: Start) -> dict[str, Any]:
    started, memory_before, config = time.perf_counter(), host_peak(), start.config
    _be_deterministic(config.seed)
    check_trackers(config.log.trackers)
    rewards, questions, prints = _load_inputs(start)
    policy, another, questions = _load_models(config, questions)
    splits, longest = questions.with_shots(policy.tokenizer), config.rollout.max_new_tokens
    check_prompts(policy, [example.prompt for example in splits.listed], longest)
    evaluate = build_evaluation(config.eval, splits, policy, rewards, longest)
    report = RunReport(config.output_dir, config.log, config.steps, start.lengths, start.step)
    if start.checkpoint is None:
        start.enter_folder(report)
    with (
        report,
        build_engine(policy, config.rollout) as engine,
        Stopping().listening(policy.lm.base_model, policy.agreed),
        distributed.answered(),
    ):
        if config.warm_start is not None and start.checkpoint is None:
            warm_start(
                policy, questions.train, config.warm_start, seed=config.seed,
                is_sharded=config.is_sharded, log=report.log,
            )  # fmt: skip
        # Behind the warm start: a frozen reference is a copy of the policy that it led to.
        reference = Reference(policy, config.reference, another)
        critic = load_critic(config.critic, config.model, policy)
        trainer = Trainer(config, policy, reference, critic)
        collector = build_collector(config, policy, engine, rewards, PromptQueue(splits.train))
        run = Run(config, collector, trainer, report, evaluate, prints)
        if start.checkpoint is not None:
            run.load(start.checkpoint)
            start.enter_folder(report)  # cuts logs back: only now, so a failed start cuts none
            report.note(f"goes on from {start.checkpoint}")
        kernels = _kernels(policy)
        report.note(*opening_lines(config.rollout, kernels, engine.fallback))
        report.note(*asking_lines(splits.data, policy.tokenizer, splits.train[0].prompt))
        with run.saved_when_it_ends():
            for step in run.steps():
                make_step(step, collector, trainer, run.rest)
                run.finish(step)
        summary = {
            "before": run.state.before, "after": run.state.after, **kernels,
            **trainer.summary(memory_before), "seconds": time.perf_counter() - started,
        }  # fmt: skip
        report.finish(summary)
        if config.log.save_model:
            save_models(policy, critic, config.model, report.folder)
        report.note(memory_line(summary), *closing_lines(report.folder, config.has_code))
    return summary


def make_step(
    step: Step, collector: Collector, trainer: Trainer, rest: Callable[[Step], Any] = id
) -> None:
    """Completions, then μ passes of updates over them, from where the step stands.

    rest: called where the run can be left, and go on from there.
    """
    if step.collected is None:
        trainer.pack(step, collector.next(step.number, step.clock))
        rest(step)
    collector.begin_ahead(step.number, step.clock)
    if step.metrics is not None:
        return
    for minibatch in trainer.remaining(step):  # of all passes over the batch
        trainer.update(step, minibatch)  # hidden → fused loss → clip → optimizer
        rest(step)
    step.clock.lap("train")
    collector.settle_ahead(step.clock)
    trainer.finish(step)
    rest(step)
