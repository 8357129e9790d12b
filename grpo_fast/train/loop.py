"""A run: model and data, a step after the other (trainer.py), evaluations, the run's folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from grpo_fast.data import load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.kernels import route
from grpo_fast.objective.advantages import CENTERED
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.rewards import build_rewards, check_examples
from grpo_fast.rollout import (
    Engine,
    EngineError,
    NonFiniteLogits,
    awake,
    build_engine,
    check_prompts,
)
from grpo_fast.train import distributed
from grpo_fast.train.checkpoint import CheckpointError
from grpo_fast.train.config import RunConfig
from grpo_fast.train.critic import load_critic
from grpo_fast.train.evaluate import EvalResult, build_evaluation
from grpo_fast.train.lines import written
from grpo_fast.train.loading import build_tokenizer, load_policy
from grpo_fast.train.metrics import finite
from grpo_fast.train.optimizer import NonFiniteGradient
from grpo_fast.train.planning.budget import host_peak
from grpo_fast.train.policy import Policy
from grpo_fast.train.prompts import PromptQueue
from grpo_fast.train.reference import check_reference
from grpo_fast.train.report import RunReport, kernels_line, memory_line, sampler_line, support_line
from grpo_fast.train.resume import Start, find_start
from grpo_fast.train.run_state import RunState
from grpo_fast.train.silent_report import SilentReport
from grpo_fast.train.stopping import SAVED, Stopped, Stopping
from grpo_fast.train.trackers import check_trackers
from grpo_fast.train.trainer import Trainer
from grpo_fast.train.warm_start import warm_start

log = logging.getLogger(__name__)

LOSS_IS_ZERO = "one update per batch: {} while its gradient does not{}; watch reward and grad_norm"


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
        trainer = Trainer(config, policy, rewards, load_critic(config, policy), engine)
        state = RunState(trainer, PromptQueue(examples), report)
        if start.checkpoint is not None:
            state.load(start.checkpoint)
        report.note(sampler_line(config.rollout.engine, engine.fallback))
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


def run_steps(state: RunState, evaluate: Callable[[Engine], EvalResult]) -> None:
    """All steps that are left, evaluated and reported along the way."""
    trainer, report = state.trainer, state.report
    config, trainer.at_rest = trainer.config, state.mark

    def evaluated(steps: int) -> dict[str, float]:
        with awake(trainer.engine, trainer.policy, version=steps) as engine:
            return evaluate(engine).metrics

    is_first = trainer.updates == 1 and config.advantages in CENTERED
    if is_first and is_zero_on_policy(trainer.loss_config):
        report.note(zero_line(trainer.loss_config, config.advantages))
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


def is_zero_on_policy(loss: LossConfig) -> bool:
    """Whether the losses of advantages 1 and -1 cancel where every ratio to the old policy is 1."""
    leaf, logps = OBJECTIVES[loss.loss_type].leaf, torch.tensor([-1.0, -2.0])
    values, _ = leaf(logps, torch.zeros(2), torch.tensor([1.0, -1.0]), *loss.params)
    return float(values.sum()) == 0


def zero_line(loss: LossConfig, advantages: str) -> str:
    """What the loss shows where the policy term of every step is 0, lengths apart."""
    rest = "beta * KL" if loss.uses_reference else ""
    rest += " - entropy_coef * entropy" if loss.entropy_coef else ""
    by_token = AGGREGATIONS[loss.aggregation].by_length == (advantages == "opo")
    near = "near 0" + ", apart from how lengths go with advantages," * by_token
    term = f"the {'policy term of the ' if rest else ''}loss stays {near}"
    return LOSS_IS_ZERO.format(term, f", and the rest of the loss is {rest.strip()}" * bool(rest))


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
