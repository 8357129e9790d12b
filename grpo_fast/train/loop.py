"""A run: model and data, a step after the other (trainer.py), evaluations, the run's folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from grpo_fast.data import Example, load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rollout import (
    Engine,
    EngineError,
    NonFiniteLogits,
    awake,
    build_engine,
    check_prompts,
)
from grpo_fast.train.collect.prompts import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.run import SHARDED
from grpo_fast.train.evaluation.evaluate import EvalResult, build_evaluation
from grpo_fast.train.files import written
from grpo_fast.train.metrics.losses import finite, is_policy_alone
from grpo_fast.train.models.loading import build_tokenizer, load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import check_reference
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport, kernels_line, memory_line, support_line
from grpo_fast.train.report.silent_report import SilentReport
from grpo_fast.train.report.trackers import check_trackers
from grpo_fast.train.runs.checkpoint import CheckpointError
from grpo_fast.train.runs.export import unsharded_models
from grpo_fast.train.runs.fingerprints import check_ranks, check_resumed, fingerprints
from grpo_fast.train.runs.folder import FolderLock
from grpo_fast.train.runs.resume import Start, find_start, lock_existing
from grpo_fast.train.runs.run_state import RunState
from grpo_fast.train.runs.stopping import SAVED, Stopped, Stopping
from grpo_fast.train.update.budget import host_peak
from grpo_fast.train.update.critic import load_critic
from grpo_fast.train.update.optimizer import NonFiniteGradient
from grpo_fast.train.update.trainer import Trainer
from grpo_fast.train.update.warm_start import warm_start

log = logging.getLogger(__name__)

LOSS_IS_ZERO = (
    "one update per batch: the loss stays near 0 while its gradient does not; watch reward and "
    "grad_norm"
)


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
    with distributed.joined(*ranks), locked(config.output_dir) as lock:
        return _train(config, lock)


def _train(config: RunConfig, lock: FolderLock | None) -> dict[str, Any]:
    started, memory_before = time.perf_counter(), host_peak()
    torch.manual_seed(config.seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    start = agreed_start(config)
    check_trackers(config.log.trackers)
    rewards, questions, prints = load_inputs(config, start)
    with distributed.together():
        tokenizer = build_tokenizer(config, questions)
        policy = load_policy(config.model, tokenizer, empty=is_dealt_to(config))
    if config.distributed not in SHARDED:
        distributed.align([policy.model])
    check_reference(config.reference, config.model, policy.tokenizer)
    counted = token_counter(policy.tokenizer)
    examples = load_examples(config.data, split="train", seed=config.seed, count_tokens=counted)
    listed = examples if isinstance(examples, list) else examples[:1]
    check_prompts(policy, [example.prompt for example in listed], config.rollout.max_new_tokens)
    evaluate = build_evaluation(config, policy, rewards)
    with (
        open_report(config, start, lock) as report,
        build_engine(policy, config.rollout) as engine,
        Stopping().listening(policy.lm.base_model, agreement(policy)),
        distributed.answered(),
    ):
        if config.rollout.wants_kept:
            report.note(support_line(config.rollout))
        if config.warm_start is not None and start.checkpoint is None:
            with distributed.together(), warm_starting(config) as is_here:
                if is_here:
                    options = config.warm_start
                    warm_start(policy, questions, options, seed=config.seed, log=report.log)
        trainer = Trainer(config, policy, rewards, load_critic(config, policy), engine)
        kernels = kernels_of(policy)
        report.note(kernels_line(kernels))
        state = RunState(trainer, PromptQueue(examples), report, prints)
        if start.checkpoint is not None:
            state.load(start.checkpoint)
            begin_again(report)
            report.note(f"goes on from {start.checkpoint}")
        with saved_when_it_ends(state):
            run_steps(state, evaluate)
        summary = {
            "before": state.before, "after": state.after, **kernels,
            **trainer.summary(memory_before), "seconds": time.perf_counter() - started,
        }  # fmt: skip
        report.finish(summary)
        report.note(memory_line(summary))
        if config.log.save_model:
            save_models(trainer, report.folder)
    return summary


def load_inputs(
    config: RunConfig, start: Start
) -> tuple[RewardSet, Sequence[Example], dict[str, str]]:
    """Rewards, the training set, and the fingerprints of all that a run depends on.

    Raises ValueError where a rank, or the checkpoint of the start, has others.
    """
    with distributed.together():
        rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
        plain = config.data.model_copy(update={"shots_tokens": None})
        questions = load_examples(plain, split="train", seed=config.seed)
        # Of examples that are made when asked for, all alike, the first is checked.
        known = questions if isinstance(questions, list) else questions[:1]
        check_examples(rewards, known, "training")
        prints = fingerprints(config, questions)
    check_ranks(config, prints)
    if start.checkpoint is not None:
        for name in check_resumed(start.fingerprints, prints, config.resume_allow):
            log.warning("the run goes on with another %s than it began with", name)
    return rewards, questions, prints


def kernels_of(policy: Policy) -> dict[str, Any]:
    """The backend of the head, and why it is not a faster one."""
    return {
        "backend": route.head_route("auto", policy.head.weight).backend,
        "backend_fallback": route.fallback_reason(policy.device.type),
    }


def is_dealt_to(config: RunConfig) -> bool:
    """Whether this rank gets its shards from rank 0, which alone has the weights till then."""
    return config.distributed in SHARDED and not distributed.is_main()


@contextmanager
def warm_starting(config: RunConfig) -> Iterator[bool]:
    """Whether this rank makes the warm start: all, or before weights are dealt out rank 0 alone."""
    is_here = not is_dealt_to(config)
    with distributed.alone() if config.distributed in SHARDED else nullcontext():
        yield is_here


def agreement(policy: Policy) -> Callable[[], AbstractContextManager[None]]:
    """How the ranks agree on a signal in a forward pass, where they make that in step."""
    return lambda: distributed.together() if policy.in_step else nullcontext()


@contextmanager
def locked(folder: str) -> Iterator[FolderLock | None]:
    """Rank 0's lock of a run's folder, before anyone looks what lies there; None where none is."""
    with distributed.together():
        lock = lock_existing(folder) if distributed.is_main() else None
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()


def agreed_start(config: RunConfig) -> Start:
    """Where the run begins, as rank 0 finds it."""

    def start_of_main() -> list[Any]:
        start = find_start(config, log.warning)
        return [None if start.checkpoint is None else str(start.checkpoint), *start[1:]]

    checkpoint, (metrics, prompts), *rest = distributed.from_main(start_of_main)
    return Start(None if checkpoint is None else Path(checkpoint), (metrics, prompts), *rest)


def open_report(config: RunConfig, start: Start, lock: FolderLock | None) -> RunReport:
    """Rank 0's, or one that writes nothing."""
    with distributed.together():
        if not distributed.is_main():
            return SilentReport(config.output_dir)
        return RunReport(config.output_dir, config, start=start, lock=lock)


def begin_again(report: RunReport) -> None:
    """Cut the logs back to what the checkpoint has seen, which is loaded on all ranks."""
    with distributed.together():
        report.begin()


def save_models(trainer: Trainer, folder: Path) -> None:
    """What the run was for, behind its summary: a disk that is full costs no more than this."""
    policy, critic = unsharded_models(trainer.config, trainer.policy, trainer.critic)
    with distributed.together(), written(folder / "model"):
        if distributed.is_main():
            policy.save(folder / "model")
            if critic is not None:
                critic.save(folder / "critic")


def run_steps(state: RunState, evaluate: Callable[[Engine], EvalResult]) -> None:
    """All steps that are left, evaluated and reported along the way."""
    trainer, report = state.trainer, state.report
    config, trainer.at_rest = trainer.config, state.mark

    def evaluated(steps: int) -> dict[str, float]:
        with awake(trainer.engine, trainer.policy, version=steps) as engine:
            return evaluate(engine).metrics

    if trainer.updates == 1 and is_policy_alone(trainer.loss_config) and trainer.critic is None:
        report.note(LOSS_IS_ZERO)
    if state.before is None:
        before = evaluated(0)
        report.log(0, before)
        state.before = state.after = before
        state.mark()
    for step in range(state.step + 1, config.steps + 1):
        metrics, collected = trainer.step(step, state.queue)
        after = None
        if step == config.steps or (config.eval.every and step % config.eval.every == 0):
            metrics |= (after := evaluated(step))
        report.prompts(collected.prompts)
        for row in trainer.underway.update_rows:
            report.log(step, row)
        report.log(step, finite(metrics))
        every = config.log.completions_every
        if every and (step in (1, config.steps) or step % every == 0):
            report.completions(step, trainer.rows(collected))
        state.finish_step(step, finite(metrics), after)
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            state.save()


@contextmanager
def saved_when_it_ends(state: RunState) -> Iterator[None]:
    """A run that a signal, its engine or its gradients end leaves a checkpoint.

    Others leave what they have.
    """
    trainer = state.trainer
    try:
        yield
    except NonFiniteLogits as error:
        when = f"at step {trainer.steps}" if trainer.steps else "before the first step"
        advice = "a lower optim.lr or a wider model.dtype may help"
        raise NonFiniteLogits(f"{error} {when}; {advice}") from None
    except NonFiniteGradient as error:
        raise NonFiniteGradient(f"{error}; {_saved(state)}") from None
    except EngineError as error:
        raise EngineError(f"{error}; {_saved(state)}") from error
    except Stopped as stopped:
        trainer.forget_gradients()
        path = state.save()
        stopped.code = SAVED
        state.report.note(f"{stopped.name}: saved in {path}; resume=auto goes on from there")
        raise


def _saved(state: RunState) -> str:
    try:
        return f"saved in {state.save()}"
    except CheckpointError as error:
        return str(error)
